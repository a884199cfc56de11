"""One sentence from the figures."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping
from typing import Any, get_args

import pytest
import samples

from harness.config import Config, walk
from harness.feed.interface import in_form
from harness.watch.bottleneck import Bottleneck
from harness.watch.evidence import Evidence, RankFigures
from harness.watch.figures import Spread, Tag
from harness.watch.ledger import Ledger
from harness.watch.stages import StageCost, StageTotals
from harness.watch.verdict import Verdict, judge

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
    return StageTotals(1000, 100, sum(cost.wall_s for cost in costs.values()), costs)


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


CASES = [
    pytest.param(
        evidence(
            0.4, stages=READING, sampled={Tag.READ_BYTES_PER_S: 6e7, Tag.STORAGE_BYTES_PER_S: 5e7}
        ),
        "storage",
        "Storage-bound. The device waited for data 40% of the time. Reading takes 9 of the 12.8 ms "
        "of a sample, mostly "
        "waiting. Of 60 MB/s, 50 came from a disk or NFS: the files were not in the page cache. "
        "Faster loading gives at "
        "most 1.67x. Try: loader.num_workers=12, or put the files on a faster disk, or keep them "
        "in memory.",
        id="cold files",
    ),
    pytest.param(
        evidence(
            0.4,
            stages=READING,
            autotuned=True,
            sampled={Tag.READ_BYTES_PER_S: 6e7, Tag.STORAGE_BYTES_PER_S: 1e7},
        ),
        "storage",
        "Storage-bound. The device waited for data 40% of the time. Reading takes 9 of the 12.8 ms "
        "of a sample, mostly "
        "waiting. Of 60 MB/s, 10 came from a disk or NFS. Faster loading gives at most 1.67x. Try: "
        "put the files on a "
        "faster disk, or keep them in memory.",
        id="some cold files",
    ),
    pytest.param(
        evidence(
            0.4,
            stages=READING,
            autotuned=True,
            sampled={Tag.READ_BYTES_PER_S: 2e4, Tag.STORAGE_BYTES_PER_S: 3e5},
        ),
        "storage",
        "Storage-bound. The device waited for data 40% of the time. Reading takes 9 of the 12.8 ms "
        "of a sample, mostly "
        "waiting. Of 0.3 MB/s, 0.3 came from a disk or NFS: the files were not in the page cache. "
        "Faster loading gives "
        "at most 1.67x. Try: put the files on a faster disk, or keep them in memory.",
        id="mapped files",
    ),
    pytest.param(
        evidence(
            0.4,
            stages=READING,
            autotuned=True,
            sampled={Tag.READ_BYTES_PER_S: 6e7, Tag.STORAGE_BYTES_PER_S: 1e5},
        ),
        "storage",
        "Storage-bound. The device waited for data 40% of the time. Reading takes 9 of the 12.8 ms "
        "of a sample, mostly "
        "waiting. Hardly a byte came from a disk: opening files, or a network's files, are slow. "
        "Faster loading gives at most 1.67x. Try: put the files on a faster disk, or keep them in "
        "memory.",
        id="a network's files, tuned",
    ),
    pytest.param(
        evidence(0.4, stages=DECODING, cores=2.0),
        "decode",
        "Decode-bound. The device waited for data 40% of the time. Decoding takes 3 of the 4 ms of "
        "a sample. The 2 cores "
        "have no room for more workers. Faster loading gives at most 1.67x. Try: store smaller "
        "files (shorter side 1.15 "
        "to 2 times the crop), or add cores.",
        id="decoding fills the cores",
    ),
    pytest.param(
        evidence(0.4, stages=CROPPING, autotuned=True),
        "augment",
        "Augmentation-bound. The device waited for data 40% of the time. Augmentation takes 6.5 of "
        "the 8 ms of a sample, "
        "most of them in resize. Faster loading gives at most 1.67x. Try: make the augmentation "
        "cheaper, or add cores.",
        id="one slow transform",
    ),
    pytest.param(
        evidence(0.4, stages=COLLATING, cores=2.0),
        "collate",
        "Collate-bound. The device waited for data 40% of the time. Putting batches together takes "
        "5 of the 6.7 ms of a "
        "sample. The 2 cores have no room for more workers. Faster loading gives at most 1.67x. "
        "Try: make images or "
        "batches smaller, or add cores.",
        id="slow collate",
    ),
    pytest.param(
        evidence(0.4, stages=SHARING, cores=2.0),
        "transport",
        "Transport-bound. The device waited for data 40% of the time. Getting memory that "
        "processes share takes 4.8 of "
        "the 6.7 ms of a sample. The 2 cores have no room for more workers. Faster loading gives "
        "at most 1.67x. Try: "
        "loader.autotune=true, or make images or batches smaller.",
        id="huge batches of processes",
    ),
    pytest.param(
        evidence(0.4, stages=DECODING),
        "workers",
        "Too few workers. The device waited for data 40% of the time. A sample takes one of the 2 "
        "workers 4 ms. The 8 "
        "cores have room for more. Faster loading gives at most 1.67x. Try: loader.num_workers=4.",
        id="too few workers",
    ),
    pytest.param(
        evidence(0.4, stages=DECODING, window={"images_per_s": 100.0}),
        "workers",
        "Too few workers. The device waited for data 40% of the time. 2 workers are enough on "
        "average, but their batches "
        "come unevenly. Faster loading gives at most 1.67x. Try: loader.prefetch_factor=4.",
        id="uneven batches",
    ),
    pytest.param(
        evidence(
            0.4,
            stages=DECODING,
            window={"images_per_s": 100.0},
            settings=samples.settings(2, batch_size=64, prefetch_factor=8, backend="threads"),
        ),
        "workers",
        "Too few workers. The device waited for data 40% of the time. 2 workers are enough on "
        "average, but their batches "
        "come unevenly. Faster loading gives at most 1.67x. Try: loader.prefetch_factor=16.",
        id="uneven batches of threads, which are in flight for all of them",
    ),
    pytest.param(
        on_cpu(
            0.4,
            stages=DECODING,
            settings=samples.settings(0, batch_size=64),
            window={"images_per_s": 150.0},
            sampled={Tag.CPU_CORES: 0.9},
        ),
        "workers",
        "Too few workers. Training waited for data 40% of the time. Loading runs in the trainer "
        "itself. The 2 cores have room for workers. Faster loading gives at most 1.67x, and less "
        "where it takes processors from the step. Try: loader.num_workers=2.",
        id="no workers",
    ),
    pytest.param(
        evidence(
            0.4,
            stages=WRITING,
            window={"wait_parts": {"make": 0.2, "transport": 0.6, "pin": 0.2, "move": 0.0}},
        ),
        "transport",
        "Transport-bound. The device waited for data 40% of the time. For 80% of that, batches "
        "were made but not here yet. Faster loading gives at most 1.67x. Try: "
        "loader.autotune=true, or make images or batches smaller.",
        id="batches on their way",
    ),
    pytest.param(
        evidence(0.1, 0.3, stages=DECODING, settings=samples.settings(2)),
        "copy",
        "Copy-bound. The device waited for data 40% of the time. Copies took 30% of the time while "
        "nothing ran, from "
        "pageable memory. Faster loading gives at most 1.67x. Try: loader.pin_memory=true, or make "
        "images smaller, or "
        "steps longer.",
        id="pageable copies",
    ),
    pytest.param(
        on_cpu(
            0.4,
            stages=WRITING,
            window={"wait_parts": {"make": 0.1, "transport": 0.1, "pin": 0.0, "move": 0.8}},
        ),
        "copy",
        "Copy-bound. Training waited for data 40% of the time. Moving and normalising batches took "
        "80% of that. Faster "
        "loading gives at most 1.67x, and less where it takes processors from the step. Try: make "
        "images smaller, or "
        "steps longer.",
        id="normalising on a CPU",
    ),
    pytest.param(
        evidence(0.01, host=0.3, window={"host_parts_s": {"logging": 2.5, "gc": 0.3}}),
        "host",
        "Held up by Python. Python held the steps up 30% of the time: logging 25%, garbage "
        "collection 3%, unnamed work "
        "2%. Try: watch.window_steps=100.",
        id="logging",
    ),
    pytest.param(
        on_cpu(0.01, host=0.3, window={"host_parts_s": {"gc": 3.0}}),
        "host",
        "Held up by Python. Python held the steps up 30% of the time: garbage collection 30%. Try: "
        "keep fewer objects "
        "alive, or call gc.freeze() before training.",
        id="collections",
    ),
    pytest.param(
        evidence(
            0.0,
            precision="bf16",
            channels_last=True,
            compiled=True,
            window={"host_parts_s": {"gc": 3.0}},
        ),
        "compute",
        "Compute-bound. The network takes 100% of the time. Try: a smaller network or image.",
        id="collections behind queued work",
    ),
    pytest.param(
        evidence(0.01, host=0.3),
        "host",
        "Held up by Python. Python held the steps up 30% of the time: unnamed work 30%. Try: "
        "loader.batch_size=128, or "
        "do less between two steps.",
        id="callbacks",
    ),
    pytest.param(
        evidence(
            0.01,
            window={
                "launch_ms": spread(44.0),
                "shares": {"compute": 0.36, "launch": 0.63, "starved": 0.01},
            },
        ),
        "launch",
        "Launch-bound. The device waited for Python within the step 63% of the time. Launching a "
        "step takes 44.0 ms. "
        "Try: trainer.compile=true.",
        id="launches",
    ),
    pytest.param(
        evidence(0.01, window={"launch_ms": spread(44.0)}, precision="bf16"),
        "compute",
        "Compute-bound. The network takes 99% of the time. Try: trainer.channels_last=true.",
        id="launching waits for a full queue",
    ),
    pytest.param(
        on_cpu(0.01),
        "compute",
        "Compute-bound. The network takes 99% of the time. Try: a smaller network or image, or a "
        "GPU.",
        id="slow steps on a CPU",
    ),
    pytest.param(
        evidence(0.06, host=0.01),
        "balanced",
        "Balanced. The device waited for data 6% of the time, and for Python 1%. Faster loading "
        "gives at most 1.06x.",
        id="balanced",
    ),
    pytest.param(
        on_cpu(0.4, stages=DECODING, sampled={Tag.THROTTLED_FRACTION: 0.8}, cores=0.5),
        "quota",
        "Held back by the processor quota. 0.5 cores are too few. The quota stopped this run in "
        "80% of its periods. "
        "Faster loading gives at most 1.67x, and less where it takes processors from the step. "
        "Try: raise the quota "
        "(cpu.max, docker --cpus, Kubernetes limits.cpu).",
        id="quota",
    ),
    pytest.param(
        evidence(0.4, stages=READING, sampled={Tag.MEMORY_STALL_FRACTION: 0.3}),
        "memory",
        "Short of memory. Work stood still for memory 30% of the time. Faster loading gives at "
        "most 1.67x. Try: "
        "loader.num_workers=1, or give the run more memory.",
        id="memory",
    ),
    pytest.param(
        on_cpu(0.04, sampled=CROWDED),
        "neighbours",
        "Held back by other programs. Other programs take 1.6 of the 2 cores. On average, 1.2 "
        "threads of this run waited "
        "for a core. Try: wait "
        "until these programs end, or train on cores of your own.",
        id="other programs",
    ),
    pytest.param(
        evidence(0.0, sampled={Tag.GPU_OTHERS_UTILIZATION: 0.4}),
        "neighbours",
        "Held back by other programs. Other programs keep the GPU busy 40% of the time. Try: wait "
        "until these programs "
        "end, or train on another GPU.",
        id="other programs on the GPU",
    ),
    pytest.param(
        on_cpu(0.0, ranks=(rank(0, 1.0), rank(1, 1.0), rank(2, 9.0), rank(3, 1.2))),
        "rank",
        "One rank is slow. Rank 2 holds the others up by 8.0 ms a step. Most of that is waiting "
        "for data. Faster loading "
        "gives at most 1.25x, and less where it takes processors from the step. Try: "
        "loader.autotune=true, or look at "
        "that rank's storage and cores.",
        id="a rank that waits",
    ),
    pytest.param(
        evidence(0.5, window={"steps": 9}),
        "unknown",
        "Unknown. 9 steps are too few for a verdict. Try: let the run go on for longer.",
        id="too short",
    ),
    pytest.param(
        evidence(0.5, window={"steps": 19, "elapsed_s": 0.9}),
        "unknown",
        "Unknown. 19 steps are too few for a verdict. Try: let the run go on for longer.",
        id="too short for quick steps",
    ),
    pytest.param(
        evidence(0.4),
        "unknown",
        "Unknown. The device waited for data 40% of the time. The feed does not say for what. "
        "Faster loading gives at "
        "most 1.67x. Try: loader.autotune=true.",
        id="a feed that does not tell",
    ),
    pytest.param(
        evidence(
            0.01,
            device="mps",
            window={"stall_basis": "host", "shares": {"starved": 0.01}},
        ),
        "unknown",
        "Unknown. Loading does not hold the steps up. The loop waited for data 1% of the time, the "
        "device at most as "
        "long. On mps, the network's time and Python's cannot be told apart.",
        id="mps",
    ),
    pytest.param(
        evidence(0.2, stages=DECODING, cores=2.0),
        "decode",
        "Mostly compute (80%), then decoding. The device waited for data 20% of the time. Decoding "
        "takes 3 of the 4 ms "
        "of a sample. The 2 cores have no room for more workers. Faster loading gives at most "
        "1.25x. Try: store smaller "
        "files (shorter side 1.15 to 2 times the crop), or add cores.",
        id="mostly the network",
    ),
]


@pytest.mark.parametrize(("given", "bottleneck", "sentence"), CASES)
def test_the_sentence_has_the_evidence_and_the_next_step(
    given: Evidence, bottleneck: str, sentence: str
) -> None:
    """Each kind of bottleneck is named, with its figures and what to do."""
    verdict = judge(given)
    assert (verdict.bottleneck, verdict.sentence) == (bottleneck, sentence)


def test_every_kind_has_a_case() -> None:
    """The cases above leave no kind of bottleneck out."""
    assert {case.values[1] for case in CASES} == set(get_args(Bottleneck))


@pytest.mark.parametrize(
    "given", [case.values[0] for case in CASES], ids=[case.id for case in CASES]
)
def test_the_next_step_can_be_typed(given: Evidence) -> None:
    """Every override names a setting that exists, and stands in the sentence."""
    verdict = judge(given)
    known = {path for path, _, _ in walk(Config())}
    for override in (verdict.next_step or "").split():
        assert override.partition("=")[0] in known
    assert verdict.next_step is None or f"Try: {verdict.next_step}" in verdict.sentence


def kind(given: Evidence) -> str:
    return judge(given).bottleneck


@pytest.mark.parametrize(
    ("given", "bottleneck"),
    [
        pytest.param(evidence(0.019), "compute", id="fed"),
        pytest.param(evidence(0.021), "balanced", id="a little starved"),
        pytest.param(evidence(0.01, host=0.049), "compute", id="prompt"),
        pytest.param(evidence(0.01, host=0.051), "balanced", id="a little late"),
        pytest.param(evidence(0.099), "balanced", id="nearly a tenth"),
        pytest.param(evidence(0.101, stages=DECODING), "workers", id="a tenth"),
        pytest.param(evidence(0.05, 0.03, 0.03, stages=DECODING), "workers", id="a tenth in all"),
        pytest.param(evidence(0.0, 0.06, 0.05), "copy", id="copies before Python"),
        pytest.param(evidence(0.0, 0.05, 0.06), "host", id="Python before copies"),
        pytest.param(
            evidence(0.4, stages=DECODING, window={"wait_parts": {"make": 0.3, "transport": 0.7}}),
            "workers",
            id="late for want of processors",
        ),
        pytest.param(full_cores(decode_ms=2.9), "decode", id="processors full of samples"),
        pytest.param(full_cores(decode_ms=1.6), "transport", id="processors full of other work"),
        pytest.param(on_cpu(0.0, sampled={Tag.THROTTLED_FRACTION: 0.26}), "quota", id="throttled"),
        pytest.param(
            on_cpu(0.0, sampled={Tag.THROTTLED_FRACTION: 0.24}), "compute", id="hardly throttled"
        ),
        pytest.param(
            evidence(0.0, sampled={Tag.THROTTLED_FRACTION: 0.9}),
            "compute",
            id="a throttled host of a busy device",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled={Tag.THROTTLED_FRACTION: 0.4}),
            "storage",
            id="readers that are throttled at times",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled={Tag.THROTTLED_FRACTION: 0.6}),
            "quota",
            id="throttled readers",
        ),
        pytest.param(on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.11}), "memory", id="memory"),
        pytest.param(
            on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.09}),
            "compute",
            id="hardly short of memory",
        ),
        pytest.param(
            evidence(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.9}),
            "compute",
            id="a short host of a busy device",
        ),
        pytest.param(on_cpu(0.0, sampled={Tag.MAJOR_FAULTS_PER_S: 1100.0}), "memory", id="faults"),
        pytest.param(
            on_cpu(0.0, sampled={Tag.MAJOR_FAULTS_PER_S: 900.0}), "compute", id="few faults"
        ),
        pytest.param(
            on_cpu(0.0, sampled={Tag.MAJOR_FAULTS_PER_S: 9e3, Tag.MEMORY_STALL_FRACTION: 0.0}),
            "compute",
            id="faults without pressure",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled={Tag.MAJOR_FAULTS_PER_S: 9e3}),
            "storage",
            id="mapped files fault where read",
        ),
        pytest.param(
            evidence(0.0, sampled=CROWDED), "compute", id="a crowded host of a busy device"
        ),
        pytest.param(
            evidence(0.4, stages=DECODING, sampled=CROWDED),
            "neighbours",
            id="a crowded host of a device that waits",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled=CROWDED), "storage", id="crowded readers"
        ),
        pytest.param(
            evidence(0.4, stages={"read": (3.0, 0.6), "decode": (0.5, 0.3)}, sampled=CROWDED),
            "neighbours",
            id="readers that wait for a processor each time",
        ),
        pytest.param(
            on_cpu(0.4, stages=DECODING, sampled=CROWDED | {Tag.OTHERS_CPU_CORES: 0.05}),
            "decode",
            id="own crowd",
        ),
        pytest.param(
            on_cpu(0.0, sampled=CROWDED | {Tag.THROTTLED_FRACTION: 0.9}),
            "quota",
            id="crowded, but throttled",
        ),
        pytest.param(
            evidence(0.0, sampled={Tag.GPU_OTHERS_UTILIZATION: 0.19}),
            "compute",
            id="hardly anybody on the GPU",
        ),
        pytest.param(
            evidence(0.4, stages=READING, sampled={Tag.GPU_OTHERS_UTILIZATION: 0.9}),
            "storage",
            id="a shared GPU that waits",
        ),
        pytest.param(
            on_cpu(0.0, ranks=(rank(0, 1.0), rank(1, 5.1))), "rank", id="a rank a tenth behind"
        ),
        pytest.param(
            on_cpu(0.0, ranks=(rank(0, 1.0), rank(1, 4.9))), "compute", id="a rank a little behind"
        ),
        pytest.param(
            on_cpu(0.0, ranks=(rank(0, 30.0), rank(1, 30.0))), "compute", id="ranks that wait alike"
        ),
    ],
)
def test_thresholds_hold_from_both_sides(given: Evidence, bottleneck: str) -> None:
    """A little less, or a little more, is another verdict."""
    assert kind(given) == bottleneck


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        pytest.param(
            (rank(0, 1.0), rank(1, 1.0, host_ms=9.0)),
            "Rank 1 .* Python between two steps",
            id="host",
        ),
        pytest.param(
            (rank(0, 1.0), rank(1, 1.0, forward_ms=19.0)),
            "Rank 1 .* the forward pass",
            id="forward",
        ),
        pytest.param(
            (rank(0, 1.0, host_ms=19.0), rank(1, 9.0, host_ms=None)),
            "Rank 1 .* waiting for data",
            id="one cannot tell",
        ),
    ],
)
def test_a_straggler_is_named_with_what_keeps_it(ranks: tuple[RankFigures, ...], said: str) -> None:
    """The cause is what that rank has more of than the others; what one rank cannot tell counts for
    none.
    """
    verdict = judge(on_cpu(0.0, ranks=ranks))
    assert verdict.bottleneck == "rank"
    assert re.search(said, verdict.sentence)


def test_the_ceiling_is_what_free_loading_would_give() -> None:
    """The ceiling is 1 / (1 - stall), finite also where the device did nothing but wait."""
    ceilings = [judge(evidence(stall)).ceiling for stall in (0.0, 0.5, 0.75, 1.0)]
    assert ceilings == pytest.approx([1.0, 2.0, 4.0, 1000.0])


def test_steps_that_hardly_wait_are_slowed_by_loading_on_their_processors() -> None:
    """A measured ceiling that waits do not explain is no gain of faster loading."""
    window = {"stall_basis": "host"}
    sentence = judge(evidence(0.01, window=window, ceiling=1.2, device="cpu")).sentence
    assert "Loading takes processors from the steps: without it, they are 1.2x as fast." in sentence
    assert "Faster loading" not in sentence


def test_without_figures_there_is_no_ceiling() -> None:
    """What is not known is absent."""
    nothing = evidence(window={"stall_fraction": None, "steps": 0})
    few = "Unknown. 0 steps are too few for a verdict. Try: let the run go on for longer."
    assert judge(nothing) == Verdict("unknown", None, few, None, ())


def test_the_evidence_has_the_figures() -> None:
    """Each clause is one figure."""
    given = evidence(0.4, 0.05, 0.1, stages=READING, window={"host_parts_s": {"gc": 0.5}})
    assert judge(given).evidence == (
        "time on the device's clock: starved 40%, exposed copy 5%, host 10%, compute 45%",
        "waiting for a batch: make 90%, transport 5%, pin 3%, move 2%",
        (
            "a sample takes 12.8 ms, 4 ms of them on a processor: storage 70%, decode 23%, augment "
            "4%, collate 2%"
        ),
        "named work between steps: gc 5%",
    )


@pytest.mark.parametrize(
    ("sampled", "workers", "bottleneck"),
    [
        pytest.param(
            {Tag.CPU_CORES: 1.0, Tag.CPU_FRACTION: 0.5}, 2, "storage", id="idle processors"
        ),
        pytest.param(
            {Tag.CPU_CORES: 1.9, Tag.CPU_FRACTION: 0.5}, 2, "decode", id="own processors full"
        ),
        pytest.param(
            {Tag.CPU_CORES: 1.0, Tag.CPU_FRACTION: 0.95}, 2, "decode", id="the machine full"
        ),
        pytest.param({Tag.CPU_CORES: 1.0, Tag.THROTTLED_FRACTION: 0.3}, 2, "quota", id="throttled"),
        pytest.param({}, 1, "storage", id="unknown"),
    ],
)
def test_a_data_set_without_stages_waits_unless_processors_were_scarce(
    sampled: dict[str, float], workers: int, bottleneck: str
) -> None:
    """Eight milliseconds with two of a processor are reading where there were idle ones, and else
    may be work.
    """
    slow = {"sample": (8.0, 2.0)}
    assert (
        kind(
            on_cpu(
                0.6,
                stages=slow,
                sampled=sampled,
                settings=samples.settings(workers),
                autotuned=True,
            )
        )
        == bottleneck
    )


@pytest.mark.parametrize(
    ("settings", "next_step"),
    [
        pytest.param(
            {"precision": "fp32"},
            "trainer.precision=bf16 trainer.channels_last=true",
            id="nothing done",
        ),
        pytest.param(
            {"half_precision": "fp16", "channels_last": True},
            "trainer.precision=fp16",
            id="a GPU without bf16",
        ),
        pytest.param(
            {"precision": "bf16", "channels_last": True}, "trainer.compile=true", id="but compiled"
        ),
        pytest.param(
            {"precision": "fp16", "channels_last": True, "compiled": True}, None, id="all done"
        ),
    ],
)
def test_a_network_that_sets_the_pace_is_told_what_it_does_not_do_yet(
    settings: dict[str, Any], next_step: str | None
) -> None:
    """What is set already is not proposed again."""
    assert judge(evidence(0.0, **settings)).next_step == next_step


@pytest.mark.parametrize(
    ("given", "next_step"),
    [
        pytest.param(
            on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.5}),
            "loader.num_workers=1",
            id="fewer workers",
        ),
        pytest.param(
            on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.5}, settings=samples.settings(1)),
            "loader.prefetch_factor=1",
            id="fewer batches",
        ),
        pytest.param(
            on_cpu(0.0, sampled={Tag.MEMORY_STALL_FRACTION: 0.5}, settings=samples.settings(0)),
            None,
            id="nothing to save",
        ),
        pytest.param(
            evidence(0.5, stages=WAITING, window={"images_per_s": 9000.0}),
            "loader.num_workers=32",
            id="at most four a core",
        ),
        pytest.param(
            evidence(
                0.5, stages=WAITING, window={"images_per_s": 9000.0}, settings=samples.settings(32)
            ),
            None,
            id="as many as there may be",
        ),
        pytest.param(
            on_cpu(
                0.4,
                stages={"gather": (0.7, 0.7)},
                settings=in_form(samples.settings(0, batch_size=64), "arrays"),
                window={"images_per_s": 150.0},
                sampled={Tag.CPU_CORES: 0.9},
            ),
            None,
            id="arrays have no workers",
        ),
        pytest.param(
            evidence(
                0.4,
                stages=DECODING,
                settings=samples.settings(2, prefetch_factor=8),
                window={"images_per_s": 100.0},
            ),
            None,
            id="as deep as there may be",
        ),
        pytest.param(
            evidence(
                0.6,
                stages={"read": (0.1, 0.1), "collate": (0.5, 0.4)},
                window={"wait_parts": {"make": 0.0, "transport": 1.0}},
            ),
            "loader.num_workers=0",
            id="making is quicker than fetching",
        ),
        pytest.param(
            evidence(host=0.3, window={"host_parts_s": {"gc": 2.5}}),
            None,
            id="collections have no setting",
        ),
    ],
)
def test_the_next_step_fits_the_settings(given: Evidence, next_step: str | None) -> None:
    """It goes from what is set, within what is sensible, and is absent where no setting helps."""
    assert judge(given).next_step == next_step


def drawn(rng: random.Random) -> Evidence:
    """Evidence of any kind, with figures that contradict each other
    and figures that are missing.
    """
    maybe = lambda value: None if rng.random() < 0.2 else value
    share = lambda: rng.choice([0.0, 1.0, rng.random(), 10 ** rng.uniform(-4, 0)])
    names = ("read", "decode", "crop", "sample", "own", "collate", "share")
    stages = {
        name: (10 ** rng.uniform(-4, 3) * rng.choice([0, 1]), 10 ** rng.uniform(-4, 3))
        for name in rng.sample(names, rng.randrange(7))
    }
    shares = {
        name: share()
        for name in rng.sample(["compute", "starved", "exposed_copy", "host"], rng.randrange(5))
    }
    parts = {
        name: share() for name in rng.sample(["make", "transport", "pin", "move"], rng.randrange(5))
    }
    window = dataclasses.replace(
        Ledger().window(),
        steps=rng.randrange(100),
        images=rng.randrange(1000),
        elapsed_s=rng.choice([0.0, rng.random() * 100]),
        images_per_s=maybe(rng.choice([0.0, 10 ** rng.uniform(-2, 5)])),
        stall_fraction=maybe(share()),
        stall_basis=rng.choice(["host", "device"]),
        shares=shares,
        wait_parts=parts,
        host_parts_s={
            name: rng.random() for name in rng.sample(["gc", "logging", "hooks"], rng.randrange(4))
        },
        **{
            f"{name}_ms": maybe(spread(rng.random() * 10))
            for name in ("launch", "gap", "compute", "step")
        },
    )
    return Evidence(
        window=window,
        stages=maybe(dataclasses.replace(totals(stages), samples=rng.choice([0, 1000]))),
        settings=samples.settings(rng.choice([0, 1, 8, 64]), batch_size=rng.choice([1, 256])),
        cores=rng.choice([0.1, 2.0, 64.0]),
        device=rng.choice(["cpu", "cuda", "mps"]),
        sampled={tag: 10 ** rng.uniform(-3, 9) for tag in Tag if rng.random() < 0.3},
        autotuned=rng.random() < 0.5,
        ranks=tuple(
            RankFigures(
                rank=i,
                step_ms=share(),
                stalled_ms=share(),
                host_ms=maybe(share()),
                forward_ms=maybe(share()),
            )
            for i in range(rng.randrange(4))
        ),
    )


@pytest.mark.parametrize("seed", range(10))
def test_any_figures_give_a_verdict(seed: int) -> None:
    """Whatever is missing or makes no sense: no error, no inf or nan in the text, a ceiling of 1 or
    more, a known kind.
    """
    rng = random.Random(seed)
    for _ in range(300):
        given = drawn(rng)
        verdict = judge(given)
        assert verdict.bottleneck in get_args(Bottleneck), given
        assert verdict.ceiling is None or 1 <= verdict.ceiling <= 1000, given
        assert not re.search(
            r"\b(nan|inf|None)\b", " ".join([verdict.sentence, *verdict.evidence])
        ), given
        assert all(len(clause) < 200 for clause in verdict.evidence), given
