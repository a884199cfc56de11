"""What a loader delivers, by running its queue on paper: for samples so uneven that a short measurement says little."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BATCHES = 1000


def batch_times(times: Sequence[tuple[float, float]], batch_size: int) -> np.ndarray:
    """Seconds that a worker needs for each of many batches, drawn from the times of samples; float64 ``[1000]``.

    Args:
        times: (seconds, how many samples took them).
        batch_size: samples in a batch.
    """
    seconds, counts = np.array(times, float).T
    drawn = np.random.Generator(np.random.Philox(0)).multinomial(batch_size, counts / counts.sum(), size=_BATCHES)
    batches: np.ndarray = drawn @ seconds
    return batches


def delivered(batches: np.ndarray, num_workers: int, prefetch_factor: int, step_s: float) -> float:
    """Batches per second that steps of ``step_s`` get from torch's DataLoader, whose batches come in order.

    A worker makes every ``num_workers``-th batch, and begins one when it is through with the last and when the batch
    ``num_workers * prefetch_factor`` before it has been taken: one slow batch holds up all that are behind it.
    """
    in_flight = num_workers * prefetch_factor
    ready = [0.0] * num_workers  # when each worker is free
    taken: list[float] = []
    free = 0.0  # when the consumer can take the next batch
    for i, seconds in enumerate(batches.tolist()):
        begin = max(ready[i % num_workers], taken[i - in_flight] if i >= in_flight else 0.0)
        ready[i % num_workers] = begin + seconds
        at = max(ready[i % num_workers], free)
        taken.append(at)
        free = at + step_s
    skip = len(taken) // 10
    return (len(taken) - 1 - skip) / (taken[-1] - taken[skip])
