"""From a name in the config to a training and a validation set.

A new data set is a function from ``DataConfig`` to two sources, a line in ``DATASETS``, a file in
``conf/data/`` and a test; or a function of the user's, which ``harness.data.own`` opens.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from harness.config import AugmentConfig, ConfigError, DataCache, DataConfig
from harness.data import cifar, shapes
from harness.data.cache import PixelCache
from harness.data.cache_files import Gathered, crop_error, open_caches
from harness.data.decode import DecodeOptions
from harness.data.images import ImageDataset
from harness.data.own import OwnDataset, open_own
from harness.data.storage import ArraySource, Source, open_folder_splits, split
from harness.data.transforms import EvalTransform, TrainTransform
from harness.runtime import parts
from harness.runtime.errors import DataError
from harness.watch.console import say

Opener = Callable[[DataConfig], tuple[Source, Source]]

# not the run's: another seed must not move images that a network was trained on into its validation
# set
_SPLIT_SEED = 0
_DIGITS_SPLIT = 0.2


@dataclass(frozen=True, slots=True)
class FakeDataset:
    """The numbers of a data set that does not exist: the feed makes its tensors on the device."""

    length: int
    image_size: int  # side in pixels
    num_classes: int

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class Splits:
    """A training and a validation set."""

    train: ImageDataset | OwnDataset | FakeDataset  # val is of the same kind
    val: ImageDataset | OwnDataset | FakeDataset
    classes: tuple[str, ...]
    name: str
    root: str  # empty where the data set has a place of its own

    @property
    def cache(self) -> PixelCache | None:
        """Where decoded images of both sets are kept; None where none are."""
        cache = getattr(self.train, "cache", None)
        return cache if isinstance(cache, PixelCache) else None

    @property
    def reserved_bytes(self) -> int:
        """Memory that the cache of decoded images may still take, of all ranks of this machine
        together.
        """
        return self.cache.reserved_bytes if self.cache is not None else 0


def open_digits(data: DataConfig) -> tuple[Source, Source]:
    """scikit-learn's 1797 handwritten digits of 8x8 grey pixels, four fifths of each class for
    training.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            'data=digits needs scikit-learn: pip install -e ".[digits]" or uv sync --extra digits'
        ) from error
    bunch = load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # 0..16, one channel
    images = np.ascontiguousarray(np.broadcast_to(grey[..., None], (*grey.shape, 3)))
    return split(
        ArraySource(images, bunch.target, map(str, range(10)), "digits"), _DIGITS_SPLIT, _SPLIT_SEED
    )


def open_folders(data: DataConfig) -> tuple[Source, Source]:
    """A folder tree of the user's.

    Raises:
        ConfigError: ``data.root`` is not set.
    """
    if data.root is None:
        raise ConfigError(
            f"data.root: data={data.name} needs it, for example data.root=/data/{data.name}"
        )
    return open_folder_splits(data.root, data.split_fraction, _SPLIT_SEED)


DATASETS: dict[str, Opener] = {
    "shapes": shapes.open_shapes,
    "digits": open_digits,
    "cifar10": cifar.open_cifar10,
    "cifar100": cifar.open_cifar100,
    "imagefolder": open_folders,
    "imagenet": open_folders,
}
FAKE = "fake"  # has no source: load makes it

_CACHE = {"cache", "cache_gb", "cache_max_side"}  # of what is decoded
_FOLDERS = {"root", "split_fraction", "exif_orientation", "background", "max_pixels", *_CACHE}
_ARCHIVE = {"root", "download", "mirror", "md5"}
_OPTIONAL = _FOLDERS | _ARCHIVE | {"generate"}  # settings that only some data sets have
_EFFECTIVE = {
    **dict.fromkeys(("imagefolder", "imagenet"), _FOLDERS),
    **dict.fromkeys(("cifar10", "cifar100"), _ARCHIVE),
    "shapes": _FOLDERS - {"split_fraction"} | {"generate"},
    "digits": set[str](),
    FAKE: {"generate"},
}


def load(
    data: DataConfig, augment: AugmentConfig, seed: int, gathered: Gathered = lambda value: [value]
) -> Splits:
    """The data set that ``data`` names, its training images changed as ``augment`` and ``seed``
    say.

    Every rank calls this, with ``gathered``, which gives every rank's value in their order, for a
    cache that they share.

    Raises:
        ConfigError: an unknown name, a setting without effect, or one that is missing.
        DataError: the data set is missing, incomplete or unreadable.
    """
    _check(data)
    size = data.image_size
    if data.name == FAKE:
        numbers = data.generate
        fake_train, fake_val = (
            FakeDataset(n, size, numbers.classes)
            for n in (numbers.train_images, numbers.val_images)
        )
        return Splits(fake_train, fake_val, tuple(map(str, range(numbers.classes))), FAKE, "")
    first, second = (
        open_own(data, seed, _SPLIT_SEED) if parts.is_own(data.name) else DATASETS[data.name](data)
    )
    if isinstance(first, OwnDataset) or isinstance(second, OwnDataset):
        assert isinstance(first, OwnDataset) and isinstance(second, OwnDataset)
        return Splits(first, second, first.classes, data.name, data.root or "")
    sources = first, second
    red, green, blue = data.background
    options = DecodeOptions(data.exif_orientation, (red, green, blue), data.max_pixels)
    opened = (
        open_caches(sources, data, options, gathered) if data.cache is not DataCache.none else None
    )
    caches = opened or (None, None)
    transform = TrainTransform.from_config(augment, size, data.eval_resize)
    train = ImageDataset(sources[0], transform, options, size, seed, caches[0])
    val = ImageDataset(
        sources[1], EvalTransform(size, data.eval_resize), options, size, seed, caches[1]
    )
    if data.cache_max_side is not None:
        error = crop_error(train, data.cache_max_side)
        change = (
            "no image was larger"
            if error is None
            else f"larger images change by {error:.2f} grey levels a pixel"
        )
        say(
            f"data.cache_max_side={data.cache_max_side}: of some training images looked at, "
            f"{change}"
        )
    return Splits(train, val, train.classes, data.name, data.root or "")


def _check(data: DataConfig) -> None:
    names = [*DATASETS, FAKE]
    if data.name not in names and not parts.is_own(data.name):
        near = difflib.get_close_matches(data.name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"data.name={data.name}: no such data set; choose from {', '.join(names)}{hint}"
        )
    default = DataConfig()
    for setting in sorted(_OPTIONAL - _EFFECTIVE.get(data.name, _OPTIONAL)):
        if (value := getattr(data, setting)) != getattr(default, setting):
            value = value.name if isinstance(value, Enum) else value
            raise ConfigError(
                f"data.{setting}={value} has no effect with data={data.name}; leave it out"
            )
    if data.eval_resize is not None and data.eval_resize < data.image_size:
        reason = (
            f"is smaller than data.image_size={data.image_size}; the centre crop would reach "
            "over the edge"
        )
        raise ConfigError(f"data.eval_resize={data.eval_resize} {reason}")
