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
from torchvision.transforms import InterpolationMode, v2

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
            ``CenterCrop``, to a square, bilinear.

    Raises:
        ValueError: the data set is another one, or its transforms begin otherwise.
    """
    loader = getattr(dataset, "loader", None)
    if loader not in (folder.default_loader, folder.pil_loader):
        raise ValueError("dataset: not an ImageFolder of torchvision's with its own loader")
    steps = dataset.transform.transforms if isinstance(dataset.transform, _COMPOSES) else ()
    head, rest = _head(steps)
    found = copy.copy(dataset)
    found.loader = _load
    # what torchvision calls; the attribute of the same name is for people
    found.transform = _Fast(head, transforms.Compose([*rest]))
    return found


def _load(path: str) -> np.ndarray:
    return decode(read_regular(path), DecodeOptions())


class _Head(NamedTuple):
    """A crop to a square, and a flip or none."""

    size: int
    random: Any
    short: int
    flip: float | None


def _head(steps: Sequence[Any]) -> tuple[_Head, Sequence[Any]]:
    """Returns what the first transforms do, and the others."""
    known = None
    if steps and isinstance(steps[0], _CROPS) and _plain(steps[0]):
        known = _Head(_side(steps[0]), steps[0], 0, None)
        rest = steps[1:]
    elif (
        len(steps) > 1
        and isinstance(steps[0], _RESIZES)
        and isinstance(steps[1], _CENTERS)
        and _plain(steps[0])
        and not getattr(steps[0], "max_size", None)
    ):
        short = np.ravel(steps[0].size)
        if len(short) == 1 and short[0] >= _side(steps[1]):
            known = _Head(_side(steps[1]), None, int(short[0]), None)
            rest = steps[2:]
    if known is None or not known.size:
        raise ValueError(
            "dataset.transform: does not begin with RandomResizedCrop, or Resize and CenterCrop, "
            "to a square, bilinear"
        )
    if rest and isinstance(rest[0], _FLIPS):
        return known._replace(flip=rest[0].p), rest[1:]
    return known, rest


def _plain(step: Any) -> bool:
    return InterpolationMode(step.interpolation) is InterpolationMode.BILINEAR and step.antialias


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
        size, random, short, flip = self._head
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
        resize_into(pixels, box, out.transpose(2, 0, 1), mirrored, new_size)
        return self._rest(Image.fromarray(out))


class Trial(NamedTuple):
    """What ``faster`` gives: seconds of a sample before and after, and the pixels' difference.

    ``difference`` is the mean of the grey levels, 0..255.
    """

    before_s: float
    after_s: float
    difference: float


def trial(dataset: Any) -> Trial | None:
    """Returns what ``faster`` gives for some images of a data set; None: it cannot serve it.

    Nothing is drawn from a generator of torch's that is not put back.
    """
    try:
        quick = faster(dataset)
    except (ValueError, AttributeError):
        return None
    picked = np.linspace(0, len(dataset) - 1, min(_COMPARED, len(dataset))).astype(int).tolist()
    sides = []
    with torch.random.fork_rng(devices=[]):
        for one in (dataset, quick):
            took_s = []
            made = []
            # the second look finds files and code at hand
            for index in 2 * picked:
                torch.manual_seed(index)
                begin_s = time.thread_time()
                made.append(one[index][0])
                took_s.append(time.thread_time() - begin_s)
            sides.append((float(np.median(took_s[len(picked) :])), made[len(picked) :]))
    return Trial(sides[0][0], sides[1][0], _difference(*(made for _, made in sides)))


def _difference(some: Sequence[Any], others: Sequence[Any]) -> float:
    """Returns the mean difference of the images, in 255ths of their range."""
    if not all(isinstance(image, torch.Tensor) for image in (*some, *others)):
        some, others = (
            [torch.from_numpy(np.array(image)) for image in images] for images in (some, others)
        )
    scale = 1.0
    if some[0].is_floating_point():
        low = min(float(image.min()) for image in some)
        high = max(float(image.max()) for image in some)
        scale = 255.0 / max(high - low, 1e-9)
    pairs = zip(some, others, strict=True)
    return scale * float(np.mean([float((a.float() - b.float()).abs().mean()) for a, b in pairs]))
