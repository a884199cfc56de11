"""An emulated GPU whose figures of memory are made up."""

from __future__ import annotations

import torch
from emulator import EmulatedDevice

from harness.runtime.accelerator import MemoryUse

GB = 10**9


class Gpu(EmulatedDevice):
    """For ``emulated``, on the wall clock.

    Attributes:
        peaks: what of its memory is allocated at most, in turn for each reading; the last one
            stays.
        free: bytes of it that nobody has.
        pinned: how many tensors were page-locked.
        resets: how often the peaks were begun again.
    """

    def __init__(self, *peaks: int, free: int = 50 * GB) -> None:
        super().__init__()
        self.peaks = list(peaks or (0,))
        self.free = free
        self.pinned = self.resets = 0

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned += 1
        return super().pin(tensor)

    def memory(self) -> MemoryUse:
        peak = self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0]
        return MemoryUse(peak, 30 * GB, peak, 30 * GB, self.free, 80 * GB)

    def reset_peaks(self) -> None:
        self.resets += 1
