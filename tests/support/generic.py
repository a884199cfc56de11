"""A GPU by ``torch.accelerator`` alone, as one of a type that nobody here has."""

from __future__ import annotations

from harness.runtime.accelerator import Cuda, Generic


class GenericCuda(Generic):
    """CUDA without anything of its own but for what tests ask: a delay and figures of memory."""

    delay = Cuda.delay
    memory = Cuda.memory
    reset_peaks = Cuda.reset_peaks
    release = Cuda.release
