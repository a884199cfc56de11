"""What a feed's workers do, counted where they do it: not at the consumer, whose queue was filled
before it looked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from harness.watch.rows import Rows

# samples, wall seconds, their squares, processor seconds
_FIGURES = 4


@dataclass(frozen=True, slots=True)
class Work:
    """Totals over all workers.

    Attributes:
        samples: how many are done.
        moved: how many workers have done at least one.
        wall_s: sum of the samples' wall times in seconds.
        wall_sq_s2: sum of their squares.
        cpu_s: sum of the processor seconds of the threads that made them.
    """

    samples: int
    moved: int
    wall_s: float
    wall_sq_s2: float
    cpu_s: float


class Gauge:
    """What the workers of one feed have done so far, in shared memory: one row of float64 per
    worker.

    The figures of the sample that is just being added may disagree, by that one sample per worker.

    Args:
        slots: workers (processes or threads) that will write; slot 0 is the process itself where
            there are none.

    Attributes:
        slots: how many may write.
    """

    def __init__(self, slots: int) -> None:
        self.slots = max(1, slots)
        self._rows = Rows(self.slots, _FIGURES)

    def add(self, slot: int, wall_s: float, cpu_s: float, samples: int = 1) -> None:
        """Count ``samples`` of worker ``slot`` that took so many seconds each."""
        cells = self._rows.cells
        first = _FIGURES * slot
        cells[first] += samples
        cells[first + 1] += samples * wall_s
        cells[first + 2] += samples * wall_s * wall_s
        cells[first + 3] += samples * cpu_s

    def read(self) -> Work:
        """The totals over all slots, now."""
        rows = self._rows.read()
        samples, wall_s, wall_sq_s2, cpu_s = rows.sum(dim=0).tolist()
        return Work(int(samples), int((rows[:, 0] > 0).sum()), wall_s, wall_sq_s2, cpu_s)


def gauged(dataset: Any, gauge: Gauge) -> Any:
    """Returns any map-style ``dataset`` as one that tells ``gauge`` what its samples took."""
    return (_Batches if hasattr(dataset, "__getitems__") else _Samples)(dataset, gauge)


class _Samples(Dataset[Any]):
    """A data set that tells ``gauge`` what each of its samples took."""

    def __init__(self, dataset: Any, gauge: Gauge) -> None:
        self.dataset = dataset
        self.gauge = gauge

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._timed(lambda: self.dataset[index], 1)

    def _timed(self, load: Callable[[], Any], samples: int) -> Any:
        wall_s = time.perf_counter()
        cpu_s = time.thread_time()
        loaded = load()
        wall_s = time.perf_counter() - wall_s
        cpu_s = time.thread_time() - cpu_s
        worker = get_worker_info()
        for _ in range(samples):
            self.gauge.add(worker.id if worker else 0, wall_s / samples, cpu_s / samples)
        return loaded


class _Batches(_Samples):
    def __getitems__(self, indices: list[int]) -> Any:
        return self._timed(lambda: self.dataset.__getitems__(indices), len(indices))
