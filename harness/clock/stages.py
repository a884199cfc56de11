"""Divides the workers' time into reading, decoding, each transform and batch assembly.

A worker times every batch, by two looks at the clock, so that its total is exact. How the total
divides among the stages comes of *laps*: a data set that names its ``stages`` is given a function
to call at the end of each. Laps are taken of whole batches, as many as make one sample in 30 ms of
work, so that they cost less than a thousandth of it: of all where a sample takes longer, of few
where it takes microseconds. A rare slow sample may then be missed or counted for others.

Throughput follows operational laws (Denning and Buzen 1978): with w seconds of wall and c of
processor time a sample, n workers give at most n / w images/s, and C processors C / (c + r + s),
where receiving an image takes r and the step s of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures import Tag

if TYPE_CHECKING:
    from torch import Tensor

# told to a lap at the beginning of a sample, or of a batch
START = ""
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

# a worker's row: samples, busy seconds; then the figures of ``Work``, but for ``moved``;
# then wall seconds by stage, then processor seconds
_COUNTS = 2
_HEAD = 6
# of work for a sample that is timed: the laps of one take some 10 us, where caches are cold
_EVERY_S = 0.03


class Stamps(NamedTuple):
    """When a batch came where, on ``time.perf_counter``.

    That is one clock for all processes of a machine. Unpickling sets ``received_s``, and the
    batch's ``pin_memory`` sets ``pinned_s``, after the tensors.

    Attributes:
        made_s: the worker had it complete.
        received_s: this process had it; ``made_s`` where it was made here.
        pinned_s: it lay in page-locked memory; ``received_s`` where nothing pins.
    """

    made_s: float
    received_s: float
    pinned_s: float

    def pin_memory(self) -> Stamps:
        """Returns the same with ``pinned_s`` now."""
        return self._replace(pinned_s=time.perf_counter())

    def __reduce__(self) -> tuple[Callable[[float], Stamps], tuple[float]]:
        return received, (self.made_s,)


def received(made_s: float) -> Stamps:
    """Returns the stamps of a batch that arrives now."""
    now_s = time.perf_counter()
    return Stamps(made_s, now_s, now_s)


class StageCost(NamedTuple):
    """Wall and processor seconds of all samples in one stage; the difference is waiting."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class StageTotals:
    """What a feed's workers have done.

    Attributes:
        samples: how many they have made.
        busy_s: wall seconds that they spent on them, summed over the workers; the stages' wall
            seconds add up to it.
        stages: by name, in the order in which a sample goes through them; then ``collate``, and
            ``share`` of processes.
    """

    samples: int
    busy_s: float
    stages: Mapping[str, StageCost]

    def since(self, before: StageTotals | None) -> StageTotals:
        """Returns what was done after ``before``, an earlier reading; None: all of it."""
        if before is None:
            return self
        stages = {}
        for name, cost in self.stages.items():
            # below zero where the earlier reading had given the stage too much
            pairs = zip(cost, before.stages[name], strict=True)
            stages[name] = StageCost(*(max(0.0, now_s - then_s) for now_s, then_s in pairs))
        return StageTotals(
            self.samples - before.samples,
            self.busy_s - before.busy_s,
            stages,
        )

    def by_tag(self, worker_s: float) -> dict[str, float]:
        """Returns wall milliseconds per sample of each stage, and how busy the workers were.

        ``worker_s`` are the seconds of all workers together.
        """
        if not self.samples or worker_s <= 0:
            return {}
        each = {f"stages/{row['name']}_ms": row["wall_ms"] for row in self.rows()}
        return {**each, Tag.BUSY_FRACTION: min(1.0, self.busy_s / worker_s)}

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


def shared_rows(rows: int, columns: int, shared: bool = True) -> Tensor:
    """Returns float64 zeros ``[rows, columns]``: each process writes its own row, one reads all.

    An aligned float64 is stored by one instruction on every 64-bit machine: without a lock a reader
    finds each figure as it was before or after a write, never half of both. Figures that are
    written together may be seen apart. Pickled for a worker process, the memory itself travels, as
    torch's batches do; it is gone with its last owner.

    Raises:
        RuntimeError, OSError: there is no shared memory to be had.
    """
    # not above: what imports this file for a type needs no torch
    import torch

    zeros = torch.zeros(rows, columns, dtype=torch.float64)
    return zeros.share_memory_() if shared else zeros


def cells(rows: Tensor, slot: int) -> memoryview[float]:
    """Returns the figures of one row: ten times faster to write than the tensor."""
    # numpy's arrays are buffers
    return memoryview(rows[slot].numpy())  # type: ignore[arg-type]


class StageMeter:
    """The totals of one feed's workers, in memory that they share.

    The totals only grow, whatever becomes of the workers. A reading may miss the batch or the
    sample that a worker is just adding, or a part of its figures.

    Attributes:
        stages: of samples and batches, in order.
        rows: of figures, one of each worker; a ``StageTimer`` and ``timed`` write them.

    Args:
        stages: the data set's, in order.
        workers: how many will write, from slot 0 on; without any the process itself does, into slot
            0.
        shared: whether they are processes; threads need no shared memory.

    Raises:
        RuntimeError, OSError: there is no shared memory to be had.
    """

    def __init__(self, stages: Sequence[str], workers: int, shared: bool = True) -> None:
        shared = shared and workers > 0
        self.stages = (*stages, COLLATE)
        if shared:
            self.stages += (SHARE,)
        self.rows = shared_rows(max(1, workers), _HEAD + 2 * len(self.stages), shared)

    def read(self) -> StageTotals:
        """Returns the totals over all slots, now.

        A worker's time divides among the stages as that of its timed samples does.
        """
        sizes = (_HEAD, len(self.stages), len(self.stages))
        counts, wall_s, cpu_s = self.rows.clone().split(sizes, dim=1)
        # a worker's busy seconds, by those that its timed samples stand for
        scale = (counts[:, 1] / wall_s.sum(dim=1)).nan_to_num(posinf=0.0)
        samples, busy_s = counts[:, :_COUNTS].sum(dim=0).tolist()
        # two clocks are not read at the very same moment
        cpu_s = cpu_s.minimum(wall_s)
        costs = map(StageCost, (scale @ wall_s).tolist(), (scale @ cpu_s).tolist())
        stages = dict(zip(self.stages, costs, strict=True))
        return StageTotals(int(samples), busy_s, stages)

    def timed(self, slot: int, make: Callable[..., Any], samples: int = 1) -> Callable[..., Any]:
        """Returns ``make``, each call of which counts as ``samples`` of worker ``slot``'s ``work``.

        A consumer only sees a queue, and a batch may take seconds. A call that raises does not
        count.
        """
        row = cells(self.rows, slot)

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
        rows = self.rows[:, _COUNTS:_HEAD].clone()
        samples, *seconds = rows.sum(dim=0).tolist()
        return Work(int(samples), int((rows[:, 0] > 0).sum()), *seconds)


class StageTimer:
    """Times a worker's batches, and the samples of a batch for ``_EVERY_S`` of work for each.

    For each batch call ``begin`` and ``end``. A batch with timed samples stands for all since the
    last such batch.

    Args:
        meter: has the totals.
        slot: the row of ``meter`` that this writes, one thread at a time.
        now: the wall clock in seconds.
        cpu_now: the thread's processor clock in seconds.
    """

    def __init__(
        self,
        meter: StageMeter,
        slot: int,
        now: Clock = time.perf_counter,
        cpu_now: Clock = time.thread_time,
    ) -> None:
        self._columns = {stage: column for column, stage in enumerate(meter.stages, _HEAD)}
        self._row = cells(meter.rows, slot)
        self._now = now
        # of a batch with timed samples
        self._marks: list[tuple[str, float, float]] = []
        mark = self._marks.append
        # takes no lookup of this object's
        self._lap: Lap = lambda stage: mark((stage, now(), cpu_now()))
        # work since the last batch with timed samples
        self._worked_s = math.inf
        self._begun_s = 0.0
        # samples of this batch, and all since the last one with timed samples
        self._samples = self._since = 0

    def begin(self, samples: int) -> Lap | None:
        """Starts a batch; returns what times its samples, or None where none is timed.

        It is called with ``START`` at the beginning of a sample, and with the name of a stage at
        the end of each.
        """
        self._samples = samples
        self._since += samples
        self._marks.clear()
        if self._worked_s < samples * _EVERY_S:
            self._begun_s = self._now()
            return None
        self._worked_s = 0.0
        self._lap(START)
        self._begun_s = self._marks[0][1]
        return self._lap

    def mark(self, stage: str) -> None:
        """Note that a stage of the batch itself ends, such as ``COLLATE`` or ``SHARE``.

        What follows ``START`` until ``end`` is ``COLLATE``.
        """
        if self._marks:
            self._lap(stage)

    def end(self, samples: int) -> Stamps:
        """Add what the batch took to the totals; its last sample is there.

        If several workers fill one batch, each times its part; where two see to the same samples,
        one of them counts them.
        """
        made_s = self._now()
        busy_s = made_s - self._begun_s
        row = self._row
        row[0] += samples
        row[1] += busy_s
        self._worked_s += busy_s
        if self._marks:
            if self._marks[-1][0] == START:
                self._lap(COLLATE)
            # what the timed samples took, by stage, for all samples that they stand for
            weight = self._since / self._samples
            for (_, wall_then, cpu_then), (stage, wall, cpu) in pairwise(self._marks):
                # none is of a beginning, or of a stage that the data set does not name
                if column := self._columns.get(stage):
                    row[column] += weight * (wall - wall_then)
                    row[column + len(self._columns)] += weight * (cpu - cpu_then)
            self._since = 0
        return Stamps(made_s, made_s, made_s)


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


def total(stages: Collection[StageCost]) -> StageCost:
    """Returns the seconds of several stages together."""
    return StageCost(sum(cost.wall_s for cost in stages), sum(cost.cpu_s for cost in stages))
