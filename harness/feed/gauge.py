"""What a feed's workers do, counted where they do it: not at the consumer, whose queue was filled before it looked."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from harness.feed.interface import FillableDataset, StagedDataset
from harness.watch.rows import Rows
from harness.watch.stages import Lap

_FIGURES = 4  # samples, wall seconds, their squares, processor seconds
_BINS = 128  # of wall times, four to a doubling: from a microsecond to over an hour
_PER_DOUBLING, _SHORTEST_S = 4, 1e-6


@dataclass(frozen=True, slots=True)
class Work:
    """Totals over all workers.

    Attributes:
        samples: how many are done.
        moved: how many workers have done at least one.
        wall_s: sum of the samples' wall times in seconds.
        wall_sq_s2: sum of their squares.
        cpu_s: sum of the processor seconds of the threads that made them.
        bins: how many samples took how long; ``times_since`` says it in seconds.
    """

    samples: int
    moved: int
    wall_s: float
    wall_sq_s2: float
    cpu_s: float
    bins: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def times_since(self, before: Work) -> tuple[tuple[float, int], ...]:
        """(seconds, samples) for the samples that were done after ``before``; the seconds are within 10 %."""
        counts = enumerate(now - then for now, then in zip(self.bins, before.bins, strict=True))
        return tuple((_SHORTEST_S * 2 ** ((i + 0.5) / _PER_DOUBLING), count) for i, count in counts if count > 0)


class Gauge:
    """What the workers of one feed have done so far, in shared memory: one row of float64 per worker.

    The figures of the sample that is just being added may disagree, by that one sample per worker.

    Args:
        slots: workers (processes or threads) that will write; slot 0 is the process itself where there are none.

    Attributes:
        slots: how many may write.
    """

    def __init__(self, slots: int) -> None:
        self.slots = max(1, slots)
        self._rows = Rows(self.slots, _FIGURES + _BINS)

    def add(self, slot: int, wall_s: float, cpu_s: float, samples: int = 1) -> None:
        """Count ``samples`` of worker ``slot`` that took so many seconds each."""
        cells, first = self._rows.cells, (_FIGURES + _BINS) * slot
        cells[first] += samples
        cells[first + 1] += samples * wall_s
        cells[first + 2] += samples * wall_s * wall_s
        cells[first + 3] += samples * cpu_s
        place = int(_PER_DOUBLING * math.log2(max(wall_s, _SHORTEST_S) / _SHORTEST_S))
        cells[first + _FIGURES + min(place, _BINS - 1)] += samples

    def read(self) -> Work:
        """The totals over all slots, now."""
        rows = self._rows.read()
        samples, wall_s, wall_sq_s2, cpu_s, *bins = rows.sum(dim=0).tolist()
        return Work(int(samples), int((rows[:, 0] > 0).sum()), wall_s, wall_sq_s2, cpu_s, tuple(map(int, bins)))


class Gauged:
    """A data set that tells ``gauge`` what each of its samples took the worker of ``slot``."""

    def __init__(self, dataset: FillableDataset, gauge: Gauge, slot: int) -> None:
        self.dataset, self.gauge, self.slot, self.image_size = dataset, gauge, slot, dataset.image_size
        if isinstance(dataset, StagedDataset):
            self.stages = dataset.stages

    def __len__(self) -> int:
        return len(self.dataset)

    def fill(self, epoch: int, index: int, out: np.ndarray, *lap: Lap) -> int:
        """As the data set does; a sample that cannot be read is not counted."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        label = self.dataset.fill(epoch, index, out, *lap)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        self.gauge.add(self.slot, wall_s, cpu_s)
        return label
