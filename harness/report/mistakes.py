"""Writes the network's mistakes to the run folder and to TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..config import Config
from ..data.datasets import Splits
from ..monitor.writer import RunWriter, plain
from ..runtime.errors import BadSample, printable
from ..runtime.files import sheet
from ..training.pictures import PredictionLog, coded

# maximum number of pictures of mistakes
_MOST = 24


# maximum number of confused class pairs on the page, about 300 kB
_MOST_KINDS = 20_000


# a larger matrix would have over 4 million cells
_MOST_CLASSES = 2_000


# classes are imbalanced if one has this many times as many images as another
_UNEVEN = 5
# batches per epoch: with fewer, little is learned, and the number suggested instead
_FEW_STEPS, _STEPS = 5, 10


def show(
    answers: PredictionLog,
    splits: Splits,
    config: Config,
    writer: RunWriter,
    *,
    read: bool,
) -> None:
    """Writes ``classes.csv``, ``confusion.csv``, ``mistakes.json`` and TensorBoard's pictures.

    If ``read``, misclassified images are read again, as the network saw them.
    """
    names = [*map(printable, splits.classes)]
    kinds = answers.confused()
    right = answers.labels[answers.labels == answers.given]
    images, given, correct = (
        np.bincount(kind, minlength=len(names)) for kind in (answers.labels, answers.given, right)
    )
    columns: dict[str, Any] = {"images": images, "correct": correct, "given": given}
    # a fraction of zero images is None
    with np.errstate(invalid="ignore"):
        columns |= {"accuracy": correct / images, "precision": correct / given}
    if splits.labels is not None:
        columns["train_images"] = np.bincount(splits.labels, minlength=len(names))
    classes = {"class": names, **{name: plain(each.tolist()) for name, each in columns.items()}}
    _table(writer, "classes.csv", classes, zip(*classes.values(), strict=True))
    if len(names) <= _MOST_CLASSES:
        matrix = np.diag(correct)
        matrix[kinds[:, 0], kinds[:, 1]] = kinds[:, 2]
        rows = ([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
        _table(writer, "confusion.csv", ["", *names], rows)
        # by fraction of the true class; the square root makes rare mistakes visible
        shares = np.sqrt(matrix / np.maximum(1, images[:, None]))
        gray = (255 - 255 * shares).astype(np.uint8)
        writer.images("val/confusion", np.broadcast_to(gray, (1, 3, *gray.shape)), [""])
    found = {
        "counts": class_counts(splits, config),
        "classes": classes,
        "kinds": kinds[:_MOST_KINDS].tolist(),
        "mistakes": _mistakes(answers, names, splits, writer, read),
    }
    writer.write("mistakes.json", json.dumps(found))


def _mistakes(
    answers: PredictionLog, names: list[str], splits: Splits, writer: RunWriter, read: bool
) -> list[dict[str, Any]]:
    """Returns the most confident mistakes; shows their pictures in TensorBoard."""
    rows = []
    tiles = []
    texts = []
    dataset = splits.val
    # the location of the data may be private
    root = f"{os.path.abspath(os.path.expanduser(splits.root))}/"
    # datasets made on the device lack ``fill``; the user's may lack ``source``
    fill = getattr(dataset, "fill", None)
    source = getattr(dataset, "source", None)
    for place in answers.surest(_MOST):
        index, label, given, probability = (each[place].item() for each in answers)
        where = source.where(index).removeprefix(root) if source else f"sample {index}"
        row = {
            "where": printable(where),
            "label": names[label],
            "given": names[given],
            "probability": probability,
        }
        rows.append(row)
        # an unreadable image was replaced by another
        with suppress(BadSample):
            if read and fill:
                tile = np.empty((3, dataset.image_size, dataset.image_size), np.uint8)
                fill(0, index, tile)
                row["picture"] = coded(tile)
                tiles.append(tile)
                texts.append(f"{row['given']}, not {row['label']}")
    if tiles:
        writer.images("val/mistakes", np.stack(tiles), texts)
    return rows


def missed(answers: PredictionLog | None, classes: Sequence[str]) -> list[str]:
    """Returns the classes that have images, none of which were classified correctly."""
    if answers is None:
        return []
    right = answers.labels[answers.labels == answers.given]
    return [classes[label] for label in np.setdiff1d(answers.labels, right)]


def class_counts(splits: Splits, config: Config) -> str | None:
    """Returns a sentence about the training images per class, with a remedy for imbalance."""
    if splits.labels is None:
        return None
    counts = np.bincount(splits.labels, minlength=len(splits.classes))
    least, most = counts.min(), counts.max()
    number = f"{most}" if least == most else f"{least} to {most}"
    text = f"{len(counts)} classes with {number} training images each"
    if least * _UNEVEN <= most:
        text += ", very imbalanced"
        if not (config.data.balance or config.optim.class_weights):
            text += ". Try: data.balance=0.5, or optim.class_weights=balanced"
    batch = config.loader.batch_size
    smaller = max(8, len(splits.labels) // _STEPS)
    if len(splits.labels) < _FEW_STEPS * batch and smaller < batch:
        text += f". An epoch has fewer than {_FEW_STEPS} batches. Try: loader.batch_size={smaller}"
        if config.optim.lr_per is None:
            text += f" optim.lr={config.optim.lr * smaller / batch:.3g}"
    return text


def _table(
    writer: RunWriter, name: str, head: Iterable[str], rows: Iterable[Iterable[Any]]
) -> None:
    writer.write(name, sheet([head, *rows]).rstrip("\n"))
