"""How near a run comes to running out of its device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.runtime.accelerator import Accelerator, Memory
from harness.runtime.folder import log
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
            f"peak {_gb(most)} allocated ({_gb(self.evaluation_bytes)} in evaluation), "
            f"{_gb(self.reserved_bytes)} reserved, of {_gb(self.total_bytes)}"
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
        """Returns the peaks of the window of training that ends with ``step``, by tag.

        Warns once where the windows' peaks keep rising.
        """
        first = self.peaks is None
        memory = self._read()
        if memory is None or self.peaks is None:
            return {}
        peak = memory.peak_allocated
        self.peaks.training_bytes = max(self.peaks.training_bytes, peak)
        # the first window makes what updates allocate, and chooses kernels
        if not first and not self._told:
            if self._rising and peak <= self._rising[-1][1]:
                self._rising.clear()
            self._rising.append((step, peak))
            if (rise := steady_rise(self._rising)) is not None:
                self._told = True
                log.warning(
                    "step %d: peak memory rises by %s per 1,000 steps, and the device is full "
                    "after about %.0f more; each step keeps tensors, such as a loss with its "
                    "graph: keep loss.detach()",
                    step,
                    _gb(1000 * rise),
                    (memory.free + memory.reserved - peak) / rise,
                )
        return {
            Tag.GPU_MEMORY_PEAK_ALLOCATED_BYTES: peak,
            Tag.GPU_MEMORY_PEAK_RESERVED_BYTES: memory.peak_reserved,
        }

    def evaluated(self) -> dict[str, float]:
        """Returns the peak of an evaluation, by tag; no window of training holds it."""
        memory = self._read()
        if memory is None or self.peaks is None:
            return {}
        self.peaks.evaluation_bytes = max(self.peaks.evaluation_bytes, memory.peak_allocated)
        return {Tag.VAL_MEMORY_PEAK_BYTES: memory.peak_allocated}

    def _read(self) -> Memory | None:
        memory = self._own.memory()
        if memory is not None:
            self._own.reset_peaks()
            self.peaks = self.peaks or MemoryPeaks(memory.total)
            self.peaks.reserved_bytes = max(self.peaks.reserved_bytes, memory.peak_reserved)
        return memory


def steady_rise(windows: Sequence[tuple[int, int]]) -> float | None:
    """Returns the bytes a step by which the peaks of ``windows`` rise; None: not steadily.

    Each window is its last step and its peak in bytes. A steady rise is one of every window, not of
    a few.
    """
    # fewer may rise by chance
    if len(windows) < 10:
        return None
    first_step, first = windows[0]
    last_step, last = windows[-1]
    rises = [after - before for (_, before), (_, after) in pairwise(windows)]
    whole = last - first
    if min(rises) <= 0 or max(rises) > 0.5 * whole or whole < 0.01 * first:
        return None
    return whole / (last_step - first_step)


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
