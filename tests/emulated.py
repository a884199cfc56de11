"""A GPU that there is not: its tensors lie on the CPU, its memory is a number, and what returns is done."""

from __future__ import annotations

from typing import Any

import torch
from fake_cuda import Event, Stream

from harness.runtime.accelerator import Accelerator, Memory

GB = 10**9


class Gpu(Accelerator):
    """For ``accelerator.emulate``.

    Attributes:
        peaks: what of its memory is allocated at most, in turn for each reading; the last one stays.
        free: bytes of it that nobody has.
        pinned: how many tensors were page-locked.
        resets: how often the peaks were begun again.
    """

    kind = "cuda"
    has_streams = True

    def __init__(self, *peaks: int, free: int = 50 * GB) -> None:
        super().__init__(torch.device("cpu"))
        self.peaks, self.free = list(peaks or (0,)), free
        self.pinned = self.resets = 0
        self._stream = Stream()

    def event(self, *, timed: bool = False) -> Any:
        return Event()

    def stream(self) -> Any:
        return self._stream

    def side_stream(self) -> Any:
        return self._stream

    def idle_stream(self) -> Any:
        return self._stream

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned += 1
        return tensor.clone()

    def memory(self) -> Memory:
        peak = self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0]
        return Memory(peak, 30 * GB, peak, 30 * GB, self.free, 80 * GB)

    def reset_peaks(self) -> None:
        self.resets += 1
