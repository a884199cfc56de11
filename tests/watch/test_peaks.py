"""Peaks of a GPU's memory, and the note where they keep rising."""

from __future__ import annotations

import random

import pytest
import torch
from emulated import GB, Gpu

from harness.runtime.accelerator import Accelerator
from harness.watch.figures import Tag
from harness.watch.peaks import MemoryPeaks, MemoryWatch, steady_rise

STEADY = [10 * GB + k * GB // 10 for k in range(12)]


def windows(peaks: list[int]) -> list[tuple[int, int]]:
    """Windows of 10 steps with these peaks."""
    return [(10 * k, peak) for k, peak in enumerate(peaks, 2)]


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        pytest.param(STEADY, 0.01 * GB, id="a tenth of a GB each window"),
        pytest.param(
            [peak + k % 2 * GB // 25 for k, peak in enumerate(STEADY)],
            1.14 * GB / 110,
            id="unevenly",
        ),
        pytest.param(STEADY[:9], None, id="too few"),
        pytest.param([10 * GB + k for k in range(12)], None, id="by nearly nothing"),
        pytest.param([10 * GB] * 12, None, id="level"),
        pytest.param([10 * GB] * 6 + [20 * GB] * 6, None, id="one jump"),
        pytest.param(
            [10 * GB + k * 2**20 + (k > 5) * GB for k in range(12)],
            None,
            id="one jump, and a trickle",
        ),
        pytest.param([*STEADY[:-1], STEADY[0]], None, id="back again"),
        pytest.param(STEADY[::-1], None, id="falling"),
        pytest.param([], None, id="none"),
    ],
)
def test_a_steady_rise_is_one_of_every_window(peaks: list[int], expected: float | None) -> None:
    """It is told in bytes a step; jumps, trickles and what comes and goes are none."""
    assert steady_rise(windows(peaks)) == (None if expected is None else pytest.approx(expected))


def noted(gpu: Gpu, caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """What a run of ``count`` windows of 10 steps is told."""
    watch = MemoryWatch(gpu)
    for k in range(1, count + 1):
        watch.trained(10 * k)
    return [record.getMessage() for record in caplog.records]


def test_a_leak_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the rise, when the device will be full, and the way out."""
    gpu = Gpu(60 * GB, *(10 * GB + k * GB // 10 for k in range(40)), free=50 * GB)
    assert noted(gpu, caplog, 40) == [
        "step 110: peak memory rises by 10.0 GB per 1,000 steps, and the device is full after "
        "about 6910 more; each step "
        "keeps tensors, such as a loss with its graph: keep loss.detach()"
    ]


def test_a_leak_that_begins_late_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    """Windows that were level before it, or higher, do not hide it."""
    level = [12 * GB] * 50 + [10 * GB] * 5
    assert len(noted(Gpu(*level, *STEADY), caplog, 67)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_noted(caplog: pytest.LogCaptureFixture, seed: int) -> None:
    """Peaks that wander by a tenth, as with batches of many sizes, are no leak in 2,000 windows."""
    noise = random.Random(seed)
    assert noted(Gpu(*(int(noise.gauss(10, 1) * GB) for _ in range(2_000))), caplog, 2_000) == []


def test_evaluation_is_told_apart() -> None:
    """Its peak is in no window of training, and each reading begins the peaks again."""
    gpu = Gpu(20 * GB, 25 * GB, 22 * GB)
    watch = MemoryWatch(gpu)
    assert watch.trained(10) == {
        Tag.GPU_MEMORY_PEAK_ALLOCATED_BYTES: 20 * GB,
        Tag.GPU_MEMORY_PEAK_RESERVED_BYTES: 30 * GB,
    }
    assert watch.evaluated() == {Tag.VAL_MEMORY_PEAK_BYTES: 25 * GB}
    watch.trained(20)
    assert watch.peaks == MemoryPeaks(80 * GB, 30 * GB, 22 * GB, 25 * GB)
    assert (
        str(watch.peaks)
        == "peak 25.0 GB allocated (25.0 GB in evaluation), 30.0 GB reserved, of 80.0 GB"
    )
    assert gpu.resets == 4


def test_a_device_without_memory_of_its_own_gives_nothing() -> None:
    """On a CPU there are no tags and no peaks."""
    watch = MemoryWatch(Accelerator(torch.device("cpu")))
    assert (watch.trained(10), watch.evaluated(), watch.peaks) == ({}, {}, None)
