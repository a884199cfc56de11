"""Augments uint8 batches ``[N, 3, H, W]`` on their device, from ColorJitter to mixup.

The pixels equal those from torchvision's tensor functions, which take one parameter per batch; here
each image has its own. Parameters are float64 ``[N]`` and drawn on the host; the host never waits
for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import AugmentConfig, Policies
from ..runtime import accelerator
from ..runtime.seeding import BATCH, OWN, order_rng, uniforms
from .own import OwnAugment

# numbered as in torchvision's ColorJitter
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)

# uint8 pixels per chunk on a CPU, so that their float32 copies fit in its caches
_CACHED_BYTES = 1 << 20

_BINS = 31
# random streams, like those in seeding
_ERASE = 4
_MIX = 5
_TRIES = 10
# in torchvision's order, which keeps the operations in a group adjacent, then 3-Augment's
Op = IntEnum(
    "Op",
    "Identity ShearX ShearY TranslateX TranslateY Rotate Brightness Color Contrast Sharpness "
    "Posterize Solarize AutoContrast Equalize Gray Blur",
    start=0,
)
# the first operation in each group that runs together, and the end of the last group
_GROUPS = (
    Op.ShearX, Op.Brightness, Op.Sharpness, Op.Posterize, Op.Solarize, Op.AutoContrast, Op.Equalize,
    Op.Gray, Op.Blur, len(Op),
)  # fmt: skip
# largest shear, shift (fraction of the side, and pixels), angle, color change, bits dropped
_NARROW = 0.3, 150 / 331, 0, 30, 0.9, 4
_WIDE = 0.99, 0, 32, 135, 0.99, 6
# AutoAugment's pairs: operation, probability in tenths, magnitude; Solarize 9 inverts
_IMAGENET = """Posterize 4 8    Rotate 6 9
Solarize 6 5    AutoContrast 6 0
Equalize 8 0    Equalize 6 0
Posterize 6 7    Posterize 6 6
Equalize 4 0    Solarize 2 4
Equalize 4 0    Rotate 8 8
Solarize 6 3    Equalize 6 0
Posterize 8 5    Equalize 10 0
Rotate 2 3    Solarize 6 8
Equalize 6 0    Posterize 4 6
Rotate 8 8    Color 4 0
Rotate 4 9    Equalize 6 0
Equalize 0 0    Equalize 8 0
Solarize 6 9    Equalize 10 0
Color 6 4    Contrast 10 8
Rotate 8 8    Color 10 2
Color 8 8    Solarize 8 7
Sharpness 4 7    Solarize 6 9
ShearX 6 5    Equalize 10 0
Color 4 0    Equalize 6 0
Equalize 4 0    Solarize 2 4
Solarize 6 5    AutoContrast 6 0
Solarize 6 9    Equalize 10 0
Color 6 4    Contrast 10 8
Equalize 8 0    Equalize 6 0""".splitlines()


@dataclass(eq=False)
class BatchAugment:
    """Applies ``parts`` one after another, as a function of (seed, epoch, index) and the pixels.

    A part maps uint8 ``[N, 3, H, W]`` and float64 draws ``[N, part.draws]`` in [0, 1), one row per
    image, to new images. The user's ``own`` function runs last, on the whole batch.
    """

    parts: Sequence[Policy | ColorJitter]
    seed: int
    own: OwnAugment | None = None

    @classmethod
    def from_config(cls, augment: AugmentConfig, seed: int) -> BatchAugment | None:
        """Returns the rotation, policy and color jitter that ``augment`` sets, or None."""
        parts: list[Policy | ColorJitter] = []
        if most := augment.rotate:
            parts.append(Policy(["Rotate 10 -1"], 1, between=(-most, most)))
        if policy := Policy.from_config(augment):
            parts.append(policy)
        if any(augment.color_jitter):
            parts.append(ColorJitter(augment.color_jitter))
        name = augment.own_batch
        own = OwnAugment("augment.own_batch", name) if name else None
        return cls(parts, seed, own) if parts or own else None

    def __call__(self, images: Tensor, batch: Any) -> Tensor:
        """Returns augmented ``images``, uint8 ``[N, 3, H, W]``, in new memory on their device.

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
        # the user's function may change them in place
        images = done[0] if self.parts and len(done) == 1 else torch.cat(done)
        if self.own is not None:
            images = self.own(images, BatchRng(self.seed, batch, images.device))
        return images


@dataclass(slots=True)
class BatchRng:
    """A batch's random numbers on its ``device``: functions of (seed, epoch, index) per image."""

    seed: int
    batch: Any
    device: torch.device
    # numbers already drawn per image
    _drawn: int = 0

    def uniform(self, count: int) -> Tensor:
        """Returns the next ``count`` numbers per image, float32 ``[N, count]`` in [0, 1)."""
        first = self._drawn
        self._drawn += count
        indices = self.batch.indices.numpy()
        drawn = uniforms(self.seed, self.batch.epoch, indices, self._drawn, OWN)
        # rounding to float32 would turn the largest into 1
        return to_device(drawn[:, first:].clip(max=1 - 2**-24), self.device)


class ColorJitter:
    """Changes brightness, contrast, saturation and hue in random order, like ``v2.ColorJitter``.

    Args:
        most: largest deviations of the brightness, contrast and saturation factors from 1, with
            factors clamped at 0, and largest hue rotation in either direction, where 1 is the full
            circle; 0 disables an operation.
    """

    def __init__(self, most: Sequence[float]) -> None:
        neutral = np.array([1.0, 1.0, 1.0, 0.0])
        low = neutral - most
        low[:HUE] = low[:HUE].clip(0)
        self._kinds = np.flatnonzero(most)
        self._low = low[self._kinds]
        self._high = (neutral + most)[self._kinds]
        self.draws = 2 * len(self._kinds)

    def choose(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each image's operations, in order, and their amounts, ``[N, kinds]``."""
        count = len(self._kinds)
        order = draws[:, :count].argsort(axis=1)
        amounts = self._low + (self._high - self._low) * draws[:, count:]
        return self._kinds[order], np.take_along_axis(amounts, order, axis=1)

    def __call__(self, images: Tensor, draws: np.ndarray) -> Tensor:
        """Returns the jittered ``images``."""
        for kinds, amounts in zip(*(chosen.T for chosen in self.choose(draws)), strict=True):
            # All blends together, then the hues of the other images.
            hue = kinds == HUE
            images = blend(images, np.where(hue, BRIGHTNESS, kinds), np.where(hue, 1.0, amounts))
            if hue.any():
                rows = to_device(np.flatnonzero(hue), images.device)
                images[rows] = adjust_hue(images[rows], amounts[hue])
        return images


class Policy:
    """Applies random operations to each image, following a published policy.

    Each image draws one of the ``rows``, ``times`` times. A row's operations run in sequence; each
    has its own probability, and a random direction if it has two. As by default in torchvision,
    interpolation is nearest and the fill is black. All images with the same operation are processed
    together; shears, shifts and rotations are one operation with different matrices.

    Args:
        rows: operations, each with its probability in tenths and its magnitude, which is a bin
            counted from 0, or -1 to draw it from ``between``.
        bins: number of magnitudes.
        ends: largest magnitudes, ``_NARROW`` or ``_WIDE``.
        times: number of rows drawn per image.
        between: smallest and largest magnitude; by default, those of the blur width.
    """

    def __init__(
        self,
        rows: Sequence[str],
        bins: int,
        ends: Sequence[float] = _NARROW,
        times: int = 1,
        between: Sequence[float] = (0.1, 2.0),
    ) -> None:
        # slow to import
        from torchvision.transforms.v2 import functional

        words = [[Op.__members__.get(word, word) for word in row.split()] for row in rows]
        self._table = np.array(words, int).reshape(len(rows), -1, 3)
        self._bins = bins
        self._ends = ends
        self._between = between
        self.draws = times * (1 + self._table.shape[1])
        self._same_for_all = {
            Op.AutoContrast: functional.autocontrast,
            Op.Equalize: functional.equalize,
            Op.Gray: partial(functional.rgb_to_grayscale, num_output_channels=3),
        }

    @classmethod
    def from_config(cls, augment: AugmentConfig) -> Policy | None:
        """Returns the policy selected by ``augment``, or None.

        RandAugment (arXiv:1909.13719), TrivialAugmentWide (arXiv:2103.10158) and AutoAugment for
        ImageNet (arXiv:1805.09501) follow torchvision, 3-Augment (arXiv:2204.07118) follows timm.
        """
        every = range(Op.Equalize + 1)
        match augment.auto:
            case Policies.trivial:
                return cls([f"{op} 10 {bin}" for op in every for bin in range(_BINS)], _BINS, _WIDE)
            case Policies.three:
                return cls(["Solarize 10 5", "Gray 10 0", "Blur 10 -1"], 11)
            case Policies.auto:
                return cls(_IMAGENET, 10)
        times = augment.rand_augment or 2 * (augment.auto is Policies.rand)
        rows = [f"{op} 10 {augment.rand_augment_magnitude}" for op in every]
        return cls(rows, _BINS, times=times) if times else None

    def choose(self, draws: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns each image's operations and amounts, ``[N, times, operations]``, in order."""
        drawn = draws.reshape(len(draws), -1, 1 + self._table.shape[1])
        rows = (len(self._table) * drawn[..., 0]).astype(np.int64)
        ops, tenths, bins = np.moveaxis(self._table[rows], -1, 0)
        # one draw determines whether an operation runs, and its direction or amount
        chances = drawn[..., 1:]
        ops = np.where(10 * chances < tenths, ops, Op.Identity)
        amounts = _levels(self._ends, self._bins, height, width)[ops, bins]
        amounts[(20 * chances < tenths) & (ops <= Op.Sharpness)] *= -1
        low, high = self._between
        return ops, np.where(bins < 0, low + (high - low) * chances, amounts)

    def __call__(self, images: Tensor, draws: np.ndarray) -> Tensor:
        """Returns the augmented images."""
        chosen = self.choose(draws, *images.shape[2:])
        images = images.clone()
        for ops, amounts in zip(*(each.reshape(len(draws), -1).T for each in chosen), strict=True):
            self._operate(images, ops, amounts)
        return images

    def _operate(self, images: Tensor, ops: np.ndarray, amounts: np.ndarray) -> None:
        """Applies ``ops`` with their ``amounts`` to ``images``, in place."""
        # in memory order, so that whole images are copied instead of single bytes
        whole = images.permute(0, 2, 3, 1)
        for first, end in pairwise(_GROUPS):
            at = np.flatnonzero((first <= ops) & (ops < end))
            if not len(at):
                continue
            rows = to_device(at, images.device)
            part = whole.index_select(0, rows).permute(0, 3, 1, 2)
            own = amounts[at]
            match first:
                case Op.ShearX:
                    part = affine(part, moves(ops[at], own, *images.shape[2:]))
                case Op.Brightness:
                    kinds = np.array([BRIGHTNESS, SATURATION, CONTRAST])[ops[at] - first]
                    part = blend(part, kinds, 1.0 + own)
                case Op.Sharpness:
                    part = adjust_sharpness(part, 1.0 + own)
                case Op.Posterize:
                    part = part & per_image((256 - 2 ** own.round()).astype(np.uint8), part)
                case Op.Solarize:
                    part = torch.where(part >= per_image(255 * own, part), ~part, part)
                case Op.Blur:
                    part = blur(part, own)
                case _:
                    part = self._same_for_all[Op(first)](part)
            whole.index_copy_(0, rows, part.permute(0, 2, 3, 1))


# on a CPU, this is called for every few images in a batch
@lru_cache
def _levels(ends: Sequence[float], bins: int, height: int, width: int) -> np.ndarray:
    """Returns the magnitudes by bin, ``[operations, bins]``, rounded as in torchvision.

    Units are fractions, pixels, degrees, dropped bits and, for solarize, a fraction of white; the
    last operations have no magnitude.
    """
    shear, share, pixels, degrees, change, bits = ends
    shifts = (share * side + pixels for side in (width, height))
    largest = 0.0, shear, shear, *shifts, degrees, *4 * (change,), bits
    spans = [*((0.0, end) for end in largest), *[(1, 0)] * 5]
    return np.array([torch.linspace(*span, bins).tolist() for span in spans])


def moves(ops: np.ndarray, amounts: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns the inverse matrices of shears, shifts and rotations for ``affine``."""
    across, down, right, below, turn = amounts * (ops == np.c_[Op.ShearX : Op.Brightness])
    sine, cosine = np.sin(np.radians(turn)), np.cos(np.radians(turn))
    # the origin of shears is the upper left corner
    to_x = cosine, across - sine, across * height / 2 - np.trunc(right)
    to_y = down + sine, cosine, down * width / 2 - np.trunc(below)
    return np.moveaxis(np.array([to_x, to_y], np.float32), -1, 0)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns ``values`` on ``device``, with float64 converted to float32."""
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return accelerator.get(device).copy(torch.from_numpy(values))


def per_image(values: np.ndarray, images: Tensor) -> Tensor:
    """Returns ``values``, one per image, on the device of ``images``, ``[N, 1, 1, 1]``."""
    return to_device(values, images.device).view(-1, 1, 1, 1)


def blend(images: Tensor, kinds: np.ndarray, factors: np.ndarray) -> Tensor:
    """Changes brightness, contrast or saturation, selected by ``kinds``; a factor of 1 is a no-op.

    Each is a blend with black, with the mean luma or with the luma, respectively.
    """
    rests = np.where(kinds == BRIGHTNESS, 0.0, 1.0 - factors)
    shares = to_device(np.stack((factors, rests)), images.device)
    even = per_image(kinds == CONTRAST, images)
    pixels = images.float()
    red, green, blue = pixels.split(1, dim=1)
    luma = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()
    gray = torch.where(even, luma.mean((2, 3), keepdim=True), luma)
    own, rest = shares.view(2, -1, 1, 1, 1)
    return pixels.mul_(own).addcmul_(gray, rest).clamp_(0, 255).to(torch.uint8)


def adjust_hue(images: Tensor, turns: np.ndarray) -> Tensor:
    """Rotates hues by ``turns``, where 1 is the full circle.

    Computes the hue in sixths of the circle, then computes each channel from it (Smith 1978, "Color
    gamut transform pairs").
    """
    pixels = images.float()
    red, green, blue = pixels.split(1, dim=1)
    value = pixels.amax(1, keepdim=True)
    chroma = value - pixels.amin(1, keepdim=True)
    # gray pixels have no hue
    span = chroma.clamp(min=1)
    sixth = torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span)
    sixth = torch.where(value == red, (green - blue) / span, sixth)
    sixth += per_image(6 * turns, images)
    place = (sixth + torch.arange(5, 0, -2, device=images.device).view(3, 1, 1)).remainder_(6)
    lost = torch.minimum(place, 4 - place).clamp_(0, 1).mul_(chroma)
    return (value - lost).mul_(255.999 / 255).to(torch.uint8)


def adjust_sharpness(images: Tensor, factors: np.ndarray) -> Tensor:
    """Blends images with blurred copies: 1 is a no-op, 0 blurs; border pixels do not change."""
    pixels = images.float()
    around = F.avg_pool2d(pixels, 3, stride=1, divisor_override=1)
    inner = pixels[:, :, 1:-1, 1:-1]
    # thirteenths of integers are never halfway between integers
    blurred = around.add_(inner, alpha=4).mul_(1 / 13).round_()
    inner.add_(blurred.sub_(inner).mul_(per_image(1.0 - factors, images)))
    return pixels.clamp_(0, 255).to(torch.uint8)


def affine(images: Tensor, matrices: np.ndarray) -> Tensor:
    """Applies ``matrices``, float32 ``[N, 2, 3]``, with nearest interpolation and black fill.

    Matrices act on pixel coordinates (x, y, 1) whose origin is the image center. The arithmetic
    matches torchvision's to the last bit, because ties between two pixels would otherwise round
    differently.
    """
    count, _, height, width = images.shape
    places = torch.ones(height, width, 3, device=images.device)
    places[..., 0] = torch.arange(width, device=images.device) - (width - 1) / 2
    places[..., 1] = (torch.arange(height, device=images.device) - (height - 1) / 2).unsqueeze(1)
    # with the edges at -1 and 1
    to_edges = matrices / np.array([[width / 2], [height / 2]], dtype=np.float32)
    # matrix products round as the CPU's BLAS does, in torchvision too
    grid = places.view(-1, 3) @ to_device(to_edges, images.device).mT
    grid = grid.view(count, height, width, 2)
    return F.grid_sample(images.float(), grid, mode="nearest", align_corners=False).to(torch.uint8)


def blur(images: Tensor, sigmas: np.ndarray) -> Tensor:
    """Blurs like Pillow's ``GaussianBlur``, with three box filters per axis; ``sigmas`` at most 2.

    A box includes fractional pixels at both ends (Gwosdek et al. 2011, "Theoretical foundations
    of Gaussian convolution by extended box filtering").
    """
    square = sigmas**2
    radius = np.where(square < 2, square / (6 - 2 * square), (square + 18) / (24 - 2 * square))
    shares = np.clip(radius + 1 - abs(np.c_[-2:3]), 0, 1) / (2 * radius + 1)
    taps = to_device(shares, images.device).view(5, -1, 1, 1, 1)
    pixels = images.float()
    for _ in range(2):
        for _ in range(3):
            wide = F.pad(pixels, (2, 2, 0, 0), mode="replicate").unfold(3, pixels.shape[3], 1)
            pixels = sum(map(torch.mul, taps, wide.unbind(3)), torch.tensor(0.5)).floor_()
        pixels = pixels.mT
    return pixels.to(torch.uint8)


class Mix:
    """Erases a part of each image, then mixes it with the previous one, like torchvision's v2.

    Erased rectangles are filled with the mean color, 0 after normalization. They are a function of
    (seed, epoch, index); mixing is a function of (seed, epoch) and the first index in the batch. If
    mixup and CutMix are both set, each batch uses one of them.
    """

    def __init__(self, augment: AugmentConfig, classes: int, seed: int) -> None:
        self._augment = augment
        self._classes = classes
        self._seed = seed
        mixers = (("mixup", augment.mixup), ("cutmix", augment.cutmix))
        self._mixers = [(name, alpha) for name, alpha in mixers if alpha]

    @classmethod
    def from_config(cls, augment: AugmentConfig, classes: int | None, seed: int) -> Mix | None:
        """Returns the mix that ``augment`` sets, or None; only mixing needs ``classes``."""
        mix = cls(augment, classes or 0, seed)
        return mix if augment.random_erasing or mix._mixers else None

    def choose(self, batch: Any) -> tuple[str, float, np.random.Generator]:
        """Returns the mixer for a batch, each image's own share, and further random numbers."""
        rng = order_rng(self._seed, batch.epoch, int(batch.indices[0]), _MIX)
        name, alpha = self._mixers[rng.integers(len(self._mixers))]
        return name, rng.beta(alpha, alpha), rng

    def __call__(self, images: Tensor, labels: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the images and labels, mixed in new memory.

        Args:
            images: normalized, float ``[N, 3, H, W]``.
            labels: int64 ``[N]``; mixed labels are float32 ``[N, classes]``.
            batch: has the ``epoch`` and ``indices``, as in ``BatchAugment``.
        """
        height, width = images.shape[2:]
        # one comparison per batch, without a list of rectangles to wait for
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
            # a rectangle from the previous image, with area about 1 - share, clipped at the edges
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
    """Returns random rectangles: top, left, bottom, right, int64 ``[N, 4]``; zeros if none fits.

    The distribution is that of torchvision's ``v2.RandomErasing``. Each try uses four of the
    ``draws``, ``[N, 4 * tries]``.
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
    """Blends ``share`` of each row with the previous row, and the first row with the last."""
    mixed = torch.empty_like(values)
    torch.lerp(values[:-1], values[1:], share, out=mixed[1:])
    torch.lerp(values[-1:], values[:1], share, out=mixed[:1])
    return mixed
