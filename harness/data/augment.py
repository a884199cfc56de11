"""Augments uint8 batches ``[N, 3, H, W]`` on their device, from ColorJitter to mixup.

The pixels are those of torchvision's functions on tensors, which take one parameter for a whole
batch; here each image has its own. Parameters come from the host as float64 ``[N]``; the host
never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import AugmentConfig
from ..runtime import accelerator
from ..runtime.seeding import BATCH, order_rng, uniforms

# as torchvision's ColorJitter numbers them
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)

# uint8 pixels that a CPU works on at a time: their float32 forms then stay in its caches
_CACHED_BYTES = 1 << 20

_BINS = 31
# streams of random numbers, as seeding's
_ERASE = 4
_MIX = 5
_TRIES = 10
# in torchvision's order, in which those that are done together are neighbours
Op = IntEnum(
    "Op",
    "Identity ShearX ShearY TranslateX TranslateY Rotate Brightness Color Contrast Sharpness "
    "Posterize Solarize AutoContrast Equalize",
    start=0,
)
# The first operations of groups that are done together, and the end of the last group.
_GROUPS = (
    Op.ShearX, Op.Brightness, Op.Sharpness, Op.Posterize, Op.Solarize, Op.AutoContrast, Op.Equalize,
    len(Op),
)  # fmt: skip


@dataclass(eq=False)
class BatchAugment:
    """Applies ``parts`` one after the other; a function of (seed, epoch, index) and the pixels.

    A part makes of uint8 ``[N, 3, H, W]`` and float64 draws ``[N, part.draws]`` in [0, 1) new
    images; each image takes its own draws.
    """

    parts: Sequence[ColorJitter | RandAugment]
    seed: int

    @classmethod
    def from_config(cls, augment: AugmentConfig, seed: int) -> BatchAugment | None:
        """Returns RandAugment and then colour jitter as ``augment`` sets them; None for neither."""
        parts: list[ColorJitter | RandAugment] = []
        if augment.rand_augment:
            parts.append(RandAugment(augment.rand_augment, augment.rand_augment_magnitude))
        if any(augment.color_jitter):
            parts.append(ColorJitter(*augment.color_jitter))
        return cls(parts, seed) if parts else None

    def __call__(self, images: Tensor, batch: Any) -> Tensor:
        """Returns ``images``, uint8 ``[N, 3, H, W]``, augmented, in new memory on their device.

        ``batch`` has the ``epoch`` and the samples' ``indices``, int64 ``[N]`` on the host.
        """
        count = sum(part.draws for part in self.parts)
        draws = uniforms(self.seed, batch.epoch, batch.indices.numpy(), count, stream=BATCH)
        chunk = len(images)
        if images.device.type == "cpu":
            chunk = max(1, _CACHED_BYTES // images[0].numel())
        done = []
        for begin in range(0, len(images), chunk):
            some = images[begin : begin + chunk]
            drawn = draws[begin : begin + chunk]
            for part in self.parts:
                some = part(some, drawn[:, : part.draws])
                drawn = drawn[:, part.draws :]
            done.append(some)
        return done[0] if len(done) == 1 else torch.cat(done)


class ColorJitter:
    """Changes brightness, contrast, saturation and hue in a drawn order, as ``v2.ColorJitter``.

    Args:
        brightness: most change of the factor 1, which stays at least 0; 0: none.
        contrast: the same for contrast.
        saturation: the same for saturation.
        hue: most turn of the hue to either side, 1 being the whole circle; 0: none.
    """

    def __init__(self, brightness: float, contrast: float, saturation: float, hue: float) -> None:
        most = np.array([brightness, contrast, saturation, hue])
        neutral = np.array([1.0, 1.0, 1.0, 0.0])
        low = neutral - most
        low[:HUE] = low[:HUE].clip(0)
        self._kinds = np.flatnonzero(most)
        self._low = low[self._kinds]
        self._high = (neutral + most)[self._kinds]
        self.draws = 2 * len(self._kinds)

    def choose(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each image's kinds of change, in order, and amounts, ``[N, kinds]``."""
        count = len(self._kinds)
        order = draws[:, :count].argsort(axis=1)
        amounts = self._low + (self._high - self._low) * draws[:, count:]
        return self._kinds[order], np.take_along_axis(amounts, order, axis=1)

    def __call__(self, images: Tensor, draws: np.ndarray) -> Tensor:
        """Returns ``images`` with other colours."""
        for kinds, amounts in zip(*(chosen.T for chosen in self.choose(draws)), strict=True):
            # All blends at once, then the hues of the other images.
            hue = kinds == HUE
            images = blend(images, np.where(hue, BRIGHTNESS, kinds), np.where(hue, 1.0, amounts))
            if hue.any():
                rows = to_device(np.flatnonzero(hue), images.device)
                images[rows] = adjust_hue(images[rows], amounts[hue])
        return images


class RandAugment:
    """Does ``operations`` random ones of torchvision's ``v2.RandAugment`` to each image.

    From Cubuk et al. 2019, arXiv:1909.13719. torchvision's defaults hold: a moved pixel comes from
    the nearest one, and black from outside. The images of an operation are worked on at once;
    shears, shifts and rotations are one operation with different matrices.

    Args:
        operations: how many, one after the other.
        magnitude: the strength of all, 0 to 30.
    """

    def __init__(self, operations: int, magnitude: int) -> None:
        # torchvision's transforms take a while to import
        from torchvision.transforms.v2 import functional

        self.draws = 2 * operations
        self._magnitude = magnitude
        bits = round(8 - 4 * magnitude / (_BINS - 1))
        self._same_for_all = {
            Op.Posterize: partial(functional.posterize, bits=bits),
            Op.Solarize: partial(functional.solarize, threshold=255 * self._level(0.0, start=1.0)),
            Op.AutoContrast: functional.autocontrast,
            Op.Equalize: functional.equalize,
        }

    def __call__(self, images: Tensor, draws: np.ndarray) -> Tensor:
        """Returns the augmented images; an operation takes two ``draws``: kind and direction."""
        ops = (len(Op) * draws[:, ::2]).astype(np.int64)
        signs = np.where(draws[:, 1::2] < 0.5, -1.0, 1.0)
        images = images.clone()
        for kinds, directions in zip(ops.T, signs.T, strict=True):
            self._operate(images, kinds, directions)
        return images

    def _operate(self, images: Tensor, ops: np.ndarray, signs: np.ndarray) -> None:
        """Does to each of ``images`` what ``ops`` says, in place."""
        height, width = images.shape[2:]
        # where a pixel is found, by sign and by operation
        matrices = []
        for sign in (-1, 1):
            shear = sign * self._level(0.3)
            angle = sign * math.radians(self._level(30.0))
            across = -sign * int(self._level(150.0 / 331.0 * width))
            down = -sign * int(self._level(150.0 / 331.0 * height))
            # shears are about the upper left corner
            matrices.append((
                ((1, shear, shear * height / 2), (0, 1, 0)),
                ((1, 0, 0), (shear, 1, shear * width / 2)),
                ((1, 0, across), (0, 1, 0)),
                ((1, 0, 0), (0, 1, down)),
                ((math.cos(angle), -math.sin(angle), 0), (math.sin(angle), math.cos(angle), 0)),
            ))  # fmt: skip
        factors = 1.0 + signs * self._level(0.9)
        # as they lie in memory: whole images are copied, not byte by byte
        whole = images.permute(0, 2, 3, 1)
        for first, end in pairwise(_GROUPS):
            at = np.flatnonzero((first <= ops) & (ops < end))
            if not len(at):
                continue
            rows = to_device(at, images.device)
            part = whole.index_select(0, rows).permute(0, 3, 1, 2)
            kinds = ops[at] - first
            match first:
                case Op.ShearX:
                    moves = np.array(matrices, np.float32)
                    part = affine(part, moves[(signs[at] > 0).astype(int), kinds])
                case Op.Brightness:
                    blends = np.array([BRIGHTNESS, SATURATION, CONTRAST])
                    part = blend(part, blends[kinds], factors[at])
                case Op.Sharpness:
                    part = adjust_sharpness(part, factors[at])
                case _:
                    part = self._same_for_all[Op(first)](part)
            whole.index_copy_(0, rows, part.permute(0, 2, 3, 1))

    def _level(self, end: float, start: float = 0.0) -> float:
        """Returns the magnitude's place between ``start`` and ``end``, rounded as torchvision's."""
        return float(torch.linspace(start, end, _BINS)[self._magnitude])


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns ``values`` on ``device``, float64 as float32."""
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return accelerator.get(device).copy(torch.from_numpy(values))


def blend(images: Tensor, kinds: np.ndarray, factors: np.ndarray) -> Tensor:
    """Changes brightness, contrast or saturation, as ``kinds`` says; 1 does nothing.

    Each of the three is a blend with a grey: with black, with the luma's mean, with the luma.
    """
    rests = np.where(kinds == BRIGHTNESS, 0.0, 1.0 - factors)
    shares = to_device(np.stack((factors, rests)), images.device)
    even = to_device(kinds == CONTRAST, images.device).view(-1, 1, 1, 1)
    pixels = images.float()
    red, green, blue = pixels.split(1, dim=1)
    luma = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()
    grey = torch.where(even, luma.mean((2, 3), keepdim=True), luma)
    own, rest = shares.view(2, -1, 1, 1, 1)
    return pixels.mul_(own).addcmul_(grey, rest).clamp_(0, 255).to(torch.uint8)


def adjust_hue(images: Tensor, turns: np.ndarray) -> Tensor:
    """Turns hues by ``turns``, 1 being the whole circle.

    The colour's place on the circle in sixths, then each channel from it (Smith 1978, "Color gamut
    transform pairs").
    """
    pixels = images.float()
    red, green, blue = pixels.split(1, dim=1)
    value = pixels.amax(1, keepdim=True)
    chroma = value - pixels.amin(1, keepdim=True)
    # a grey pixel has no hue, and needs none
    span = chroma.clamp(min=1)
    sixth = torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span)
    sixth = torch.where(value == red, (green - blue) / span, sixth)
    sixth += to_device(6 * turns, images.device).view(-1, 1, 1, 1)
    place = (sixth + torch.arange(5, 0, -2, device=images.device).view(3, 1, 1)).remainder_(6)
    lost = torch.minimum(place, 4 - place).clamp_(0, 1).mul_(chroma)
    return (value - lost).mul_(255.999 / 255).to(torch.uint8)


def adjust_sharpness(images: Tensor, factors: np.ndarray) -> Tensor:
    """Blends images with their blurred selves: 1 does nothing, 0 blurs, the border stays."""
    pixels = images.float()
    around = F.avg_pool2d(pixels, 3, stride=1, divisor_override=1)
    inner = pixels[:, :, 1:-1, 1:-1]
    # thirteenths of integers are never half-way
    blurred = around.add_(inner, alpha=4).mul_(1 / 13).round_()
    inner.add_(blurred.sub_(inner).mul_(to_device(1.0 - factors, images.device).view(-1, 1, 1, 1)))
    return pixels.clamp_(0, 255).to(torch.uint8)


def affine(images: Tensor, matrices: np.ndarray) -> Tensor:
    """Moves each pixel by ``matrices``, float32 ``[N, 2, 3]``, to the nearest; outside is black.

    Matrices act on pixel coordinates (x, y, 1) whose origin is the image's centre. The arithmetic
    is torchvision's to the last bit, or pixels half-way between two would come from the other.
    """
    count, _, height, width = images.shape
    places = torch.ones(height, width, 3, device=images.device)
    places[..., 0] = torch.arange(width, device=images.device) - (width - 1) / 2
    places[..., 1] = (torch.arange(height, device=images.device) - (height - 1) / 2).unsqueeze(1)
    # which are at -1 and 1
    to_edges = matrices / np.array([[width / 2], [height / 2]], dtype=np.float32)
    # A product of matrices rounds as this processor's library has it, and so does torchvision's.
    grid = places.view(-1, 3) @ to_device(to_edges, images.device).mT
    grid = grid.view(count, height, width, 2)
    return F.grid_sample(images.float(), grid, mode="nearest", align_corners=False).to(torch.uint8)


class Mix:
    """Erases from each image, then mixes each with the one before it; torchvision's v2 transforms.

    An erased rectangle is 0 after normalisation: the mean colour. It is a function of (seed, epoch,
    index); how images are mixed, of (seed, epoch) and the batch's first index. With both mixup and
    CutMix, each batch gets one or the other.
    """

    def __init__(self, augment: AugmentConfig, classes: int, seed: int) -> None:
        self._augment = augment
        self._classes = classes
        self._seed = seed
        mixers = (("mixup", augment.mixup), ("cutmix", augment.cutmix))
        self._mixers = [(name, alpha) for name, alpha in mixers if alpha]

    @classmethod
    def from_config(cls, augment: AugmentConfig, classes: int | None, seed: int) -> Mix | None:
        """Returns what ``augment`` sets, or None; ``classes`` may be None if nothing is mixed."""
        mix = cls(augment, classes or 0, seed)
        assert classes is not None or not mix._mixers, "mixed labels have a place for each class"
        return mix if augment.random_erasing or mix._mixers else None

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
        if self._augment.random_erasing:
            indices = batch.indices.numpy()
            draws = uniforms(self._seed, batch.epoch, indices, 1 + 4 * _TRIES, stream=_ERASE)
            boxes = erased_boxes(draws[:, 1:], height, width, self._augment)
            boxes[draws[:, 0] >= self._augment.random_erasing] = 0
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


def erased_boxes(draws: np.ndarray, height: int, width: int, augment: AugmentConfig) -> np.ndarray:
    """Returns random rectangles: top, left, bottom, right, int64 ``[N, 4]``; 0: none fits.

    The distribution of torchvision's ``v2.RandomErasing``, with four of the ``draws``, ``[N, 4 *
    tries]``, for each try.
    """
    area, aspect, down, across = np.moveaxis(draws.reshape(len(draws), -1, 4), 2, 0)
    least, most = augment.erasing_scale
    area = height * width * (least + (most - least) * area)
    low, high = np.log(augment.erasing_ratio)
    aspect = np.exp(low + (high - low) * aspect)
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
