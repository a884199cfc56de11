"""Geometry on uint8 pixels: what is cut out of an image, at which size, and whether it is mirrored.

The pixels are those of torchvision's transforms on PIL images; the random numbers come from the caller.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from PIL import Image

from harness.config import AugmentConfig
from harness.watch.stages import Lap

Pixels = Image.Image | np.ndarray

_TRIES = 10
_EVAL_SHARE = 256 / 224  # ImageNet's custom since AlexNet: a border of one eighth is left out
_MAX_SIDE = 65_535


class Transform(Protocol):
    """Writes pixels of any size into a row of a batch; times what it does where it is asked to."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of what it does, in order."""
        ...

    def __call__(self, image: Pixels, rng: random.Random, out: np.ndarray, lap: Lap | None = None) -> None:
        """Write the result into ``out``, uint8 ``[3, S, S]``; everything random comes from ``rng``.

        ``lap`` is to be called at the end of each stage, with its name; one that is left out takes no time.
        """
        ...


def random_crop_box(
    rng: random.Random, width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """The left, top, width and height of a random part of an image, in pixels.

    The distribution of torchvision's ``RandomResizedCrop.get_params``: area uniform within ``scale`` of the image's, width
    over height log-uniform within ``ratio``, ten tries, then the largest central part whose ratio is allowed (Szegedy et
    al. 2014, arXiv:1409.4842, section 6).
    """
    log_ratio = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_TRIES):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(*log_ratio))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = rng.randrange(height - h + 1)
            return rng.randrange(width - w + 1), top, w, h
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(height * ratio[1]))
    return (width - w) // 2, (height - h) // 2, w, h


@dataclass(frozen=True, slots=True)
class EvalTransform:
    """Resize the shorter side to ``resize`` pixels, then cut out the centre, as torchvision's ``Resize`` and ``CenterCrop``."""

    size: int  # side of the result in pixels
    resize: int | None = None  # None: size * 256 / 224, and arrays that have size already (CIFAR) stay as they are
    stages: ClassVar[tuple[str, ...]] = ("resize", "crop", "write")

    def __call__(self, image: Pixels, rng: random.Random, out: np.ndarray, lap: Lap | None = None) -> None:
        """Write the result into ``out``, uint8 ``[3, size, size]``; ``rng`` is not used."""
        _write(self.cut(image, lap), out, lap)

    def cut(self, image: Pixels, lap: Lap | None = None) -> Pixels:
        """The centre of ``image``, ``size`` pixels wide and high.

        Raises:
            ValueError: the image is so narrow that its resized form would not fit in memory.
        """
        if self.resize is None and isinstance(image, np.ndarray) and image.shape[:2] == (self.size, self.size):
            return image
        image = _picture(image)
        width, height = image.size
        short = self.resize or round(self.size * _EVAL_SHARE)
        long = int(short * max(width, height) / min(width, height))
        if long > _MAX_SIDE:
            raise ValueError(f"{width}x{height} pixels are too narrow: resized, the longer side would have {long}")
        new = (short, long) if width <= height else (long, short)
        if image.size != new:
            image = image.resize(new, Image.Resampling.BILINEAR)
        if lap is not None:
            lap("resize")
        left, top = round((new[0] - self.size) / 2), round((new[1] - self.size) / 2)
        image = image.crop((left, top, left + self.size, top + self.size))
        if lap is not None:
            lap("crop")
        return image


@dataclass(frozen=True, slots=True)
class TrainTransform:
    """Crop at random, resize and mirror; the fields are those of ``AugmentConfig``, and two of ``EvalTransform``."""

    size: int
    crop: str = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 4
    hflip: float = 0.5
    resize: int | None = None  # before a center crop

    @classmethod
    def from_config(cls, augment: AugmentConfig, size: int, resize: int | None = None) -> TrainTransform:
        """The transform that ``augment`` describes; ``size`` and ``resize`` as in ``EvalTransform``."""
        (low, high), (narrow, wide) = augment.scale, augment.ratio
        return cls(size, augment.crop.name, (low, high), (narrow, wide), augment.pad, augment.hflip, resize)

    @property
    def stages(self) -> tuple[str, ...]:
        """In the order of the kind of crop; ``write`` mirrors as well."""
        return ("crop", "resize", "write") if self.crop == "random_resized" else EvalTransform.stages

    def __call__(self, image: Pixels, rng: random.Random, out: np.ndarray, lap: Lap | None = None) -> None:
        """Write the result into ``out``, uint8 ``[3, size, size]``; everything random comes from ``rng``."""
        pixels = self._cut(image, rng, lap)
        _write(pixels, out[:, :, ::-1] if rng.random() < self.hflip else out, lap)

    def _cut(self, image: Pixels, rng: random.Random, lap: Lap | None) -> Pixels:
        if self.crop == "pad":
            return self._pad_crop(image, rng, lap)
        if self.crop == "center":
            return EvalTransform(self.size, self.resize).cut(image, lap)
        image = _picture(image)
        left, top, width, height = random_crop_box(rng, image.width, image.height, self.scale, self.ratio)
        # Not resize(box=...): its filter reaches over the box's edge into pixels that are not part of the crop.
        part = image.crop((left, top, left + width, top + height))
        if lap is not None:
            lap("crop")
        part = part.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if lap is not None:
            lap("resize")
        return part

    def _pad_crop(self, image: Pixels, rng: random.Random, lap: Lap | None) -> np.ndarray:
        size, pad = self.size, self.pad
        if not (isinstance(image, np.ndarray) and image.shape[:2] == (size, size)):
            image = _picture(image)
            if image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            if lap is not None:
                lap("resize")
        canvas = np.zeros((size + 2 * pad, size + 2 * pad, 3), np.uint8)
        canvas[pad : pad + size, pad : pad + size] = np.asarray(image)
        top, left = rng.randrange(2 * pad + 1), rng.randrange(2 * pad + 1)
        if lap is not None:
            lap("crop")
        return canvas[top : top + size, left : left + size]


def _picture(image: Pixels) -> Image.Image:
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


def _write(pixels: Pixels, out: np.ndarray, lap: Lap | None) -> None:
    """Copy ``[H, W, 3]`` into ``out``, ``[3, H, W]``."""
    if isinstance(pixels, np.ndarray):
        out[...] = pixels.transpose(2, 0, 1)
    else:
        for channel, name in enumerate("RGB"):  # a third of the time that np.asarray and a transposed copy take
            plane = np.frombuffer(pixels.tobytes("raw", name), np.uint8)
            out[channel] = plane.reshape(pixels.height, pixels.width)
    if lap is not None:
        lap("write")
