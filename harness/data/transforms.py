"""Cuts, resizes and mirrors uint8 pixels.

The cuts are those of torchvision's transforms; the random numbers come from the caller.

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


class Transform(Protocol):
    """Writes pixels of any size into a row of a batch."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of its stages, in order."""
        ...

    def __call__(
        self, image: Pixels, rng: SampleRng, out: np.ndarray, lap: Lap | None = None
    ) -> None:
        """Writes the result into ``out``, uint8 ``[3, S, S]`` of any strides.

        Everything random comes from ``rng``. ``image`` is not changed. ``lap`` is called at the end
        of each stage, with its name; a stage that is left out takes no time. Several threads may
        call at once.
        """
        ...


def random_crop_box(
    rng: SampleRng, width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """Returns left, top, width and height of a random part of an image.

    The distribution of torchvision's ``RandomResizedCrop.get_params``: area uniform within
    ``scale`` of the image's, width over height log-uniform within ``ratio``, ten tries, then the
    largest central part whose ratio is allowed (Szegedy et al. 2014, arXiv:1409.4842, section 6).
    """
    low = math.log(ratio[0])
    high = math.log(ratio[1])
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(low, high))
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = rng.randrange(height - h + 1)
            return rng.randrange(width - w + 1), top, w, h
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return (width - w) // 2, (height - h) // 2, w, h


@dataclass(frozen=True, slots=True)
class EvalTransform:
    """Resizes the shorter side and cuts out the centre, as ``Resize`` and ``CenterCrop`` do."""

    # side of the result in pixels
    size: int
    # The shorter side; None: size * 256 / 224, as since AlexNet, and images that have size already
    # (CIFAR) stay as they are.
    resize: int | None = None
    stages: ClassVar[tuple[str, ...]] = ("resize",)

    def __call__(
        self, image: Pixels, rng: SampleRng, out: np.ndarray, lap: Lap | None = None
    ) -> None:
        """Writes the result into ``out``, uint8 ``[3, size, size]``; ``rng`` is not used.

        Raises:
            ValueError: the image is so narrow that its resized form would not fit in memory.
        """
        self.write(image, out, flip=False)
        if lap is not None:
            lap("resize")

    def write(self, image: Pixels, out: np.ndarray, flip: bool) -> None:
        """Writes the result into ``out``, mirrored if ``flip`` says so."""
        height, width, _ = image.shape
        size = (width, height)
        if self.resize is not None or not width == height == self.size:
            short = self.resize or round(self.size * 256 / 224)
            long = int(short * max(size) / min(size))
            if long > 65_535:
                raise ValueError(
                    f"{width}x{height} pixels are too narrow: resized, the longer side would have "
                    f"{long}"
                )
            size = (short, long) if width <= height else (long, short)
        resize_into(image, (0, 0, width, height), out, flip, size)


@dataclass(frozen=True, slots=True)
class TrainTransform:
    """Crops at random, resizes and mirrors; fields of ``AugmentConfig`` and ``EvalTransform``."""

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
        """Returns the transform that ``augment``, ``size`` and ``resize`` describe."""
        low, high = augment.scale
        narrow, wide = augment.ratio
        return cls(
            size, augment.crop.name, (low, high), (narrow, wide), augment.pad, augment.hflip, resize
        )

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of its stages: only a pad crop comes after the resize."""
        return ("resize", "crop") if self.crop == "pad" else ("resize",)

    def __call__(
        self, image: Pixels, rng: SampleRng, out: np.ndarray, lap: Lap | None = None
    ) -> None:
        """Writes the result into ``out``; draws the crop first, then the flip."""
        height, width, _ = image.shape
        size = self.size
        if self.crop == "center":
            EvalTransform(size, self.resize).write(image, out, rng.random() < self.hflip)
        elif self.crop == "random_resized":
            box = random_crop_box(rng, width, height, self.scale, self.ratio)
            resize_into(image, box, out, rng.random() < self.hflip)
        else:
            side = size + 2 * self.pad
            canvas = np.zeros((side, side, 3), np.uint8)
            inner = slice(self.pad, self.pad + size)
            canvas[inner, inner] = resized(image, size, size)
        if lap is not None:
            lap("resize")
        if self.crop == "pad":
            top = rng.randrange(2 * self.pad + 1)
            left = rng.randrange(2 * self.pad + 1)
            window = canvas[top : top + size, left : left + size].transpose(2, 0, 1)
            if rng.random() < self.hflip:
                window = window[:, :, ::-1]
            out[...] = window
            if lap is not None:
                lap("crop")


def resize_into(
    pixels: np.ndarray,
    box: Box,
    out: np.ndarray,
    flip: bool = False,
    size: tuple[int, int] | None = None,
) -> None:
    """Writes part ``box`` of ``pixels``, uint8 ``[H, W, 3]``, resized, into ``out``.

    The filter does not reach over the edge of the box.

    Args:
        pixels: the image.
        box: the part of it.
        out: uint8 ``[3, S, S]`` of any strides; as of a row of a channels_last batch is quickest.
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
    # Most training crops: straight into the batch.
    is_whole = new_width == new_height == side
    if rows.flags.c_contiguous and not flip and is_whole and part.shape != rows.shape:
        _kernel(_plain(part), rows)
        return
    # Else by a copy, of which the centre is wanted.
    x = round((new_width - side) / 2)
    y = round((new_height - side) / 2)
    result = resized(part, new_width, new_height)[y : y + side, x : x + side]
    if flip:
        mirror_into(result, rows)
    else:
        rows[...] = result


def mirror_into(pixels: np.ndarray, out: np.ndarray) -> None:
    """Writes ``pixels``, uint8 ``[..., H, W, 3]``, mirrored into ``out``, other memory."""
    # in a quarter of the time of all three at once
    for channel in range(3):
        out[..., channel] = pixels[..., ::-1, channel]


def resized(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resizes uint8 ``[H, W, 3]``; returns ``pixels`` themselves if they have the size."""
    if pixels.shape == (height, width, 3):
        return pixels
    result = np.empty((height, width, 3), np.uint8)
    _kernel(_plain(pixels), result)
    return result


def _plain(pixels: np.ndarray) -> np.ndarray:
    """Returns ``pixels`` contiguous, as the kernel needs them, and writable, or torch warns."""
    return np.require(pixels, requirements=("C", "W"))


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
    """Returns torch's in-place kernel if it agrees with ``F.interpolate``, else the latter's."""
    source = np.arange(75, dtype=np.uint8).reshape(5, 5, 3)
    targets = np.zeros((2, 3, 3, 3), np.uint8)
    _resize_public(source, targets[0])
    try:
        _resize_in_place(source, targets[1])
    except (AttributeError, RuntimeError, TypeError):
        return _resize_public
    return _resize_in_place if np.array_equal(*targets) else _resize_public


_kernel = _select_kernel()
