"""What a loader delivers, by running its queue on paper: for samples so uneven that a short measurement says little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_BATCHES = 1000
_SLOW = 4.0  # times the mean: a sample that takes longer

Times = Sequence[tuple[float, float]]  # seconds, and how many samples took them


class Batches(NamedTuple):
    """What many batches take, in seconds; float64 ``[1000]`` each: all samples one after the other, and the longest of them."""

    total_s: np.ndarray
    longest_s: np.ndarray


def pooled(probes: Iterable[Times]) -> Times:
    """The samples of all ``probes``, by their seconds."""
    counts: dict[float, float] = defaultdict(float)
    for times in probes:
        for seconds, count in times:
            counts[seconds] += count
    return sorted(counts.items())


def with_slow_of(many: Times, times: Times) -> Times:
    """``times`` with the slow samples of ``many`` in place of their own, as many for each fast one."""
    limit_s = _SLOW * moments(many)[0]
    slow, fast = [pair for pair in many if pair[0] > limit_s], [pair for pair in times if pair[0] <= limit_s]
    if not slow or not fast:
        return times
    share = samples(fast) / (samples(many) - samples(slow))
    return [*fast, *((seconds, share * count) for seconds, count in slow)]


def samples(times: Times) -> float:
    """How many there are."""
    return sum(count for _, count in times)


def moments(times: Times) -> tuple[float, float]:
    """Mean and variance of a sample's seconds; zeros where there is none."""
    of = max(1, samples(times))
    mean = sum(seconds * count for seconds, count in times) / of
    return mean, sum((seconds - mean) ** 2 * count for seconds, count in times) / of


def batch_times(times: Times, batch_size: int) -> Batches:
    """Batches drawn from the times of samples, the same on every call.

    Args:
        times: (seconds, how many samples took them).
        batch_size: samples in a batch.
    """
    seconds, counts = np.array(times, float).T
    drawn = np.random.Generator(np.random.Philox(0)).multinomial(batch_size, counts / counts.sum(), size=_BATCHES)
    return Batches(drawn @ seconds, np.where(drawn > 0, seconds, 0.0).max(axis=1))


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
    return _rate(taken)


def delivered_together(batches: Batches, num_threads: int, ahead: int, step_s: float) -> float:
    """As ``delivered``, from threads that make each batch together, at most ``ahead`` of them before one is taken.

    All of them go on to the next batch when nothing of this one is left to begin; its longest sample may still hold it up.
    """
    taken: list[float] = []
    begin = free = 0.0
    for i, (total_s, longest_s) in enumerate(zip(batches.total_s.tolist(), batches.longest_s.tolist(), strict=True)):
        begin = max(begin, taken[i - ahead] if i >= ahead else 0.0)
        taken.append(max(begin + max(total_s / num_threads, longest_s), free))
        begin += total_s / num_threads
        free = taken[-1] + step_s
    return _rate(taken)


def _rate(taken: Sequence[float]) -> float:
    """Batches per second by the times at which they were taken, without the first tenth of them."""
    skip = len(taken) // 10
    return (len(taken) - 1 - skip) / (taken[-1] - taken[skip])
