"""From a name in the config to a training and a validation set.

A new data set is a function from ``DataConfig`` to two sources, a line in ``DATASETS``, a file in ``conf/data/`` and
a test.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.config import AugmentConfig, ConfigError, DataConfig
from harness.data import cifar, shapes
from harness.data.decode import DecodeOptions, decode
from harness.data.storage import ArraySource, Source, open_folder_splits, split
from harness.data.transforms import EvalTransform, Pixels, TrainTransform
from harness.runtime.errors import BadSample, DataError
from harness.runtime.seeding import sample_rng

Opener = Callable[[DataConfig], tuple[Source, Source]]

_SPLIT_SEED = 0  # not the run's: another seed must not move images that a network was trained on into its validation set
_DIGITS_SPLIT = 0.2


class Transform(Protocol):
    """What makes a row of a batch."""

    def __call__(self, image: Pixels, rng: random.Random, out: np.ndarray) -> None:
        """Write pixels of any size into ``out``, uint8 ``[3, S, S]``."""
        ...


class ImageDataset:
    """A source, decoded and transformed; what a sample looks like depends on (seed, epoch, index) alone.

    Args:
        source: where the samples lie.
        transform: from pixels to a row of a batch.
        options: how files are decoded.
        image_size: side of the result in pixels.
        seed: the run's seed.
    """

    def __init__(self, source: Source, transform: Transform, options: DecodeOptions, image_size: int, seed: int) -> None:
        self.source = source
        self.transform = transform
        self.options = options
        self.image_size = image_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.source)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.source.classes

    @property
    def labels(self) -> np.ndarray:
        """The label of every sample, int64 ``[N]``."""
        return self.source.labels

    def where(self, index: int) -> str:
        """Where sample ``index`` lies, for messages."""
        return self.source.where(index)

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        """The label of sample ``index``, whose pixels in ``epoch`` go into ``out``, uint8 ``[3, image_size, image_size]``.

        Raises:
            BadSample: the sample cannot be read, whatever the reason.
        """
        assert 0 <= index < len(self.source)
        assert out.dtype == np.uint8 and out.shape == (3, self.image_size, self.image_size)
        try:
            image, label = self.source.read(index)
            if isinstance(image, bytes):
                pixels: Pixels = decode(image, self.source.where(index), self.options)
            else:
                pixels = image
            self.transform(pixels, sample_rng(self.seed, epoch, index), out)
            return label
        except BadSample:
            raise
        except Exception as error:  # a StopIteration that got out would end a worker's epoch in silence
            raise BadSample(self.source.where(index), f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class FakeDataset:
    """The numbers of a data set that does not exist: the feed makes its tensors on the device.

    Attributes:
        length: images.
        image_size: side of an image in pixels.
        num_classes: number of classes.
    """

    length: int
    image_size: int
    num_classes: int

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class Splits:
    """A training and a validation set.

    Attributes:
        train: the training set; a ``FakeDataset`` exactly where ``val`` is one.
        val: the validation set.
        classes: names of the classes.
        name: ``data.name``.
        root: ``data.root``; empty where the data set has a place of its own.
    """

    train: ImageDataset | FakeDataset
    val: ImageDataset | FakeDataset
    classes: tuple[str, ...]
    name: str
    root: str


def open_digits(data: DataConfig) -> tuple[Source, Source]:
    """scikit-learn's 1797 handwritten digits of 8x8 grey pixels, four fifths of each class for training.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError('data=digits needs scikit-learn: pip install "wellfed[digits]" or uv sync --extra digits') from error
    bunch = load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # 0..16, one channel
    images = np.ascontiguousarray(np.broadcast_to(grey[..., None], (*grey.shape, 3)))
    return split(ArraySource(images, bunch.target, map(str, range(10)), "digits"), _DIGITS_SPLIT, _SPLIT_SEED)


def open_folders(data: DataConfig) -> tuple[Source, Source]:
    """A folder tree of the user's.

    Raises:
        ConfigError: ``data.root`` is not set.
    """
    if data.root is None:
        raise ConfigError(f"data.root: data={data.name} needs it, for example data.root=/data/{data.name}")
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

_FILES = ("exif_orientation", "background", "max_pixels")
_ARCHIVE = ("root", "download", "mirror", "md5")
_EFFECTIVE: dict[str, tuple[str, ...]] = {  # which of the settings that only some data sets have, has each
    "shapes": ("root", "generate", *_FILES),
    "digits": (),
    "cifar10": _ARCHIVE,
    "cifar100": _ARCHIVE,
    "imagefolder": ("root", "split_fraction", *_FILES),
    "imagenet": ("root", "split_fraction", *_FILES),
    FAKE: ("generate",),
}
_OPTIONAL = frozenset().union(*_EFFECTIVE.values())


def load(data: DataConfig, augment: AugmentConfig, seed: int) -> Splits:
    """The data set that ``data`` names.

    Args:
        data: the user's settings.
        augment: what happens to training images.
        seed: of everything random about a sample.

    Raises:
        ConfigError: an unknown name, a setting without effect, or one that is missing.
        DataError: the data set is missing, incomplete or unreadable.
    """
    _check(data)
    size = data.image_size
    if data.name == FAKE:
        numbers = data.generate
        train, val = (FakeDataset(n, size, numbers.classes) for n in (numbers.train_images, numbers.val_images))
        return Splits(train, val, tuple(map(str, range(numbers.classes))), FAKE, "")
    train_source, val_source = DATASETS[data.name](data)
    red, green, blue = data.background
    options = DecodeOptions(data.exif_orientation, (red, green, blue), data.max_pixels)
    train_transform = TrainTransform.from_config(augment, size, data.eval_resize)
    return Splits(
        train=ImageDataset(train_source, train_transform, options, size, seed),
        val=ImageDataset(val_source, EvalTransform(size, data.eval_resize), options, size, seed),
        classes=train_source.classes,
        name=data.name,
        root=data.root or "",
    )


def _check(data: DataConfig) -> None:
    names = [*DATASETS, FAKE]
    if data.name not in names:
        near = difflib.get_close_matches(data.name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"data.name={data.name}: no such data set; choose from {', '.join(names)}{hint}")
    effective = _EFFECTIVE.get(data.name, tuple(_OPTIONAL))
    default = DataConfig()
    for setting in sorted(_OPTIONAL.difference(effective)):
        value = getattr(data, setting)
        if value != getattr(default, setting):
            raise ConfigError(f"data.{setting}={value} has no effect with data={data.name}; leave it out")
    if data.eval_resize is not None and data.eval_resize < data.image_size:
        raise ConfigError(
            f"data.eval_resize={data.eval_resize} is smaller than data.image_size={data.image_size}; "
            "the centre crop would reach over the edge"
        )
