"""Calls of CUDA that a training step makes, of which none waits for the device."""

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
from harness.training import pictures
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
    """With a thread, normalization and the clock no event is made, and few are asked.

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
    # the thread may for once be a batch further ahead
    assert made <= 3
    # two of them for tensors that two streams use
    assert recorded <= 9
    # torch asks both events of a distance
    assert read <= 6 and asked / (STEPS - 1) - 2 * read <= 5
    assert waited <= 1


# loader, augmentation and training as users have them
RUNS = {
    "processes": [
        "loader.backend=processes",
        "loader.num_workers=2",
        "loader.pin_memory=true",
        "optim.clip_norm=1",
    ],
    "threads": [
        "loader.backend=threads",
        "loader.num_workers=2",
        "trainer.accumulate_steps=2",
        "augment.mixup=0.2",
    ],
    "arrays": [
        "loader.backend=arrays",
        "augment.crop=center",
        "augment.rand_augment=2",
        "augment.random_erasing=0.5",
    ],
    "average": ["trainer.precision=fp16", "optim.ema_decay=0.9", "augment.cutmix=1"],
}


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_no_call_of_a_step_waits_for_the_device(
    overrides: list[str],
    composed: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept_globals: None,
) -> None:
    """Torch's own detector finds none, also not in the prefetcher's thread meanwhile."""
    one_step = Engine._one_step
    steps = 0

    def watched(self: Engine, *arguments: Any) -> None:
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            one_step(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def evaluated(self: Engine, epoch: int) -> Evaluation:
        self.state.pending = False
        return Evaluation(1, 0.0, 0.0, 0.0)

    monkeypatch.setattr(Engine, "_one_step", watched)
    # whose sums no kernel computes on the made-up runtime
    monkeypatch.setattr(Engine, "evaluate", evaluated)
    # which once waits, between two steps
    monkeypatch.setattr(pictures, "show_batch", lambda *_: None)
    config = composed(
        "data.generate.train_images=640", "data.generate.val_images=64", "loader.batch_size=32",
        "trainer.max_steps=12", "watch.window_steps=5", "device=cuda",
        *overrides,
    )  # fmt: skip
    job.run(0, job.Job(config, tmp_path / "run", ()))
    assert steps == 12
