"""Figures in, one class of bottleneck and what should change out. Pure functions.

``judge`` is the one classifier: of runs, and of what ``mode=diagnose`` has measured. A verdict is
data, which ``harness.watch.report`` puts into sentences. What processors and workers can give, by
what a sample and a step cost, follows operational laws (Denning and Buzen 1978): with w seconds of
wall and c of processor time a sample, n workers give at most n / w images/s, and C processors
C / (c + r + s), where receiving an image takes r and the step s of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from ..config import Precision, TrainerConfig
from .figures import Tag, Window
from .host import SPOILT, taken
from .stages import AUGMENT, GROUPS, SAMPLE, StageCost, StageTotals

Bottleneck = Literal[
    "storage", "decode", "augment", "collate", "transport", "copy", "workers", "compute", "launch",
    "quota", "memory", "host", "neighbours", "rank", "balanced", "unknown",
]  # fmt: skip

# of the time: MLPerf Storage asks for an accelerator utilisation of 0.90
HARM = 0.10
# of the scheduling periods: kubernetes-mixin's CPUThrottlingHigh warns from here on
THROTTLED = 0.25
# what a stall below this share of the time would give back cannot be told from noise
FED = 0.02
# new values by setting
Change = Mapping[str, int | bool | str]
Why = Literal[
    "few steps", "no stall", "no stages", "no compute", "uneven", "handed over", "gc", ""
]  # fmt: skip


def roofline(cores: float, *each_s: float) -> float:
    """Returns the images/s at which loading and steps fill ``cores``.

    ``each_s`` are processor seconds an image, such as of loading, of receiving and of the step.
    """
    return cores / sum(each_s) if any(each_s) else math.inf


def workers_for(images_per_s: float, wall_s: float) -> int:
    """Returns the fewest workers for a rate, where a sample takes one of them ``wall_s``.

    At least 1; a twentieth of a worker is none.
    """
    return max(1, math.ceil(images_per_s * wall_s - 0.05))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank's step in milliseconds: means, but for ``step_ms``, a median.

    ``stalled_ms`` is device time idle for want of data, not the host's wait, which is harmless
    while work is queued. None: the device cannot tell.
    """

    rank: int
    step_ms: float
    stalled_ms: float
    host_ms: float | None
    forward_ms: float | None

    @classmethod
    def of(cls, rank: int, total: Window, forward_ms: float | None) -> RankFigures:
        """Returns the figures of a rank's whole run."""
        mean_ms = 1e3 * total.elapsed_s / max(1, total.steps)
        host = total.shares.get("host")
        return cls(
            rank=rank,
            step_ms=total.step_ms.median if total.step_ms else 0.0,
            stalled_ms=(total.stall_fraction or 0.0) * mean_ms,
            host_ms=None if host is None else host * mean_ms,
            forward_ms=forward_ms,
        )


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """What a sample costs the workers of a feed, and what that time goes for.

    Attributes:
        wall_s: seconds that a worker takes for a sample.
        cpu_s: processor seconds of these.
        wants_s: ``cpu_s`` and the seconds in which the worker waited for a processor.
        contention: how many times its processor time work lasts; 1: processors are free.
        parts: by kind, the share of ``wall_s``; they sum to 1.
        kind: the largest part.
        stage: the largest stage of that kind.
        waits: whether that kind's time is mostly waiting, and not for a processor.
    """

    wall_s: float
    cpu_s: float
    wants_s: float
    contention: float
    parts: Mapping[str, float]
    kind: Bottleneck
    stage: str
    waits: bool


def worker_cost(totals: StageTotals | None, *, full: bool = False) -> WorkerCost | None:
    """Returns what a sample costs; None: ``totals`` of the workers say nothing.

    ``full`` processors may have kept a stage that works waiting.
    """
    stages = totals.stages if totals else {}
    wall_s, cpu_s = total(stages.values())
    if totals is None or totals.samples <= 0 or wall_s <= 0:
        return None
    # crowded processors prolong every stage that works: the least prolonged one tells by how much.
    # A lone stage that is crowded out cannot be told from one that waits, but by their fullness.
    prolonged = [
        cost.wall_s / cost.cpu_s for cost in stages.values() if cost.cpu_s >= max(1e-9, 0.1 * cpu_s)
    ]
    if len(prolonged) == 1 and not full:
        prolonged.append(1.0)
    contention = max(1.0, min(prolonged, default=1.0))

    def waits(cost: StageCost) -> bool:
        # on full processors only a stage that hardly ever has one is sure to wait for another thing
        outside = not full or cost.cpu_s < 0.1 * cost.wall_s
        return outside and cost.wall_s - contention * cost.cpu_s >= 0.5 * cost.wall_s

    kinds: dict[str, dict[str, StageCost]] = {}
    for name, cost in stages.items():
        kind = GROUPS.get(name, AUGMENT)
        if kind == SAMPLE:
            # a data set that names no stages reads where it waits, and decodes where it works
            kind = "storage" if waits(cost) else "decode"
        kinds.setdefault(kind, {})[name] = cost
    costs = {kind: total(named.values()) for kind, named in kinds.items()}
    top = max(costs, key=lambda kind: costs[kind].wall_s)
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


def total(stages: Collection[StageCost]) -> StageCost:
    """Returns the seconds of several stages together."""
    return StageCost(sum(cost.wall_s for cost in stages), sum(cost.cpu_s for cost in stages))


class Straggler(NamedTuple):
    """The rank that the others wait for, where gradients meet.

    Attributes:
        rank: its number.
        late_ms: by which it holds the others up, a step.
        part: what it spends most of that on: ``stalled``, ``host`` or ``forward``.
        share: of a step, if it waits for data.
    """

    rank: int
    late_ms: float
    part: str
    share: float

    @classmethod
    def among(cls, ranks: Sequence[RankFigures]) -> Straggler | None:
        """Returns the one of ``ranks``; None: they are alike."""
        if len(ranks) < 2:
            return None
        ms = np.array([[rank.stalled_ms, rank.host_ms, rank.forward_ms] for rank in ranks], float)
        # a figure that one rank cannot tell counts for none of them
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
    """What a verdict rests on, and what follows from it by arithmetic: shares of the time, 0..1.

    Attributes:
        window: the steps' figures, usually the whole run's.
        stages: what the workers spent their time on; None: the feed does not tell.
        settings: the loader's, with torch's names; ``backend`` is "processes", "threads", or
            "arrays", which never has workers; ``prefetch_factor`` is per worker process, or of
            threads in all.
        cores: processors that this rank may use.
        device: its kind.
        sampled: the machine's figures by tag, means over the run.
        autotuned: whether the loader's settings are those of a search.
        ranks: every rank's figures, where there are several.
        trainer: the network's settings.
        half_precision: the faster of bf16 and fp16 on the device.
        window_steps: steps in one logged window.
        cores_from: where the number of cores is said.
        most_workers: workers that are worth a try and fit; None: the tuner's cap, max(8, 4 a core).
        others: cores that other programs took; None: they harmed nothing, as ``sampled`` has it.
        ceiling: speed-up if loading were free, where measured; None: as the stall says.
        stall: the device had nothing to run for want of data.
        starved: of that, the loop waited for a batch.
        copy: of that, the loop waited for a batch's copy.
        host: the device waited for Python, on a CPU for garbage collections within a step too.
        launch: the device waited for the next kernel's launch; 0 where that was not looked into.
        lost: ``starved``, ``copy``, ``host`` and ``launch`` together.
        prepare: batches were augmented and normalised.
        compute: the network ran; None: not known.
        made: share of ``starved`` until the batch was made; 1 where no batch told.
        handed: share of ``starved`` until it was here, and in page-locked memory.
        moved: share of ``starved`` until it was on the device and normalised.
        host_parts: what ``host`` was spent on, by name.
        workers: of the loader.
        rate: images/s; 0: not known.
        throttled: share of the scheduling periods in which a quota stopped this run.
        cost: what the workers' time went for; None: nothing tells.
        memory: this run waited for memory.
        late: the rank that the others wait for; None: they are alike.
        speedup: if loading were free, at most 1000.
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
    half_precision: str = "bf16"
    window_steps: int = 10
    cores_from: str = ""
    most_workers: int | None = None
    others: float | None = None
    ceiling: float | None = None

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
        # host work hidden behind queued device work is not part of the gap
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
        # where nine tenths of the processors are in use, some work waits for one
        in_use = max(used, self.sampled.get(Tag.CPU_FRACTION, 0.0))
        full = in_use >= 0.9 or self.throttled >= THROTTLED or self.others is not None
        self.cost = worker_cost(self.stages, full=full)
        # a page from a disk takes 0.1 ms at least
        faulting = min(1.0, 1e-4 * self.sampled.get(Tag.MAJOR_FAULTS_PER_S, 0.0))
        self.memory = self.sampled.get(Tag.MEMORY_STALL_FRACTION, faulting)
        self.late = Straggler.among(self.ranks)

    def unmade(self) -> float:
        """Returns the share of the time waited for batches if handing over took no time."""
        if self.cost is None or not self.workers:
            return self.starved
        wanted = self.cost.wall_s * self.rate * self.speedup
        return max(0.0, 1 - self.workers / max(self.workers, wanted))

    def could(self) -> float:
        """Returns the images/s that all processors could load beside the step."""
        cores = self.cores
        if self.cost is None or not self.rate:
            return self.rate
        used = self.sampled.get(Tag.CPU_CORES)
        # where the device is another one and nothing was sampled
        step_cores = 0.0
        if used is not None:
            step_cores = max(0.0, min(used, cores) - self.cost.cpu_s * self.rate)
        elif self.device == "cpu":
            step_cores = cores * (self.compute or 0.0)
        return roofline(cores, self.cost.wants_s, step_cores / self.rate)

    def has_room(self) -> bool:
        """Returns whether processors could load a tenth more than the workers do or might."""
        if self.cost is None:
            return False
        return self.could() >= (1 + HARM) * max(self.rate, self.workers / self.cost.wall_s)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a run.

    Attributes:
        kind: of bottleneck; balanced: some waiting, under a tenth of the time.
        shares: the figures that it rests on.
        change: settings that should help, with their new values; empty: no setting does.
        why: the reason, where ``kind`` and ``shares`` leave it open.
        ceiling: speed-up if loading were free, 1 / (1 - stall_fraction); None: the stall is not
            known.
    """

    kind: Bottleneck
    shares: Evidence
    change: Change = field(default_factory=dict)
    why: Why = ""
    ceiling: float | None = None


def judge(r: Evidence) -> Verdict:
    """Returns what bounds the steps in ``r.window``, and what to try."""
    window = r.window
    # in under a second, a single slow step among a few would decide
    if window.steps < (10 if window.elapsed_s >= 1.0 else 20):
        return Verdict("unknown", r, why="few steps")
    if window.stall_fraction is None:
        return Verdict("unknown", r, why="no stall")
    rule = unharmed
    if r.lost >= HARM:
        # the rule for what costs the most
        costs = {starved: r.starved, copied: r.copy, hosted: r.host, launched: r.launch}
        rule = max(costs, key=costs.__getitem__)
    ceiling = r.speedup
    if r.late:
        found = Verdict("rank", r, searched(r) if r.late.part == "stalled" else {})
        ceiling = max(ceiling, 1 / max(0.01, 1 - r.late.share))
    else:
        found = rule(r)
    return replace(lacking(r, found.kind) or found, ceiling=ceiling)


def searched(r: Evidence) -> Change:
    """Returns the search for the loader's settings, if they are not those of one."""
    return {} if r.autotuned else {"loader.autotune": True}


def unharmed(r: Evidence) -> Verdict:
    """Returns what sets the pace where next to nothing is lost."""
    # a twentieth of the time for Python is no surprise where steps are short
    if r.stall >= FED or r.host >= 0.05:
        return Verdict("balanced", r)
    if r.compute is None:
        return Verdict("unknown", r, why="no compute")
    change: dict[str, bool | str] = {}
    if r.device == "cuda":
        if r.trainer.precision is Precision.fp32:
            change["trainer.precision"] = r.half_precision
        if not r.trainer.channels_last:
            change["trainer.channels_last"] = True
        if not change and not r.trainer.compile:
            change["trainer.compile"] = True
    return Verdict("compute", r, change)


def starved(r: Evidence) -> Verdict:
    """Returns why batches come too late: made too slowly, or long on the way."""
    cores = r.cores
    cost = r.cost
    late = max(r.handed, r.moved) > r.made
    # workers that are too slow, and processors full of samples, delay handing over too: where that
    # were the bottleneck, they would idle
    is_full = r.could() < (1 + HARM) * r.rate and cost and 2 * cost.wants_s * r.rate >= cores
    change = searched(r)
    if late and not is_full and (cost is None or r.unmade() < r.starved / 2):
        if r.moved >= r.handed:
            return copied(r)
        # making a batch here is quicker than fetching it
        if change and r.workers and cost and 0 < cost.wall_s * r.rate < r.starved:
            change = {"loader.num_workers": 0}
        return Verdict("transport", r, change, "handed over")
    if cost is None:
        return Verdict("unknown", r, change, "no stages")
    more = more_in_flight(r)
    if more and not cost.waits:
        return Verdict("workers", r, more)
    # backends other than processes share nothing
    return Verdict(cost.kind, r, change if cost.kind == "transport" else more)


def more_in_flight(r: Evidence) -> Change:
    """Returns a setting that adds workers or batches in flight; empty: none helps."""
    cost = r.cost
    if cost is None or r.autotuned or r.could() < (1 + HARM) * r.rate:
        return {}
    if r.workers and r.unmade() == 0:
        # more than 8 batches ahead of each process, or 32 of all threads, have not helped
        deepest = 32 if r.settings.backend == "threads" else 8
        depth = r.settings.prefetch_factor or deepest
        return {"loader.prefetch_factor": min(2 * depth, deepest)} if depth < deepest else {}
    # a tenth more than the steps would take, as far as there are processors: samples are uneven
    wanted = workers_for(1.1 * min(r.could(), r.speedup * r.rate), cost.wall_s)
    wanted = min(wanted, r.most_workers or max(8, int(4 * r.cores)))
    if not r.has_room() or wanted <= r.workers or r.settings.backend == "arrays":
        return {}
    return {"loader.num_workers": wanted}


def copied(r: Evidence) -> Verdict:
    """Returns that batches that are here wait to be brought to the device and normalised."""
    pins = r.device == "cuda" and not r.settings.pin_memory
    return Verdict("copy", r, {"loader.pin_memory": True} if pins else {})


def hosted(r: Evidence) -> Verdict:
    """Returns that Python keeps the device waiting between two steps."""
    match max(r.host_parts, key=r.host_parts.__getitem__):
        case "gc":
            return Verdict("host", r, why="gc")
        case "logging":
            return Verdict("host", r, {"watch.window_steps": 10 * r.window_steps})
    return Verdict("host", r, {"loader.batch_size": 2 * r.settings.batch_size})


def launched(r: Evidence) -> Verdict:
    """Returns that Python launches kernels more slowly than the device runs them."""
    larger = {"loader.batch_size": 2 * r.settings.batch_size}
    return Verdict("launch", r, larger if r.trainer.compile else {"trainer.compile": True})


def lacking(r: Evidence, kind: Bottleneck) -> Verdict | None:
    """Returns what the machine lacked, where that can have caused ``kind``."""
    # slow processors do not harm an accelerator that is busy all the same
    if r.device == "cpu" or r.lost >= HARM:
        # files that are mapped fault where they are read
        is_told = kind != "storage" or Tag.MEMORY_STALL_FRACTION in r.sampled
        if r.memory >= HARM and is_told and kind != "rank":
            if r.workers > 1:
                return Verdict("memory", r, {"loader.num_workers": r.workers // 2})
            deep = (r.settings.prefetch_factor or 1) > 1
            return Verdict("memory", r, {"loader.prefetch_factor": 1} if deep else {})
        # a quota that stops the run in most periods stops it within reads, too
        waits = kind == "storage" and r.throttled < 0.5 and r.cost and r.cost.waits
        if not waits and kind not in ("copy", "rank", "unknown"):
            full = r.others is None and r.cores_from.startswith("quota") and not r.has_room()
            if r.throttled >= THROTTLED or (full and r.cost and r.cost.kind == kind):
                return Verdict("quota", r)
            return None if r.others is None else Verdict("neighbours", r)
    shared = r.sampled.get(Tag.GPU_OTHERS_UTILIZATION, 0.0) >= SPOILT
    return Verdict("neighbours", r) if shared and kind == "compute" else None
