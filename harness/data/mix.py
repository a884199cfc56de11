"""Random erasing, then mixup or CutMix of a normalised batch, on the batch's device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.config import AugmentConfig
from harness.data.augment import to_device
from harness.runtime.seeding import order_rng, uniforms

# streams of random numbers, as seeding's
_ERASE = 4
_MIX = 5
_TRIES = 10


class Mix:
    """Erases from each image, then mixes each with the one before it; torchvision's v2 transforms.

    An erased rectangle is 0 after normalisation: the mean colour. It is a function of (seed, epoch,
    index); how images are mixed, of (seed, epoch) and the batch's first index. With both mixup and
    CutMix, each batch gets one or the other.
    """

    def __init__(self, augment: AugmentConfig, classes: int, seed: int) -> None:
        self._erasing = augment.random_erasing
        self._classes = classes
        self._seed = seed
        mixers = (("mixup", augment.mixup), ("cutmix", augment.cutmix))
        self._mixers = [(name, alpha) for name, alpha in mixers if alpha]

    @classmethod
    def from_config(cls, augment: AugmentConfig, classes: int | None, seed: int) -> Mix | None:
        """Returns what ``augment`` sets, or None; ``classes`` may be None if nothing is mixed."""
        mix = cls(augment, classes or 0, seed)
        assert classes is not None or not mix._mixers, "mixed labels have a place for each class"
        return mix if mix._erasing or mix._mixers else None

    def choose(self, batch: Any) -> tuple[str, float, np.random.Generator]:
        """Returns how a batch is mixed: the mixer, an image's own share, more chance."""
        rng = order_rng(self._seed, batch.epoch, int(batch.indices[0]), _MIX)
        name, alpha = self._mixers[rng.integers(len(self._mixers))]
        return name, rng.beta(alpha, alpha), rng

    def __call__(self, images: Tensor, labels: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the images and labels, mixed in new memory.

        Args:
            images: normalised, float ``[N, 3, H, W]``.
            labels: int64 ``[N]``; mixed ones are float32 ``[N, classes]``.
            batch: has the ``epoch`` and ``indices``, as for ``BatchAugment``.
        """
        height, width = images.shape[2:]
        # One comparison for the batch: the device waits for no list of rectangles.
        if self._erasing:
            indices = batch.indices.numpy()
            draws = uniforms(self._seed, batch.epoch, indices, 1 + 4 * _TRIES, stream=_ERASE)
            boxes = erased_boxes(draws[:, 1:], height, width)
            boxes[draws[:, 0] >= self._erasing] = 0
            sides = to_device(boxes, images.device).view(-1, 4, 1, 1, 1)
            top, left, bottom, right = sides.unbind(1)
            y = torch.arange(height, device=images.device).unsqueeze(1)
            x = torch.arange(width, device=images.device)
            inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
            images = torch.where(inside, 0.0, images)
        if not self._mixers:
            return images, labels
        name, share, rng = self.choose(batch)
        if name == "mixup":
            images = _mixed(images, share)
        else:
            # A rectangle of the one before, whose area is about 1 - share, cut at the edges.
            half = 0.5 * math.sqrt(1.0 - share)
            x0 = int(rng.integers(width))
            y0 = int(rng.integers(height))
            right0 = int(half * width)
            down = int(half * height)
            rows = slice(max(0, y0 - down), y0 + down)
            columns = slice(max(0, x0 - right0), x0 + right0)
            cut = images[:, :, rows, columns].roll(1, dims=0)
            images = images.clone()
            images[:, :, rows, columns] = cut
            share = 1.0 - cut[0, 0].numel() / (height * width)
        return images, _mixed(F.one_hot(labels, self._classes).float(), share)


def erased_boxes(draws: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns random rectangles: top, left, bottom, right, int64 ``[N, 4]``; 0: none fits.

    The distribution of torchvision's ``v2.RandomErasing``, with four of the ``draws``, ``[N, 4 *
    tries]``, for each try: 2 to 33 % of the area, height over width 0.3 to 3.3.
    """
    area, aspect, down, across = np.moveaxis(draws.reshape(len(draws), -1, 4), 2, 0)
    area = height * width * (0.02 + (0.33 - 0.02) * area)
    low = math.log(0.3)
    aspect = np.exp(low + (math.log(3.3) - low) * aspect)
    h = np.rint(np.sqrt(area * aspect))
    w = np.rint(np.sqrt(area / aspect))
    fits = (h < height) & (w < width)
    top = np.floor(down * (height - h + 1))
    left = np.floor(across * (width - w + 1))
    boxes = np.stack((top, left, top + h, left + w), axis=-1) * fits[..., None]
    first: np.ndarray = boxes[np.arange(len(draws)), fits.argmax(axis=1)]
    return first.astype(np.int64)


def _mixed(values: Tensor, share: float) -> Tensor:
    """Blends ``share`` of each row with the row before; the first follows the last."""
    mixed = torch.empty_like(values)
    torch.lerp(values[:-1], values[1:], share, out=mixed[1:])
    torch.lerp(values[-1:], values[:1], share, out=mixed[:1])
    return mixed
