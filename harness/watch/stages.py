"""Where the workers' time goes: reading, decoding, each transform, the batch around them.

A worker times every batch, by two looks at the clock, so that its total is exact. How the total
divides among the stages comes of *laps*: a data set that names its ``stages`` is given a function
to call at the end of each. Laps are taken of as many samples as keep their cost below a thousandth
of the work: of all where a sample takes twenty milliseconds, of few where it takes microseconds.
Where not all samples of a batch are timed, the last few hundred that were divide it; a rare slow
sample may then be missed or counted for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from harness.watch.rows import Rows

# told to a lap at the beginning of a sample
START = ""
# and where something of the batch begins
_BATCH = "<batch>"
# all of a sample, where a data set names no stages
SAMPLE = "sample"
READ = "read"
DECODE = "decode"
# a batch but for its samples
COLLATE = "collate"
# of that, to get memory that another process can map
SHARE = "share"
GROUPS: Mapping[str, str] = {
    READ: "storage",
    DECODE: "decode",
    COLLATE: "collate",
    SHARE: "transport",
    SAMPLE: "sample",
}
# the group of every stage that is not in GROUPS
AUGMENT = "augment"

Clock = Callable[[], float]
# called by a data set with the name of each stage at its end
Lap = Callable[[str], None]

# a worker's row: samples, batches, busy seconds; then the figures of ``Work``, but for ``moved``;
# then wall seconds by stage, then processor seconds
_COUNTS = 3
_HEAD = 7
# of the work, for laps
_BUDGET = 2.5e-4
# samples that make timing a batch worth its cost, if the batch has as many
_FEW = 8


class Stamps(NamedTuple):
    """When a batch came where, on ``time.perf_counter``.

    That is one clock for all processes of a machine. Unpickling sets ``received_s``, and the
    batch's ``pin_memory`` sets ``pinned_s``, after the tensors.

    Attributes:
        begun_s: a worker began it.
        made_s: the worker had it complete.
        received_s: this process had it; ``made_s`` where it was made here.
        pinned_s: it lay in page-locked memory; ``received_s`` where nothing pins.
    """

    begun_s: float
    made_s: float
    received_s: float
    pinned_s: float

    def pin_memory(self) -> Stamps:
        """Returns the same with ``pinned_s`` now."""
        return self._replace(pinned_s=time.perf_counter())

    def __reduce__(self) -> tuple[Callable[[float, float], Stamps], tuple[float, float]]:
        return received, (self.begun_s, self.made_s)


def wait_parts(began_s: float, ended_s: float, stamps: Stamps) -> dict[str, float]:
    """Returns the seconds of a wait by where its batch was at the time."""
    parts = {}
    at_s = began_s
    for name, until_s in (
        ("make", stamps.made_s),
        ("transport", stamps.received_s),
        ("pin", stamps.pinned_s),
        ("move", ended_s),
    ):
        until_s = max(at_s, min(until_s, ended_s))
        parts[name] = until_s - at_s
        at_s = until_s
    return parts


def received(begun_s: float, made_s: float) -> Stamps:
    """Returns the stamps of a batch that arrives now."""
    now_s = time.perf_counter()
    return Stamps(begun_s, made_s, now_s, now_s)


class StageCost(NamedTuple):
    """Wall and processor seconds of all samples in one stage; the difference is waiting."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class StageTotals:
    """What a feed's workers have done.

    Attributes:
        samples: how many they have made.
        batches: how many they have made.
        busy_s: wall seconds that they spent on them, summed over the workers; the stages' wall
            seconds add up to it.
        stages: by name, in the order in which a sample goes through them; then ``collate``, and
            ``share`` of processes.
    """

    samples: int
    batches: int
    busy_s: float
    stages: Mapping[str, StageCost]

    def since(self, before: StageTotals | None) -> StageTotals:
        """Returns what was done after ``before``, an earlier reading; None: all of it."""
        if before is None:
            return self
        stages = {}
        for name, cost in self.stages.items():
            # below zero where the earlier reading had given the stage too much of the last batches
            pairs = zip(cost, before.stages[name], strict=True)
            stages[name] = StageCost(*(max(0.0, now_s - then_s) for now_s, then_s in pairs))
        return StageTotals(
            self.samples - before.samples,
            self.batches - before.batches,
            self.busy_s - before.busy_s,
            stages,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Returns each stage's name, its group, and what a sample takes, in milliseconds."""
        return [
            {
                "name": name,
                "group": GROUPS.get(name, AUGMENT),
                "wall_ms": 1e3 * cost.wall_s / self.samples,
                "cpu_ms": 1e3 * cost.cpu_s / self.samples,
            }
            for name, cost in self.stages.items()
        ]


class Work(NamedTuple):
    """What the samples took that were timed one by one, over all workers.

    Attributes:
        samples: samples that are done.
        moved: workers that have done a sample.
        wall_s: sum of the samples' wall times in seconds.
        wall_sq_s2: sum of their squares.
        cpu_s: sum of the processor seconds of the threads that made the samples.
    """

    samples: int
    moved: int
    wall_s: float
    wall_sq_s2: float
    cpu_s: float


class StageMeter:
    """The totals of one feed's workers, in memory that they share.

    The totals only grow, whatever becomes of the workers. A reading may miss the batch or the
    sample that a worker is just adding, or a part of its figures.

    Attributes:
        stages: of samples and batches, in order.
        of_samples: of samples alone.
        rows: of figures, one of each worker; a ``StageTimer`` and ``timed`` write them.

    Args:
        stages: the data set's, in order.
        workers: how many will write, from slot 0 on; without any the process itself does, into slot
            0.
        shared: whether they are processes; threads need no shared memory.

    Raises:
        RuntimeError, OSError: there is no shared memory to be had.
        ValueError: two stages have one name, or one has none.
    """

    def __init__(self, stages: Sequence[str], workers: int, shared: bool = True) -> None:
        shared = shared and workers > 0
        self.of_samples = tuple(stages)
        if len({START, COLLATE, SHARE, *stages}) < len(stages) + 3:
            raise ValueError(
                f"stages {self.of_samples} of a data set: give each a name of its own "
                f"({COLLATE!r} and {SHARE!r} are the batch's)"
            )
        self.stages = (*stages, COLLATE)
        if shared:
            self.stages += (SHARE,)
        self.rows = Rows(max(1, workers), _HEAD + 2 * len(self.stages), shared=shared)

    def read(self) -> StageTotals:
        """Returns the totals over all slots, now.

        Batches whose time is not divided yet are divided like those before them.
        """
        counts, wall_s, cpu_s = self.rows.read().split(
            (_HEAD, len(self.stages), len(self.stages)), dim=1
        )
        # a worker's busy seconds, by those of them that are divided
        scale = (counts[:, 2] / wall_s.sum(dim=1)).nan_to_num(posinf=0.0)
        samples, batches, busy_s = counts[:, :_COUNTS].sum(dim=0).tolist()
        # two clocks are not read at the very same moment
        cpu_s = cpu_s.minimum(wall_s)
        costs = map(StageCost, (scale @ wall_s).tolist(), (scale @ cpu_s).tolist())
        stages = dict(zip(self.stages, costs, strict=True))
        return StageTotals(int(samples), int(batches), busy_s, stages)

    def timed(self, slot: int, make: Callable[..., Any], samples: int = 1) -> Callable[..., Any]:
        """Returns ``make``, each call of which counts as ``samples`` of worker ``slot``'s ``work``.

        A consumer only sees a queue, and a batch may take seconds. A call that raises does not
        count.
        """
        row = self.rows.row(slot)

        def made(*args: Any) -> Any:
            wall_s = time.perf_counter()
            cpu_s = time.thread_time()
            result = make(*args)
            wall_s = time.perf_counter() - wall_s
            cpu_s = time.thread_time() - cpu_s
            row[_COUNTS] += samples
            row[_COUNTS + 1] += wall_s
            row[_COUNTS + 2] += wall_s * wall_s / samples
            row[_COUNTS + 3] += cpu_s
            return result

        return made

    def work(self) -> Work:
        """Returns the totals of what ``timed`` counts, now."""
        rows = self.rows.read()[:, _COUNTS:_HEAD]
        samples, *seconds = rows.sum(dim=0).tolist()
        return Work(int(samples), int((rows[:, 0] > 0).sum()), *seconds)


class StageTimer:
    """Times a worker's batches, and some of their samples at 0.025 % of the work.

    For each batch call ``begin``, ``share`` where the memory is shared, ``fill`` and ``end``.

    Args:
        meter: has the totals.
        slot: the row of ``meter`` that this writes, one thread at a time.
        now: the wall clock in seconds.
        cpu_now: the thread's processor clock in seconds.

    Attributes:
        lap: for a sample that ``begin`` says to time, called with ``START`` at its beginning and
            with a stage's name at the end of each.
    """

    def __init__(
        self,
        meter: StageMeter,
        slot: int,
        now: Clock = time.perf_counter,
        cpu_now: Clock = time.thread_time,
    ) -> None:
        self._stages = meter.stages
        self._of_samples = meter.of_samples
        self._row = meter.rows.row(slot)
        self._now = now
        self._marks: list[tuple[str, float, float]] = []
        mark = self._marks.append

        def lap(stage: str) -> None:
            mark((stage, now(), cpu_now()))

        self.lap: Lap = lap
        # the quickest of three batches of nothing tells what a lap costs
        trials = []
        for _ in range(3):
            began_s = now()
            for _ in range(64):
                lap(START)
            trials.append(now() - began_s)
        self._lap_s = min(trials) / 64
        # a sample's; beside work that fills the caches a lap costs 1 to 5 times what it does here
        self._cost_s = 3.0 * max(self._lap_s, 1e-9) * len(self._stages)
        # that may go for laps
        self._spare_s = _FEW * self._cost_s
        self._offset = 0.0
        self._timing = False  # whether samples of this batch are timed
        self._begun_s = 0.0
        self._samples = 1
        self._undivided_s = 0.0  # of the work: not divided among the stages yet
        # wall, then processor seconds by stage, sums over the last few hundred timed samples
        self._recent = [0.0] * 2 * len(self._stages)
        self._divided = 0

    def begin(self, samples: int) -> Sequence[StageTimer | None] | None:
        """Starts a batch; returns what times each sample, or None where none is timed."""
        self._samples = samples
        self._timing = self._spare_s >= min(samples, _FEW) * self._cost_s
        if not self._timing:
            self._begun_s = self._now()
            return None
        count = min(samples, int(self._spare_s / self._cost_s))
        self._spare_s -= count * self._cost_s
        # evenly spread, from another place each time: the golden ratio's multiples leave no gaps
        self._offset = (self._offset + 0.618034) % 1.0
        timers: list[StageTimer | None] = [None] * samples
        for i in range(count):
            timers[int((i + self._offset) * samples / count)] = self
        self._marks.clear()
        self.lap(_BATCH)
        self._begun_s = self._marks[0][1]
        return timers

    def share(self) -> None:
        """Note that until ``fill`` the worker gets memory that another process can map."""
        if self._timing and SHARE in self._stages:
            self.lap(COLLATE)

    def fill(self) -> None:
        """Note that all is ready for the batch's first sample."""
        if self._timing:
            self.lap(SHARE if self._marks[-1][0] == COLLATE else COLLATE)

    def collate(self) -> None:
        """Note that the samples are made, and that until ``end`` they are put together."""
        if self._timing:
            self.lap(_BATCH)

    def end(self, samples: int, batches: int = 1) -> Stamps:
        """Add what the batch took to the totals; its last sample is there.

        If several workers fill one batch, each times its part and exactly one passes
        ``batches=1``; likewise with ``samples`` where two see to the same ones.

        Raises:
            ValueError: the data set told the end of a stage that it does not name, or of none.
        """
        made_s = self._now()
        busy_s = made_s - self._begun_s
        row = self._row
        row[0] += samples
        row[1] += batches
        row[2] += busy_s
        self._spare_s += _BUDGET * busy_s
        self._undivided_s += busy_s
        if self._timing:
            if self._marks[-1][0] == _BATCH:
                self.lap(COLLATE)
            self._divide(alone=self._undivided_s == busy_s)
        return Stamps(self._begun_s, made_s, made_s, made_s)

    def _divide(self, alone: bool) -> None:
        """Divide this batch, and unless it is ``alone`` those before it, among the stages."""
        timed = sum(stage == START for stage, _, _ in self._marks)
        costs_s = self._costs_s(timed)
        if timed:
            # what a worker's first batch paid for warming up is soon forgotten
            keep = max(0.0, 1.0 - timed / 512) if self._divided >= 2 else 0.0
            self._divided += 1
            recent = zip(self._recent, costs_s, strict=True)
            self._recent = [old_s * keep + new_s for old_s, new_s in recent]
        if not (alone and timed == self._samples):
            costs_s = self._recent
        scale = self._undivided_s / (sum(costs_s[: len(self._stages)]) or 1.0)
        for place, cost_s in enumerate(costs_s, _HEAD):
            self._row[place] += scale * cost_s
        self._undivided_s = 0.0

    def _costs_s(self, timed: int) -> list[float]:
        """Returns wall, then processor seconds by stage of this batch's ``timed`` samples.

        Their part of the batch's own stages is in them, and what timing took is not.
        """
        ended = {stage for stage, _, _ in self._marks} - {START, _BATCH, COLLATE, SHARE}
        if not ended.issubset(self._of_samples) or (timed and not ended):
            raise ValueError(
                f"the data set names the stages {self._of_samples} and tells the end of "
                f"{sorted(ended) or 'none'}: call lap(stage) at the end of each"
            )
        wall_s = dict.fromkeys(self._stages, 0.0)
        cpu_s = dict.fromkeys(self._stages, 0.0)
        for (_, wall_then, cpu_then), (stage, wall, cpu) in pairwise(self._marks):
            if stage in wall_s:
                part = 1.0 if stage in ended else timed / max(1, self._samples)
                wall_s[stage] += part * (wall - wall_then - self._lap_s)
                cpu_s[stage] += part * (cpu - cpu_then - self._lap_s)
        return [max(0.0, cost_s) for cost_s in (*wall_s.values(), *cpu_s.values())]
