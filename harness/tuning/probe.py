"""How many images a loader delivers in a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from harness.feed.interface import Feed
from harness.runtime import signals


@dataclass(frozen=True, slots=True)
class Supply:
    """Loader-only delivery: ``images`` in ``elapsed_s`` seconds, start-up and the primed queue left out."""

    images: int
    elapsed_s: float

    @property
    def images_per_s(self) -> float:
        """The rate; 0 where nothing was delivered."""
        return self.images / self.elapsed_s if self.elapsed_s > 0 else 0.0


def primed_batches(num_workers: int, prefetch_factor: int | None) -> int:
    """How many batches the workers have in hand before the first is taken; what they take is no measure of their speed."""
    return num_workers * (prefetch_factor or 0)


def measure_supply(feed: Feed, batches: int, limit_s: float, now: Callable[[], float] = time.perf_counter) -> Supply:
    """Take ``batches`` batches from ``feed`` as fast as it gives them, after its primed queue.

    Args:
        feed: a fresh feed with at least the primed queue and ``batches`` batches; it is closed afterwards.
        batches: how many to time.
        limit_s: stop after so many seconds from the start, once at least one batch is timed.
        now: the clock.
    """
    begin = now()
    skip = primed_batches(feed.settings.num_workers, feed.settings.prefetch_factor)
    iterator = iter(feed)
    try:
        images = 0
        for _ in range(skip + 1):  # the first batch holds the workers' start
            images += len(next(iterator).labels)
            signals.check()
            if skip and now() - begin > limit_s:
                return Supply(images, now() - begin)  # less than it can do: the workers' start is in it
        images, start = 0, now()
        for _ in range(batches):
            images += len(next(iterator).labels)
            signals.check()
            if now() - begin > limit_s:
                break
        return Supply(images, now() - start)  # the clock is read before the iterator and its workers are dropped
    finally:
        if hasattr(iterator, "close"):
            iterator.close()
        feed.close()
