"""How near a run comes to running out of its device's memory."""

from __future__ import annotations

from dataclasses import dataclass

from harness.runtime.accelerator import Accelerator
from harness.watch.figures import Tag


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
        most = max(self.training_bytes, self.evaluation_bytes)
        return (
            f"peak {most / 1e9:.1f} GB allocated ({self.evaluation_bytes / 1e9:.1f} GB in "
            f"evaluation), {self.reserved_bytes / 1e9:.1f} GB reserved, of "
            f"{self.total_bytes / 1e9:.1f} GB"
        )


class MemoryWatch:
    """Reads the peaks of a device's memory, where the host has just waited for the device.

    Attributes:
        peaks: of the run so far; None where the device has no memory of its own, or nothing was
            read yet.
    """

    def __init__(self, own: Accelerator) -> None:
        self._own = own
        self.peaks: MemoryPeaks | None = None
        own.reset_peaks()

    def read(self, *, evaluating: bool = False) -> dict[str, float]:
        """Returns the peaks since the last call, by tag: of a window, or of an evaluation."""
        memory = self._own.memory()
        if memory is None:
            return {}
        self._own.reset_peaks()
        peak = memory.peak_allocated
        peaks = self.peaks = self.peaks or MemoryPeaks(memory.total)
        peaks.reserved_bytes = max(peaks.reserved_bytes, memory.peak_reserved)
        if evaluating:
            peaks.evaluation_bytes = max(peaks.evaluation_bytes, peak)
            return {Tag.VAL_MEMORY_PEAK_BYTES: peak}
        peaks.training_bytes = max(peaks.training_bytes, peak)
        return {
            Tag.GPU_MEMORY_PEAK_ALLOCATED_BYTES: peak,
            Tag.GPU_MEMORY_PEAK_RESERVED_BYTES: memory.peak_reserved,
        }
