"""Whole runs that fine-tune, stop early and stop by the clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import commands
import pytest
from run_state import digest

from harness.config import Config
from harness.training import checkpoint_read

Composed = Callable[..., Config]
COMMON = ("device=cpu", "trainer.num_threads=1", "loader.num_workers=0", "watch.tensorboard=false")
# seven steps an epoch
DIGITS = (
    "data=digits", *COMMON, "loader.batch_size=200", "run.name=x", "data.image_size=16",
    "data.eval_resize=16",
)  # fmt: skip
OWN = """
import numpy as np
from sklearn.datasets import load_digits

from harness.data.storage import ArraySource, Subset


def split(first, count, labels):
    digits = load_digits()
    images = np.repeat((digits.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=3)
    source = ArraySource(images, labels, map(str, range(1 + max(labels))), "digits")
    return Subset(source, first + np.arange(count)), Subset(source, np.arange(1000, 1797))


def all_ten(data, seed):
    return split(0, 900, load_digits().target)


def few_pairs(data, seed):
    return split(900, 96, load_digits().target // 2)
"""
pytestmark = pytest.mark.usefixtures("kept_globals")
run = partial(commands.run_here, stopped=True)


@pytest.mark.parametrize(
    ("seeds", "rates"),
    [(range(1), (0.03,)), pytest.param(range(1, 5), (0.01, 0.03, 0.1), marks=pytest.mark.slow)],
    ids=str,
)
def test_fine_tuning_is_above_training_from_nothing(
    composed: Composed,
    tmp_path: Path,
    write_module: Callable[[str, str], None],
    seeds: range,
    rates: tuple[float, ...],
) -> None:
    """The recipe on 96 digits in five classes, from a network that knows ten: at equal steps it is
    far above the same network from random weights, at the best of several rates.
    """
    write_module("halves", OWN)
    own = (
        *COMMON, "data=own", "data.image_size=16", "augment=digits", "model=small",
        "data.mean=[0.305,0.305,0.305]", "data.std=[0.376,0.376,0.376]",
        "trainer.epochs=4", "trainer.eval_every_epochs=4", "data.eval_resize=16",
    )  # fmt: skip
    before = run(composed(*own, "data.name=halves:all_ten"), tmp_path / "ten")
    # far above one in ten, whatever a processor rounds
    assert before["top1"] > 0.5
    few = (*own, "data.name=halves:few_pairs", "loader.batch_size=16")
    for seed in seeds:
        tuned = composed(
            "experiment=finetune", *few, f"seed={seed}", "optim.ema_decay=0.9",
            f"model.weights={tmp_path / 'ten'}",
        )  # fmt: skip
        found = run(tuned, tmp_path / f"tuned-{seed}")
        best = max(
            run(composed(*few, f"seed={seed}", f"optim.lr={lr}"), tmp_path / f"{lr}-{seed}")["top1"]
            for lr in rates
        )
        assert found["steps"] == 24
        assert found["top1"] > best + 0.1, f"seed {seed}"


@pytest.mark.slow
def test_a_resume_of_fine_tuning_is_exact(
    composed: Composed, tmp_path: Path, stop_at: Callable[[int | None], None]
) -> None:
    """Stopped while frozen, at the thaw and after it: the same weights, averages and momentum."""
    common = (
        *DIGITS, "trainer.epochs=2", "optim.freeze=all_but_head", "optim.freeze_epochs=1",
        "optim.layer_decay=0.8", "optim.ema_decay=0.9", "optim.lr_per=256",
    )  # fmt: skip
    run(composed(*common), tmp_path / "whole")
    for step in (3, 7, None):
        stop_at(step)
        run(composed(*common, "resume=auto"), tmp_path / "parts")
        assert step in (None, checkpoint_read.read(tmp_path / "parts").record.step)
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    assert "ema" in checkpoint_read.read(tmp_path / "whole").state


def test_a_run_that_gets_no_better_stops(
    composed: Composed,
    tmp_path: Path,
    stop_at: Callable[[int | None], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """trainer.patience_epochs counts over a resume; the run is completed and says why."""
    common = (
        *DIGITS, "trainer.epochs=9", "optim.freeze=all_but_head", "optim.lr=0",
        "trainer.patience_epochs=2", "resume=auto",
    )  # fmt: skip
    stop_at(16)
    run(composed(*common), tmp_path)
    assert checkpoint_read.read(tmp_path).state["stale"] == 1
    stop_at(None)
    report = run(composed(*common), tmp_path)
    assert (report["status"], report["epochs"]) == ("completed", 3)
    assert report["stopped"] == "top-1 has not improved for 2 epochs"
    assert "stopped        top-1 has not improved for 2 epochs\n" in capsys.readouterr().out
    run(composed(*common), tmp_path)
    said = capsys.readouterr().out
    assert "step 21; " in said and "trainer.patience_epochs" in said


def test_a_run_whose_time_is_over_goes_on(
    composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """trainer.max_hours ends it within an epoch: evaluated, saved, and exactly resumed."""
    common = (*DIGITS, "trainer.epochs=1", "optim.ema_decay=0.9")
    whole = run(composed(*common), tmp_path / "whole")
    report = run(composed(*common, "trainer.max_hours=1e-9"), tmp_path / "parts")
    said = capsys.readouterr().out
    assert (report["status"], report["steps"], report["val_images"]) == (
        "completed", 1, whole["val_images"],
    )  # fmt: skip
    assert report["stopped"].startswith("trainer.max_hours=1e-09 ")
    assert "stopped after step 1; epochs done: 0 of 1, and 200 of 1400 images " in said
    assert "\nresume with    " in said and " train.py resume=" in said
    assert checkpoint_read.read(tmp_path / "parts").record.top1 == report["top1"]
    run(composed(*common, "resume=auto"), tmp_path / "parts")
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
