"""Page-locked memory: what is reckoned is what the real feeds take of an emulated allocator, at the
most.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import samples
from emulator import EmulatedDevice, WallClock, emulated
from machines import room

from harness.config import DataConfig
from harness.data.datasets import ImageDataset
from harness.data.storage import ArraySource
from harness.feed.base import Backend, FeedSettings
from harness.feed.feeds import BACKENDS
from harness.feed.order import Order
from harness.feed.prefetcher import DataPrefetcher

SETTLED_S = 0.3
LIMIT_S = 30.0
HOUR_S = 3600.0

in_settings = pytest.mark.parametrize(
    ("what", "side"),
    [
        *(
            pytest.param(
                samples.settings(
                    workers, prefetch_factor=prefetch, batch_size=size, pin_memory=True
                ),
                side,
                id=f"processes {workers} x {prefetch} of {size} at {side}",
            )
            for workers, prefetch, size, side in (
                (1, 1, 4, 8),
                (2, 2, 7, 16),
                (2, 3, 16, 9),
                (1, 5, 5, 32),
                (0, 1, 6, 11),
            )
        ),
        *(
            pytest.param(
                samples.settings(
                    workers,
                    prefetch_factor=prefetch,
                    batch_size=size,
                    pin_memory=True,
                    backend="threads",
                ),
                side,
                id=f"threads {workers} x {prefetch} of {size} at {side}",
            )
            for workers, prefetch, size, side in (
                (1, 1, 4, 8),
                (3, 2, 7, 16),
                (2, 4, 16, 9),
                (0, 1, 5, 32),
            )
        ),
        *(
            pytest.param(
                samples.settings(0, batch_size=size, pin_memory=True, backend="arrays"),
                side,
                id=f"arrays of {size} at {side}",
            )
            for size, side in ((4, 8), (7, 16), (33, 9))
        ),
    ],
)


class Moved(WallClock):
    """The real time, put forward by hand: a device's long work ends when the test says so."""

    def __init__(self) -> None:
        self._ahead_s, self._changed = 0.0, threading.Condition()

    def now(self) -> float:
        return time.perf_counter() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        until_s = self.now() + seconds
        with self._changed:
            assert (
                self._changed.wait_for(lambda: self.now() >= until_s, min(seconds, LIMIT_S))
                or seconds < LIMIT_S
            )

    def forward(self, seconds: float) -> None:
        with self._changed:
            self._ahead_s += seconds
            self._changed.notify_all()


def made(settings: FeedSettings, side: int, batches: int) -> Backend:
    """A feed over so many batches of small images."""
    count = batches * settings.batch_size
    source = ArraySource(
        np.zeros((count, side, side, 3), np.uint8), np.zeros(count, np.int64), ["a", "b"], "small"
    )
    dataset = ImageDataset(
        source, samples.eval_transform(side), DataConfig(max_pixels=10**9), side, 0
    )
    return BACKENDS[settings.backend](dataset, Order(count, settings.batch_size), settings)


@contextlib.contextmanager
def prefetched(feed: Backend, device: EmulatedDevice) -> Iterator[DataPrefetcher]:
    """Its batches on ``device``; no worker is left."""
    batches = DataPrefetcher(feed, device.device)
    try:
        yield batches
    finally:
        if isinstance(device.clock, Moved):
            device.clock.forward(1e3 * HOUR_S)
        batches.close()
        feed.close()
        assert samples.comes_true(lambda: samples.at_work() == [])


def settled(figure: Callable[[], int]) -> int:
    """``figure`` once it has not changed for a while."""
    end_s = time.monotonic() + LIMIT_S
    value = figure()
    since_s = time.monotonic()
    while time.monotonic() - since_s < SETTLED_S and time.monotonic() < end_s:
        time.sleep(0.01)
        if figure() != value:
            value = figure()
            since_s = time.monotonic()
    return value


def reckoned(settings: FeedSettings, side: int) -> int:
    """The page-locked bytes of those that are reckoned: of threads, which copy nothing, all."""
    size = settings.batch_size * (3 * side**2 + 8 + 8)
    memory = room(size).needs(settings).memory
    if settings.backend == "threads":
        return memory
    return memory - room(size).needs(replace(settings, pin_memory=False)).memory


@in_settings
def test_a_consumer_that_stands_still_finds_what_was_reckoned(
    what: FeedSettings, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take an hour: the second batch is on its way, and the first one's memory waits for
    that too.
    """
    device = EmulatedDevice(clock := Moved(), pinned_per_s=what.batch_size * 3 * side**2 / HOUR_S)
    feed = made(what, side, what.num_workers * (what.prefetch_factor or 0) + 8)
    with emulated(device, monkeypatch), prefetched(feed, device) as batches:
        next(batches)
        settled(lambda: device.pinned_pool.reserved)
        clock.forward(1.5 * HOUR_S)
        next(batches)
        taken = settled(lambda: device.pinned_pool.peak_reserved)
        if what.backend == "threads" and not what.num_workers:
            # nothing is made ahead of this consumer, whose second batch is the last that it has:
            # of three batches, the images and labels of two, and labels of one before them
            assert taken == reckoned(what, side) - 16384 - 64
        else:
            assert taken == reckoned(what, side)


@in_settings
@pytest.mark.parametrize("copy_s", [1e-5, 20e-3], ids=["fast copies", "slow copies"])
def test_a_consumer_that_runs_never_takes_more(
    what: FeedSettings, side: int, copy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two passes, whether the feed or the copies hold it up."""
    device = EmulatedDevice(pinned_per_s=what.batch_size * 3 * side**2 / copy_s)
    feed = made(what, side, 12)
    with emulated(device, monkeypatch), prefetched(feed, device) as batches:
        for epoch in range(2):
            feed.set_epoch(epoch)
            for _ in batches:
                device.launch(1e-3)
        assert device.pinned_pool.peak_reserved <= reckoned(what, side)
