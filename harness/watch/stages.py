"""Where the workers' time goes: what reading, decoding, each transform and the batch around them take.

A worker times every batch by two looks at the clock. Some batches it also splits: a data set that names its ``stages`` is
given a function to call at the end of each. Splitting pauses until its cost is a small part of the work, so that long batches
are all split and short ones rarely. What a worker took is exact. How that divides is exact for the batches that were split;
the others are divided like the last few hundred samples that were, so that a rare slow sample may be missed or count double.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = "sample"  # all of a sample, where a data set names no stages
# a batch but for its samples; of that, memory that another process can map
COLLATE = "collate"
SHARE = "share"
GROUPS: Mapping[str, str] = MappingProxyType(
    {"read": "storage", "decode": "decode", COLLATE: "collate", SHARE: "transport", SAMPLE: "sample"}
)
AUGMENT = "augment"  # the group of every stage that is not in GROUPS

Clock = Callable[[], float]
Lap = Callable[[str], None]  # called by a data set at the end of each of its stages, with the stage's name

# samples, batches, busy seconds: the head of a worker's row; then wall seconds by stage, then processor seconds
_COUNTS = 3
# of the work, for laps at their least; amid work that fills the caches they cost up to four times that, as measured
_BUDGET = 1e-4
_UNSEEN = 0.5  # of the part of a lap that its own two looks enclose: what lies before and after them
_MEMORY = 512  # samples of split batches by which the others are divided


class Rows:
    """Float64 zeros in memory that processes share: each writes its own row alone, and one reads them all.

    An aligned float64 is stored by one instruction on every 64-bit machine: without a lock a reader finds each figure as it
    was before or after a write, never half of both. Figures that are written together may be seen apart.

    Pickled for a worker process, the memory itself travels (as torch's batches do, and with the same means); it is gone with
    its last owner.

    Args:
        rows: processes that will write.
        columns: figures of each.
        shared: whether there are processes to share them with.

    Attributes:
        cells: the figures, row after row: ten times faster to write than the tensor.

    Raises:
        RuntimeError, OSError: there is no shared memory to be had.
    """

    cells: memoryview[float]

    def __init__(self, rows: int, columns: int, shared: bool = True) -> None:
        import torch  # not above: what imports this file for a type needs no torch

        zeros = torch.zeros(rows, columns, dtype=torch.float64)
        self._hold(zeros.share_memory_() if shared else zeros)

    def read(self) -> Tensor:
        """The figures now, ``[rows, columns]``."""
        return self._rows.clone()

    def __getstate__(self) -> Tensor:
        return self._rows

    def __setstate__(self, rows: Tensor) -> None:
        self._hold(rows)

    def _hold(self, rows: Tensor) -> None:
        self._rows = rows
        self.cells = memoryview(rows.view(-1).numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers


class Stamps(NamedTuple):
    """When a batch came where, on ``time.perf_counter``, which is one clock for all processes of a machine.

    Unpickling sets ``received_s``, and the batch's ``pin_memory`` sets ``pinned_s``, after the tensors.

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
    parts = {}
    at_s = began_s
    for name, until_s in (
        ("make", stamps.made_s),
        ("transport", stamps.received_s),
        ("pin", stamps.pinned_s),
        ("move", ended_s),
    ):
        end_s = max(at_s, min(until_s, ended_s))
        parts[name] = end_s - at_s
        at_s = end_s
    return parts


def _received(begun_s: float, made_s: float) -> Stamps:
    now_s = time.perf_counter()
    return Stamps(begun_s, made_s, now_s, now_s)


class StageCost(NamedTuple):
    """Seconds that all samples together took in one stage, by the wall clock and of a processor; the rest is waiting."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class StageTotals:
    """What a feed's workers have done.

    Attributes:
        samples: how many they have made.
        batches: how many they have made.
        busy_s: wall seconds that they spent on them, summed over the workers; the stages' wall seconds add up to it.
        stages: by name, in the order in which a sample goes through them; then ``collate``, and ``share`` of processes.
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
        # an earlier reading has divided the last batches by the shares of those before them, maybe giving a stage too much
        stages = {
            name: StageCost(max(0.0, cost.wall_s - then.wall_s), max(0.0, cost.cpu_s - then.cpu_s))
            for (name, cost), then in pairs
        }
        samples = self.samples - before.samples
        batches = self.batches - before.batches
        return StageTotals(samples, batches, self.busy_s - before.busy_s, stages)


class StageMeter:
    """The totals of one feed's workers, in memory that they share: they only grow, whatever becomes of the workers.

    A reading may miss the batch that a worker is just adding, or a part of its figures.

    Args:
        stages: the data set's, in order.
        workers: how many will write, from slot 0 on; without any the process itself does, into slot 0.
        shared: whether they are processes; threads need no shared memory.

    Raises:
        RuntimeError, OSError: there is no shared memory to be had.
        ValueError: two stages have one name, or one has none.
    """

    def __init__(self, stages: Sequence[str], workers: int, shared: bool = True) -> None:
        shared = shared and workers > 0
        self.stages = (*stages, COLLATE, SHARE) if shared else (*stages, COLLATE)
        self._of_samples = tuple(stages)
        if len({"", COLLATE, SHARE, *stages}) < len(stages) + 3:
            own = f"{COLLATE!r} and {SHARE!r} are the batch's"
            raise ValueError(f"stages {self._of_samples} of a data set: give each a name of its own ({own})")
        self._columns = _COUNTS + 2 * len(self.stages)
        self._rows = Rows(max(1, workers), self._columns, shared=shared)

    def read(self) -> StageTotals:
        """Returns the totals over all slots; batches that are not divided yet are divided like those before them."""
        counts, wall_s, cpu_s = self._rows.read().split((_COUNTS, len(self.stages), len(self.stages)), dim=1)
        scale = (counts[:, 2] / wall_s.sum(dim=1)).nan_to_num(posinf=0.0).unsqueeze(1)
        samples, batches, busy_s = counts.sum(dim=0).tolist()
        costs = map(StageCost, (wall_s * scale).sum(dim=0).tolist(), (cpu_s * scale).sum(dim=0).tolist())
        return StageTotals(int(samples), int(batches), busy_s, dict(zip(self.stages, costs, strict=True)))

    def timer(self, slot: int, now: Clock = time.perf_counter, cpu_now: Clock = time.thread_time) -> StageTimer:
        """Returns what writes the row of worker ``slot``; used in its process, and in one thread at a time."""
        row = self._rows.cells[slot * self._columns : (slot + 1) * self._columns]
        return StageTimer(row, self._of_samples, self.stages, now, cpu_now)


class StageTimer:
    """Times the batches of one worker: for each ``begin``, ``share`` if it is shared, ``fill``, its samples, and ``end``."""

    def __init__(
        self, row: memoryview[float], of_samples: Sequence[str], stages: Sequence[str], now: Clock, cpu_now: Clock
    ) -> None:
        self._row = row
        self._of_samples = tuple(of_samples)
        self._stages = tuple(stages)
        self._now = now
        self._cpu_now = cpu_now
        self._splitting = False  # whether this batch is split
        self._begun_s = 0.0  # this batch
        self._lapped_s = 0.0  # the last lap of this batch, by the wall clock and of a processor
        self._lapped_cpu_s = 0.0
        self._wall_s: dict[str, float] = {}  # of this batch by stage
        self._cpu_s: dict[str, float] = {}  # likewise
        self._ended: str | None = COLLATE  # the stage that ended last; None: none of this sample has
        self._laps = 0  # in this batch
        self._own_s = math.inf  # what a lap takes between its own looks, undisturbed
        self._busy_s = 0.0  # so far
        self._due_s = 0.0  # of that: another batch is split
        self._undivided_s = 0.0  # of that: since the last one was
        self._splits = 0
        self._recent = [0.0] * (2 * len(stages))  # wall and processor seconds by stage of batches that were split

    def begin(self) -> Lap | None:
        """Starts a batch. Returns what its samples tell the ends of their stages; None where it is not split."""
        self._splitting = self._busy_s >= self._due_s
        self._begun_s = self._now()
        if not self._splitting:
            return None
        self._wall_s.clear()
        self._cpu_s.clear()
        self._ended = COLLATE
        self._laps = 0
        self._lapped_cpu_s = self._cpu_now()
        self._lapped_s = self._now()
        return self._lap

    def share(self) -> None:
        """What is left to do until ``fill`` is to get memory that another process can map."""
        if self._splitting:
            self._lap(COLLATE)

    def fill(self) -> None:
        """All is ready for the batch's first sample."""
        if self._splitting:
            self._lap(SHARE if SHARE in self._stages else COLLATE)

    def sample(self) -> None:
        """Starts a sample of a batch that is split."""
        self._ended = None

    def fail(self) -> None:
        """Ends a sample with an error, in the stage after the one that ended last."""
        last = len(self._of_samples) - 1
        done = -1 if self._ended is None else self._of_samples.index(self._ended)
        self._lap(self._of_samples[min(done + 1, last)])

    def end(self, samples: int, batches: int = 1) -> Stamps:
        """Ends the batch and adds what it took to the totals.

        If several workers fill one batch, each times its part and exactly one passes ``batches=1``; so it is with
        ``samples`` where two of them see to the same one.

        Raises:
            ValueError: the data set told the end of a stage that it does not name, or of none.
        """
        made_s = self._now()
        busy_s = made_s - self._begun_s
        row = self._row
        row[0] += samples
        row[1] += batches
        row[2] += busy_s
        self._busy_s += busy_s
        if self._splitting:
            self._check()
            self._divide(max(1, samples), busy_s)
        else:
            self._undivided_s += busy_s
        return Stamps(self._begun_s, made_s, made_s, made_s)

    def _lap(self, stage: str) -> None:
        """Ends a stage. What the lap takes itself belongs to none."""
        wall_s = self._now()
        cpu_s = self._cpu_now()
        self._ended = stage
        took_cpu_s = cpu_s - self._lapped_cpu_s
        self._cpu_s[stage] = self._cpu_s.get(stage, 0.0) + took_cpu_s
        self._lapped_cpu_s = cpu_s
        took_s = wall_s - self._lapped_s
        self._lapped_s = self._now()
        self._laps += 1
        # the least of all: a thread may be held up amid a lap
        self._own_s = min(self._own_s, self._lapped_s - wall_s)
        self._wall_s[stage] = self._wall_s.get(stage, 0.0) + took_s - _UNSEEN * self._own_s

    def _check(self) -> None:
        for stage in self._wall_s:
            if stage not in self._stages:
                raise ValueError(f"stage {stage!r} is not among the data set's stages {self._of_samples}")
        if self._ended is None:
            named = f"the data set names the stages {self._of_samples}"
            raise ValueError(f"{named} and never tells the end of one: call lap(stage)")

    def _divide(self, samples: int, busy_s: float) -> None:
        """Divides what this batch took by its own laps, and those before it that were not split by recent ones."""
        wall_s = [max(0.0, self._wall_s.get(stage, 0.0)) for stage in self._stages]
        cpu_s = [self._cpu_s.get(stage, 0.0) for stage in self._stages]
        own = [*wall_s, *map(min, wall_s, cpu_s)]
        # what the first batch paid for warming up is no rule for the others
        keep = 0.0 if self._splits < 2 else max(0.0, 1 - samples / _MEMORY)
        self._splits += 1
        self._recent = [old * keep + new for old, new in zip(self._recent, own, strict=True)]
        self._add(own, busy_s)
        self._add(self._recent, self._undivided_s)
        self._undivided_s = 0.0
        cost_s = self._laps * (1 + _UNSEEN) * self._own_s
        self._due_s = self._busy_s - busy_s + cost_s / _BUDGET

    def _add(self, costs: Sequence[float], seconds: float) -> None:
        """Adds ``seconds`` to the stages in proportion to ``costs``."""
        whole_s = sum(costs[: len(self._stages)])
        if whole_s > 0:
            for place, cost_s in enumerate(costs):
                self._row[_COUNTS + place] += seconds * cost_s / whole_s
