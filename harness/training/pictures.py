"""Gathers predictions and writes the first training batch as pictures."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..config import DataConfig
from ..monitor.writer import RunWriter
from ..runtime.distributed import World
from ..runtime.errors import printable

# maximum side length of a picture in pixels
_SIDE = 160


class PredictionLog(NamedTuple):
    """A network's predictions, one entry per image.

    Attributes:
        indices: positions in the dataset.
        labels: the true classes.
        given: the predicted classes.
        probabilities: the probabilities of the predicted classes, 0..1.
    """

    indices: np.ndarray
    labels: np.ndarray
    given: np.ndarray
    probabilities: np.ndarray

    @classmethod
    def gathered(
        cls, kept: Sequence[Sequence[Tensor]], places: Iterable[np.ndarray], world: World
    ) -> PredictionLog:
        """Returns the predictions from all ranks; every rank calls this.

        Args:
            kept: labels, predictions and probabilities for each batch on this rank.
            places: the indices in the same batches.
            world: this rank.
        """
        own = []
        if kept:
            # the host waits for the device
            tensors = (torch.cat(each).cpu().numpy() for each in zip(*kept, strict=True))
            own = [np.concatenate([*places]), *tensors]
        # a rank may have no images
        return cls(*map(np.concatenate, zip(*filter(None, world.gathered(own)), strict=True)))

    def confused(self) -> np.ndarray:
        """Returns confusions, int64 ``[K, 3]``: true class, predicted class, number of images.

        They are sorted by descending frequency, then by class.
        """
        wrong = np.stack((self.labels, self.given))[:, self.labels != self.given]
        kinds, counts = np.unique(wrong, axis=1, return_counts=True)
        return np.vstack((kinds, counts)).T[np.argsort(-counts, kind="stable")]

    def surest(self, most: int) -> np.ndarray:
        """Returns the ``most`` wrong entries with the highest probabilities; ties by image."""
        wrong = np.flatnonzero(self.labels != self.given)
        order = np.lexsort((self.indices[wrong], -self.probabilities[wrong]))
        return wrong[order[:most]]


def show_batch(
    images: Tensor, labels: Tensor, data: DataConfig, classes: Sequence[str], writer: RunWriter
) -> None:
    """Writes normalized training ``images`` to ``first_batch.json`` and TensorBoard.

    The host waits for the device.
    """
    mean, std = (np.reshape(each, (3, 1, 1)) for each in (data.mean, data.std))
    pixels = 255 * (images.float().cpu().numpy() * std + mean)
    tiles = pixels.round().clip(0, 255).astype(np.uint8)
    names = [*map(printable, classes)]
    texts = [names[label] for label in labels.tolist()] if labels.ndim == 1 else []
    # mixed from two images
    for mixed in labels.tolist()[len(texts) :]:
        shares = sorted(zip(mixed, names, strict=True), reverse=True)[:2]
        texts.append(" + ".join(f"{share:.0%} {name}" for share, name in shares if share))
    writer.images("train/first_batch", tiles, texts)
    rows = zip(texts, tiles, strict=True)
    found = [{"label": text, "picture": coded(tile)} for text, tile in rows]
    writer.write("first_batch.json", json.dumps(found))


def coded(tile: np.ndarray) -> str:
    """Returns uint8 ``[3, S, S]`` as a base64-encoded JPEG."""
    picture = Image.fromarray(tile.transpose(1, 2, 0))
    picture.thumbnail((_SIDE, _SIDE))
    file = BytesIO()
    picture.save(file, "JPEG", quality=95, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()
