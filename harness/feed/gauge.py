"""Counts what a feed's workers do, in the workers: a consumer only sees a queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from harness.watch.rows import Rows


class Work(NamedTuple):
    """Totals over all workers.

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


class Gauge:
    """Counts samples and seconds of one feed's workers, in shared memory, a row for each worker.

    While a worker adds a sample, its figures may disagree by this sample.

    Args:
        slots: workers (processes or threads); without any, the process itself is slot 0.
    """

    def __init__(self, slots: int) -> None:
        # samples, wall seconds, their squares, processor seconds
        self._rows = Rows(max(1, slots), 4)

    def add(self, slot: int, wall_s: float, cpu_s: float, samples: int = 1) -> None:
        """Counts ``samples`` of worker ``slot``, with the seconds of each."""
        cells = self._rows.cells
        first = 4 * slot
        cells[first] += samples
        cells[first + 1] += samples * wall_s
        cells[first + 2] += samples * wall_s * wall_s
        cells[first + 3] += samples * cpu_s

    def timed(self, slot: int, make: Callable[..., Any], samples: int = 1) -> Callable[..., Any]:
        """Returns ``make``, each call of which counts as ``samples`` of worker ``slot``.

        A call that raises does not count.
        """

        def made(*args: Any) -> Any:
            wall_s = time.perf_counter()
            cpu_s = time.thread_time()
            result = make(*args)
            wall_s = time.perf_counter() - wall_s
            cpu_s = time.thread_time() - cpu_s
            self.add(slot, wall_s / samples, cpu_s / samples, samples)
            return result

        return made

    def read(self) -> Work:
        """Returns the totals over all slots."""
        rows = self._rows.read()
        samples, *seconds = rows.sum(dim=0).tolist()
        return Work(int(samples), int((rows[:, 0] > 0).sum()), *seconds)


@dataclass(eq=False)
class Gauged(Dataset[Any]):
    """Any map-style ``dataset``, which tells ``gauge`` what its samples took."""

    dataset: Any
    gauge: Gauge

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        worker = get_worker_info()
        slot = worker.id if worker else 0
        # a data set that gives whole batches can only be timed by the batch
        if hasattr(self.dataset, "__getitems__"):
            return self.gauge.timed(slot, self.dataset.__getitems__, len(indices))(indices)
        return [*map(self.gauge.timed(slot, self.dataset.__getitem__), indices)]
