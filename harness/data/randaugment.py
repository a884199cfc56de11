"""RandAugment (Cubuk et al.

2019, arXiv:1909.13719) on whole batches, each image by operations of its own.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from harness.data.adjust import (
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    adjust_sharpness,
    affine,
    blend,
    to_device,
)

_BINS = 31
# in torchvision's order, in which those that are done together are neighbours
Op = IntEnum(
    "Op",
    "Identity ShearX ShearY TranslateX TranslateY Rotate Brightness Color Contrast Sharpness "
    "Posterize Solarize "
    "AutoContrast Equalize",
    start=0,
)
# what Brightness, Color and Contrast change
_BLENDS = np.array([BRIGHTNESS, SATURATION, CONTRAST])


class RandAugment:
    """As many random operations of torchvision's ``v2.RandAugment`` on each image as ``operations``
    says.

    Its defaults hold: a moved pixel comes from the nearest one, and black from outside.

    The images are sorted by their operation, so that it works on all of them at once; shears,
    shifts and rotations are one operation with different matrices.

    Args:
        operations: how many, one after the other.
        magnitude: the strength of all, 0 to 30.
    """

    def __init__(self, operations: int, magnitude: int) -> None:
        self.draws = 2 * operations
        self._magnitude = magnitude
        self._bits = round(8 - 4 * magnitude / (_BINS - 1))
        self._threshold = 255 * self._level(0.0, start=1.0)

    def __call__(self, images: Tensor, draws: np.ndarray) -> Tensor:
        """``images`` after their operations; each takes two of the ``draws``, for what and for
        which direction.
        """
        ops = (len(Op) * draws[:, ::2]).astype(np.int64)
        signs = np.where(draws[:, 1::2] < 0.5, -1.0, 1.0)
        # which image each row holds
        held = np.arange(len(images))
        for k in range(ops.shape[1]):
            order = ops[held, k].argsort(kind="stable")
            held = held[order]
            images = images[to_device(order, images.device)]
            self._operate(images, ops[held, k], signs[held, k])
        return images[to_device(held.argsort(), images.device)]

    def _operate(self, images: Tensor, ops: np.ndarray, signs: np.ndarray) -> None:
        """Do to each of ``images`` what the sorted ``ops`` say, in place."""
        height, width = images.shape[2:]
        factors = 1.0 + signs * self._level(0.9)
        matrices = self._matrices(height, width)
        for first, last, act in (
            (
                Op.ShearX,
                Op.Rotate,
                lambda part, at: affine(
                    part, matrices[ops[at] - Op.ShearX, (signs[at] > 0).astype(int)]
                ),
            ),
            (
                Op.Brightness,
                Op.Contrast,
                lambda part, at: blend(part, _BLENDS[ops[at] - Op.Brightness], factors[at]),
            ),
            (Op.Sharpness, Op.Sharpness, lambda part, at: adjust_sharpness(part, factors[at])),
            (Op.Posterize, Op.Posterize, lambda part, at: functional.posterize(part, self._bits)),
            (Op.Solarize, Op.Solarize, lambda part, at: functional.solarize(part, self._threshold)),
            (Op.AutoContrast, Op.AutoContrast, lambda part, at: functional.autocontrast(part)),
            (Op.Equalize, Op.Equalize, lambda part, at: functional.equalize(part)),
        ):
            at = slice(*np.searchsorted(ops, (first, last + 1)))
            if at.start < at.stop:
                images[at] = act(images[at], at)

    def _matrices(self, height: int, width: int) -> np.ndarray:
        """Where a pixel of the result is found: float32 ``[5, 2, 2, 3]``, by operation from ShearX
        on and by sign.
        """
        made = []
        shear = self._level(0.3)
        angle = math.radians(self._level(30.0))
        across, down = (int(self._level(150.0 / 331.0 * side)) for side in (width, height))
        for sign in (-1, 1):
            s = sign * shear
            cos = math.cos(angle)
            sin = sign * math.sin(angle)
            made.append((
                # about the upper left corner
                ((1, s, s * height / 2), (0, 1, 0)),
                ((1, 0, 0), (s, 1, s * width / 2)),
                ((1, 0, -sign * across), (0, 1, 0)),
                ((1, 0, 0), (0, 1, -sign * down)),
                ((cos, -sin, 0), (sin, cos, 0)),
            ))  # fmt: skip
        return np.array(made, dtype=np.float32).swapaxes(0, 1)

    def _level(self, end: float, start: float = 0.0) -> float:
        """The magnitude's place between ``start`` and ``end``, to torchvision's rounding."""
        return float(torch.linspace(start, end, _BINS)[self._magnitude])
