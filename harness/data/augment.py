"""What is done to the colours of a batch: torchvision's ColorJitter and RandAugment, on whichever
device the batch is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from harness.config import AugmentConfig
from harness.data.adjust import BRIGHTNESS, HUE, adjust_hue, blend, to_device
from harness.runtime.seeding import BATCH, uniforms

# uint8 pixels that a CPU works on at a time: their float32 forms then stay in its caches
_CACHED_BYTES = 1 << 20


class Numbered(Protocol):
    """What the random numbers of a batch depend on."""

    @property
    def epoch(self) -> int:
        """Of which pass it is."""
        ...

    @property
    def indices(self) -> Tensor:
        """The samples' places in the data set, int64 ``[N]`` on the host."""
        ...


class Part(Protocol):
    """One kind of augmentation.

    Attributes:
        draws: random numbers that it takes for each image.
    """

    draws: int

    def __call__(self, images: Tensor, draws: np.ndarray) -> Tensor:
        """New uint8 ``[N, 3, H, W]``; ``draws``, float64 ``[N, draws]`` in [0, 1), hold each
        image's random numbers.
        """
        ...


class BatchAugment:
    """The ``parts``, one after the other; what becomes of an image is a function of (seed, epoch,
    index) and its pixels.
    """

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self._parts = parts
        self._seed = seed

    @classmethod
    def from_config(cls, augment: AugmentConfig, seed: int) -> BatchAugment | None:
        """RandAugment and then colour jitter, as ``augment`` wants them; None where it wants
        neither.
        """
        parts: list[Part] = []
        if augment.rand_augment:
            # torchvision's transforms take a while to import
            from harness.data.randaugment import RandAugment

            parts.append(RandAugment(augment.rand_augment, augment.rand_augment_magnitude))
        if any(augment.color_jitter):
            parts.append(ColorJitter(*augment.color_jitter))
        return cls(parts, seed) if parts else None

    def __call__(self, images: Tensor, batch: Numbered) -> Tensor:
        """``images``, uint8 ``[N, 3, H, W]``, augmented in new memory on the same device; ``batch``
        is theirs.
        """
        count = sum(part.draws for part in self._parts)
        draws = uniforms(self._seed, batch.epoch, batch.indices.numpy(), count, stream=BATCH)
        most = len(images)
        if images.device.type == "cpu":
            most = max(1, _CACHED_BYTES // images[0].numel())
        done = []
        for chunk, drawn in zip(
            images.split(most), np.split(draws, range(most, len(draws), most)), strict=True
        ):
            begin = 0
            for part in self._parts:
                chunk = part(chunk, drawn[:, begin : begin + part.draws])
                begin += part.draws
            done.append(chunk)
        return done[0] if len(done) == 1 else torch.cat(done)


class ColorJitter:
    """Brightness, contrast, saturation and hue in an order drawn for each image, as torchvision's
    ``v2.ColorJitter``.

    Args:
        brightness: most change of the factor, which lies within ``[max(0, 1 - brightness), 1 +
            brightness]``; 0: none.
        contrast: the same for contrast.
        saturation: the same for saturation.
        hue: most turn of the hue to either side, 1 being the whole circle; 0: none.
    """

    def __init__(self, brightness: float, contrast: float, saturation: float, hue: float) -> None:
        most = np.array([brightness, contrast, saturation, hue])
        low, high = np.maximum(0.0, 1.0 - most), 1.0 + most
        low[HUE] = -hue
        high[HUE] = hue
        self._kinds = np.flatnonzero(most)
        self._low = low[self._kinds]
        self._high = high[self._kinds]
        self.draws = 2 * len(self._kinds)

    def __call__(self, images: Tensor, draws: np.ndarray) -> Tensor:
        """``images`` with other colours; the first half of the ``draws`` is for the order, the
        second for the factors.
        """
        count = len(self._kinds)
        order = draws[:, :count].argsort(axis=1)
        factors = np.take_along_axis(
            self._low + (self._high - self._low) * draws[:, count:], order, axis=1
        )
        for kinds, amounts in zip(self._kinds[order].T, factors.T, strict=True):
            images = _adjusted(images, kinds, amounts)
        return images


def _adjusted(images: Tensor, kinds: np.ndarray, amounts: np.ndarray) -> Tensor:
    """Each image with the one property that ``kinds`` names changed: all blends at once, then the
    hues.
    """
    hues = np.flatnonzero(kinds == HUE)
    images = blend(
        images, np.where(kinds == HUE, BRIGHTNESS, kinds), np.where(kinds == HUE, 1.0, amounts)
    )
    if len(hues):
        rows = to_device(hues, images.device)
        images[rows] = adjust_hue(images[rows], amounts[hues])
    return images
