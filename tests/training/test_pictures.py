"""What is written of an evaluation's mistakes and of the first batch."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from samples import eval_transform
from sklearn.metrics import precision_score, recall_score

from harness.config import Config, DataConfig, LoaderConfig, OptimConfig
from harness.data.datasets import FakeDataset, ImageDataset, Splits
from harness.data.storage import ArraySource
from harness.monitor.writer import RunWriter
from harness.report import mistakes
from harness.runtime.errors import BadSample
from harness.training import pictures
from harness.training.pictures import PredictionLog

HOSTILE = ("<img src=x>", 'a,"b"\n', "\x1b[31mred", "caf\udce9", "\u202eevil", "plain", "empty")
SIDE = 12


class Source(ArraySource):
    """Some images; the one at ``bad`` cannot be read."""

    bad = -1

    def read(self, i: int) -> tuple[np.ndarray, int]:
        if i == self.bad:
            raise BadSample(self.where(i), "gone")
        return super().read(i)


def splits_of(classes: tuple[str, ...] = HOSTILE) -> Splits:
    """Twelve images of all classes but the last."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, SIDE, SIDE, 3), np.uint8)
    # smooth ones, of which JPEG changes little
    pixels[:] = pixels.mean((1, 2), keepdims=True)
    source = Source(pixels, np.arange(12) % 6, classes, "<b>\x1b")
    dataset = ImageDataset(source, eval_transform(SIDE, SIDE), DataConfig(), SIDE, 0)
    return Splits(dataset, dataset, classes, "mine", "")


def answers_of(splits: Splits, given: list[int]) -> PredictionLog:
    labels: Any = splits.labels
    sure = np.linspace(0.5, 0.9, 12, dtype=np.float32)
    return PredictionLog(np.arange(12), labels, np.array(given), sure)


GIVEN = [1, 1, 2, 3, 4, 5, 1, 1, 2, 4, 4, 5]


def shown(folder: Path, splits: Splits, *, read: bool = True) -> dict[str, Any]:
    with RunWriter(folder, tensorboard=False) as writer:
        mistakes.show(answers_of(splits, GIVEN), splits, Config(), writer, read=read)
    found: dict[str, Any] = json.loads((folder / "mistakes.json").read_text())
    return found


def rows(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text())))


def test_classes_have_their_figures(tmp_path: Path) -> None:
    """Accuracy and precision are scikit-learn's; a share of nothing has no figure."""
    splits = splits_of()
    shown(tmp_path, splits)
    head, *table = rows(tmp_path / "classes.csv")
    columns = dict(zip(head, zip(*table, strict=True), strict=True))
    labels, known = splits.labels, range(6)
    recalls = recall_score(labels, GIVEN, labels=known, average=None)
    precisions = precision_score(labels, GIVEN, labels=known[1:], average=None)
    assert np.allclose([*map(float, columns["accuracy"][:-1])], recalls)
    assert np.allclose([*map(float, columns["precision"][1:-1])], precisions)
    assert columns["accuracy"][-1] == "" and columns["precision"][0] == ""
    assert columns["images"] == columns["train_images"] == ("2",) * 6 + ("0",)
    matrix = np.array(rows(tmp_path / "confusion.csv")[1:])[:, 1:].astype(int)
    assert matrix.sum() == 12 and matrix[0, 1] == 2 and matrix.trace() == 9


def test_the_pictures_are_what_the_network_saw(tmp_path: Path) -> None:
    """Each of the mistakes, the surest first, with its place, classes and pixels."""
    splits = splits_of()
    found = shown(tmp_path, splits)["mistakes"]
    assert [row["where"] for row in found] == [f"<b>\\x1b[{i}]" for i in (9, 6, 0)]
    assert (found[0]["label"], found[0]["given"]) == ("caf\\udce9", "\\u202eevil")
    assert found[0]["probability"] == pytest.approx(0.5 + 0.4 * 9 / 11)
    for row, index in zip(found, (9, 6, 0), strict=True):
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(row["picture"]))))
        tile = np.empty((3, SIDE, SIDE), np.uint8)
        splits.val.fill(0, index, tile)  # type: ignore[union-attr]
        assert np.abs(picture.transpose(2, 0, 1).astype(int) - tile).max() <= 3


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """Whatever folders are called, each file is read back with printable names."""
    found = shown(tmp_path, splits_of())
    names = found["classes"]["class"]
    assert names == [row[0] for row in rows(tmp_path / "classes.csv")[1:]]
    assert names == rows(tmp_path / "confusion.csv")[0][1:]
    assert all(name.isprintable() for name in names) and len({*names}) == len(HOSTILE)


def test_an_image_that_cannot_be_read_has_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have theirs."""
    monkeypatch.setattr(Source, "bad", 6)
    found = shown(tmp_path, splits_of())["mistakes"]
    assert ["picture" in row for row in found] == [True, False, True]


def test_a_run_that_ends_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was stopped there are figures and no pictures."""
    monkeypatch.setattr(Source, "read", lambda self, i: pytest.fail("read"))
    assert not any("picture" in row for row in shown(tmp_path, splits_of(), read=False)["mistakes"])


def test_a_class_without_a_right_answer_is_missed() -> None:
    """A class without images is not."""
    splits = splits_of()
    assert mistakes.missed(answers_of(splits, GIVEN), HOSTILE) == [HOSTILE[0]]
    assert mistakes.missed(None, HOSTILE) == []


def test_mistakes_have_paths_below_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a relative data.root."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Source, "where", lambda self, i: f"{tmp_path}/images/{i}.jpg")
    splits = dataclasses.replace(splits_of(), root="x/../images/")
    assert [row["where"] for row in shown(tmp_path, splits)["mistakes"]] == [
        "9.jpg", "6.jpg", "0.jpg",
    ]  # fmt: skip


def test_many_classes_have_no_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells would be too many; the classes' own figures and the kinds of mistakes stay."""
    monkeypatch.setattr(mistakes, "_MOST_CLASSES", 6)
    found = shown(tmp_path, splits_of())
    assert found["kinds"] == [[0, 1, 2], [3, 4, 1]]
    assert not (tmp_path / "confusion.csv").exists() and (tmp_path / "classes.csv").exists()


def test_noise_has_no_pictures(tmp_path: Path) -> None:
    """Images that are made on the device cannot be read again."""
    noise = FakeDataset(12, 8)
    fake = Splits(noise, noise, HOSTILE, "fake", "")
    with RunWriter(tmp_path, tensorboard=False) as writer:
        mistakes.show(answers_of(splits_of(), GIVEN), fake, Config(), writer, read=True)
    found = json.loads((tmp_path / "mistakes.json").read_text())
    assert found["mistakes"][0]["where"] == "sample 9" and "picture" not in found["mistakes"][0]
    assert found["counts"] is None and "train_images" not in found["classes"]


@pytest.mark.parametrize(
    ("images", "balance", "tries"), [(4, 0.0, False), (5, 0.0, True), (5, 0.5, False)]
)
def test_uneven_classes_are_reported(images: int, balance: float, tries: bool) -> None:
    """From five times the images on, with the setting that helps unless it is set."""
    splits = splits_of(("a", "b"))
    source: Any = splits.train.source  # type: ignore[union-attr]
    source.labels = np.repeat([0, 1], (images, 1))
    said = mistakes.class_counts(splits, Config(data=DataConfig(balance=balance))) or ""
    assert f"1 to {images}" in said
    assert ("data.balance=0.5" in said) == tries


@pytest.mark.parametrize(
    ("images", "lr_per", "tries"),
    [
        (79, None, ["loader.batch_size=8", "optim.lr=0.02"]),
        (79, 8, ["loader.batch_size=8"]),
        (80, None, []),
    ],
)
def test_few_batches_are_reported(images: int, lr_per: int | None, tries: list[str]) -> None:
    """Below five per epoch, with a smaller batch and its rate."""
    splits = splits_of(("a", "b"))
    source: Any = splits.train.source  # type: ignore[union-attr]
    source.labels = np.arange(images) % 2
    config = Config(loader=LoaderConfig(batch_size=16), optim=OptimConfig(lr=0.04, lr_per=lr_per))
    said = mistakes.class_counts(splits, config) or ""
    assert re.findall(r"[a-z_.]+=[0-9.]+", said) == tries


def test_the_first_batch_is_shown_as_the_network_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pixels before normalization, and both names of a mixed image."""
    data = DataConfig(name="mine")
    mean, std = (np.reshape(each, (1, 3, 1, 1)) for each in (data.mean, data.std))
    pixels = np.arange(4 * 3 * 64).reshape(4, 3, 8, 8) % 256
    images = torch.from_numpy((pixels / 255 - mean) / std).float()
    seen: list[np.ndarray] = []
    monkeypatch.setattr(RunWriter, "images", lambda self, tag, tiles, texts: seen.append(tiles))
    mixed = torch.tensor([[0.7, 0.3], [1.0, 0.0], [0.25, 0.75], [0.0, 1.0]])
    for labels, expected in (
        (torch.tensor([0, 1, 1, 0]), ["a\\n", "b", "b", "a\\n"]),
        (mixed, ["70% a\\n + 30% b", "100% a\\n", "75% b + 25% a\\n", "100% b"]),
    ):
        with RunWriter(tmp_path, tensorboard=False) as writer:
            pictures.show_batch(images, labels, data, ("a\n", "b"), writer)
        found = json.loads((tmp_path / "first_batch.json").read_text())
        assert [row["label"] for row in found] == expected
    assert np.array_equal(seen[0], pixels) and seen[0].dtype == np.uint8
