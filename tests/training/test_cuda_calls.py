"""Calls of CUDA that a training step makes of its own, and that none of them waits for the device.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cli import job
from harness.clock.clock import StepClock
from harness.config import Config
from harness.feed.base import HostBatch
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator
from harness.training.engine import Engine
from harness.training.evaluate import Evaluation

pytestmark = pytest.mark.cuda_order

WARM_UP = 30
STEPS = 40


@pytest.fixture
def calls() -> Any:
    """The made-up runtime's counters."""
    counters: Any = ctypes.CDLL(None)
    if not hasattr(counters, "fakert_count"):
        pytest.skip("a real CUDA runtime counts no calls")
    return counters


def page_locked(count: int) -> Iterator[HostBatch]:
    """Batches in the same page-locked memory, as a feed's are."""
    images = torch.zeros((8, 3, 32, 32), dtype=torch.uint8).pin_memory()
    labels = torch.zeros(8).pin_memory()
    yield from itertools.repeat(HostBatch(images, labels, labels), count)


def test_a_steady_step_makes_few_calls(calls: Any) -> None:
    """With a thread, normalisation and the clock no event is made, and few are asked.

    torch's allocators have events of their own, which are not timed.
    """
    clock = StepClock("cuda")
    statistics = (0.5, 0.5, 0.5)
    prefetcher = DataPrefetcher(
        page_locked(WARM_UP + STEPS), "cuda", mean=statistics, std=statistics, clock=clock
    )
    for step, (images, _) in enumerate(prefetcher):
        if step == WARM_UP:
            calls.fakert_zero()
        with clock.computing():
            accelerator.get("cuda").delay(5e-3)
        clock.step(len(images))
        if step == WARM_UP + STEPS - 2:
            break
    made, asked = (
        calls.fakert_count(f"cudaEvent{call} timed".encode()) for call in ("Create", "Query")
    )
    recorded, read, waited = (
        calls.fakert_count(f"cudaEvent{call}".encode()) / (STEPS - 1)
        for call in ("Record", "ElapsedTime", "Synchronize")
    )
    assert made == 0
    # two of them for tensors that two streams use
    assert recorded <= 9
    # torch asks both events of a distance
    assert read <= 6 and asked / (STEPS - 1) - 2 * read <= 5
    assert waited <= 1
