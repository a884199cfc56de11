"""What the network saw and what went wrong, as files of the run and pictures."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..config import DataConfig
from ..data.datasets import Splits
from ..runtime.distributed import World
from ..runtime.errors import BadSample, printable
from ..watch.board import Board, plain

# pictures of mistakes
_MOST = 24
# on the page: kinds of mistakes, some 300 kB
_MOST_KINDS = 20_000
# the matrix of more would have over 4 million cells
_MOST_CLASSES = 2_000
# pixels of a picture's side
_SIDE = 160
# classes are uneven if one has so many times the images of another
_UNEVEN = 10


class Answers(NamedTuple):
    """What a network answered, one entry for each image.

    Attributes:
        indices: places in the data set.
        labels: the true classes.
        given: the classes that the network gave.
        probabilities: of these classes, 0..1.
    """

    indices: np.ndarray
    labels: np.ndarray
    given: np.ndarray
    probabilities: np.ndarray

    @classmethod
    def gathered(
        cls, kept: Sequence[Sequence[Tensor]], places: Iterable[np.ndarray], world: World
    ) -> Answers:
        """Returns the answers of all ranks; every rank calls this.

        Args:
            kept: of each batch of this rank, what follows ``indices`` above.
            places: of the same batches, the indices.
            world: this rank.
        """
        own: list[np.ndarray] = []
        if kept:
            # the host waits for the device
            tensors = (torch.cat(each).cpu().numpy() for each in zip(*kept, strict=True))
            own = [np.concatenate([*places]), *tensors]
        # a rank may have had no image
        return cls(*map(np.concatenate, zip(*filter(None, world.gathered(own)), strict=True)))

    def confused(self) -> np.ndarray:
        """Returns the mistakes by kind, int64 ``[K, 3]``: true class, given class, images.

        The most frequent come first, of equally frequent ones the first by class.
        """
        wrong = np.stack((self.labels, self.given))[:, self.labels != self.given]
        kinds, counts = np.unique(wrong, axis=1, return_counts=True)
        return np.vstack((kinds, counts)).T[np.argsort(-counts, kind="stable")]

    def surest(self, most: int) -> np.ndarray:
        """Returns which mistakes have the highest probabilities; of equal ones the first images."""
        wrong = np.flatnonzero(self.labels != self.given)
        order = np.lexsort((self.indices[wrong], -self.probabilities[wrong]))
        return wrong[order[:most]]


def show_batch(
    images: Tensor, labels: Tensor, data: DataConfig, classes: Sequence[str], board: Board
) -> None:
    """Shows normalised ``images`` of training in ``first_batch.json`` and TensorBoard.

    The host waits for the device.
    """
    mean, std = (np.reshape(each, (3, 1, 1)) for each in (data.mean, data.std))
    pixels = 255 * (images.float().cpu().numpy() * std + mean)
    tiles = pixels.round().clip(0, 255).astype(np.uint8)
    names = [*map(printable, classes)]
    texts = [names[label] for label in labels.tolist()] if labels.ndim == 1 else []
    # of two images
    for mixed in labels.tolist()[len(texts) :]:
        shares = sorted(zip(mixed, names, strict=True), reverse=True)[:2]
        texts.append(" + ".join(f"{share:.0%} {name}" for share, name in shares if share))
    board.images("train/first_batch", tiles, texts)
    rows = zip(texts, map(_coded, tiles), strict=True)
    found = [{"label": text, "picture": picture} for text, picture in rows]
    board.write("first_batch.json", json.dumps(found))


def show(answers: Answers, splits: Splits, board: Board, *, read: bool) -> None:
    """Writes ``classes.csv``, ``confusion.csv``, ``mistakes.json`` and TensorBoard's pictures.

    If ``read``, the mistaken images are read again, as the network saw them.
    """
    names = [*map(printable, splits.classes)]
    kinds = answers.confused()
    right = answers.labels[answers.labels == answers.given]
    images, given, correct = (
        np.bincount(kind, minlength=len(names)) for kind in (answers.labels, answers.given, right)
    )
    columns: dict[str, Any] = {"images": images, "correct": correct, "given": given}
    # a share of nothing is None
    with np.errstate(invalid="ignore"):
        columns |= {"accuracy": correct / images, "precision": correct / given}
    if splits.labels is not None:
        columns["train_images"] = np.bincount(splits.labels, minlength=len(names))
    classes = {"class": names, **{name: plain(each.tolist()) for name, each in columns.items()}}
    _table(board, "classes.csv", classes, zip(*classes.values(), strict=True))
    if len(names) <= _MOST_CLASSES:
        matrix = np.diag(correct)
        matrix[kinds[:, 0], kinds[:, 1]] = kinds[:, 2]
        rows = ([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
        _table(board, "confusion.csv", ["", *names], rows)
        # by share of the true class; a root shows what is seldom
        shares = np.sqrt(matrix / np.maximum(1, images[:, None]))
        grey = (255 - 255 * shares).astype(np.uint8)
        board.images("val/confusion", np.broadcast_to(grey, (1, 3, *grey.shape)), [""])
    found = {
        "counts": told(splits),
        "classes": classes,
        "kinds": kinds[:_MOST_KINDS].tolist(),
        "mistakes": _mistakes(answers, names, splits, board, read),
    }
    board.write("mistakes.json", json.dumps(found))


def _mistakes(
    answers: Answers, names: list[str], splits: Splits, board: Board, read: bool
) -> list[dict[str, Any]]:
    """Returns the surest mistakes; shows their pictures in TensorBoard."""
    rows = []
    tiles = []
    texts = []
    dataset = splits.val
    # where data lie may be a secret: names are below it
    root = f"{Path(splits.root).expanduser()}/"
    # a data set that is made on the device has none, one of the user's may have no source
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
        # in place of one that cannot be read there was another
        with suppress(BadSample):
            if read and fill:
                tile = np.empty((3, dataset.image_size, dataset.image_size), np.uint8)
                fill(0, index, tile)
                row["picture"] = _coded(tile)
                tiles.append(tile)
                texts.append(f"{row['given']}, not {row['label']}")
    if tiles:
        board.images("val/mistakes", np.stack(tiles), texts)
    return rows


def told(splits: Splits) -> str | None:
    """Returns a sentence on the training images of each class, and on very uneven classes."""
    if splits.labels is None:
        return None
    counts = np.bincount(splits.labels, minlength=len(splits.classes))
    text = f"{len(counts)} classes of {counts.min()} to {counts.max()} training images"
    if counts.min() * _UNEVEN <= counts.max():
        text += ", very uneven. Try: data.balance=0.5, or optim.class_weights=balanced"
    return text


def _coded(tile: np.ndarray) -> str:
    """Returns uint8 ``[3, S, S]`` as a file of JPEG in base64."""
    picture = Image.fromarray(tile.transpose(1, 2, 0))
    picture.thumbnail((_SIDE, _SIDE))
    file = BytesIO()
    picture.save(file, "JPEG", quality=95, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()


def _table(board: Board, name: str, head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    board.write(name, text.getvalue().rstrip("\n"))
