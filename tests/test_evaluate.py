"""mode=evaluate: the validation set, a test set, or a folder of images that a run never saw."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from harness.cli import job
from harness.config import Config, DataConfig, Evaluate
from harness.data.datasets import load_evaluated
from harness.inference.loaded import load
from harness.runtime.errors import DataError
from harness.training import checkpoint_read, resume

Composed = Callable[..., Config]
CLASSES = ("ash", "elm", "oak")
SIZES = {"train": 12, "val": 4, "test": 10}
SMALL = ("device=cpu", "data.image_size=32", "watch.tensorboard=false", "trainer.num_threads=1")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of noise around a gray, in three splits."""
    root = tmp_path_factory.mktemp("tree")
    rng = np.random.default_rng(0)
    for split, count in SIZES.items():
        for place, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                gray = 90 + 30 * place + rng.normal(0, 40, (40, 44, 3))
                Image.fromarray(gray.clip(0, 255).astype(np.uint8)).save(folder / f"{i:02}.png")
    return root


@pytest.fixture(scope="module")
def run(tree: Path, composed: Composed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the tree, whose update takes fewer images than the default one."""
    folder = tmp_path_factory.mktemp("outputs") / "run"
    folder.mkdir()
    typed = (
        *("data=imagefolder", f"data.root={tree}", "loader.batch_size=8", "loader.num_workers=0"),
        *("trainer.epochs=2", "optim=adamw", "optim.lr=0.003", *SMALL),
    )
    threads = torch.get_num_threads()
    job.main_worker(0, job.Job(composed(*typed), folder, typed))
    torch.set_num_threads(threads)
    return folder


def by_hand(run: Path, folder: Path) -> tuple[float, float, int]:
    """Accuracy, loss and number of the images in a folder of class folders."""
    net = load(run)
    files = sorted(folder.glob("*/*"))
    labels = torch.tensor([net.classes.index(file.parent.name) for file in files])
    with torch.no_grad():
        images = torch.stack([net.transform(file) for file in files])
        # laid out as a feed does
        logits = net.model(images.contiguous(memory_format=torch.channels_last))
    losses = F.cross_entropy(logits, labels, reduction="none").tolist()
    right = int((logits.argmax(1) == labels).sum())
    return right / len(files), sum(losses) / len(files), len(files)


def evaluated(composed: Composed, folder: Path, *typed: str) -> dict[str, Any]:
    """The report of an evaluation."""
    folder.mkdir()
    typed = ("mode=evaluate", *typed, *SMALL)
    job.main_worker(0, job.Job(composed(*typed), folder, typed))
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.usefixtures("one_thread")
def test_the_test_set_gives_what_a_loop_by_hand_gives(
    composed: Composed, tree: Path, run: Path, tmp_path: Path
) -> None:
    """By its name or as a folder, to the last digit, with a training set of less than a batch."""
    whole = (f"resume={run}", "data.evaluate=test")
    alone = (f"resume={run}", f"data.root={tree / 'test'}")
    by_path = (f"model.weights={run / 'checkpoints' / 'last.pt'}", *alone[1:])
    for name, typed in (("whole", whole), ("alone", alone), ("path", by_path)):
        report = evaluated(composed, tmp_path / name, *typed)
        found = (report["top1"], report["loss"], report["val_images"])
        assert found == by_hand(run, tree / "test")
        assert 0.4 < report["top1"] < 1
    validated = evaluated(composed, tmp_path / "val", f"resume={run}")
    assert (validated["top1"], validated["loss"], 12) == by_hand(run, tree / "val")


@pytest.mark.usefixtures("one_thread")
def test_a_folder_without_one_class_is_evaluated_by_name(
    composed: Composed, tree: Path, run: Path, tmp_path: Path
) -> None:
    """What is there counts under its own class, in the figures and in the tables."""
    for name in ("ash", "oak"):
        shutil.copytree(tree / "test" / name, tmp_path / "lacks" / name)
    typed = (f"resume={run}", f"data.root={tmp_path / 'lacks'}")
    report = evaluated(composed, tmp_path / "out", *typed)
    found = (report["top1"], report["loss"], report["val_images"])
    assert found == by_hand(run, tmp_path / "lacks")
    with open(tmp_path / "out" / "classes.csv", newline="") as file:
        rows = {row["class"]: int(row["images"]) for row in csv.DictReader(file)}
    assert rows == {"ash": 10, "elm": 0, "oak": 10}
    with open(tmp_path / "out" / "confusion.csv", newline="") as file:
        matrix = np.array([row[1:] for row in csv.reader(file)][1:], int)
    assert matrix.trace() == round(20 * report["top1"]) and matrix[1].sum() == 0


def test_labels_go_by_the_networks_order(tree: Path) -> None:
    """A network whose classes have another order than folders have gets its own numbers."""
    classes = ("oak", "ash", "yew", "elm")
    data = DataConfig(name="imagefolder", root=str(tree), evaluate=Evaluate.test)
    splits = load_evaluated(data, 0, classes)
    assert splits.labels is None and splits.classes == classes
    source = splits.val.source  # type: ignore[union-attr]
    assert [source.read(i)[1] for i in (0, 10, 20)] == [1, 3, 0]
    assert np.bincount(source.labels).tolist() == [10, 10, 0, 10]


def test_a_class_that_the_network_lacks_is_refused(tree: Path) -> None:
    """It is named, and nothing is evaluated."""
    data = DataConfig(name="imagefolder", root=str(tree / "test"))
    with pytest.raises(DataError, match="elm"):
        load_evaluated(data, 0, ("ash", "oak"))


def test_validation_images_alone_are_enough(tree: Path, tmp_path: Path) -> None:
    """A root without a training set is evaluated on val; one without a test set says so."""
    (tmp_path / "val").symlink_to(tree / "val")
    data = DataConfig(name="imagefolder", root=str(tmp_path))
    splits = load_evaluated(data, 0, CLASSES)
    assert (len(splits.val), splits.val_name) == (12, "validation images")
    data.evaluate = Evaluate.test
    with pytest.raises(DataError, match="data.evaluate=test"):
        load_evaluated(data, 0, CLASSES)


def test_what_a_run_held_out_is_evaluated_and_other_trees_are_whole(
    composed: Composed, tree: Path
) -> None:
    """The part that a run split off is not trained on; of another tree nothing is."""
    data = DataConfig(name="imagefolder", root=str(tree / "train"), split_fraction=0.25)
    splits = load_evaluated(data, 0, CLASSES)
    assert (len(splits.val), splits.val_name) == (9, "validation images")
    data = DataConfig(name="imagefolder", root=str(tree / "test"))
    splits = load_evaluated(data, 0, CLASSES)
    assert (len(splits.val), splits.val_name) == (30, "images")


def test_a_checkpoint_writes_and_fetches_nothing(
    composed: Composed, run: Path, tmp_path: Path
) -> None:
    """Whatever data the settings in a run's folder name, nothing is generated there or fetched."""
    for name in ("shapes", "cifar10"):
        state = checkpoint_read.read(run).state
        theirs = {"name": name, "root": str(tmp_path / name), "mirror": "http://127.0.0.1:9"}
        state["settings"]["data"] |= theirs
        saved = checkpoint_read.Saved("best.pt", state, in_run=True)
        used = resume.settings(composed("mode=evaluate", "resume=best.pt"), saved, ())
        assert (used.data.root, used.data.mirror) == (theirs["root"], None)
        with pytest.raises(DataError, match="data.download=false"):
            load_evaluated(used.data, 0, saved.classes)
    assert not [*tmp_path.iterdir()]
