"""What a loader delivers, by running its queue on paper: for samples so uneven that a short measurement says little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_BATCHES = 1000
_SLOW = 4.0  # a sample is slow that takes so many times the mean

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


def with_slow_of(forms: Iterable[Times], times: Times) -> Times:
    """``times`` with the slow samples of all ``forms`` in place of their own, as many for each fast one.

    How many are slow is the data's, and each form has seen only a few; its own fast ones say how long a sample takes it.
    """
    parts = [_divided(each) for each in forms]
    slow, fast = pooled(slow for slow, _ in parts), _divided(times)[1]
    if not slow or not fast:
        return times
    scale = samples(fast) / sum(samples(fast) for _, fast in parts)
    return [*fast, *((seconds, scale * count) for seconds, count in slow)]


def _divided(times: Times) -> tuple[Times, Times]:
    """The slow samples, and the others."""
    limit_s = _SLOW * moments(times)[0]
    return [pair for pair in times if pair[0] > limit_s], [pair for pair in times if pair[0] <= limit_s]


def samples(times: Times) -> float:
    """How many there are."""
    return sum(count for _, count in times)


def moments(times: Times) -> tuple[float, float]:
    """Mean and variance of a sample's seconds; zeros where there is none."""
    of = max(1, samples(times))
    mean = sum(seconds * count for seconds, count in times) / of
    return mean, sum((seconds - mean) ** 2 * count for seconds, count in times) / of


def batch_times(times: Times, batch_size: int) -> Batches:
    """Batches of samples of these times, each as often as its share says, and slow ones at the same places on every call.

    Args:
        times: (seconds, how many samples took them).
        batch_size: samples in a batch.
    """
    return _batch_times(tuple(sorted(times)), batch_size)


@lru_cache(maxsize=8)
def _batch_times(times: Times, batch_size: int) -> Batches:
    seconds, counts = np.array(times, float).T
    size, up_to = _BATCHES * batch_size, np.cumsum(counts)
    drawn = seconds[np.searchsorted(up_to / up_to[-1], (np.arange(size) + 0.5) / size)]
    mixed = drawn[np.random.Generator(np.random.Philox(0)).permutation(size)].reshape(_BATCHES, batch_size)
    return Batches(mixed.sum(axis=1), mixed.max(axis=1))


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
