"""Checks that the prefetcher hides copies and yields correct values under load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from harness.feed.base import HostBatch
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator

# batches in a check of values
_NUMBERED = 24


class Slow:
    """A loader of ``count`` preloaded batches that sleeps ``sleep_s`` for each."""

    def __init__(self, batches: Sequence[Any], sleep_s: float = 0.0, count: int = 0) -> None:
        self.batches = batches
        self.sleep_s = sleep_s
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            if self.sleep_s:
                time.sleep(self.sleep_s)
            yield self.batches[i % len(self.batches)]


def step_ms(batches: Iterable[Any], work: Callable[[], object], device: torch.device) -> float:
    """Returns milliseconds per step of a batch and ``work``, without the first step."""
    begin = 0.0
    steps = -1
    for _ in batches:
        work()
        steps += 1
        if steps == 0:
            wait(device)
            begin = time.perf_counter()
    wait(device)
    return 1e3 * (time.perf_counter() - begin) / steps


def wait(device: torch.device) -> None:
    """Waits for the current stream and the prefetcher's own.

    ``synchronize`` only waits for the current one.
    """
    own = accelerator.get(device)
    if own.has_streams:
        own.stream().wait_stream(own.side_stream())
    own.synchronize()


def _hold_up(device: torch.device) -> None:
    """Delays the current stream, or without one the thread, for some milliseconds."""
    own = accelerator.get(device)
    own.delay(0.005) if own.has_streams else time.sleep(0.002)


def wrong_values(device: torch.device, slow: str) -> list[str]:
    """Returns the faults of numbered batches when a copy or a step is delayed.

    Each is allocated anew and dropped at once, so that both allocators reuse memory as fast as
    possible.
    """
    own = accelerator.get(device)

    def numbered() -> Iterator[HostBatch]:
        for i in range(_NUMBERED):
            images = torch.full((64, 3, 64, 64), i, dtype=torch.uint8)
            labels = torch.full((64,), i)
            images = own.pin(images)
            labels = own.pin(labels)
            # on the side stream, where the prefetcher takes its batches
            if slow == "copy":
                _hold_up(device)
            yield HostBatch(images, labels, labels)

    seen = []
    for images, labels in DataPrefetcher(numbered(), device, ahead=True):
        if slow == "step":
            _hold_up(device)
        seen.append(
            torch.stack(
                (images.amin(), images.amax(), labels.amin().float(), labels.amax().float())
            )
        )
    right = torch.arange(_NUMBERED).float().view(-1, 1).expand(-1, 4)
    if torch.equal(torch.stack(seen).cpu(), right):
        return []
    return [f"wrong values if the {slow} is slow"]
