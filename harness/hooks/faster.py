"""Speeds up the decoding and resizing of other people's data sets and transforms."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import choice
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

_Set = TypeVar("_Set")

_COMPOSES = transforms.Compose | v2.Compose
# a preset may begin with one of these
_TO_TENSOR = (transforms.PILToTensor, v2.PILToTensor, v2.ToImage)


def faster(dataset: _Set) -> _Set:
    """Returns the data set with JPEGs decoded, cut, resized and mirrored by this project.

    Random numbers are drawn as before and in the same order: crops and flips stay. Other formats
    and damaged files are left to the loader of the data set. Pixels differ by less than one grey
    level on average, by the resizing. What follows the mirroring stays, and gets a PIL image.

    Args:
        dataset: torchvision's ``ImageFolder``, or a kin of it, with its own loader; timm's
            ``ImageDataset``, also before ``create_loader`` gives it a transform; or a transform
            alone, for PIL images. The transform is a ``Compose``, or an object that has one, and
            begins with ``RandomResizedCrop`` or timm's, or with ``Resize`` and ``CenterCrop``, to a
            square, bilinear or bicubic.

    Raises:
        ValueError: the data set is another one, or its transforms begin otherwise.
    """
    given: Any = dataset
    loader = getattr(given, "loader", None)
    if loader in (folder.default_loader, folder.pil_loader):
        found: Any = copy.copy(given)
        # what torchvision calls; the attribute of the same name is for people
        found.transform, takes_arrays = _transform(found.transform)
        found.loader = partial(_load, loader, takes_arrays)
    elif hasattr(given, "reader") and hasattr(given, "input_img_mode"):
        found = _of_timm(given)
    elif callable(given) and _inside(given) is not None:
        found = _transform(given)[0]
    else:
        raise ValueError(
            "dataset: neither torchvision's ImageFolder with its own loader, nor timm's "
            "ImageDataset, nor a Compose; a data set of your own takes faster(transform) and "
            "load_image(path)"
        )
    return found  # type: ignore[no-any-return]


def load_image(path: str) -> Image.Image:
    """Returns an image file's pixels in RGB, for the loader of a data set of one's own.

    Raises:
        OSError: it cannot be read; as Pillow's are, with the path.
    """
    found: Image.Image = _load(folder.pil_loader, False, path)
    return found


def _inside(transform: Any) -> str | None:
    """Returns the attribute that holds the ``Compose`` of a transform; "": it is one itself."""
    if isinstance(transform, _COMPOSES):
        return ""
    parts = getattr(transform, "__dict__", {})
    names = [name for name, own in parts.items() if isinstance(own, _COMPOSES)]
    return names[0] if len(names) == 1 else None


def _transform(transform: Any) -> tuple[Any, bool]:
    """Returns a faster transform, and whether it takes arrays too.

    Raises:
        ValueError: it has no ``Compose``, or begins otherwise.
    """
    name = _inside(transform)
    if not name:
        return _fast([*_steps(transform)]), True
    found = copy.copy(transform)
    setattr(found, name, _fast([*_steps(getattr(transform, name))]))
    # its own code comes first
    return found, False


def _steps(transform: Any) -> Iterator[Any]:
    """Yields the transforms of a ``Compose``, and of those within it."""
    for step in transform.transforms if isinstance(transform, _COMPOSES) else ():
        yield from _steps(step) if isinstance(step, _COMPOSES) else (step,)


def _load(loader: Callable[[str], Any], as_array: bool, path: str) -> Any:
    """Returns the pixels that ``loader`` gives, of an intact JPEG without Pillow."""
    try:
        pixels = _decoded(read_regular(path))
        if pixels is None:
            pixels = np.asarray(loader(path))
        return pixels if as_array else Image.fromarray(pixels)
    except Exception as error:
        error.args = (f"{path}: {error}",)
        raise


def _decoded(data: bytes) -> np.ndarray | None:
    """Returns the pixels of an intact JPEG; None: it is something else."""
    with suppress(DecodeError):
        # of a larger image Pillow warns
        return decode_jpeg(data, Image.MAX_IMAGE_PIXELS or 2**40)
    return None


class _Reader:
    """A reader of timm's whose intact JPEGs are decoded, in a form that Pillow only copies."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_reader":
            raise AttributeError(name)
        return getattr(self._reader, name)

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Any:
        file, *rest = self._reader[index]
        pixels = _decoded(file.read())
        if pixels is None:
            file.seek(0)
        else:
            file.close()
            height, width, _ = pixels.shape
            file = io.BytesIO(b"P6 %d %d 255\n" % (width, height) + pixels.tobytes())
        return (file, *rest)


def _of_timm(dataset: Any) -> Any:
    """Returns timm's ``ImageDataset`` with each transform that it is given made faster."""
    state = dict(vars(dataset))
    if dataset.load_bytes:
        raise ValueError("dataset: load_bytes=True gives bytes, and no images")
    if state["transform"] is not None:
        state["transform"] = _transform(state["transform"])[0]
    state["reader"] = _Reader(state["reader"])
    return _remade(type(dataset), state)


def _remade(kind: type, state: dict[str, Any]) -> Any:
    """Returns an object of a kin of ``kind`` with these attributes."""

    def assign(self: Any, name: str, value: Any) -> None:
        # as timm's create_loader does, and whoever has it made faster already
        if name == "transform" and value is not None and not isinstance(value, _Fast):
            value = _transform(value)[0]
        object.__setattr__(self, name, value)

    def reduce(self: Any) -> tuple[Any, ...]:
        return _remade, (kind, dict(vars(self)))

    kin: Any = type(kind.__name__, (kind,), {"__setattr__": assign, "__reduce__": reduce})
    found = kin.__new__(kin)
    vars(found).update(state)
    return found


def _filter(step: Any) -> str | list[str]:
    """Returns the antialiased filter that ``step`` resizes by, or those of which it draws one.

    Empty: none that serves here.
    """
    # version 2 keeps what it was given
    several = isinstance(step.interpolation, tuple)
    given = [getattr(each, "value", each) for each in np.atleast_1d(step.interpolation)]
    serve = getattr(step, "antialias", True) and {*given} <= {"bilinear", "bicubic"}
    return (given if several else given[0]) if serve else ""


def _side(step: Any) -> int:
    """Returns the side of the square that ``step`` makes; 0: it makes none."""
    sides = {int(side) for side in np.ravel(step.size)}
    return sides.pop() if len(sides) == 1 else 0


@dataclass
class _Fast:
    """Cuts to a square, resizes and mirrors in one go, then does the rest.

    Attributes:
        size: side of the square.
        filter: that resizes; one of several is drawn.
        random: draws what is cut; None: the centre.
        short: the shorter side that the centre is cut from.
        flip: how often it mirrors; None: never, and nothing is drawn.
    """

    size: int
    filter: str | list[str]
    random: Any = None
    short: int = 0
    flip: float | None = None
    rest: Any = None

    def __call__(self, image: Any) -> Any:
        pixels = np.asarray(image if isinstance(image, np.ndarray) else image.convert("RGB"))
        height, width, _ = pixels.shape
        box: Box = (0, 0, width, height)
        new_size = None
        if self.random is not None:
            # of which it asks the size
            size = torch.empty(3, height, width, device="meta")
            top, left, h, w = self.random.get_params(size, self.random.scale, self.random.ratio)
            box = (left, top, w, h)
        else:
            new_size = CropTransform(self.size, resize=self.short).whole_size(width, height)
        name = self.filter if isinstance(self.filter, str) else choice(self.filter)
        mirrored = self.flip is not None and bool(torch.rand(1) < self.flip)
        out = np.empty((self.size, self.size, 3), np.uint8)
        resize_into(pixels, box, out.transpose(2, 0, 1), mirrored, new_size, name)
        return self.rest(Image.fromarray(out))


def _fast(steps: Sequence[Any]) -> _Fast:
    """Returns what does the first transforms in one go, and then the others.

    Raises:
        ValueError: they begin otherwise.
    """
    found = None
    first = [*steps[:1]] if isinstance(next(iter(steps), None), _TO_TENSOR) else []
    match [*steps[len(first) :]]:
        case [crop, *rest] if _cuts(crop):
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
            "the transform does not begin with RandomResizedCrop, or Resize and CenterCrop, "
            "to a square, bilinear or bicubic"
        )
    match rest:
        case [transforms.RandomHorizontalFlip() | v2.RandomHorizontalFlip() as flip, *rest]:
            found.flip = flip.p
    # watched, each of its transforms is a stage
    found.rest = transforms.Compose([*first, *rest])
    return found


def _cuts(step: Any) -> bool:
    """Whether ``step`` is torchvision's ``RandomResizedCrop``, or timm's."""
    names = {kind.__name__ for kind in type(step).__mro__}
    return bool(names & {"RandomResizedCrop", "RandomResizedCropAndInterpolation"})
