"""Torchvision's ``ImageFolder`` with this project's decoding and resizing in its place."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import folder
from torchvision.transforms import v2

from harness.data.decode import DecodeOptions, decode
from harness.data.transforms import Box, TrainTransform, resize_into
from harness.runtime.files import read_regular

_Set = TypeVar("_Set", bound=folder.DatasetFolder)

_COMPOSES = (transforms.Compose, v2.Compose)
_CROPS = (transforms.RandomResizedCrop, v2.RandomResizedCrop)
_RESIZES = (transforms.Resize, v2.Resize)
_CENTERS = (transforms.CenterCrop, v2.CenterCrop)
_FLIPS = (transforms.RandomHorizontalFlip, v2.RandomHorizontalFlip)
# images that are compared
_COMPARED = 32


def faster(dataset: _Set) -> _Set:
    """Returns the data set with JPEGs decoded, cut, resized and mirrored by this project.

    Random numbers are drawn as before and in the same order: crops and flips stay. Pixels differ by
    less than one grey level on average. What follows the mirroring stays, and gets a PIL image.

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
    head, rest = _head(_steps(dataset))
    found = copy.copy(dataset)
    found.loader = _load
    # what torchvision calls; the attribute of the same name is for people
    found.transform = _Fast(head, transforms.Compose([*rest]))
    return found


def _steps(dataset: Any) -> Sequence[Any]:
    compose = dataset.transform
    return compose.transforms if isinstance(compose, _COMPOSES) else ()


def _load(path: str) -> np.ndarray:
    return decode(read_regular(path), DecodeOptions())


class _Head(NamedTuple):
    """A crop to a square, and a flip or none."""

    size: int
    random: Any
    short: int
    flip: float | None
    interpolation: Any


def _head(steps: Sequence[Any]) -> tuple[_Head, Sequence[Any]]:
    """Returns what the first transforms do, and the others."""
    known = None
    if steps and isinstance(steps[0], _CROPS) and _filter(steps[0]):
        known = _Head(_side(steps[0]), steps[0], 0, None, _filter(steps[0]))
        rest = steps[1:]
    elif (
        len(steps) > 1
        and isinstance(steps[0], _RESIZES)
        and isinstance(steps[1], _CENTERS)
        and _filter(steps[0])
        and not getattr(steps[0], "max_size", None)
    ):
        short = np.ravel(steps[0].size)
        if len(short) == 1 and short[0] >= _side(steps[1]):
            known = _Head(_side(steps[1]), None, int(short[0]), None, _filter(steps[0]))
            rest = steps[2:]
    if known is None or not known.size:
        raise ValueError(
            "dataset.transform: does not begin with RandomResizedCrop, or Resize and CenterCrop, "
            "to a square, bilinear or bicubic"
        )
    if rest and isinstance(rest[0], _FLIPS):
        return known._replace(flip=rest[0].p), rest[1:]
    return known, rest


def _filter(step: Any) -> str | None:
    """Returns the antialiased filter that ``step`` resizes by; None: none that serves here."""
    # version 2 keeps what it was given
    given = getattr(step.interpolation, "value", step.interpolation)
    return given if step.antialias and given in ("bilinear", "bicubic") else None


def _side(step: Any) -> int:
    """Returns the side of the square that ``step`` makes; 0: it makes none."""
    sides = {int(side) for side in np.ravel(step.size)}
    return sides.pop() if len(sides) == 1 else 0


class _Fast:
    """Cuts, resizes and mirrors in one go, then does the rest."""

    def __init__(self, head: _Head, rest: Callable[[Any], Any]) -> None:
        self._head = head
        self._rest = rest

    def __call__(self, pixels: np.ndarray) -> Any:
        height, width, _ = pixels.shape
        size, random, short, flip, interpolation = self._head
        box: Box = (0, 0, width, height)
        new_size = None
        if random is not None:
            # of which it asks the size
            image = torch.empty(1, dtype=torch.uint8).expand(3, height, width)
            top, left, h, w = random.get_params(image, random.scale, random.ratio)
            box = (left, top, w, h)
        else:
            new_size = TrainTransform(size, resize=short).whole_size(width, height)
        mirrored = flip is not None and bool(torch.rand(1) < flip)
        out = np.empty((size, size, 3), np.uint8)
        resize_into(pixels, box, out.transpose(2, 0, 1), mirrored, new_size, interpolation)
        return self._rest(Image.fromarray(out))


class Trial(NamedTuple):
    """What ``faster`` gives for reading, decoding, cutting and mirroring.

    Attributes:
        share: of their processor time that is left.
        difference: of the pixels, mean, in grey levels of 255.
        steps: names of the transforms that it does.
    """

    share: float
    difference: float
    steps: tuple[str, ...]


def trial(dataset: Any) -> Trial | None:
    """Tries ``faster`` on some images of a data set; None: it cannot serve it.

    Torch's generator is as before.
    """
    steps = _steps(dataset)
    theirs = copy.copy(dataset)
    try:
        steps = steps[: len(steps) - len(_head(steps)[1])]
        theirs.transform = transforms.Compose([*steps])
        ours = faster(theirs)
    except (ValueError, AttributeError):
        return None
    count = min(_COMPARED, len(dataset))
    picked = [place * len(dataset) // count for place in range(count)]
    spent_s = []
    made = []
    with torch.random.fork_rng(devices=[]):
        for one in (theirs, ours):
            for index in picked:
                # so that files and code are at hand
                one[index]
            begin_s = time.thread_time()
            for index in picked:
                torch.manual_seed(index)
                made.append(np.asarray(one[index][0], np.int16))
            spent_s.append(time.thread_time() - begin_s)
    apart = [np.abs(a - b).mean() for a, b in zip(made, made[count:], strict=False)]
    names = tuple(type(step).__name__ for step in steps)
    return Trial(spent_s[1] / spent_s[0], float(np.mean(apart)), names)
