"""Divides the workers' time into reading, decoding, each transform and batch assembly.

A worker reads the clock twice per batch, so its total is exact. *Laps* divide the total among the
stages: a dataset with ``stages`` receives a function to call at the end of each stage. Laps are
taken for whole batches, about one sample per 30 ms of work, so that they cost less than a
thousandth: for all batches if samples take longer than that, for few if they take microseconds. A
rare slow sample may be missed or treated as representative of others.

Throughput follows operational laws (Denning and Buzen 1978): if a sample takes w wall seconds and c
CPU seconds, n workers make at most n / w images/s, and C cores make at most C / (c + r + s), where
receiving an image takes r CPU seconds and the step takes s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures import Tag

if TYPE_CHECKING:
    from torch import Tensor

# passed to a lap at the start of a sample or a batch
START = ""
# the whole sample, if a dataset has no stages
SAMPLE = "sample"
READ = "read"
DECODE = "decode"
# a batch, excluding its samples
COLLATE = "collate"
# the part of it that allocates shared memory
SHARE = "share"
GROUPS: Mapping[str, str] = {
    READ: "storage",
    DECODE: "decode",
    COLLATE: "collate",
    SHARE: "transport",
    SAMPLE: "sample",
}
# group for stages that are not in GROUPS
AUGMENT = "augment"

Clock = Callable[[], float]
# called by a dataset at the end of each stage with the stage's name
Lap = Callable[[str], None]

# a worker's row: samples, busy seconds; the fields in ``Work`` except ``moved``; wall seconds by
# stage, then CPU seconds
_COUNTS = 2
_HEAD = 6
# seconds of work per timed sample, whose laps take about 10 us with cold caches
_EVERY_S = 0.03


class Stamps(NamedTuple):
    """A batch's timestamps, on ``time.perf_counter``.

    All processes on a machine share this clock. Unpickling sets ``received_s``, and the batch's
    ``pin_memory`` sets ``pinned_s`` after pinning the tensors.

    Attributes:
        made_s: when the worker completed it.
        received_s: when this process received it; ``made_s`` if it was made here.
        pinned_s: when it was copied to pinned memory; ``received_s`` without pinning.
    """

    made_s: float
    received_s: float
    pinned_s: float

    def pin_memory(self) -> Stamps:
        """Returns a copy with ``pinned_s`` set to now."""
        return self._replace(pinned_s=time.perf_counter())

    def __reduce__(self) -> tuple[Callable[[float], Stamps], tuple[float]]:
        return received, (self.made_s,)


def received(made_s: float) -> Stamps:
    """Returns stamps with ``received_s`` set to now."""
    now_s = time.perf_counter()
    return Stamps(made_s, now_s, now_s)


class StageCost(NamedTuple):
    """Wall and CPU seconds for all samples in one stage; the difference is waiting time."""

    wall_s: float
    cpu_s: float


class StageTotals(NamedTuple):
    """The work done by a feed's workers.

    Attributes:
        samples: number of samples made.
        busy_s: wall seconds spent making samples, summed over workers; the sum of all stages.
        stages: costs by name, in processing order; then ``collate``, and ``share`` for processes.
    """

    samples: int
    busy_s: float
    stages: Mapping[str, StageCost]

    def since(self, before: StageTotals | None) -> StageTotals:
        """Returns the work since ``before``, an earlier reading, or all work if that is None."""
        if before is None:
            return self
        stages = {}
        for name, cost in self.stages.items():
            # negative if the earlier reading overestimated the stage
            pairs = zip(cost, before.stages[name], strict=True)
            stages[name] = StageCost(*(max(0.0, now_s - then_s) for now_s, then_s in pairs))
        return StageTotals(
            self.samples - before.samples,
            self.busy_s - before.busy_s,
            stages,
        )

    def by_tag(self, worker_s: float) -> dict[str, float]:
        """Returns wall milliseconds per sample and stage, and the workers' utilization.

        ``worker_s`` is the total time of all workers.
        """
        if not self.samples or worker_s <= 0:
            return {}
        each = {f"stages/{row['name']}_ms": row["wall_ms"] for row in self.rows()}
        return {**each, Tag.BUSY_FRACTION: min(1.0, self.busy_s / worker_s)}

    def rows(self) -> list[dict[str, Any]]:
        """Returns each stage's name, group and milliseconds per sample."""
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
    """Times for individually timed samples, over all workers.

    Attributes:
        samples: number of finished samples.
        moved: number of workers that have finished a sample.
        wall_s: sum of the samples' wall times in seconds.
        wall_sq_s2: sum of the squared wall times.
        cpu_s: sum of the CPU seconds used by the threads that made the samples.
    """

    samples: int
    moved: int
    wall_s: float
    wall_sq_s2: float
    cpu_s: float


def shared_rows(rows: int, columns: int, shared: bool = True) -> Tensor:
    """Returns float64 zeros ``[rows, columns]``; each process writes its row, and one reads all.

    An aligned float64 is stored by one instruction on every 64-bit machine, so a reader without a
    lock never sees half a value. Values written together may be seen at different times. Pickling
    shares the memory with a worker process, as with torch's batches; the memory is freed when its
    last owner is.

    Raises:
        RuntimeError, OSError: no shared memory is available.
    """
    # local import, because importing this file for a type must not load torch
    import torch

    zeros = torch.zeros(rows, columns, dtype=torch.float64)
    return zeros.share_memory_() if shared else zeros


def cells(rows: Tensor, slot: int) -> memoryview[float]:
    """Returns a view of one row, which is ten times faster to write to than the tensor."""
    # numpy arrays are buffers
    return memoryview(rows[slot].numpy())  # type: ignore[arg-type]


class StageMeter:
    """The totals for one feed's workers, in shared memory.

    The totals never decrease, even when workers die. A reading may miss a batch or sample, or part
    of it, while a worker adds it.

    Attributes:
        stages: the stages of samples and batches, in order.
        rows: one row per worker, written by a ``StageTimer`` and ``timed``.

    Args:
        stages: the dataset's stages, in order.
        workers: number of writers, from slot 0; if 0, the process itself writes to slot 0.
        shared: whether the workers are processes, because threads need no shared memory.

    Raises:
        RuntimeError, OSError: no shared memory is available.
    """

    def __init__(self, stages: Sequence[str], workers: int, shared: bool = True) -> None:
        shared = shared and workers > 0
        self.stages = (*stages, COLLATE)
        if shared:
            self.stages += (SHARE,)
        self.rows = shared_rows(max(1, workers), _HEAD + 2 * len(self.stages), shared)

    def read(self) -> StageTotals:
        """Returns the current totals over all slots.

        A worker's time is divided among the stages in proportion to the times of its timed samples.
        """
        sizes = (_HEAD, len(self.stages), len(self.stages))
        counts, wall_s, cpu_s = self.rows.clone().split(sizes, dim=1)
        # scale from the timed samples' seconds to a worker's busy seconds
        scale = (counts[:, 1] / wall_s.sum(dim=1)).nan_to_num(posinf=0.0)
        samples, busy_s = counts[:, :_COUNTS].sum(dim=0).tolist()
        # two clocks are not read at exactly the same time
        cpu_s = cpu_s.minimum(wall_s)
        costs = map(StageCost, (scale @ wall_s).tolist(), (scale @ cpu_s).tolist())
        stages = dict(zip(self.stages, costs, strict=True))
        return StageTotals(int(samples), busy_s, stages)

    def timed(self, slot: int, make: Callable[..., Any], samples: int = 1) -> Callable[..., Any]:
        """Wraps ``make`` so that each call adds ``samples`` samples to worker ``slot``'s ``work``.

        A consumer sees only a queue, and a batch may take seconds. Calls that raise do not count.
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
        """Returns the current totals from ``timed``."""
        rows = self.rows[:, _COUNTS:_HEAD].clone()
        samples, *seconds = rows.sum(dim=0).tolist()
        return Work(int(samples), int((rows[:, 0] > 0).sum()), *seconds)


class StageTimer:
    """Times a worker's batches, and about one sample per ``_EVERY_S`` seconds of work.

    Call ``begin`` and ``end`` for each batch. A batch with timed samples represents all batches
    since the last such batch.

    Args:
        meter: holds the totals.
        slot: the row in ``meter`` to write to, by one thread at a time.
        now: the wall clock in seconds.
        cpu_now: the thread's CPU clock in seconds.
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
        # the laps in a batch with timed samples
        self._marks: list[tuple[str, float, float]] = []
        mark = self._marks.append
        # avoids an attribute lookup
        self._lap: Lap = lambda stage: mark((stage, now(), cpu_now()))
        # seconds of work since the last batch with timed samples
        self._worked_s = math.inf
        self._begun_s = 0.0
        # samples in this batch, and all since the last batch with timed samples
        self._samples = self._since = 0

    def begin(self, samples: int) -> Lap | None:
        """Starts a batch; returns the timer for its samples, or None if they are not timed.

        Call the timer with ``START`` at the start of a sample, and with each stage's name at the
        end of the stage.
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
        """Records the end of a stage for the batch itself, such as ``COLLATE`` or ``SHARE``.

        The time from ``START`` to ``end`` counts as ``COLLATE``.
        """
        if self._marks:
            self._lap(stage)

    def end(self, samples: int) -> Stamps:
        """Adds the batch's time to the totals, after its last sample.

        If several workers fill one batch, each times its part; samples made by two workers are
        counted once.
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
            # time for the timed samples by stage, scaled to the samples that they represent
            weight = self._since / self._samples
            for (_, wall_then, cpu_then), (stage, wall, cpu) in pairwise(self._marks):
                # excludes starts and stages that the dataset does not list
                if column := self._columns.get(stage):
                    row[column] += weight * (wall - wall_then)
                    row[column + len(self._columns)] += weight * (cpu - cpu_then)
            self._since = 0
        return Stamps(made_s, made_s, made_s)


def roofline(cores: float, *each_s: float) -> float:
    """Returns the images/s at which loading and steps use all ``cores``.

    ``each_s`` are CPU seconds per image, such as for loading, receiving and the step.
    """
    return cores / sum(each_s) if any(each_s) else math.inf


def workers_for(images_per_s: float, wall_s: float) -> int:
    """Returns the number of workers for a rate if a worker takes ``wall_s`` per sample.

    The number is at least 1; a twentieth of a worker is rounded down.
    """
    return max(1, math.ceil(images_per_s * wall_s - 0.05))


def total(stages: Collection[StageCost]) -> StageCost:
    """Returns the total seconds for several stages."""
    return StageCost(sum(cost.wall_s for cost in stages), sum(cost.cpu_s for cost in stages))
