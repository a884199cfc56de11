"""Speeds up decoding and resizing in existing datasets and transforms."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import choice
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from PIL import Image
from PIL.ImageFile import ImageFile
from torchvision import transforms, tv_tensors
from torchvision.datasets import folder
from torchvision.transforms import v2

from ..data.decode import DecodeError, decode_jpeg, jpeg_size
from ..data.libraries import decode_jpeg_part
from ..data.transforms import Box, CropTransform, resize_into
from ..data.whole import Seen
from ..runtime.files import read_regular

_Set = TypeVar("_Set")

_COMPOSES = transforms.Compose | v2.Compose
# presets may begin with one of these
_TO_TENSOR = (transforms.PILToTensor, v2.PILToTensor, v2.ToImage)


def faster(dataset: _Set) -> _Set:
    """Returns the dataset with JPEGs decoded, cropped, resized and flipped by wellfed.

    Random numbers are drawn in the same order as before, so crops and flips do not change. Pillow
    reads other formats and damaged files. Resized pixels differ by less than one gray level on
    average. A subsequent conversion to float32 and ``Normalize`` are done in one pass. All later
    transforms are kept.

    If a JPEG has been fully decoded before, only its crop is decoded.

    Args:
        dataset: a torchvision ``ImageFolder``, or a similar dataset, with its default loader; a
            timm ``ImageDataset``, even before ``create_loader`` sets its transform; or just a
            transform for PIL images. The transform is a ``Compose``, or an object that has one, and
            begins with torchvision's or timm's ``RandomResizedCrop``, or with ``Resize`` and
            ``CenterCrop``, with square output and bilinear or bicubic interpolation.

    Raises:
        ValueError: the dataset is of another kind, or its transforms begin differently.
    """
    given: Any = dataset
    loader = getattr(given, "loader", None)
    if loader in (folder.default_loader, folder.pil_loader):
        found: Any = copy.copy(given)
        # torchvision calls this attribute; its namesake is for display
        found.transform = _transform(found.transform)
        found.loader = partial(_load, loader)
    elif hasattr(given, "reader") and hasattr(given, "input_img_mode"):
        found = _of_timm(given)
    elif callable(given) and _inside(given) is not None:
        found = _transform(given)
    else:
        raise ValueError(
            "dataset: not a torchvision ImageFolder with its default loader, a timm "
            "ImageDataset or a Compose; in your own dataset, use faster(transform) and "
            "load_image(path)"
        )
    return found  # type: ignore[no-any-return]


def load_image(path: str) -> Image.Image:
    """Returns an image file in RGB, for your own dataset's loader.

    As with ``Image.open``, a JPEG is decoded lazily.

    Raises:
        OSError: it cannot be read; as in Pillow, but with the path in the message.
    """
    return _load(folder.pil_loader, path)


def _inside(transform: Any) -> str | None:
    """Returns the attribute that has a transform's ``Compose``; "" if it is one itself."""
    if isinstance(transform, _COMPOSES):
        return ""
    parts = getattr(transform, "__dict__", {})
    names = [name for name, own in parts.items() if isinstance(own, _COMPOSES)]
    return names[0] if len(names) == 1 else None


def _transform(transform: Any) -> Any:
    """Returns a faster transform.

    Raises:
        ValueError: it has no ``Compose``, or begins differently.
    """
    name = _inside(transform)
    if not name:
        return _fast(transform)
    found = copy.copy(transform)
    setattr(found, name, _fast(getattr(transform, name)))
    return found


def _steps(transform: Any) -> Iterator[Any]:
    """Yields the transforms in a ``Compose``, including nested ones."""
    for step in transform.transforms if isinstance(transform, _COMPOSES) else ():
        yield from _steps(step) if isinstance(step, _COMPOSES) else (step,)


def _load(loader: Callable[[str], Image.Image], path: str) -> Image.Image:
    """Returns the image from ``loader``; a JPEG is not decoded yet."""
    try:
        held = _held(read_regular(path), path)
        return loader(path) if held is None else _Jpeg(held)
    except Exception as error:
        error.args = (f"{path}: {error}",)
        raise


class _Held(io.BytesIO):
    """A JPEG for ``Image.open``; only ``_Jpeg`` reads its bytes."""

    mark = b"wellfed holds it"
    data: bytes
    # width and height
    size: tuple[int, int]
    path: str


def _held(data: bytes, path: str = "") -> _Held | None:
    """Returns a JPEG to decode later; None for other formats and sizes beyond Pillow's limit."""
    size = jpeg_size(data, Image.MAX_IMAGE_PIXELS or 2**40)
    if size is None:
        return None
    held = _Held(_Held.mark)
    held.data, held.size, held.path = data, size, path
    return held


class _Jpeg(ImageFile):
    """A lazily decoded RGB JPEG."""

    format = "JPEG"
    _held: _Held | None

    def _open(self) -> None:
        self._held = self.fp  # type: ignore[assignment]
        assert self._held is not None
        self._size, self._mode = self._held.size, "RGB"

    def convert(self, mode: str | None = None, *more: Any, **named: Any) -> Image.Image:
        if mode == "RGB" and self._held is not None:
            return self
        return super().convert(mode, *more, **named)

    def load(self) -> Any:
        if self._held is not None:
            self.im = Image.fromarray(_whole(self._held)[0]).im
            self._held = None
        return super().load()

    def part(self, box: Box, seen: Seen) -> tuple[np.ndarray, Box]:
        """Returns pixels, uint8 ``[H, W, 3]``, and the position of ``box`` in them."""
        if self._held is None:
            return np.asarray(self), box
        data = self._held.data
        digest = xxhash.xxh3_64_intdigest(data)
        with suppress(ValueError):
            if seen.has(digest, digest) and (found := decode_jpeg_part(data, lambda *_: box)):
                return found
        pixels, intact = _whole(self._held)
        if intact:
            seen.add(digest, digest)
        return pixels, box


def _whole(held: _Held) -> tuple[np.ndarray, bool]:
    """Returns all pixels, and whether the file is intact; Pillow handles damaged ones."""
    with suppress(DecodeError):
        width, height = held.size
        if (pixels := decode_jpeg(held.data, width * height)) is not None:
            return pixels, True
    try:
        return np.asarray(Image.open(io.BytesIO(held.data)).convert("RGB")), False
    except Exception as error:
        if held.path:
            error.args = (f"{held.path}: {error}",)
        raise


# registered last, because Pillow's own formats come first
Image.register_open("WELLFED", _Jpeg, lambda prefix: prefix == _Held.mark)


class _Reader:
    """A timm reader whose JPEGs are decoded later."""

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
        held = _held(file.read())
        if held is None:
            file.seek(0)
            return (file, *rest)
        file.close()
        return (held, *rest)


def _of_timm(dataset: Any) -> Any:
    """Returns a timm ``ImageDataset`` that speeds up each transform assigned to it."""
    state = dict(vars(dataset))
    if dataset.load_bytes:
        raise ValueError("dataset: load_bytes=True returns bytes, not images")
    if state["transform"] is not None:
        state["transform"] = _transform(state["transform"])
    state["reader"] = _Reader(state["reader"])
    return _remade(type(dataset), state)


def _remade(kind: type, state: dict[str, Any]) -> Any:
    """Returns an instance of a subclass of ``kind`` with these attributes."""

    def assign(self: Any, name: str, value: Any) -> None:
        # assigned by timm's create_loader, or already faster
        if name == "transform" and value is not None and not isinstance(value, _Fast):
            value = _transform(value)
        object.__setattr__(self, name, value)

    def reduce(self: Any) -> tuple[Any, ...]:
        return _remade, (kind, dict(vars(self)))

    kin: Any = type(kind.__name__, (kind,), {"__setattr__": assign, "__reduce__": reduce})
    found = kin.__new__(kin)
    vars(found).update(state)
    return found


def _filters(step: Any) -> list[str]:
    """Returns the antialiased filter of ``step``, or the filters from which it draws one.

    Empty if unsupported.
    """
    # version 2 keeps its argument
    given = [getattr(each, "value", each) for each in np.atleast_1d(step.interpolation)]
    serve = getattr(step, "antialias", True) and {*given} <= {"bilinear", "bicubic"}
    return given if serve else []


def _side(step: Any) -> int:
    """Returns the side length of the square that ``step`` produces; 0 if there is none."""
    sides = {int(side) for side in np.ravel(step.size)}
    return sides.pop() if len(sides) == 1 else 0


@dataclass
class _Fast:
    """Crops to a square, resizes and flips in one pass, then applies the rest.

    Attributes:
        size: side of the square.
        filters: for resizing; one of several is drawn.
        random: draws the crop; None for a center crop.
        short: the shorter side before the center crop.
        flip: probability of a flip; None: never, and nothing is drawn.
        rest: the later transforms.
        seen: the JPEGs that were fully decoded.
    """

    size: int
    filters: list[str]
    random: Any = None
    short: int = 0
    flip: float | None = None
    rest: Any = None
    seen: Seen = field(default_factory=Seen)

    def __call__(self, image: Image.Image) -> Any:
        width, height = image.size
        box: Box = (0, 0, width, height)
        new_size = None
        if self.random is not None:
            # only its size is used
            size = torch.empty(3, height, width, device="meta")
            top, left, h, w = self.random.get_params(size, self.random.scale, self.random.ratio)
            box = (left, top, w, h)
        else:
            new_size = CropTransform(self.size, resize=self.short).whole_size(width, height)
        name = choice(self.filters) if len(self.filters) > 1 else self.filters[0]
        mirrored = self.flip is not None and bool(torch.rand(1) < self.flip)
        if isinstance(image, _Jpeg):
            pixels, box = image.part(box, self.seen)
        else:
            pixels = np.asarray(image.convert("RGB"))
        out = np.empty((self.size, self.size, 3), np.uint8)
        resize_into(pixels, box, out.transpose(2, 0, 1), mirrored, new_size, name)
        to_float = isinstance(next(iter(self.rest.transforms), None), ToFloat)
        return self.rest(out if to_float else Image.fromarray(out))


def _fast(transform: Any) -> _Fast:
    """Returns a transform that fuses the first steps of ``transform`` and applies the others.

    Raises:
        ValueError: the first steps are of other kinds.
    """
    found = None
    steps = [*_steps(transform)]
    first = [step for step in steps[:1] if isinstance(step, _TO_TENSOR)]
    match steps[len(first) :]:
        case [crop, *rest] if _cuts(crop):
            found = _Fast(_side(crop), _filters(crop), crop)
        case [
            transforms.Resize() | v2.Resize() as resize,
            transforms.CenterCrop() | v2.CenterCrop() as center,
            *rest,
        ] if not getattr(resize, "max_size", None):
            short = np.ravel(resize.size)
            if len(short) == 1 and short[0] >= _side(center):
                found = _Fast(_side(center), _filters(resize), short=int(short[0]))
    if found is None or not found.size or not found.filters:
        raise ValueError(
            "the transform does not begin with RandomResizedCrop, or Resize and CenterCrop, "
            "with square output and bilinear or bicubic interpolation"
        )
    match rest:
        case [transforms.RandomHorizontalFlip() | v2.RandomHorizontalFlip() as flip, *rest]:
            found.flip = flip.p
    # when watched, each of its transforms is a stage
    found.rest = transforms.Compose(_normalizing([*first, *rest]))
    return found


def _normalizing(steps: list[Any]) -> list[Any]:
    """Returns the transforms, with the steps from an array to normalized float32 fused into one."""
    image = v2.ToImage in map(type, steps[:1])
    match steps:
        case [transforms.ToTensor(), *rest] | [
            transforms.PILToTensor() | v2.PILToTensor() | v2.ToImage(),
            transforms.ConvertImageDtype(dtype=torch.float32)
            | v2.ToDtype(dtype=torch.float32, scale=True),
            *rest,
        ]:
            pass
        case _:
            return steps
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)
    match rest:
        case [transforms.Normalize() | v2.Normalize() as normalize, *rest]:
            mean, std = normalize.mean, normalize.std
    shift, scale = (np.array(each, np.float32).reshape(-1, 1, 1) for each in (mean, std))
    return [ToFloat(shift, scale, image), *rest]


@dataclass
class ToFloat:
    """Turns uint8 ``[H, W, 3]`` into a normalized float32 tensor ``[3, H, W]`` in one pass.

    Attributes:
        mean: value subtracted from each channel, 0..1.
        std: value by which the difference is divided.
        image: whether to return version 2's ``Image``.
    """

    mean: np.ndarray
    std: np.ndarray
    image: bool

    def __call__(self, image: np.ndarray) -> torch.Tensor:
        """Returns the image as a tensor."""
        pixels = image.transpose(2, 0, 1)
        out = np.empty(pixels.shape, np.float32)
        np.multiply(pixels, 1 / (255 * self.std), out=out)
        out -= self.mean / self.std
        tensor = torch.from_numpy(out)
        return tv_tensors.Image(tensor) if self.image else tensor


def _cuts(step: Any) -> bool:
    """Whether ``step`` is a ``RandomResizedCrop`` from torchvision or timm."""
    names = {kind.__name__ for kind in type(step).__mro__}
    return bool(names & {"RandomResizedCrop", "RandomResizedCropAndInterpolation"})
