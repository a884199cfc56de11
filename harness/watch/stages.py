"""Where the workers' time goes: what reading, decoding, each transform and the batch around them
take.

A worker times every batch, by two looks at the clock, and finds out how that time divides by
*laps*: a data set that names its ``stages`` is given a function to call at the end of each. It
times as many samples as are reckoned to keep the laps' own cost well below a thousandth of the
work: all of them where a sample takes twenty milliseconds, one in some where it takes one, some in
one batch of many where it takes microseconds. What a worker took is exact either way. How it
divides is exact where all samples are timed; else it follows the last few hundred that were, so
that a rare slow sample shows in its stage only if it is among them, and then counts for those that
were not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from harness.watch.rows import Rows

START = ""  # told to a lap at the beginning of a sample
SAMPLE = "sample"  # all of a sample, where a data set names no stages
COLLATE, SHARE = (
    "collate",
    "share",
)  # a batch but for its samples; of that, memory that another process can map
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "read": "storage",
        "decode": "decode",
        COLLATE: "collate",
        SHARE: "transport",
        SAMPLE: "sample",
    }
)
AUGMENT = "augment"  # the group of every stage that is not in GROUPS

Clock = Callable[[], float]
Lap = Callable[
    [str], None
]  # called by a data set at the end of each of its stages, with the stage's name

# samples, batches, busy seconds: the head of a worker's row; then wall seconds by stage, then
# processor seconds
_COUNTS = 3
_WALL_BUDGET, _CPU_BUDGET = (
    2e-4,
    5e-5,
)  # of the work, for looks at the wall clock and at the processor clock, a system call
# timing a sample amid work that fills the caches costs 1 to 5 times what it does in a loop of its
# own, as measured
_COLD = 3.0
_FEW = 16  # samples that make timing a batch worth while, where it has so many
_MEMORY = 512  # timed samples by which a batch is divided where not all of its own are
_TRIALS = 3  # batches of nothing, the quickest of which tells what timing a sample costs
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, spread evenly however many there are


class Stamps(NamedTuple):
    """When a batch came where, on ``time.perf_counter``, which is one clock for all processes of a
    machine.

    Unpickling sets ``received_s``, and the batch's ``pin_memory`` sets ``pinned_s``, after the
    tensors.

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
        """The same with ``pinned_s`` now."""
        return self._replace(pinned_s=time.perf_counter())

    def __reduce__(self) -> tuple[Callable[[float, float], Stamps], tuple[float, float]]:
        return _received, (self.begun_s, self.made_s)


def wait_parts(began_s: float, ended_s: float, stamps: Stamps) -> dict[str, float]:
    """Seconds of a wait by where its batch was at the time."""
    parts, at_s = {}, began_s
    for name, until_s in (
        ("make", stamps.made_s),
        ("transport", stamps.received_s),
        ("pin", stamps.pinned_s),
        ("move", ended_s),
    ):
        parts[name], at_s = max(0.0, min(until_s, ended_s) - at_s), max(at_s, min(until_s, ended_s))
    return parts


def _received(begun_s: float, made_s: float) -> Stamps:
    now_s = time.perf_counter()
    return Stamps(begun_s, made_s, now_s, now_s)


class StageCost(NamedTuple):
    """Seconds that all samples together took in one stage, by the wall clock and of a processor;
    the rest is waiting.
    """

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
        """What was done after ``before``, an earlier reading of the same meter; None: all of it."""
        if before is None:
            return self
        pairs = zip(self.stages.items(), before.stages.values(), strict=True)
        # an earlier reading has divided the last batches by the shares of those before them, maybe
        # giving a stage too much
        stages = {
            name: StageCost(max(0.0, cost.wall_s - then.wall_s), max(0.0, cost.cpu_s - then.cpu_s))
            for (name, cost), then in pairs
        }
        samples, batches = self.samples - before.samples, self.batches - before.batches
        return StageTotals(samples, batches, self.busy_s - before.busy_s, stages)


class StageMeter:
    """The totals of one feed's workers, in memory that they share: they only grow, whatever becomes
    of the workers.

    A reading may miss the batch that a worker is just adding, or a part of its figures.

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
        self.stages = (*stages, COLLATE, SHARE) if shared else (*stages, COLLATE)
        self._of_samples = tuple(stages)
        if len({START, COLLATE, SHARE, *stages}) < len(stages) + 3:
            own = f"{COLLATE!r} and {SHARE!r} are the batch's"
            raise ValueError(
                f"stages {self._of_samples} of a data set: give each a name of its own ({own})"
            )
        self._columns = _COUNTS + 2 * len(self.stages)
        self._rows = Rows(max(1, workers), self._columns, shared=shared)

    def read(self) -> StageTotals:
        """The totals over all slots, now; batches whose time is not divided yet are divided like
        those before them.
        """
        counts, wall_s, cpu_s = self._rows.read().split(
            (_COUNTS, len(self.stages), len(self.stages)), dim=1
        )
        scale = (counts[:, 2] / wall_s.sum(dim=1)).nan_to_num(posinf=0.0).unsqueeze(1)
        samples, batches, busy_s = counts.sum(dim=0).tolist()
        costs = map(
            StageCost, (wall_s * scale).sum(dim=0).tolist(), (cpu_s * scale).sum(dim=0).tolist()
        )
        return StageTotals(
            int(samples), int(batches), busy_s, dict(zip(self.stages, costs, strict=True))
        )

    def timer(
        self, slot: int, now: Clock = time.perf_counter, cpu_now: Clock = time.thread_time
    ) -> StageTimer:
        """What writes the row of worker ``slot``; used in its process, and in one thread at a time."""
        row = self._rows.cells[slot * self._columns : (slot + 1) * self._columns]
        return StageTimer(row, self._of_samples, SHARE in self.stages, now, cpu_now)


class Laps:
    """Times single samples, as many as may cost ``budget`` of the work.

    Attributes:
        lap: called with a stage's name at its end, and with ``START`` at the beginning of each
            sample.
        due_s: after so many seconds of work samples may be timed again.
    """

    def __init__(
        self, stages: Sequence[str], budget: float, now: Clock, cpu_now: Clock | None = None
    ) -> None:
        self.due_s = 0.0
        self._stages, self._budget, self._offset, self._spent_s = tuple(stages), budget, 0.0, 0.0
        self._marks: list[tuple[str, float, float]] = []
        self.lap: Lap = _marker(self._marks.append, now, cpu_now)
        self._own_s = 0.0
        cost_s, self._own_s = min(self._trial(now) for _ in range(_TRIALS))
        self._cost_s = cost_s * _COLD

    def rows(self, samples: int, work_s: float) -> list[int]:
        """Which of a batch's samples to time, after ``work_s`` seconds of work: evenly spread, from
        another place each time.
        """
        if work_s < self.due_s:
            return []
        few, spare_s = min(samples, _FEW), self._budget * work_s - self._spent_s
        count = (
            samples if samples * self._cost_s <= spare_s else max(few, int(spare_s / self._cost_s))
        )
        self._spent_s += count * self._cost_s
        self.due_s = (self._spent_s + few * self._cost_s) / self._budget
        self._offset = (self._offset + _GOLDEN) % 1.0
        return [int((i + self._offset) * samples / count) for i in range(count)]

    def fail(self) -> None:
        """The sample ends with an error, in the stage after the one that ended last."""
        ended = self._marks[-1][0]
        done = self._stages.index(ended) + 1 if ended in self._stages else 0
        self.lap(self._stages[min(done, len(self._stages) - 1)])

    def take(self) -> tuple[int, list[float], list[float]]:
        """The samples timed since the last call, and their wall and processor seconds by stage,
        less what timing took.

        Raises:
            ValueError: the data set told the end of a stage that it does not name, or of none.
        """
        wall_s, cpu_s = dict.fromkeys(self._stages, 0.0), dict.fromkeys(self._stages, 0.0)
        timed, wall_then, cpu_then = 0, 0.0, 0.0
        try:
            for stage, wall, cpu in self._marks:
                if stage == START:
                    timed += 1
                else:
                    wall_s[stage] += wall - wall_then
                    cpu_s[stage] += cpu - cpu_then
                wall_then, cpu_then = wall, cpu
        except KeyError:
            raise ValueError(
                f"stage {stage!r} is not among the data set's stages {self._stages}"
            ) from None
        if timed and timed == len(self._marks):
            raise ValueError(
                f"the data set names the stages {self._stages} and never tells the end of one: "
                "call lap(stage)"
            )
        self._marks.clear()
        own_s = timed * self._own_s
        return (
            timed,
            [max(0.0, s - own_s) for s in wall_s.values()],
            [max(0.0, s - own_s) for s in cpu_s.values()],
        )

    def _trial(self, now: Clock) -> tuple[float, float]:
        """Seconds that it took to time a sample of nothing, and what of that is in each of its
        stages.
        """
        begin_s = now()
        for _ in range(_FEW):
            for stage in (START, *self._stages):
                self.lap(stage)
        _, wall_s, _ = self.take()
        return (now() - begin_s) / _FEW, sum(wall_s) / (_FEW * len(wall_s))


def _marker(
    mark: Callable[[tuple[str, float, float]], None], now: Clock, cpu_now: Clock | None
) -> Lap:
    """Gives ``mark`` each stage with the clocks; as little as can be, for it runs amid work that
    fills the caches.
    """

    def lap(stage: str) -> None:
        mark((stage, now(), 0.0))

    def cpu_lap(stage: str) -> None:
        mark((stage, now(), cpu_now()))  # type: ignore[misc]  # not used without it

    return lap if cpu_now is None else cpu_lap


class _Recent:
    """Sums over the last few hundred timed samples; what a worker's first ones paid for warming up
    is soon forgotten.
    """

    def __init__(self, figures: int) -> None:
        self._sums, self._times = [0.0] * figures, 0

    def add(self, figures: Sequence[float], samples: int) -> Sequence[float]:
        """The sums, with those of another batch in which so many samples were timed."""
        if samples:
            keep = 0.0 if self._times < 2 else max(0.0, 1.0 - samples / _MEMORY)
            self._times += 1
            self._sums = [old * keep + new for old, new in zip(self._sums, figures, strict=True)]
        return self._sums


class StageTimer:
    """Times the batches of one worker: for each batch ``begin``, ``share`` where it is shared,
    ``fill`` and ``end``.
    """

    def __init__(
        self,
        row: memoryview[float],
        stages: Sequence[str],
        shares: bool,
        now: Clock,
        cpu_now: Clock,
    ) -> None:
        self._row, self._shares, self._now, self._cpu_now = row, shares, now, cpu_now
        self._laps, self._cpu_laps = (
            Laps(stages, _WALL_BUDGET, now),
            Laps(stages, _CPU_BUDGET, now, cpu_now),
        )
        columns = len(stages) + 1 + shares
        self._wall, self._both = _Recent(columns), _Recent(2 * columns)
        self._timing = False  # whether samples of this batch are timed
        self._begun_s = self._sharing_s = self._filling_s = 0.0
        self._begun_cpu_s = self._sharing_cpu_s = self._filling_cpu_s = 0.0
        self._busy_s = self._undivided_s = (
            0.0  # so far, and as much of it as is not divided among the stages
        )

    def begin(self, samples: int) -> Sequence[Laps | None] | None:
        """A batch of so many samples begins; gives what is to time each, None where that is none of
        them.
        """
        self._timing = self._busy_s >= self._laps.due_s
        if not self._timing:
            self._begun_s = self._now()
            return None
        timers: list[Laps | None] = [None] * samples
        for laps in (self._laps, self._cpu_laps):
            for row in laps.rows(samples, self._busy_s):
                timers[row] = laps
        self._begun_s, self._begun_cpu_s = self._now(), self._cpu_now()
        return timers

    def share(self) -> None:
        """What is left to do until ``fill`` is to get memory that another process can map."""
        if self._timing:
            self._sharing_s, self._sharing_cpu_s = self._now(), self._cpu_now()

    def fill(self) -> None:
        """All is ready for the batch's first sample."""
        if self._timing:
            self._filling_s, self._filling_cpu_s = self._now(), self._cpu_now()

    def end(self, samples: int, batches: int = 1) -> Stamps:
        """The batch's last sample is there; adds what the batch took to the totals.

        Where workers share a batch each of them times its part, and ``batches`` is 1 for one of
        these and 0 for the others; so it is with ``samples`` where two of them see to the same one.
        """
        made_s = self._now()
        busy_s = made_s - self._begun_s
        row = self._row
        row[0] += samples
        row[1] += batches
        row[2] += busy_s
        self._busy_s += busy_s
        self._undivided_s += busy_s
        if self._timing:
            self._divide(max(1, samples), alone=self._undivided_s == busy_s)
        return Stamps(self._begun_s, made_s, made_s, made_s)

    def _divide(self, samples: int, alone: bool) -> None:
        """Divide among the stages what this batch took, and unless it is ``alone`` those before it
        that timed no sample.
        """
        timed, wall_s, _ = self._laps.take()
        both, both_wall_s, both_cpu_s = self._cpu_laps.take()
        timed += both
        marks = [(self._begun_s, self._begun_cpu_s), (self._filling_s, self._filling_cpu_s)]
        if self._shares:
            marks.insert(1, (self._sharing_s, self._sharing_cpu_s))
        around = [(end_s - begin_s) / samples for (begin_s, _), (end_s, _) in pairwise(marks)]
        around_cpu = [(end_s - begin_s) / samples for (_, begin_s), (_, end_s) in pairwise(marks)]
        own = [
            *(a + b for a, b in zip(wall_s, both_wall_s, strict=True)),
            *(timed * each_s for each_s in around),
        ]
        own_both = [
            *both_wall_s,
            *(both * each_s for each_s in around),
            *both_cpu_s,
            *(both * each_s for each_s in around_cpu),
        ]
        recent, recent_both = self._wall.add(own, timed), self._both.add(own_both, both)
        shares = own if alone and timed == samples else recent
        both_sums = own_both if both == samples else recent_both
        total_s, stages = sum(shares), len(shares)
        for place, (share, both_s, cpu_s) in enumerate(
            zip(shares, both_sums[:stages], both_sums[stages:], strict=True)
        ):
            cost_s = self._undivided_s * _ratio(share, total_s)
            self._row[_COUNTS + place] += cost_s
            self._row[_COUNTS + stages + place] += cost_s * min(1.0, _ratio(cpu_s, both_s))
        self._undivided_s = 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
