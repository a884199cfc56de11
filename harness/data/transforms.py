"""Draws crop boxes; crops, resizes and flips uint8 pixels.

The crops follow torchvision's transforms; the caller supplies the random numbers.

The only resize, from a part of an image into a batch, is bilinear or bicubic and antialiased like
Pillow's. It uses the kernel of torch's ``interpolate`` with an output buffer. On contiguous ``[H,
W, 3]``, it runs in the calling thread without the GIL. All other copies use numpy, because torch
would start a thread pool for each decoding thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..clock.stages import Lap
from ..config import AugmentConfig, DataConfig
from ..runtime.seeding import SampleRng

# left, top, width and height in pixels
Box = tuple[int, int, int, int]

# Private functions, because only they write into given memory. Through torch.ops, they hold the GIL
# a few microseconds longer.
_nn: Any = torch._C._nn
_KERNELS = {"bilinear": _nn._upsample_bilinear2d_aa, "bicubic": _nn._upsample_bicubic2d_aa}


@dataclass(frozen=True, slots=True)
class CropTransform:
    """Crops, resizes and flips an image; most fields are as in ``AugmentConfig``."""

    # output side length in pixels
    size: int
    crop: str = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 4
    hflip: float = 0.5
    vflip: float = 0.0
    # The shorter side before a center crop. None: size * 256 / 224, as usual since AlexNet; images
    # that already have the output size (CIFAR) are unchanged.
    resize: int | None = None
    # whether the longer side is squashed to the same length
    squash: bool = False
    # bilinear or bicubic
    interpolation: str = "bilinear"
    stages: ClassVar[tuple[str, ...]] = ("resize",)

    @classmethod
    def from_config(cls, augment: AugmentConfig, data: DataConfig) -> CropTransform:
        """Returns the training transform specified by the settings."""
        drawn = augment.scale, augment.ratio, augment.pad, augment.hflip, augment.vflip
        how = data.eval_resize, data.eval_squash, data.interpolation.name
        return cls(data.image_size, augment.crop.name, *drawn, *how)

    def part(self, rng: SampleRng, width: int, height: int) -> Box:
        """Returns the left, top, width and height of a random crop, as drawn by ``__call__``.

        The distribution is that of torchvision's ``RandomResizedCrop.get_params``: the area is
        uniform within ``scale`` times the image's, width / height is log-uniform within ``ratio``;
        after ten tries, the largest central part with an allowed ratio is used (Szegedy et al.
        2014, arXiv:1409.4842, section 6).
        """
        narrowest, widest = self.ratio
        low = math.log(narrowest)
        high = math.log(widest)
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            aspect = math.exp(rng.uniform(low, high))
            w = round(math.sqrt(area * aspect))
            h = round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                top = rng.randrange(height - h + 1)
                return rng.randrange(width - w + 1), top, w, h
        w = min(width, max(1, round(height * widest)))
        h = min(height, max(1, round(width / narrowest)))
        return (width - w) // 2, (height - h) // 2, w, h

    def __call__(
        self,
        image: np.ndarray,
        rng: SampleRng,
        out: np.ndarray,
        lap: Lap | None = None,
        part: Box | None = None,
    ) -> None:
        """Writes ``image``, uint8 ``[H, W, 3]``, to ``out``, uint8 ``[3, S, S]`` with any strides.

        Everything random comes from ``rng``: the crop first, then the flips. ``image`` is not
        changed. ``lap`` is called with the stage's name at the end of each of the ``stages``. If
        given, ``part`` has already been drawn from ``rng``. Several threads may call this
        concurrently.

        Raises:
            ValueError: the image is so narrow that its resized version would not fit in memory.
        """
        height, width, _ = image.shape
        size = self.size
        box = (0, 0, width, height)
        new_size = None
        if self.crop == "random_resized":
            box = part or self.part(rng, width, height)
        elif self.crop == "center":
            new_size = self.whole_size(width, height)
        else:
            side = size + 2 * self.pad
            canvas = np.zeros((side, side, 3), np.uint8)
            inner = slice(self.pad, self.pad + size)
            canvas[inner, inner] = resized(image, size, size, self.interpolation)
            image = canvas
            top = rng.randrange(2 * self.pad + 1)
            box = (rng.randrange(2 * self.pad + 1), top, size, size)
        flip = rng.random() < self.hflip
        if self.vflip and rng.random() < self.vflip:
            out = out[:, ::-1]
        resize_into(image, box, out, flip, new_size, self.interpolation)
        if lap is not None:
            lap("resize")

    def whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height of an image before a center crop."""
        if self.resize is None and width == height == self.size:
            return width, height
        short = self.resize or round(self.size * 256 / 224)
        if self.squash:
            return short, short
        long = int(short * max(width, height) / min(width, height))
        if long > 65_535:
            raise ValueError(
                f"an image of {width}x{height} pixels is too narrow; after resizing, the longer "
                f"side would be {long} pixels"
            )
        return (short, long) if width <= height else (long, short)


def resize_into(
    pixels: np.ndarray,
    box: Box,
    out: np.ndarray,
    flip: bool = False,
    size: tuple[int, int] | None = None,
    interpolation: str = "bilinear",
) -> None:
    """Resizes the part ``box`` of ``pixels``, uint8 ``[H, W, 3]``, into ``out``.

    The filter does not reach beyond the box.

    Args:
        pixels: the image.
        box: the part to resize.
        out: uint8 ``[3, S, S]`` with any strides; fastest for a row in a channels_last batch.
        flip: whether to flip horizontally.
        size: width and height of the resized box, each at least S, whose center goes to ``out``;
            None: both are S.
        interpolation: bilinear or bicubic.
    """
    left, top, width, height = box
    rows = out.transpose(1, 2, 0)
    side = len(rows)
    new_width, new_height = size or (side, side)
    part = pixels[top : top + height, left : left + width]
    # flips the smaller of input and output, with the same result
    if flip and size is None and width * height < side * side:
        mirrored = np.empty_like(part, order="C")
        mirror_into(part, mirrored)
        part = mirrored
        flip = False
    # most training crops go directly into the batch
    direct = rows.flags.c_contiguous and not flip and size is None
    result = resized(part, new_width, new_height, interpolation, rows if direct else None)
    if result is rows:
        return
    x = round((new_width - side) / 2)
    y = round((new_height - side) / 2)
    center = result[y : y + side, x : x + side]
    if flip:
        mirror_into(center, rows)
    else:
        rows[...] = center


def mirror_into(pixels: np.ndarray, out: np.ndarray) -> None:
    """Writes flipped ``pixels``, uint8 ``[..., H, W, 3]``, into ``out``, which is other memory."""
    # four times faster than all three channels at once
    for channel in range(3):
        out[..., channel] = pixels[..., ::-1, channel]


def resized(
    pixels: np.ndarray,
    width: int,
    height: int,
    interpolation: str = "bilinear",
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Resizes uint8 ``[H, W, 3]`` into contiguous ``out``, or into new memory, and returns it.

    Returns ``pixels`` itself if it already has this size.
    """
    if pixels.shape == (height, width, 3):
        return pixels
    result = np.empty((height, width, 3), np.uint8) if out is None else out
    # contiguous for the kernel, and writable to avoid torch's warning; numpy is 3x faster here
    source, target = (
        torch.from_numpy(array.transpose(2, 0, 1)[None])
        for array in (np.require(pixels, requirements=("C", "W")), result)
    )
    _KERNELS[interpolation](source, target.shape[2:], False, None, None, out=target)
    return result
