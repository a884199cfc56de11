"""Evidence of runs of every kind, with what ``judge`` makes of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import samples

from harness.clock.figures import Ledger, RankFigures, Spread, Tag
from harness.clock.stages import StageCost, StageTotals
from harness.config import Precision, TrainerConfig
from harness.report.evidence import Bottleneck, Evidence
from harness.report.verdict import Change

DECODING = {
    "read": (0.2, 0.1),
    "decode": (3.0, 3.0),
    "crop": (0.5, 0.5),
    "collate": (0.3, 0.3),
}  # ms of wall, of processor
READING = {"read": (9.0, 0.2), "decode": (3.0, 3.0), "crop": (0.5, 0.5), "collate": (0.3, 0.3)}
WRITING = {"write": (1.2, 1.0)}
WAITING = {"read": (9.0, 0.1), "crop": (0.1, 0.1)}
CROPPING = {
    "read": (0.2, 0.1),
    "decode": (1.0, 1.0),
    "crop": (0.5, 0.5),
    "resize": (6.0, 6.0),
    "collate": (0.3, 0.3),
}
SHARING = {
    "read": (0.2, 0.1),
    "decode": (1.0, 1.0),
    "crop": (0.5, 0.5),
    "collate": (0.2, 0.2),
    "share": (4.8, 4.8),
}
COLLATING = {"read": (0.2, 0.1), "decode": (1.0, 1.0), "crop": (0.5, 0.5), "collate": (5.0, 5.0)}

CROWDED = {
    Tag.OTHERS_CPU_CORES: 1.6,
    Tag.QUEUED_THREADS: 1.2,
    Tag.CPU_CORES: 0.4,
    Tag.CPU_FRACTION: 0.998,
}


def spread(ms: float | None) -> Spread | None:
    return None if ms is None else Spread(ms, ms, ms)


def totals(stages: Mapping[str, tuple[float, float]]) -> StageTotals:
    """A thousand samples whose stages take so many milliseconds of
    wall and of processor time each.
    """
    costs = {name: StageCost(wall_ms, cpu_ms) for name, (wall_ms, cpu_ms) in stages.items()}
    return StageTotals(1000, sum(cost.wall_s for cost in costs.values()), costs)


def evidence(
    starved: float = 0.0,
    copy: float = 0.0,
    host: float | None = 0.0,
    stages: Mapping[str, tuple[float, float]] | None = None,
    window: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Evidence:
    """A CUDA run of 200 steps in 10 s at 500 images/s; the shares are of the time, the stages as
    ``totals`` takes them.
    """
    shares = {"starved": starved, "exposed_copy": copy, "host": host or 0.0}
    shares["compute"] = 1 - sum(shares.values())
    figures = {
        "steps": 200,
        "images": 5000,
        "elapsed_s": 10.0,
        "images_per_s": 500.0,
        "stall_basis": "device",
        "stall_fraction": starved + copy,
        "shares": shares,
        "wait_parts": {"make": 0.9, "transport": 0.05, "pin": 0.03, "move": 0.02} if stages else {},
        "step_ms": spread(50.0),
        "compute_ms": spread(45.0),
        "launch_ms": spread(5.0),
        "gap_ms": spread(0.01),
    }
    fields: dict[str, Any] = {
        "window": dataclasses.replace(Ledger().window(), **(figures | dict(window or {}))),
        "stages": totals(stages) if stages else None,
        "settings": dataclasses.replace(samples.settings(2, batch_size=64), pin_memory=True),
        "cores": 8.0,
        "device": "cuda",
        "sampled": {},
        "autotuned": False,
        "half_precision": None if changes.get("device") == "cpu" else "bf16",
    }
    return Evidence(**(fields | changes))


def on_cpu(starved: float, **changes: Any) -> Evidence:
    """A run on two cores of a CPU, by the host's clock."""
    window = {"stall_basis": "host", "gap_ms": None, "launch_ms": None} | changes.pop("window", {})
    return evidence(starved, window=window, **{"device": "cpu", "cores": 2.0} | changes)


def full_cores(decode_ms: float) -> Evidence:
    """Two full cores at 480 images/s, whose batches are late on the way from the workers."""
    return on_cpu(
        0.4,
        stages={"decode": (decode_ms, decode_ms)},
        sampled={Tag.CPU_CORES: 1.9, Tag.CPU_FRACTION: 0.99},
        window={"images_per_s": 480.0, "wait_parts": {"make": 0.3, "transport": 0.6, "move": 0.1}},
    )


def rank(
    number: int, stalled_ms: float, host_ms: float | None = 1.0, forward_ms: float | None = 10.0
) -> RankFigures:
    return RankFigures(
        rank=number, step_ms=40.0, stalled_ms=stalled_ms, host_ms=host_ms, forward_ms=forward_ms
    )


class Case(NamedTuple):
    """Evidence, the kind that it is judged to be, and the settings that should change."""

    evidence: Evidence
    kind: Bottleneck
    change: Change


CASES = {
    "cold files": Case(
        evidence(
            0.4, stages=READING, sampled={Tag.READ_BYTES_PER_S: 6e7, Tag.STORAGE_BYTES_PER_S: 5e7}
        ),
        "storage",
        {"loader.num_workers": 12},
    ),
    "some cold files": Case(
        evidence(
            0.4,
            stages=READING,
            autotuned=True,
            sampled={Tag.READ_BYTES_PER_S: 6e7, Tag.STORAGE_BYTES_PER_S: 1e7},
        ),
        "storage",
        {},
    ),
    "mapped files": Case(
        evidence(
            0.4,
            stages=READING,
            autotuned=True,
            sampled={Tag.READ_BYTES_PER_S: 2e4, Tag.STORAGE_BYTES_PER_S: 3e5},
        ),
        "storage",
        {},
    ),
    "a network's files, tuned": Case(
        evidence(
            0.4,
            stages=READING,
            autotuned=True,
            sampled={Tag.READ_BYTES_PER_S: 6e7, Tag.STORAGE_BYTES_PER_S: 1e5},
        ),
        "storage",
        {},
    ),
    "decoding fills the cores": Case(evidence(0.4, stages=DECODING, cores=2.0), "decode", {}),
    "one slow transform": Case(evidence(0.4, stages=CROPPING, autotuned=True), "augment", {}),
    "slow collate": Case(evidence(0.4, stages=COLLATING, cores=2.0), "collate", {}),
    "huge batches of processes": Case(
        evidence(0.4, stages=SHARING, cores=2.0), "transport", {"loader.autotune": True}
    ),
    "too few workers": Case(evidence(0.4, stages=DECODING), "workers", {"loader.num_workers": 4}),
    "uneven batches": Case(
        evidence(0.4, stages=DECODING, window={"images_per_s": 100.0}),
        "workers",
        {"loader.prefetch_factor": 4},
    ),
    "uneven batches of threads": Case(
        evidence(
            0.4,
            stages=DECODING,
            window={"images_per_s": 100.0},
            settings=samples.settings(2, batch_size=64, backend="threads"),
        ),
        "workers",
        {"loader.prefetch_factor": 2},
    ),
    "no workers": Case(
        on_cpu(
            0.4,
            stages=DECODING,
            settings=samples.settings(0, batch_size=64),
            window={"images_per_s": 150.0},
            sampled={Tag.CPU_CORES: 0.9},
        ),
        "workers",
        {"loader.num_workers": 2},
    ),
    "batches on their way": Case(
        evidence(
            0.4,
            stages=WRITING,
            window={"wait_parts": {"make": 0.2, "transport": 0.6, "pin": 0.2, "move": 0.0}},
        ),
        "transport",
        {"loader.autotune": True},
    ),
    "pageable copies": Case(
        evidence(0.1, 0.3, stages=DECODING, settings=samples.settings(2)),
        "copy",
        {"loader.pin_memory": True},
    ),
    "normalizing on a CPU": Case(
        on_cpu(
            0.4,
            stages=WRITING,
            window={"wait_parts": {"make": 0.1, "transport": 0.1, "pin": 0.0, "move": 0.8}},
        ),
        "copy",
        {},
    ),
    "logging": Case(
        evidence(0.01, host=0.3, window={"host_parts_s": {"logging": 2.5, "gc": 0.3}}),
        "host",
        {"watch.window_steps": 100},
    ),
    "collections": Case(on_cpu(0.01, host=0.3, window={"host_parts_s": {"gc": 3.0}}), "host", {}),
    "collections behind queued work": Case(
        evidence(
            0.0,
            trainer=TrainerConfig(precision=Precision.bf16, channels_last=True, compile=True),
            window={"host_parts_s": {"gc": 3.0}},
        ),
        "compute",
        {},
    ),
    "callbacks": Case(evidence(0.01, host=0.3), "host", {"loader.batch_size": 128}),
    "launches": Case(
        evidence(
            0.01,
            window={
                "launch_ms": spread(44.0),
                "shares": {"compute": 0.36, "launch": 0.63, "starved": 0.01},
            },
        ),
        "launch",
        {"trainer.compile": True},
    ),
    "launching waits for a full queue": Case(
        evidence(
            0.01,
            window={"launch_ms": spread(44.0)},
            trainer=TrainerConfig(precision=Precision.bf16),
        ),
        "compute",
        {"trainer.channels_last": True},
    ),
    "slow steps on a CPU": Case(on_cpu(0.01), "compute", {}),
    "balanced": Case(evidence(0.06, host=0.01), "balanced", {}),
    "quota": Case(
        on_cpu(0.4, stages=DECODING, sampled={Tag.THROTTLED_FRACTION: 0.8}, cores=0.5), "quota", {}
    ),
    "memory": Case(
        evidence(0.4, stages=READING, sampled={Tag.MEMORY_STALL_FRACTION: 0.3}),
        "memory",
        {"loader.num_workers": 1},
    ),
    "other programs": Case(on_cpu(0.04, sampled=CROWDED), "neighbors", {"trainer.num_threads": 1}),
    "other programs beside one thread": Case(
        on_cpu(0.04, sampled=CROWDED, trainer=TrainerConfig(num_threads=1)), "neighbors", {}
    ),
    "other programs on a core that a loader could use": Case(
        on_cpu(
            0.4,
            stages=CROPPING,
            settings=samples.settings(0, batch_size=64),
            window={"images_per_s": 120.0},
            sampled={Tag.CPU_CORES: 0.98, Tag.OTHERS_CPU_CORES: 1.0, Tag.QUEUED_THREADS: 0.02},
        ),
        "augment",
        {},
    ),
    "cached files read by threads that fill the cores": Case(
        on_cpu(
            0.4,
            stages={"read": (2.5, 0.08), "augment.own": (2.0, 0.9), "collate": (0.1, 0.1)},
            sampled={
                Tag.CPU_CORES: 1.98,
                Tag.READ_BYTES_PER_S: 1e7,
                Tag.STORAGE_BYTES_PER_S: 0.0,
            },
        ),
        "augment",
        {},
    ),
    "own transforms that wait": Case(
        on_cpu(0.4, stages={"read": (0.1, 0.1), "augment.own": (20.0, 0.2)}),
        "augment",
        {"loader.num_workers": 8},
    ),
    "a Dataset's own transforms": Case(
        evidence(0.4, stages={"sample": (4.0, 4.0)}, cores=2.0), "decode", {}
    ),
    "other programs beside a loader that decodes": Case(
        evidence(0.4, stages=DECODING, sampled=CROWDED), "neighbors", {}
    ),
    "other programs on the GPU": Case(
        evidence(0.0, sampled={Tag.GPU_OTHERS_UTILIZATION: 0.4}), "neighbors", {}
    ),
    "a rank that waits": Case(
        on_cpu(0.0, ranks=(rank(0, 1.0), rank(1, 1.0), rank(2, 9.0), rank(3, 1.2))),
        "rank",
        {"loader.autotune": True},
    ),
    "too short": Case(evidence(0.5, window={"steps": 9}), "unknown", {}),
    "too short for quick steps": Case(
        evidence(0.5, window={"steps": 19, "elapsed_s": 0.9}), "unknown", {}
    ),
    "a feed that does not tell": Case(evidence(0.4), "unknown", {"loader.autotune": True}),
    "mps": Case(
        evidence(
            0.01,
            device="mps",
            window={"stall_basis": "host", "shares": {"starved": 0.01}},
        ),
        "unknown",
        {},
    ),
    "mostly the network": Case(evidence(0.2, stages=DECODING, cores=2.0), "decode", {}),
    "fewer workers": Case(
        on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.5}), "memory", {"loader.num_workers": 1}
    ),
    "fewer batches": Case(
        on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.5}, settings=samples.settings(1)),
        "memory",
        {"loader.prefetch_factor": 1},
    ),
    "nothing to save": Case(
        on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.5}, settings=samples.settings(0)),
        "memory",
        {},
    ),
    "at most four a core": Case(
        evidence(0.5, stages=WAITING, window={"images_per_s": 9000.0}),
        "storage",
        {"loader.num_workers": 32},
    ),
    "as many as there may be": Case(
        evidence(
            0.5, stages=WAITING, window={"images_per_s": 9000.0}, settings=samples.settings(32)
        ),
        "storage",
        {},
    ),
    "arrays have no workers": Case(
        on_cpu(
            0.4,
            stages={"gather": (0.7, 0.7)},
            settings=dataclasses.replace(samples.settings(0, batch_size=64), backend="arrays"),
            window={"images_per_s": 150.0},
            sampled={Tag.CPU_CORES: 0.9},
        ),
        "augment",
        {},
    ),
    "as deep as there may be": Case(
        evidence(
            0.4,
            stages=DECODING,
            settings=samples.settings(2, prefetch_factor=8),
            window={"images_per_s": 100.0},
        ),
        "decode",
        {},
    ),
    "making is quicker than fetching": Case(
        evidence(
            0.6,
            stages={"read": (0.1, 0.1), "collate": (0.5, 0.4)},
            window={"wait_parts": {"make": 0.0, "transport": 1.0}},
        ),
        "transport",
        {"loader.num_workers": 0},
    ),
    "collections have no setting": Case(
        evidence(host=0.3, window={"host_parts_s": {"gc": 2.5}}), "host", {}
    ),
    "nothing done": Case(
        evidence(),
        "compute",
        {"trainer.precision": "bf16", "trainer.channels_last": True},
    ),
    "a GPU without bf16": Case(
        evidence(half_precision="fp16", trainer=TrainerConfig(channels_last=True)),
        "compute",
        {"trainer.precision": "fp16"},
    ),
    "but compiled": Case(
        evidence(trainer=TrainerConfig(precision=Precision.bf16, channels_last=True)),
        "compute",
        {"trainer.compile": True},
    ),
    "all done": Case(
        evidence(trainer=TrainerConfig(precision=Precision.fp16, channels_last=True, compile=True)),
        "compute",
        {},
    ),
    "a rank's host": Case(on_cpu(0.0, ranks=(rank(0, 1.0), rank(1, 1.0, host_ms=9.0))), "rank", {}),
    "a rank's forward": Case(
        on_cpu(0.0, ranks=(rank(0, 1.0), rank(1, 1.0, forward_ms=19.0))), "rank", {}
    ),
    "a rank's one cannot tell": Case(
        on_cpu(0.0, ranks=(rank(0, 1.0, host_ms=19.0), rank(1, 9.0, host_ms=None))),
        "rank",
        {"loader.autotune": True},
    ),
    "loading on the steps' processors": Case(
        evidence(0.01, window={"stall_basis": "host"}, ceiling=1.2, device="cpu"), "compute", {}
    ),
    "workers that start for each epoch": Case(
        evidence(
            0.05,
            window={"steps": 9, "first_steps": 9, "first_step_s": 20.0},
            starts=8,
            started_s=12.0,
        ),
        "starts",
        {"loader.persistent_workers": True},
    ),
    "no stall known": Case(evidence(window={"stall_fraction": None}), "unknown", {}),
}
