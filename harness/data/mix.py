"""What is done to normalised batches: random erasing, then mixup or CutMix, on whichever device the
batch is.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.config import AugmentConfig
from harness.data.adjust import to_device
from harness.data.augment import Numbered
from harness.runtime.seeding import uniforms

# streams of random numbers, as seeding's
_ERASE = 4
_MIX = 5
_TRIES = 10
# of an erased rectangle: share of the image's, height over width
_AREA = (0.02, 0.33)
_ASPECT = (0.3, 3.3)


class Mix:
    """Random erasing of each image, then mixup or CutMix of each with the one before it;
    torchvision's v2 transforms.

    An erased rectangle is 0 after normalisation: the mean colour. It is a function of (seed, epoch,
    index); how images are mixed, of (seed, epoch) and the batch's first index. With both mixup and
    CutMix, each batch gets one or the other.

    Args:
        erasing: probability that an image loses a rectangle.
        mixup: alpha of mixup's beta distribution; 0: none.
        cutmix: the same for CutMix.
        classes: how many there are.
        seed: the run's.
    """

    def __init__(
        self, erasing: float, mixup: float, cutmix: float, classes: int, seed: int
    ) -> None:
        self._erasing = erasing
        self._classes = classes
        self._seed = seed
        self._mixers = [
            (blend, alpha) for blend, alpha in ((_mixup, mixup), (_cutmix, cutmix)) if alpha
        ]

    @classmethod
    def from_config(cls, augment: AugmentConfig, classes: int | None, seed: int) -> Mix | None:
        """As ``augment`` wants it, None where it wants nothing of it; ``classes`` may be None where
        nothing is mixed.
        """
        wanted = augment.random_erasing, augment.mixup, augment.cutmix
        assert classes is not None or not any(wanted[1:]), (
            "mixed labels have a place for each class"
        )
        return cls(*wanted, classes or 0, seed) if any(wanted) else None

    def __call__(self, images: Tensor, labels: Tensor, batch: Numbered) -> tuple[Tensor, Tensor]:
        """The batch's images, and its labels, float32 ``[N, classes]`` where they were mixed, in
        new memory.

        Args:
            images: normalised, float ``[N, 3, H, W]``.
            labels: int64 ``[N]``.
            batch: says which images they are.
        """
        indices = batch.indices.numpy()
        if self._erasing:
            draws = uniforms(self._seed, batch.epoch, indices, 1 + 4 * _TRIES, stream=_ERASE)
            boxes = erased_boxes(draws[:, 1:], *images.shape[2:])
            images = _erase(images, np.where(draws[:, :1] < self._erasing, boxes, 0))
        if not self._mixers:
            return images, labels
        key = _MIX << 112 | self._seed << 80 | batch.epoch << 48 | int(indices[0])
        rng = np.random.Generator(np.random.Philox(key))
        mixer, alpha = self._mixers[rng.integers(len(self._mixers))]
        images, share = mixer(images, rng.beta(alpha, alpha), rng)
        return images, _mixed(F.one_hot(labels, self._classes).float(), share)


def erased_boxes(draws: np.ndarray, height: int, width: int) -> np.ndarray:
    """Top, left, bottom and right of random rectangles, int64 ``[N, 4]``; all 0 where no try fits.

    The distribution of torchvision's ``v2.RandomErasing``, with four of the ``draws``, ``[N, 4 *
    tries]``, for each try.
    """
    area, aspect, down, across = np.moveaxis(draws.reshape(len(draws), -1, 4), 2, 0)
    area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * area)
    low, high = map(math.log, _ASPECT)
    aspect = np.exp(low + (high - low) * aspect)
    h, w = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (h < height) & (w < width)
    top, left = np.floor(down * (height - h + 1)), np.floor(across * (width - w + 1))
    boxes = np.stack((top, left, top + h, left + w), axis=-1) * fits[..., None]
    first: np.ndarray = boxes[np.arange(len(draws)), fits.argmax(axis=1)]
    return first.astype(np.int64)


def _erase(images: Tensor, boxes: np.ndarray) -> Tensor:
    top, left, bottom, right = to_device(boxes, images.device).view(-1, 4, 1, 1, 1).unbind(1)
    y = torch.arange(images.shape[2], device=images.device).unsqueeze(1)
    x = torch.arange(images.shape[3], device=images.device)
    return torch.where((y >= top) & (y < bottom) & (x >= left) & (x < right), 0.0, images)


def _mixup(images: Tensor, share: float, rng: np.random.Generator) -> tuple[Tensor, float]:
    return _mixed(images, share), share


def _cutmix(images: Tensor, share: float, rng: np.random.Generator) -> tuple[Tensor, float]:
    """Each image with a rectangle of the one before it, whose area is about 1 - ``share``; and what
    is left of its own.
    """
    height, width = images.shape[2:]
    half = 0.5 * math.sqrt(1.0 - share)
    x = int(rng.integers(width))
    y = int(rng.integers(height))
    right = int(half * width)
    down = int(half * height)
    rows = slice(max(0, y - down), min(height, y + down))
    columns = slice(max(0, x - right), min(width, x + right))
    mixed = images.clone()
    mixed[1:, :, rows, columns] = images[:-1, :, rows, columns]
    mixed[:1, :, rows, columns] = images[-1:, :, rows, columns]
    return mixed, 1.0 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)


def _mixed(values: Tensor, share: float) -> Tensor:
    """``share`` of each row, the rest of the one before it; the first follows the last."""
    mixed = torch.empty_like(values)
    torch.lerp(values[:-1], values[1:], share, out=mixed[1:])
    torch.lerp(values[-1:], values[:1], share, out=mixed[:1])
    return mixed
