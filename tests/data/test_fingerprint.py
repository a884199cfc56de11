"""The fingerprint of a data set: the same as long as the data is, another once it is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.config import AugmentConfig, DataConfig
from harness.data import datasets
from harness.data.datasets import FakeDataset, ImageDataset, Splits
from harness.data.storage import ArraySource, FolderSource, Source, split
from harness.data.transforms import CropTransform


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes of three files, all of one moment long ago."""
    for name in ("cat", "dog"):
        for i in range(3):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{i}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(10))
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.utime(path, (1e9, 1e9))
    return tmp_path


def splits(source: Source, root: str = "") -> Splits:
    transform = CropTransform.from_config(AugmentConfig(), DataConfig(image_size=8))
    train = ImageDataset(source, transform, DataConfig(), 8, 0)
    return Splits(train, train, source.classes, "imagefolder", root)


def of_tree(root: Path) -> dict[str, object]:
    return splits(FolderSource(root), str(root)).fingerprint()


def add(root: Path) -> None:
    (root / "cat/new.jpg").write_bytes(b"\xff\xd8\xff")


def replace(root: Path) -> None:
    (root / "cat/1.jpg").rename(root / "cat/1a.jpg")
    os.utime(root / "cat/1a.jpg", (1e9, 1e9))


def rewrite(root: Path) -> None:
    (root / "dog/2.jpg").write_bytes(b"\xff\xd8\xff" + bytes(10))


def grow(root: Path) -> None:
    (root / "dog/0.jpg").write_bytes(b"\xff\xd8\xff" + bytes(11))
    os.utime(root / "dog/0.jpg", (1e9, 1e9))


def test_the_fingerprint_of_a_tree_stays_and_can_be_stored(tree: Path) -> None:
    """The same files have the same fingerprint: plain values with name, place and size."""
    found = of_tree(tree)
    assert found == of_tree(tree) == json.loads(json.dumps(found))
    assert (found["name"], found["root"], found["images"], found["classes"]) == (
        "imagefolder",
        str(tree),
        6,
        2,
    )


@pytest.mark.parametrize("change", [add, replace, rewrite, grow])
def test_a_changed_tree_is_another(tree: Path, change: Callable[[Path], None]) -> None:
    """A new, renamed, rewritten or grown file changes the fingerprint."""
    before = of_tree(tree)
    change(tree)
    assert of_tree(tree) != before


def test_a_part_of_a_tree_is_told_by_its_own_files(tree: Path) -> None:
    """Of a tree that is split, the training part is looked at."""
    before = splits(split(FolderSource(tree), 0.4, seed=0)[0]).fingerprint()
    assert before["images"] == 4
    chosen = split(FolderSource(tree), 0.4, seed=0)[0]
    (Path(chosen.where(0))).write_bytes(b"\xff\xd8\xff")
    assert splits(split(FolderSource(tree), 0.4, seed=0)[0]).fingerprint() != before


def test_a_large_tree_costs_no_more_looks(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many files there are, a few at most are looked at."""
    monkeypatch.setattr(datasets, "_LOOKED_AT", 2)
    looks: list[str] = []
    real = os.stat
    source = FolderSource(tree)
    monkeypatch.setattr(os, "stat", lambda path: looks.append(str(path)) or real(path))
    splits(source).fingerprint()
    assert looks == [str(tree / part) for part in ("cat/0.jpg", "dog/2.jpg")]


def test_a_file_that_went_is_no_error(tree: Path) -> None:
    """What is missing is for the reader to report; here it is one more difference."""
    source = FolderSource(tree)
    before = splits(source).fingerprint()
    (tree / "cat/0.jpg").unlink()
    assert splits(source).fingerprint() != before


def arrays(count: int = 40, side: int = 4, fill: int = 0, label: int = 0) -> dict[str, object]:
    images = np.full((count, side, side, 3), fill, np.uint8)
    return splits(ArraySource(images, np.full(count, label), ["a", "b"], "numbers")).fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"count": 41}, id="count"),
        pytest.param({"side": 5}, id="shape"),
        pytest.param({"fill": 1}, id="pixels"),
        pytest.param({"label": 1}, id="labels"),
    ],
)
def test_arrays_are_told_by_shape_and_content(other: dict[str, int]) -> None:
    """Another number, shape, content or label of arrays is another fingerprint."""
    assert arrays() == arrays() != arrays(**other)


def test_a_data_set_of_numbers_alone() -> None:
    """The data set that does not exist has no content to look at."""
    fake = FakeDataset(100, DataConfig().image_size)
    found = Splits(fake, fake, tuple(map(str, range(10))), "fake", "").fingerprint()
    assert found == {"name": "fake", "root": "", "images": 100, "image_size": 64, "classes": 10}
