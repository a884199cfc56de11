"""What a verdict rests on, and what follows from it by arithmetic alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from harness.watch.bottleneck import HARM, Bottleneck
from harness.watch.figures import Tag, Window
from harness.watch.neighbours import taken
from harness.watch.stages import AUGMENT, GROUPS, SAMPLE, StageCost, StageTotals

# of the scheduling periods: kubernetes-mixin's CPUThrottlingHigh warns from here on
THROTTLED = 0.25
# of the time: a smaller suspect is not worth a word
WORTH = 0.01


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a verdict rests on.

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
        precision: the network's, by its name in the settings.
        compiled: whether torch.compile was used.
        channels_last: whether activations are kept as NHWC.
        half_precision: the faster of bf16 and fp16 on the device.
        window_steps: steps in one logged window.
        cores_from: where the number of cores is said.
        most_workers: workers that are worth a try and fit; None: the tuner's cap, max(8, 4 a core).
        others: cores that other programs took, where ``sampled`` cannot tell.
        ceiling: speed-up if loading were free, where measured; None: as the stall says.
    """

    window: Window
    stages: StageTotals | None
    settings: Any
    cores: float
    device: str
    sampled: Mapping[str, float]
    autotuned: bool
    ranks: tuple[RankFigures, ...] = ()
    precision: str = "fp32"
    compiled: bool = False
    channels_last: bool = False
    half_precision: str = "bf16"
    window_steps: int = 10
    cores_from: str = ""
    most_workers: int | None = None
    others: float | None = None
    ceiling: float | None = None


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

    kinds: dict[str, list[str]] = {}
    for name, cost in stages.items():
        kind = GROUPS.get(name, AUGMENT)
        if kind == SAMPLE:
            # a data set that names no stages reads where it waits, and decodes where it works
            kind = "storage" if waits(cost) else "decode"
        kinds.setdefault(kind, []).append(name)
    costs = {kind: total([stages[name] for name in names]) for kind, names in kinds.items()}
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


class StallBreakdown:
    """``evidence`` as shares of the time, 0..1.

    Attributes:
        sampled: gives a figure of the machine by its tag.
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
        host_parts: what ``host`` was spent on, as far as that has a name.
        workers: of the loader.
        larger: a batch twice as large, as a setting to try.
        rate: images/s; 0: not known.
        search: the search for loader settings, as a setting to try; None: they come of one.
        others: cores that other programs took; None: they harmed nothing.
        throttled: share of the scheduling periods in which a quota stopped this run.
        cost: what the workers' time went for; None: nothing tells.
        ceiling: speed-up if loading were free, at most 1000.
    """

    def __init__(self, evidence: Evidence) -> None:
        window = evidence.window
        share = window.shares.get
        part = window.wait_parts.get
        self.evidence = evidence
        self.sampled = evidence.sampled.get
        self.stall = window.stall_fraction or 0.0
        self.ceiling = evidence.ceiling or 1 / max(1 - self.stall, 0.001)
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
        self.workers: int = evidence.settings.num_workers
        self.larger = f"loader.batch_size={2 * evidence.settings.batch_size}"
        self.rate = window.images_per_s or 0.0
        self.search = None if evidence.autotuned else "loader.autotune=true"

        self.others = evidence.others or taken(evidence.sampled)
        self.throttled = self.sampled(Tag.THROTTLED_FRACTION, 0.0)
        used = self.sampled(Tag.CPU_CORES, 0.0) / evidence.cores
        # where nine tenths of the processors are in use, some work waits for one
        in_use = max(used, self.sampled(Tag.CPU_FRACTION, 0.0))
        full = in_use >= 0.9 or self.throttled >= THROTTLED or self.others is not None
        self.cost = worker_cost(evidence.stages, full=full)

    @property
    def waited(self) -> str:
        """How long was waited for data, in words."""
        if self.evidence.window.stall_basis == "device":
            return f"The device waited for data {self.stall:.0%} of the time"
        if self.evidence.device == "cpu":
            return f"Training waited for data {self.stall:.0%} of the time"
        return f"The loop waited for data {self.stall:.0%} of the time, the device at most as long"

    def origin(self) -> str:
        """Returns what is known of where the bytes that were read came from, in words."""
        read = self.sampled(Tag.READ_BYTES_PER_S)
        stored = self.sampled(Tag.STORAGE_BYTES_PER_S)
        if not read or stored is None:
            return ""
        if stored < 0.05 * read:
            return ". Hardly a byte came from a disk: opening files, or a network's files, are slow"
        # pages of mapped files come from the disk too, and are not read
        megabytes = max(read, stored) / 1e6
        origin = f". Of {megabytes:.3g} MB/s, {stored / 1e6:.3g} came from a disk or NFS"
        if stored >= 0.5 * read:
            origin += ": the files were not in the page cache"
        return origin

    def unmade(self) -> float:
        """Returns the share of the time waited for batches if handing over took no time."""
        if self.cost is None or not self.workers:
            return self.starved
        wanted = self.cost.wall_s * self.rate * self.ceiling
        return max(0.0, 1 - self.workers / max(self.workers, wanted))

    def could(self) -> float:
        """Returns the images/s that all processors could load beside the step.

        With c processor seconds a sample, C processors load at most C / (c + s) images/s where the
        step takes s of them per image (Denning and Buzen 1978).
        """
        cores = self.evidence.cores
        if self.cost is None or not self.rate:
            return self.rate
        used = self.sampled(Tag.CPU_CORES)
        # where the device is another one and nothing was sampled
        step_cores = 0.0
        if used is not None:
            step_cores = max(0.0, min(used, cores) - self.cost.cpu_s * self.rate)
        elif self.evidence.device == "cpu":
            step_cores = cores * (self.compute or 0.0)
        return cores / max(self.cost.wants_s + step_cores / self.rate, 1e-9)

    def has_room(self) -> bool:
        """Returns whether processors could load a tenth more than the workers do or might."""
        if self.cost is None:
            return False
        return self.could() >= (1 + HARM) * max(self.rate, self.workers / self.cost.wall_s)

    def told(self) -> tuple[str, ...]:
        """Returns the figures in words."""
        window = self.evidence.window
        shares = listed(window.shares).replace("_", " ")
        clauses = [f"time on the {window.stall_basis}'s clock: {shares}"]
        if window.wait_parts and self.starved >= WORTH:
            clauses.append(f"waiting for a batch: {listed(window.wait_parts)}")
        if cost := self.cost:
            clauses.append(
                f"a sample takes {1e3 * cost.wall_s:.3g} ms, {1e3 * cost.cpu_s:.3g} ms of them "
                f"on a processor: {listed(cost.parts)}"
            )
        if self.host >= WORTH and (work := listed(self.host_parts)):
            clauses.append(f"named work between steps: {work}")
        return tuple(clauses)


def listed(shares: Mapping[str, float]) -> str:
    """Returns shares as text, without those that are next to nothing."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
