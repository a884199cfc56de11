"""Runs in lanes: they learn as in a uniform order, and go on amid an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# what it imports draws from Python's generator the first time, which would count as the run's
import sklearn.preprocessing  # noqa: F401
from commands import run_here
from run_state import digest

from harness.config import Config
from harness.runtime.errors import CheckpointError

Composed = Callable[..., Config]
# digits in blocks of 8, as shards that were packed in a permutation have them
MODULE = """
import numpy as np

from harness.data import datasets
from harness.data.storage import ArraySource


def open_splits(data, seed, repacked=0):
    train, val = datasets.open_digits(data)
    images = np.stack([train.read(i)[0] for i in range(len(train))])
    kept = ArraySource(images, train.labels, train.classes, "digits")
    kept.blocks = np.random.default_rng(repacked).permutation(len(train)) // 8
    kept.blocks = kept.blocks.astype(np.int32)
    return kept, val


def repacked(data, seed):
    return open_splits(data, seed, 1)
"""
COMMON = (
    "data=digits", "data.name=mine:open_splits", "trainer.num_threads=1", "device=cpu",
    "run.name=x", "loader.num_workers=0", "loader.batch_size=64", "augment.crop=pad",
    "checkpoint.every_minutes=null",
)  # fmt: skip
SMALL = ("trainer.epochs=4", "data.image_size=24")
LANES = ("loader.order=lanes", "loader.lanes=16", "loader.window_mb=256")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lanes_learn_as_a_uniform_order_does(
    composed: Composed, write_module: Callable[[str, str], None], tmp_path: Path
) -> None:
    """The means of top-1 and loss of five seeds differ by less than the seeds' own spread."""
    write_module("mine", MODULE)
    found = np.empty((2, 5, 2))
    for which, order in enumerate(((), LANES)):
        for seed in range(5):
            config = composed(*COMMON, *order, f"seed={seed}", *SMALL)
            report = run_here(config, tmp_path / f"{which}-{seed}")
            found[which, seed] = report["top1"], report["loss"]
    apart = np.abs(np.diff(found.mean(1), axis=0)[0])
    assert (apart <= np.ptp(found, 1).max(0)).all(), found.tolist()


@pytest.mark.slow
def test_a_run_goes_on_amid_an_epoch(
    composed: Composed, write_module: Callable[[str, str], None], tmp_path: Path
) -> None:
    """Bitwise as if it had not stopped; from shards that were packed anew it does not go on."""
    write_module("mine", MODULE)

    def run(name: str, *typed: str) -> dict[str, Any]:
        config = composed(*COMMON, *LANES, "trainer.epochs=2", "resume=auto", *typed)
        return run_here(config, tmp_path / name)

    run("whole", "trainer.max_steps=30")
    run("parts", "trainer.max_steps=9")
    with pytest.raises(CheckpointError, match=r"loader\.order\W.*16 lanes"):
        run("parts", "trainer.max_steps=30", "data.name=mine:repacked")
    run("parts", "trainer.max_steps=30")
    assert digest(tmp_path / "whole") == digest(tmp_path / "parts")
