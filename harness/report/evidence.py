"""Holds the metrics behind a verdict and derives fractions of time from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from ..clock.figures import RankFigures, Tag, Window
from ..clock.stages import AUGMENT, GROUPS, SAMPLE, StageCost, StageTotals, roofline, total
from ..config import TrainerConfig
from ..monitor.host import taken

Bottleneck = Literal[
    "storage", "decode", "augment", "collate", "transport", "copy", "workers", "compute", "launch",
    "quota", "memory", "host", "neighbors", "rank", "starts", "balanced", "unknown",
]  # fmt: skip


# fraction of the time: MLPerf Storage requires an accelerator utilization of 0.90
HARM = 0.10


# fraction of the scheduling periods: the threshold in kubernetes-mixin's CPUThrottlingHigh
THROTTLED = 0.25


# fraction of the time: the gain from removing a smaller stall is within noise
FED = 0.02


class WorkerCost(NamedTuple):
    """The cost of a sample to the loader's workers, by kind.

    Attributes:
        wall_s: worker seconds per sample.
        cpu_s: CPU seconds within ``wall_s``.
        wants_s: ``cpu_s`` plus the seconds in which the worker waited for a core.
        contention: wall time of computation over its CPU time; 1 if cores are free.
        parts: fractions of ``wall_s`` by kind; they sum to 1.
        kind: the largest part; by CPU time, and apart from storage, if ``cached``.
        stage: the largest stage of that kind.
        waits: whether that kind's time is mostly waiting for something other than a core.
    """

    wall_s: float
    cpu_s: float
    wants_s: float
    contention: float
    parts: Mapping[str, float]
    kind: Bottleneck
    stage: str
    waits: bool


def worker_cost(
    totals: StageTotals | None, *, full: bool = False, cached: bool = False
) -> WorkerCost | None:
    """Returns the cost of a sample; None if the workers' ``totals`` are empty.

    ``full``: all cores are busy, so a stage that computes may have waited for one. If also
    ``cached``, nothing came from storage, so reading waited for a core or for the interpreter.
    """
    stages = totals.stages if totals else {}
    wall_s, cpu_s = total(stages.values())
    if totals is None or totals.samples <= 0 or wall_s <= 0:
        return None
    # busy cores prolong every stage that computes; the least prolonged one shows by how much. A
    # single stage that waits for a core looks like one that waits for I/O, unless cores are full
    prolonged = [
        cost.wall_s / cost.cpu_s for cost in stages.values() if cost.cpu_s >= max(1e-9, 0.1 * cpu_s)
    ]
    if len(prolonged) == 1 and not full:
        prolonged.append(1.0)
    contention = max(1.0, min(prolonged, default=1.0))

    def waits(cost: StageCost) -> bool:
        # on full cores, only a stage that uses little CPU time surely waits for something else
        outside = not full or cost.cpu_s < 0.1 * cost.wall_s
        return outside and cost.wall_s - contention * cost.cpu_s >= 0.5 * cost.wall_s

    kinds: dict[str, dict[str, StageCost]] = {}
    for name, cost in stages.items():
        kind = GROUPS.get(name, AUGMENT)
        if kind == SAMPLE:
            # without named stages, waiting is treated as reading and computing as decoding
            kind = "storage" if waits(cost) else "decode"
        kinds.setdefault(kind, {})[name] = cost
    costs = {kind: total(named.values()) for kind, named in kinds.items()}
    # time in which all of these waited for a core says nothing about them
    known = {kind: cost.cpu_s if cached else cost.wall_s for kind, cost in costs.items()}
    top = max(costs, key=lambda kind: (not (cached and kind == "storage"), known[kind]))
    wants_s = contention * cpu_s
    if full and not waits(costs[top]):
        wants_s = wall_s
    return WorkerCost(
        wall_s=wall_s / totals.samples,
        cpu_s=cpu_s / totals.samples,
        wants_s=wants_s / totals.samples,
        contention=contention,
        parts={kind: cost.wall_s / wall_s for kind, cost in costs.items()},
        kind=cast("Bottleneck", top),
        stage=max(kinds[top], key=lambda name: stages[name].wall_s),
        waits=waits(costs[top]),
    )


class Straggler(NamedTuple):
    """The rank that the others wait for when gradients are synchronized.

    Attributes:
        rank: its number.
        late_ms: how long it delays the others per step.
        part: the main cause: ``stalled``, ``host`` or ``forward``.
        share: extra wait for data as a fraction of a step; 0 for other causes.
    """

    rank: int
    late_ms: float
    part: str
    share: float

    @classmethod
    def among(cls, ranks: Sequence[RankFigures]) -> Straggler | None:
        """Returns the straggler among ``ranks``, if there is one."""
        if len(ranks) < 2:
            return None
        ms = np.array([[rank.stalled_ms, rank.host_ms, rank.forward_ms] for rank in ranks], float)
        # a metric that one rank lacks is ignored for all
        ms[:, np.isnan(ms).any(axis=0)] = 0.0
        slowest = int(ms.sum(axis=1).argmax())
        others_ms = np.delete(ms, slowest, axis=0)
        late_ms = float(ms[slowest].sum() - np.median(others_ms.sum(axis=1)))
        step_ms = median(rank.step_ms for rank in ranks)
        if late_ms <= HARM * step_ms:
            return None
        more_ms = ms[slowest] - np.median(others_ms, axis=0)
        part = ("stalled", "host", "forward")[more_ms.argmax()]
        waits = float(more_ms[0]) / max(step_ms, 1e-9) * (part == "stalled")
        return cls(ranks[slowest].rank, late_ms, part, waits)


@dataclass(kw_only=True)
class Evidence:
    """The measurements behind a verdict, and the fractions of time (0..1) derived from them.

    Attributes:
        window: metrics for the steps, usually from the whole run.
        stages: the workers' time by stage; None if the loader does not report it.
        settings: the loader's settings, under torch's names; ``backend`` is "processes",
            "threads", or "arrays", which never has workers.
        cores: cores available to this rank.
        device: the kind of device.
        sampled: the machine's metrics by tag, as means over the run.
        autotuned: whether the loader was tuned.
        ranks: every rank's metrics, if there are several ranks.
        trainer: the trainer's settings.
        half_precision: the faster of bf16 and fp16 on the device; None if unknown.
        window_steps: steps per logged window.
        by_quota: whether a quota limits the cores.
        most_workers: the most workers that fit and are worth trying; default: max(8, 4 per core).
        others: cores used by other programs; None derives it from ``sampled``.
        ceiling: measured speedup if loading were free; None derives it from the stall.
        starts: passes that started their own workers.
        started_s: seconds from the start of these passes to their first batch.
        shrinks: speedup of loading from a smaller copy of the images; None if not measured.
        size: ``data.train_size`` of these steps in pixels; None if unset.
        stall: the device had nothing to run because data was missing.
        starved: of that, the loop waited for a batch.
        copy: of that, the loop waited for a batch's copy.
        host: the device waited for Python; on a CPU, also for garbage collection within steps.
        launch: the device waited for the next kernel's launch; 0 if not measured.
        lost: the sum of ``starved``, ``copy``, ``host`` and ``launch``.
        prepare: batches were augmented and normalized.
        compute: the network ran; None if unknown.
        made: fraction of ``starved`` until the batch was made; 1 if unknown.
        handed: fraction of ``starved`` until it was in this process, in pinned memory.
        moved: fraction of ``starved`` until it was on the device and normalized.
        host_parts: ``host`` by cause.
        workers: number of loader workers.
        rate: images/s; 0 if unknown.
        throttled: fraction of the scheduling periods in which a quota throttled this run.
        cost: a sample's cost to the workers; None if unknown.
        memory: this run waited for memory.
        late: the rank that the others wait for, if there is one.
        speedup: speedup if loading were free, at most 1000.
        starting: workers were starting, excluding the making of first batches.
    """

    window: Window
    stages: StageTotals | None
    settings: Any
    cores: float
    device: str
    sampled: Mapping[str, float]
    autotuned: bool
    ranks: tuple[RankFigures, ...] = ()
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    half_precision: str | None = None
    window_steps: int = 10
    by_quota: bool = False
    most_workers: int | None = None
    others: float | None = None
    ceiling: float | None = None
    starts: int = 0
    started_s: float = 0.0
    shrinks: float | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        window = self.window
        share = window.shares.get
        part = window.wait_parts.get
        self.stall = window.stall_fraction or 0.0
        self.speedup = self.ceiling or 1 / max(1 - self.stall, 0.001)
        self.copy = share("exposed_copy", 0.0)
        self.starved = share("starved", self.stall - self.copy)
        self.host = share("host", 0.0)
        self.launch = share("launch", 0.0)
        self.lost = self.starved + self.copy + self.host + self.launch
        self.prepare = share("prepare", 0.0)
        self.compute = share("compute")
        self.made = part("make", 1.0)
        self.handed = part("transport", 0.0) + part("pin", 0.0)
        self.moved = part("move", 0.0)
        # host work hidden by queued device work is not part of the gap
        self.host_parts = {
            name: min(self.host, spent_s / max(window.elapsed_s, 1e-9))
            for name, spent_s in window.host_parts_s.items()
        }
        named = sum(self.host_parts.values())
        self.host_parts["unnamed work"] = max(0.0, self.host - named)
        self.workers: int = self.settings.num_workers
        self.rate = window.images_per_s or 0.0

        self.others = self.others or taken(self.sampled)
        self.throttled = self.sampled.get(Tag.THROTTLED_FRACTION, 0.0)
        used = self.sampled.get(Tag.CPU_CORES, 0.0) / self.cores
        # with nine tenths of the cores in use, some work waits for one
        in_use = max(used, self.sampled.get(Tag.CPU_FRACTION, 0.0))
        full = in_use >= 0.9 or self.throttled >= THROTTLED or self.others is not None
        read = self.sampled.get(Tag.READ_BYTES_PER_S, 0.0)
        stored = self.sampled.get(Tag.STORAGE_BYTES_PER_S, read)
        self.cost = worker_cost(self.stages, full=full, cached=used >= 0.9 and stored < 0.05 * read)
        # a page fault from disk takes at least 0.1 ms
        faulting = min(1.0, 1e-4 * self.sampled.get(Tag.MAJOR_FAULTS_PER_S, 0.0))
        self.memory = self.sampled.get(Tag.MEMORY_STALL_FRACTION, faulting)
        self.late = Straggler.among(self.ranks)
        made_s = self.starts * self.settings.batch_size * (self.cost.wall_s if self.cost else 0.0)
        whole_s = window.elapsed_s + (window.first_step_s or 0.0)
        self.starting = max(0.0, self.started_s - made_s) / max(whole_s, 1e-9)

    def unmade(self) -> float:
        """Returns the fraction of time spent waiting for batches if transfers took no time."""
        if self.cost is None or not self.workers:
            return self.starved
        wanted = self.cost.wall_s * self.rate * self.speedup
        return max(0.0, 1 - self.workers / max(self.workers, wanted))

    def could(self) -> float:
        """Returns the images/s that all free cores could load while the step runs."""
        cores = max(0.1, self.cores - self.sampled.get(Tag.OTHERS_CPU_CORES, 0.0))
        if self.cost is None or not self.rate:
            return self.rate
        used = self.sampled.get(Tag.CPU_CORES)
        # if nothing was sampled and the device is not the CPU
        step_cores = 0.0
        if used is not None:
            step_cores = max(0.0, min(used, cores) - self.cost.cpu_s * self.rate)
        elif self.device == "cpu":
            step_cores = cores * (self.compute or 0.0)
        return roofline(cores, self.cost.wants_s, step_cores / self.rate)

    def has_room(self) -> bool:
        """Returns whether the cores could load 10% more than the workers do or might."""
        if self.cost is None:
            return False
        return self.could() >= (1 + HARM) * max(self.rate, self.workers / self.cost.wall_s)
