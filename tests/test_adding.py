"""Parts of a user's own: the examples of own-model-and-data.md run, and promises hold."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_here as run
from PIL import Image
from run_state import digest

from harness.config import Config, ConfigError
from harness.data import datasets
from harness.data.augment import BatchAugment
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError
from harness.runtime.limits import Limits
from harness.training import models
from harness.tuning.tuner import fingerprint

Composed = Callable[..., Config]
Write = Callable[[str, str], None]
DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "how-to" / "own-model-and-data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"```sh\nwellfed (.*?)\n```", PAGE, re.S)
DATASET = ("data=own", "data.name=my_dataset:open_splits", "data.root=photos", "data.image_size=32")
FEW = (
    "device=cpu", "loader.batch_size=4", "trainer.max_steps=4", "trainer.epochs=2",
    "schedule.warmup_epochs=0",
)  # fmt: skip

NAMES = ["model", "optimizer", "loss", "source", "dataset", "augment", "callbacks"]

pytestmark = pytest.mark.usefixtures("kept_globals")


@pytest.fixture
def examples(write_module: Write, tmp_path: Path) -> None:
    """The page's modules in the current folder, and images as its commands name them.

    The tables are a spreadsheet's: with a byte order mark, blanks, commas and quotes in names.
    """
    for block in BLOCKS:
        write_module(re.match(r"# (\w+)\.py", block)[1], block)  # type: ignore[index]
    rng = np.random.default_rng(0)
    for part, count in ("train", 8), ("val", 4):
        lines = []
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(
                    folder / f"photo {i}, old.png"
                )
                lines.append(f'"{part}/{name}/photo {i}, old.png",{name}\r\n')
        (tmp_path / "photos" / f"{part}.csv").write_text("".join(lines), encoding="utf-8-sig")


def test_the_examples_are_short() -> None:
    """Each has about 20 lines."""
    assert [len(block.splitlines()) <= 30 for block in BLOCKS] == [True] * 7
    assert len(COMMANDS) == 7


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    "command",
    COMMANDS,
    ids=["model", "optimizer", "loss", "source", "dataset", "augment", "callbacks"],
)
def test_every_example_trains(composed: Composed, tmp_path: Path, command: str) -> None:
    """As it stands on the page, two epochs of few steps."""
    report = run(composed(*shlex.split(command), *FEW), tmp_path / "run")
    assert (report["status"], report["steps"]) == ("completed", 4)


@pytest.mark.usefixtures("examples")
def test_a_run_goes_on_and_is_evaluated(composed: Composed, tmp_path: Path) -> None:
    """Evaluation asks for the names of the user's code, and takes all else from the run."""
    alone = (*FEW[:2], "loader.num_workers=0")
    short = ("trainer.epochs=1", "schedule.warmup_epochs=0")
    typed = (*DATASET, *alone, "model.name=my_model:build", *short)
    first = run(composed(*typed), tmp_path / "run", *typed)
    again = ("mode=evaluate", "resume=run", *alone)
    named = ("data.name=my_dataset:open_splits", "model.name=my_model:build")
    for left_out in (0, 1):
        given = (*again, named[1 - left_out])
        with pytest.raises(CheckpointError, match=named[left_out]):
            run(composed(*given), tmp_path / "refused", *given)
    again = (*again, *named)
    evaluated = run(composed(*again), tmp_path / "evaluated", *again)
    assert (evaluated["top1"], evaluated["val_images"]) == (first["top1"], 8)
    on = (*typed, "trainer.epochs=2", "resume=run")
    assert run(composed(*on), tmp_path / "on", *on)["steps"] == 8


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
def test_no_setting_changes_what_is_trained_on(composed: Composed, tmp_path: Path) -> None:
    """Random transforms give the same weights, bit for bit, with workers and without."""
    digests = set()
    for workers in 0, 2:
        config = composed(*DATASET, *FEW, "trainer.max_steps=null", f"loader.num_workers={workers}")
        run(config, tmp_path / f"{workers}")
        digests.add(digest(tmp_path / f"{workers}"))
    assert len(digests) == 1


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("file", ["my_data", "my_model", "my_augment"])
def test_an_answer_of_the_tuner_holds_for_the_file_as_it_is(
    composed: Composed, tmp_path: Path, write_module: Write, file: str
) -> None:
    """The same files are the same run to the tuner's memory; a changed one is another."""
    typed = ("data=own", "data.name=my_data:open_splits", "data.root=photos")
    augment = ("augment.own=my_augment:cutout", "augment.own_batch=my_augment:rain")
    config = composed(*typed, "model.name=my_model:build", *augment)
    limits = Limits(cores=2.0, memory_bytes=2**30, shm_bytes=2**30, open_files=1024)

    alone = World(0, 1, 0, 1, torch.device("cpu"))

    def facts() -> dict[str, Any]:
        splits = datasets.load(config.data, config.augment, config.seed)
        models.build(config.model, 2, image_size=32)
        BatchAugment.from_config(config.augment, 0)
        return fingerprint(config, splits.fingerprint(), limits, alone, "cpu")

    before = facts()
    assert facts() == before
    write_module(file, (tmp_path / f"{file}.py").read_text() + "# changed\n")
    assert facts() != before


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    "setting", ["loader.backend=threads", "mode=diagnose", "augment.own=my_augment:cutout"]
)
def test_what_a_dataset_cannot_do_is_refused(
    composed: Composed, tmp_path: Path, setting: str
) -> None:
    """By the name of the setting."""
    with pytest.raises(ConfigError, match=f"^{setting}: "):
        run(composed(*DATASET, *FEW, setting), tmp_path / "run")


def test_data_own_asks_for_a_name(composed: Composed) -> None:
    """Where the function is not named."""
    with pytest.raises(ConfigError, match="^data=own: .*data.name="):
        composed("data=own")
