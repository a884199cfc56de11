"""What a supply figure holds and what it leaves out, by a fake feed and a fake clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import samples
import torch

from harness.feed.interface import HostBatch
from harness.runtime import signals
from harness.runtime.errors import Interrupted
from harness.tuning.probe import Supply, measure_supply, primed_batches


class TimedFeed:
    """A feed whose batches take ``seconds`` each on its own clock, and whose end takes a hundred."""

    on_device = False

    def __init__(self, seconds: list[float], num_workers: int = 0, prefetch_factor: int = 2) -> None:
        self.settings = samples.settings(num_workers, prefetch_factor=prefetch_factor)
        self.seconds = seconds
        self.clock = 1000.0
        self.given = self.ended = self.closed = 0

    def now(self) -> float:
        return self.clock

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int:
        return len(self.seconds)

    def __iter__(self) -> Iterator[HostBatch]:
        try:
            for seconds in self.seconds:
                self.clock += seconds
                self.given += 1
                yield HostBatch(torch.zeros(8, 3, 2, 2, dtype=torch.uint8), torch.zeros(8), torch.zeros(8))
        finally:
            self.clock += 100.0
            self.ended += 1

    def close(self) -> None:
        self.clock += 100.0
        self.closed += 1


def measure(feed: TimedFeed, batches: int, limit_s: float = 1e9) -> Supply:
    return measure_supply(feed, batches, limit_s, feed.now)


def test_start_and_primed_queue_are_left_out() -> None:
    """The first batch holds the workers' start, the next ones come from their queue: the figure is of those after them."""
    feed = TimedFeed([50.0, *[0.0] * 4, 2.0, 2.0, 2.0, 7.0], num_workers=2, prefetch_factor=2)
    supply = measure(feed, 3)
    assert supply == Supply(images=24, elapsed_s=6.0)
    assert supply.images_per_s == 4.0
    assert feed.given == 8


def test_without_workers_the_first_batch_alone_is_left_out() -> None:
    """num_workers=0 has no primed queue."""
    assert measure(TimedFeed([9.0, 1.0, 1.0]), 2) == Supply(images=16, elapsed_s=2.0)


def test_the_end_of_the_workers_is_left_out() -> None:
    """The clock is read before the iterator and the feed are closed, which they are, once each."""
    feed = TimedFeed([1.0] * 5)
    assert measure(feed, 2).elapsed_s == 2.0
    assert (feed.ended, feed.closed) == (1, 1)


def test_the_limit_ends_the_measurement() -> None:
    """Counted from the start of the workers, the limit stops a slow loader with what was delivered so far."""
    feed = TimedFeed([5.0, 3.0, 3.0, 3.0, 3.0])
    assert measure(feed, 4, limit_s=10.0) == Supply(images=16, elapsed_s=6.0)
    assert feed.closed == 1


def test_a_loader_without_workers_is_measured_however_slow() -> None:
    """At least one batch is timed, so that num_workers=0 always has a figure."""
    assert measure(TimedFeed([5.0, 3.0, 3.0]), 2, limit_s=1.0) == Supply(images=8, elapsed_s=3.0)


def test_workers_too_slow_for_their_primed_queue_have_a_lower_bound() -> None:
    """What was delivered within the limit, start included, is the figure."""
    feed = TimedFeed([5.0] * 20, num_workers=2)
    assert measure(feed, 4, limit_s=7.0) == Supply(images=16, elapsed_s=10.0)
    assert (feed.ended, feed.closed) == (1, 1)


def test_a_signal_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted comes between two batches, and the feed is closed."""
    monkeypatch.setattr(signals, "_received", [(15, 0.0)])
    feed = TimedFeed([1.0] * 5)
    with pytest.raises(Interrupted):
        measure(feed, 2)
    assert (feed.given, feed.closed) == (1, 1)


def test_nothing_delivered_is_no_rate() -> None:
    """A supply without time is 0 images/s and no division by zero."""
    assert Supply(0, 0.0).images_per_s == 0.0


@pytest.mark.parametrize(("num_workers", "prefetch_factor", "primed"), [(0, None, 0), (3, 2, 6), (2, 4, 8)])
def test_primed_batches(num_workers: int, prefetch_factor: int | None, primed: int) -> None:
    """Every worker has prefetch_factor batches in hand before the first is taken."""
    assert primed_batches(num_workers, prefetch_factor) == primed
