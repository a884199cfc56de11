"""Speeds up the decoding and resizing of torchvision's ``ImageFolder``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import folder
from torchvision.transforms import v2

from ..data.decode import DecodeError, decode_jpeg
from ..data.transforms import Box, CropTransform, resize_into
from ..runtime.files import read_regular

_Set = TypeVar("_Set", bound=folder.DatasetFolder)


def faster(dataset: _Set) -> _Set:
    """Returns the data set with JPEGs decoded, cut, resized and mirrored by this project.

    Random numbers are drawn as before and in the same order: crops and flips stay. Other formats
    and damaged files are left to the loader of the data set. Pixels differ by less than one grey
    level on average, by the resizing. What follows the mirroring stays, and gets a PIL image.

    Args:
        dataset: torchvision's ``ImageFolder``, or a kin of it, with its own loader, and a
            ``Compose`` that begins with ``RandomResizedCrop``, or with ``Resize`` and
            ``CenterCrop``, to a square, bilinear or bicubic.

    Raises:
        ValueError: the data set is another one, or its transforms begin otherwise.
    """
    loader = getattr(dataset, "loader", None)
    if loader not in (folder.default_loader, folder.pil_loader):
        raise ValueError("dataset: not an ImageFolder of torchvision's with its own loader")
    found = copy.copy(dataset)
    found.loader = partial(_load, loader)
    # what torchvision calls; the attribute of the same name is for people
    found.transform = _fast(_steps(dataset))
    return found


def _steps(dataset: Any) -> Sequence[Any]:
    compose = dataset.transform
    return compose.transforms if isinstance(compose, transforms.Compose | v2.Compose) else ()


def _load(loader: Callable[[str], Any], path: str) -> np.ndarray:
    """Returns the pixels that ``loader`` gives, of an intact JPEG without Pillow."""
    try:
        with suppress(DecodeError):
            # of a larger image Pillow warns
            pixels = decode_jpeg(read_regular(path), Image.MAX_IMAGE_PIXELS or 2**40)
            if pixels is not None:
                return pixels
        return np.asarray(loader(path))
    except Exception as error:
        error.args = (f"{path}: {error}",)
        raise


def _filter(step: Any) -> str:
    """Returns the antialiased filter that ``step`` resizes by; empty: none that serves here."""
    # version 2 keeps what it was given
    given = getattr(step.interpolation, "value", step.interpolation)
    return given if step.antialias and given in ("bilinear", "bicubic") else ""


def _side(step: Any) -> int:
    """Returns the side of the square that ``step`` makes; 0: it makes none."""
    sides = {int(side) for side in np.ravel(step.size)}
    return sides.pop() if len(sides) == 1 else 0


@dataclass
class _Fast:
    """Cuts to a square, resizes and mirrors in one go, then does the rest.

    Attributes:
        size: side of the square.
        filter: that resizes.
        random: draws what is cut; None: the centre.
        short: the shorter side that the centre is cut from.
        flip: how often it mirrors; None: never, and nothing is drawn.
    """

    size: int
    filter: str
    random: Any = None
    short: int = 0
    flip: float | None = None
    rest: Any = None

    def __call__(self, pixels: np.ndarray) -> Any:
        height, width, _ = pixels.shape
        box: Box = (0, 0, width, height)
        new_size = None
        if self.random is not None:
            # of which it asks the size
            image = torch.empty(3, height, width, device="meta")
            top, left, h, w = self.random.get_params(image, self.random.scale, self.random.ratio)
            box = (left, top, w, h)
        else:
            new_size = CropTransform(self.size, resize=self.short).whole_size(width, height)
        mirrored = self.flip is not None and bool(torch.rand(1) < self.flip)
        out = np.empty((self.size, self.size, 3), np.uint8)
        resize_into(pixels, box, out.transpose(2, 0, 1), mirrored, new_size, self.filter)
        return self.rest(Image.fromarray(out))


def _fast(steps: Sequence[Any]) -> _Fast:
    """Returns what does the first transforms in one go, and then the others.

    Raises:
        ValueError: they begin otherwise.
    """
    found = None
    match [*steps]:
        case [transforms.RandomResizedCrop() | v2.RandomResizedCrop() as crop, *rest]:
            found = _Fast(_side(crop), _filter(crop), crop)
        case [
            transforms.Resize() | v2.Resize() as resize,
            transforms.CenterCrop() | v2.CenterCrop() as center,
            *rest,
        ] if not getattr(resize, "max_size", None):
            short = np.ravel(resize.size)
            if len(short) == 1 and short[0] >= _side(center):
                found = _Fast(_side(center), _filter(resize), short=int(short[0]))
    if found is None or not found.size or not found.filter:
        raise ValueError(
            "dataset.transform: does not begin with RandomResizedCrop, or Resize and CenterCrop, "
            "to a square, bilinear or bicubic"
        )
    match rest:
        case [transforms.RandomHorizontalFlip() | v2.RandomHorizontalFlip() as flip, *rest]:
            found.flip = flip.p
    # watched, each of its transforms is a stage
    found.rest = transforms.Compose(rest)
    return found
