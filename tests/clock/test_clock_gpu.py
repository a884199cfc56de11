"""The step clock on CUDA: what a real device waited for, which no synchronization tells it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from harness.clock.clock import StepClock
from harness.clock.figures import Window
from harness.feed.base import HostBatch
from harness.feed.prefetcher import DataPrefetcher

pytestmark = pytest.mark.usefixtures("cuda_class")

STEPS = 50
CYCLES = 20_000_000  # some ten milliseconds of any GPU


def slow(load_s: float, size: int) -> Iterator[HostBatch]:
    """Page-locked batches of ``size`` images of 150 KB that take so long each."""
    images = torch.zeros((size, 3, 224, 224), dtype=torch.uint8).pin_memory()
    labels = torch.zeros(size).pin_memory()
    for _ in range(STEPS):
        time.sleep(load_s)
        yield HostBatch(images, labels, labels)


def trained(load_s: float, work_s: float, size: int = 256) -> Window:
    """Runs steps of ``CYCLES`` with a loader of ``load_s`` and a loop that works for ``work_s``."""
    clock = StepClock("cuda")
    batches = iter(DataPrefetcher(slow(load_s, size), "cuda", clock=clock))
    for _ in range(STEPS):
        time.sleep(work_s)
        with clock.waiting():
            next(batches)
        with clock.computing():
            torch.cuda._sleep(CYCLES)
        clock.step(size)
    torch.cuda.synchronize()
    return clock.total()


def step_s() -> float:
    compute_ms = trained(0.0, 0.0).compute_ms
    assert compute_ms is not None
    return compute_ms.median / 1e3


@pytest.mark.cuda_values
def test_a_device_that_waits_for_the_loader_is_starved() -> None:
    """Beside a loader three times slower than the step it stands still for two thirds."""
    shares = trained(3 * step_s(), 0.0).shares
    assert shares["starved"] + shares["exposed_copy"] == pytest.approx(2 / 3, abs=0.03)
    assert shares["host"] < 0.01
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.cuda_values
def test_a_device_that_waits_for_the_loop_is_not() -> None:
    """Beside a loop that works for three steps the two thirds are the host's."""
    step = step_s()
    shares = trained(step, 3 * step).shares
    assert shares["host"] == pytest.approx(2 / 3, abs=0.03)
    assert shares["starved"] + shares["exposed_copy"] < 0.01


@pytest.mark.cuda_values
def test_a_loader_twice_as_fast_as_the_step_never_stalls_it() -> None:
    """The device always has a batch."""
    stall = trained(step_s() / 2, 0.0).stall_fraction
    assert stall is not None and stall < 0.01


@pytest.mark.cuda_order
def test_the_host_waits_for_a_full_device_and_not_for_data() -> None:
    """Beside a loader that is faster than the step the host sleeps until the device has room."""
    window = trained(0.0, 0.0, size=8)
    assert window.device_full_fraction is not None and window.device_full_fraction > 0.5
    assert window.data_wait_fraction is not None and window.data_wait_fraction < 0.5
