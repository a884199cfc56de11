"""Geometry on uint8 pixels: what is cut out of an image, at which size, and whether it is mirrored.

What is cut out is what torchvision's transforms cut; the random numbers come from the caller.

There is one resize: bilinear and antialiased as Pillow's, from a part of an image into a batch. It
is the kernel of torch's ``interpolate``, given its result's memory: the private name saves a copy,
the public one serves where it is missing. On ``[H, W, 3]`` in order the kernel runs in the thread
that calls it and without the interpreter lock. All other copies are numpy's, for torch would begin
a team of threads for each thread that decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from harness.config import AugmentConfig
from harness.runtime.seeding import SampleRng
from harness.watch.stages import Lap

# uint8 [H, W, 3]
Pixels = np.ndarray
# left, top, width and height in pixels
Box = tuple[int, int, int, int]
# from uint8 [h, w, 3] into uint8 [H, W, 3], both contiguous
_Kernel = Callable[[np.ndarray, np.ndarray], None]

_TRIES = 10
# ImageNet's custom since AlexNet: a border of one eighth is left out
_EVAL_SHARE = 256 / 224
_MAX_SIDE = 65_535


class Transform(Protocol):
    """Writes pixels of any size into a row of a batch; times what it does where it is asked to."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of what it does, in order."""
        ...

    def __call__(
        self, image: Pixels, rng: SampleRng, out: np.ndarray, lap: Lap | None = None
    ) -> None:
        """Write the result into ``out``, uint8 ``[3, S, S]`` of any strides; everything random
        comes from ``rng``.

        ``lap`` is to be called at the end of each stage, with its name; one that is left out takes
        no time. ``image`` is not to be changed. Several threads may call at once.
        """
        ...


def random_crop_box(
    rng: SampleRng, width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """The left, top, width and height of a random part of an image, in pixels.

    The distribution of torchvision's ``RandomResizedCrop.get_params``: area uniform within
    ``scale`` of the image's, width over height log-uniform within ``ratio``, ten tries, then the
    largest central part whose ratio is allowed (Szegedy et al. 2014, arXiv:1409.4842, section 6).
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
    """Resize the shorter side to ``resize`` pixels, then cut out the centre, as torchvision's
    ``Resize`` and ``CenterCrop``.
    """

    # side of the result in pixels
    size: int
    # None: size * 256 / 224, and images that have size already (CIFAR) stay as they are
    resize: int | None = None
    stages: ClassVar[tuple[str, ...]] = ("resize",)

    def __call__(
        self, image: Pixels, rng: SampleRng, out: np.ndarray, lap: Lap | None = None
    ) -> None:
        """Write the result into ``out``, uint8 ``[3, size, size]``; ``rng`` is not used.

        Raises:
            ValueError: the image is so narrow that its resized form would not fit in memory.
        """
        self.write(image, out, flip=False)
        if lap is not None:
            lap("resize")

    def write(self, image: Pixels, out: np.ndarray, flip: bool) -> None:
        """As calling it, mirrored where ``flip`` says so."""
        height, width, _ = image.shape
        resize_into(image, (0, 0, width, height), out, flip, self._resized_to(width, height))

    def _resized_to(self, width: int, height: int) -> tuple[int, int]:
        if self.resize is None and width == height == self.size:
            return width, height
        short = self.resize or round(self.size * _EVAL_SHARE)
        long = int(short * max(width, height) / min(width, height))
        if long > _MAX_SIDE:
            raise ValueError(
                f"{width}x{height} pixels are too narrow: resized, the longer side would have "
                f"{long}"
            )
        return (short, long) if width <= height else (long, short)


@dataclass(frozen=True, slots=True)
class TrainTransform:
    """Crop at random, resize and mirror; the fields are those of ``AugmentConfig``, and two of
    ``EvalTransform``.
    """

    size: int
    crop: str = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 4
    hflip: float = 0.5
    # before a center crop
    resize: int | None = None

    @classmethod
    def from_config(
        cls, augment: AugmentConfig, size: int, resize: int | None = None
    ) -> TrainTransform:
        """The transform that ``augment`` describes; ``size`` and ``resize`` as in
        ``EvalTransform``.
        """
        low, high = augment.scale
        narrow, wide = augment.ratio
        return cls(
            size, augment.crop.name, (low, high), (narrow, wide), augment.pad, augment.hflip, resize
        )

    @property
    def stages(self) -> tuple[str, ...]:
        """A box is cut out, resized and mirrored in one go; only a pad crop comes after the resize."""
        return ("resize", "crop") if self.crop == "pad" else ("resize",)

    def __call__(
        self, image: Pixels, rng: SampleRng, out: np.ndarray, lap: Lap | None = None
    ) -> None:
        """Write the result into ``out``, uint8 ``[3, size, size]``; of ``rng`` the crop comes
        first, then the flip.
        """
        if self.crop == "pad":
            self._pad_crop(image, rng, out, lap)
            return
        if self.crop == "center":
            EvalTransform(self.size, self.resize).write(image, out, rng.random() < self.hflip)
        else:
            height, width, _ = image.shape
            box = random_crop_box(rng, width, height, self.scale, self.ratio)
            resize_into(image, box, out, rng.random() < self.hflip)
        if lap is not None:
            lap("resize")

    def _pad_crop(self, image: Pixels, rng: SampleRng, out: np.ndarray, lap: Lap | None) -> None:
        size = self.size
        pad = self.pad
        canvas = np.zeros((size + 2 * pad, size + 2 * pad, 3), np.uint8)
        canvas[pad : pad + size, pad : pad + size] = resized(image, size, size)
        if lap is not None:
            lap("resize")
        top, left = rng.randrange(2 * pad + 1), rng.randrange(2 * pad + 1)
        window = canvas[top : top + size, left : left + size].transpose(2, 0, 1)
        out[...] = window[:, :, ::-1] if rng.random() < self.hflip else window
        if lap is not None:
            lap("crop")


def resize_into(
    pixels: np.ndarray,
    box: Box,
    out: np.ndarray,
    flip: bool = False,
    size: tuple[int, int] | None = None,
) -> None:
    """Write part ``box`` of ``pixels``, uint8 ``[H, W, 3]``, resized, into ``out``, uint8 ``[3, S,
    S]`` of any strides.

    The filter does not reach over the edge of the box. Strides as of a row of a channels_last batch
    are the quickest.

    Args:
        pixels: the image.
        box: the part of it.
        out: where the result goes.
        flip: mirror it, left and right.
        size: width and height to give the box, at least S each, of which ``out`` gets the centre;
            None: S each.
    """
    left, top, width, height = box
    part = pixels[top : top + height, left : left + width]
    rows = out.transpose(1, 2, 0)
    side = len(rows)
    new_width, new_height = size or (side, side)
    assert min(new_width, new_height) >= side
    if (
        rows.flags.c_contiguous
        and not flip
        and new_width == new_height == side
        and part.shape != rows.shape
    ):
        _kernel(_plain(part), rows)
        return
    x, y = round((new_width - side) / 2), round((new_height - side) / 2)
    result = resized(part, new_width, new_height)[y : y + side, x : x + side]
    if flip:
        mirror_into(result, rows)
    else:
        rows[...] = result


def mirror_into(pixels: np.ndarray, out: np.ndarray) -> None:
    """Write ``pixels``, uint8 ``[..., H, W, 3]``, mirrored left and right into ``out``, other
    memory of that shape.
    """
    # in a quarter of the time of all three at once
    for channel in range(3):
        out[..., channel] = pixels[..., ::-1, channel]


def resized(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """``pixels``, uint8 ``[H, W, 3]``, as ``[height, width, 3]``; what has that size already is
    returned as it is.
    """
    if pixels.shape == (height, width, 3):
        return pixels
    result = np.empty((height, width, 3), np.uint8)
    _kernel(_plain(pixels), result)
    return result


def _plain(pixels: np.ndarray) -> np.ndarray:
    """Contiguous, for the kernel knows no strides, and writable, for torch warns of memory that is
    not.
    """
    return pixels if pixels.flags.c_contiguous and pixels.flags.writeable else pixels.copy()


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    # numpy turns axes in a third of torch's time
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])


def _resize_in_place(source: np.ndarray, target: np.ndarray) -> None:
    resize = torch.ops.aten._upsample_bilinear2d_aa.out
    resize(_tensor(source), target.shape[:2], False, None, None, out=_tensor(target))


def _resize_public(source: np.ndarray, target: np.ndarray) -> None:
    result = F.interpolate(_tensor(source), target.shape[:2], mode="bilinear", antialias=True)
    target[...] = result[0].permute(1, 2, 0).numpy()


def _select_kernel() -> _Kernel:
    """Returns torch's in-place kernel if it exists and agrees with ``F.interpolate``, else a
    wrapper of the latter.
    """
    source = np.arange(75, dtype=np.uint8).reshape(5, 5, 3)
    targets = np.zeros((2, 3, 3, 3), np.uint8)
    _resize_public(source, targets[0])
    try:
        _resize_in_place(source, targets[1])
    except (AttributeError, RuntimeError, TypeError):
        return _resize_public
    return _resize_in_place if np.array_equal(*targets) else _resize_public


_kernel = _select_kernel()
