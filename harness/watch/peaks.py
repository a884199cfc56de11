"""How near a run comes to running out of its device's memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.runtime.accelerator import Accelerator, Memory
from harness.runtime.folder import LOGGER
from harness.watch.figures import Tag

_WINDOWS = 10  # fewer may rise by chance
_LEAST_RISE = 0.01  # of the first peak
_LARGEST_JUMP = 0.5  # of the whole rise

_log = logging.getLogger(LOGGER)


@dataclass(slots=True)
class MemoryPeaks:
    """The largest figures of a run, in bytes.

    Attributes:
        total_bytes: what the device has.
        reserved_bytes: what torch took from the driver, allocated or kept for later.
        training_bytes: what was allocated in training steps.
        evaluation_bytes: what was allocated in evaluations.
    """

    total_bytes: int
    reserved_bytes: int = 0
    training_bytes: int = 0
    evaluation_bytes: int = 0

    def __str__(self) -> str:
        """As in ``peak 21.3 GB allocated (9.8 GB in evaluation), 24.0 GB reserved, of 80.0 GB``."""
        allocated = f"{_gb(max(self.training_bytes, self.evaluation_bytes))} allocated"
        evaluated = f"{_gb(self.evaluation_bytes)} in evaluation"
        return (
            f"peak {allocated} ({evaluated}), {_gb(self.reserved_bytes)} reserved, of "
            f"{_gb(self.total_bytes)}"
        )


class MemoryWatch:
    """Reads the peaks of a device's memory, where the host has just waited for the device.

    Attributes:
        peaks: of the run so far; None where the device has no memory of its own, or nothing was
            read yet.
    """

    def __init__(self, own: Accelerator) -> None:
        self._own = own
        self._rising: list[tuple[int, int]] = []
        self._told = False
        self.peaks: MemoryPeaks | None = None
        own.reset_peaks()

    def trained(self, step: int) -> dict[str, float]:
        """The peaks of the window of training that ends with ``step``, by tag; warns once where
        windows' peaks keep rising.
        """
        # the first window makes what updates allocate, and chooses kernels
        comparable = self.peaks is not None
        memory = self._read("training_bytes")
        if memory is None:
            return {}
        if comparable and not self._told:
            self._compare(step, memory)
        return {
            Tag.GPU_MEMORY_PEAK_ALLOCATED_BYTES: memory.peak_allocated,
            Tag.GPU_MEMORY_PEAK_RESERVED_BYTES: memory.peak_reserved,
        }

    def evaluated(self) -> dict[str, float]:
        """The peak of an evaluation, by tag; no window of training holds it."""
        memory = self._read("evaluation_bytes")
        return {} if memory is None else {Tag.VAL_MEMORY_PEAK_BYTES: memory.peak_allocated}

    def _read(self, name: str) -> Memory | None:
        memory = self._own.memory()
        if memory is not None:
            self._own.reset_peaks()
            peaks = self.peaks = self.peaks or MemoryPeaks(memory.total)
            peaks.reserved_bytes = max(peaks.reserved_bytes, memory.peak_reserved)
            setattr(peaks, name, max(getattr(peaks, name), memory.peak_allocated))
        return memory

    def _compare(self, step: int, memory: Memory) -> None:
        peak = memory.peak_allocated
        if self._rising and peak <= self._rising[-1][1]:
            self._rising.clear()
        self._rising.append((step, peak))
        if (rise := steady_rise(self._rising)) is None:
            return
        self._told = True
        left = (memory.free + memory.reserved - peak) / rise
        _log.warning(
            "step %d: peak memory rises by %s per 1,000 steps, and the device is full after about "
            "%.0f more; each step keeps "
            "tensors, such as a loss with its graph: keep loss.detach()",
            *(step, _gb(1000 * rise), left),
        )


def steady_rise(windows: Sequence[tuple[int, int]]) -> float | None:
    """The bytes a step by which the peaks of ``windows`` rise; None where the rise is no steady
    one.

    Each window is its last step and its peak in bytes. A steady rise is one of every window, not of
    a few.
    """
    if len(windows) < _WINDOWS:
        return None
    (first_step, first) = windows[0]
    (last_step, last) = windows[-1]
    rises = [after - before for (_, before), (_, after) in pairwise(windows)]
    whole = last - first
    steady = min(rises) > 0 and max(rises) <= _LARGEST_JUMP * whole and whole >= _LEAST_RISE * first
    return whole / (last_step - first_step) if steady else None


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
