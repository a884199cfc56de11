"""Poisoned memory: whoever takes batches of the threads backend, and however late the device copies
them, never sees any.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import samples
import torch

from harness.feed import base as buffers
from harness.feed.base import HostBatch
from harness.feed.order import Order
from harness.feed.prefetcher import DataPrefetcher
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed
from harness.runtime import accelerator

LENGTH = 90
EPOCHS = 3
POISON = 0xAB
ORDER = Order(LENGTH, 4, seed=3)


class Device:
    """A device that copies when it likes: at the latest when it is waited for.

    It knows addresses, and holds no tensor.
    """

    def __init__(self, whim: Callable[[], int]) -> None:
        self.whim = whim  # how many orders to carry out at a look
        self.orders: deque[Callable[[], object]] = deque()
        self.one_at_a_time = threading.Lock()  # the trainer and the prefetcher's thread both look

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = torch.empty_like(tensor)
        source = tensor.data_ptr()
        size = tensor.nbytes
        self.orders.append(lambda: ctypes.memmove(copied.data_ptr(), source, size))
        return copied

    def work(self, orders: int) -> None:
        with self.one_at_a_time:
            for _ in range(min(orders, len(self.orders))):
                self.orders.popleft()()


@pytest.fixture(params=["lazy", "moody"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Stands for the GPU: what is sent ``to`` it comes when its events say so."""
    rng = random.Random(5)
    device = Device((lambda: 0) if request.param == "lazy" else (lambda: rng.randrange(4)))

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self.done = False

        def record(self, stream: Any = None) -> None:
            device.orders.append(lambda: setattr(self, "done", True))

        def query(self) -> bool:
            device.work(device.whim())
            return self.done

        def synchronize(self) -> None:
            while not self.done:
                device.work(1)

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0) -> None: ...
        def record_event(self) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...

    to = torch.Tensor.to
    for name, fake in {
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device: Stream(),
        "set_device": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(accelerator.Cuda, "new_stream", Stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda tensor, where, **how: (
            device.copy(tensor) if isinstance(where, torch.device) else to(tensor, where, **how)
        ),
    )
    return device


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills whatever comes back to the pool with poison; the places of what did."""
    taken_back = []
    take_back = buffers._take_back

    def poison(owner: Any, slot: np.ndarray) -> None:
        slot.fill(POISON)
        taken_back.append(slot.ctypes.data)
        take_back(owner, slot)

    monkeypatch.setattr(buffers, "_take_back", poison)
    return taken_back


@pytest.fixture
def feed() -> Iterator[ThreadFeed]:
    settings = samples.settings(3, persistent_workers=True, backend="threads")
    feed = ThreadFeed(samples.Noise(LENGTH), ORDER, settings)
    yield feed
    feed.close()


@pytest.fixture(scope="module")
def expected() -> list[HostBatch]:
    feed = ProcessFeed(samples.Noise(LENGTH), ORDER, samples.settings(0))
    batches = []
    for epoch in range(EPOCHS):
        feed.set_epoch(epoch)
        batches += list(feed)
    return batches


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "plain"])
def test_a_copy_is_never_of_poison(
    feed: ThreadFeed, device: Device, poisoned: list[int], expected: list[HostBatch], ahead: bool
) -> None:
    """Every batch is on the device as it was made, though memory is used again in every pass."""
    batches = DataPrefetcher(
        feed, torch.device("cuda", 0), dtype=torch.uint8, channels_last=True, ahead=ahead
    )
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    for epoch in range(EPOCHS):
        feed.set_epoch(epoch)
        given += batches
    device.work(len(device.orders))
    for (images, labels), like in zip(given, expected, strict=True):
        assert torch.equal(images, like.images) and torch.equal(labels, like.labels)
    assert len(poisoned) > len(set(poisoned))  # some of it was lent at least twice


def test_ahead_no_more_than_two_copies_are_under_way(
    feed: ThreadFeed, device: Device, poisoned: list[int]
) -> None:
    """A device that lags holds the prefetcher's thread back, so that the pool does: all memory is
    the pool's.
    """
    batches = DataPrefetcher(
        feed, torch.device("cuda", 0), dtype=torch.uint8, channels_last=True, ahead=True
    )
    count = sum(1 for _ in batches)
    assert count == len(poisoned) == len(feed)
    # of batches ahead, of the one in the making, and of two that are handed over
    assert len(set(poisoned)) <= 2 + 1 + 2


@pytest.mark.parametrize("kept", [0, 1, 3, 8, 1000])
def test_what_a_consumer_keeps_is_never_poison(
    feed: ThreadFeed, poisoned: list[int], expected: list[HostBatch], kept: int
) -> None:
    """Batches are what they were when they came, however many a consumer keeps, and through however
    many passes.
    """
    shelf: deque[tuple[HostBatch, HostBatch]] = deque()
    wanted = iter(expected)
    for epoch in range(EPOCHS):
        feed.set_epoch(epoch)
        for batch in feed:
            shelf.append((batch, next(wanted)))
            del batch
            if len(shelf) > kept:
                batch, like = shelf.popleft()
                samples.assert_same([batch], [like])
                del batch
    for batch, like in shelf:
        samples.assert_same([batch], [like])
    assert poisoned or kept == 1000
