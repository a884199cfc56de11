"""Peaks of a GPU's memory."""

from __future__ import annotations

import torch
from emulator import GB, Gpu

from harness.clock.figures import Tag
from harness.monitor.device import MemoryPeaks, MemoryWatch
from harness.runtime.accelerator import Accelerator


def test_evaluation_is_told_apart() -> None:
    """Its peak is in no window of training, and each reading begins the peaks again."""
    gpu = Gpu(20 * GB, 25 * GB, 22 * GB)
    watch = MemoryWatch(gpu)
    assert watch.read() == {
        Tag.GPU_MEMORY_PEAK_ALLOCATED_BYTES: 20 * GB,
        Tag.GPU_MEMORY_PEAK_RESERVED_BYTES: 30 * GB,
    }
    assert watch.read(evaluating=True) == {Tag.VAL_MEMORY_PEAK_BYTES: 25 * GB}
    watch.read()
    assert watch.peaks == MemoryPeaks(80 * GB, 30 * GB, 22 * GB, 25 * GB)
    assert (
        str(watch.peaks)
        == "peak 25.0 GB allocated (25.0 GB in evaluation), 30.0 GB reserved, of 80.0 GB"
    )
    assert gpu.resets == 4


def test_a_device_without_memory_of_its_own_gives_nothing() -> None:
    """On a CPU there are no tags and no peaks."""
    watch = MemoryWatch(Accelerator(torch.device("cpu")))
    assert (watch.read(), watch.read(evaluating=True), watch.peaks) == ({}, {}, None)
