"""What ``gpu_check.py`` asks of the prefetcher: whether it hides the copy, and whether its values are right when in haste."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.feed.interface import HostBatch
from harness.feed.prefetcher import DataPrefetcher

_NUMBERED = 24  # batches in a check of values


class Slow:
    """A loader of ``count`` ready batches that takes ``sleep_s`` over each."""

    def __init__(self, batches: Sequence[Any], sleep_s: float = 0.0, count: int = 0) -> None:
        self.batches, self.sleep_s, self.count = batches, sleep_s, count

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.count):
            if self.sleep_s:
                time.sleep(self.sleep_s)
            yield self.batches[i % len(self.batches)]


def step_ms(batches: Iterable[Any], work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a step that takes a batch and does ``work``; the first one does not count."""
    begin, steps = 0.0, -1
    for _ in batches:
        work()
        steps += 1
        if steps == 0:
            wait(device)
            begin = time.perf_counter()
    wait(device)
    return 1e3 * (time.perf_counter() - begin) / steps


def wait(device: torch.device) -> None:
    """Until all streams of a GPU are through, the prefetcher's own too; ``synchronize`` waits for the current one alone."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hold_up(device: torch.device) -> None:
    """Hold the current stream up for some milliseconds; without one, the thread."""
    torch.cuda._sleep(10_000_000) if device.type == "cuda" else time.sleep(0.002)


class _SlowToMove(Tensor):
    """Images whose copy waits behind a sleep on the stream that it is issued to; in all else a plain tensor."""

    def to(self, *args: Any, **how: Any) -> Tensor:
        """A plain tensor on the device that comes first among ``args``."""
        _hold_up(torch.device(args[0]))
        return self.as_subclass(Tensor).to(*args, **how)


def wrong_values(device: torch.device, slow: str) -> list[str]:
    """What is wrong with batches that each hold their number, when their copy or the step that reads them is held up.

    Each is made anew and dropped at once, so that memory goes round on both sides as fast as the allocators let it.
    """

    def numbered() -> Iterator[HostBatch]:
        for i in range(_NUMBERED):
            images, labels = torch.full((64, 3, 64, 64), i, dtype=torch.uint8), torch.full((64,), i)
            if device.type == "cuda":
                images, labels = images.pin_memory(), labels.pin_memory()
            yield HostBatch(images.as_subclass(_SlowToMove) if slow == "copy" else images, labels, labels)

    seen = []
    for images, labels in DataPrefetcher(numbered(), device, ahead=True):
        if slow == "step":
            _hold_up(device)
        seen.append(torch.stack((images.amin(), images.amax(), labels.amin().float(), labels.amax().float())))
    right = torch.arange(_NUMBERED).float().view(-1, 1).expand(-1, 4)
    return [] if torch.equal(torch.stack(seen).cpu(), right) else [f"wrong values where the {slow} is slow"]
