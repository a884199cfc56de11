"""Opens the user's own dataset, and calls the user's own augmentation function.

The function ``data.name=my_module:open_splits`` returns a training and a validation set. Each is a
source (``harness.data.storage.Source``), decoded and augmented like built-in datasets, or a
``torch.utils.data.Dataset`` of (image, label) with its own transforms.
``docs/how-to/own-model-and-data.md`` has an example of each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..config import ConfigError, DataConfig, Evaluate, OnError
from ..runtime import user_code
from ..runtime.errors import BadSample, is_out_of_memory
from ..runtime.folder import log
from ..runtime.seeding import seeded
from .decode import decode_opened
from .shards import ShardSource
from .storage import SPLIT_SEED, ArraySource, FileSource, Source, Subset


class OwnSource:
    """A user-defined source of samples, with labels in the form that the feed expects.

    ``where`` identifies the source in messages.

    Raises:
        ConfigError: a member is missing, or labels are not indices into the classes.
    """

    def __init__(self, given: Any, where: str) -> None:
        with user_code.explained(f"{where}: a source needs classes, labels, __len__, read, where:"):
            self.classes = _names(given.classes)
            labels = np.asarray(given.labels)
            length = len(given)
            if hasattr(given, "blocks"):
                self.blocks = np.asarray(given.blocks, np.int32).reshape(length)
            self._where = given.where
            self._read = given.read
        if not _are_places(labels, length, len(self.classes)):
            raise ConfigError(
                f"{where}: its labels are {_kind(labels)}, its length is {length}, and it has "
                f"{len(self.classes)} classes; each sample needs an integer label, "
                "which is an index into classes, from 0"
            )
        self.labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        """Returns the user's name for sample ``i``."""
        return str(self._where(i))

    def read(self, i: int) -> tuple[bytes | np.ndarray, int]:
        """Returns the content and label of sample ``i`` from the user's source.

        Raises:
            BadSample: the label differs, or the content is neither bytes nor pixels.
            Exception: any error from the user's source.
        """
        content, label = self._read(i)
        if float(label) != self.labels[i]:
            raise BadSample(
                self.where(i), f"read({i}) returned label {label!r}, not {self.labels[i]}"
            )
        is_pixels = isinstance(content, np.ndarray) and content.dtype == np.uint8
        if isinstance(content, bytes) or (is_pixels and content.shape[2:] == (3,)):
            return content, int(self.labels[i])
        raise BadSample(
            self.where(i),
            f"read({i}) returned {_kind(content)}; return bytes, or uint8 pixels [H, W, 3]",
        )


class OwnAugment:
    """The user's augmentation function ``name``, specified by ``setting``.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, setting: str, name: str) -> None:
        self.setting = setting
        self._begin = f"{setting}={name}:"
        self._function = user_code.found(setting, name)

    def __call__(self, images: Any, rng: Any) -> Any:
        """Returns augmented ``images``, an array or tensor with unchanged type and shape.

        Raises:
            ConfigError: the function failed, or returned another type or shape.
        """
        must = _kind(images)
        with user_code.explained(f"{self._begin} failed with"):
            made = self._function(images, rng)
        if not isinstance(made, type(images)) or _kind(made) != must:
            text = f"{self._begin} returned {_kind(made)}; it must return {must}"
            # a callable object may have no code
            if code := getattr(self._function, "__code__", None):
                text += f" ({os.path.relpath(code.co_filename)}:{code.co_firstlineno})"
            raise ConfigError(text)
        return made


@dataclass(eq=False)
class OwnDataset:
    """A ``torch.utils.data.Dataset`` of (image, label) with its own transforms, for a feed.

    The global RNGs are seeded for each sample with (seed, epoch, index). Threads share them, so
    only processes can load the dataset.

    Raises:
        ConfigError: it is not a dataset, or is empty.
    """

    given: Any
    # identifies the dataset in messages
    where: str
    classes: tuple[str, ...]
    image_size: int
    seed: int
    # used to convert Pillow images
    options: DataConfig
    # whether an unreadable sample is replaced
    skips: bool = False

    def __post_init__(self) -> None:
        must = f"{self.where} must be a source, or have __len__ and __getitem__:"
        with user_code.explained(must):
            length = len(self.given)
        if not length:
            raise ConfigError(f"{self.where} is empty")

    def __len__(self) -> int:
        return len(self.given)

    @property
    def labels(self) -> np.ndarray | None:
        """The labels, int64 ``[N]``, from ``targets`` as in torchvision datasets; or None."""
        # a user's dataset may raise anything
        with suppress(Exception):
            labels = _targets(self.given)
            if _are_places(labels, len(self), len(self.classes)):
                return labels.astype(np.int64)
        return None

    def fill(self, epoch: int, index: int, out: np.ndarray, instead: int | None = None) -> int:
        """Writes sample ``index`` into ``out``, uint8 ``[3, S, S]``; returns its label.

        ``instead`` is the index of another sample to read. For each repeat in an epoch, the index
        is increased by the length.

        Raises:
            BadSample: the dataset failed, or did not return an image of that size with a label.
        """
        place = index % len(self) if instead is None else instead
        where = f"{self.where}, sample {place}"
        try:
            with seeded(self.seed, epoch, index):
                sample = self.given[place]
        except Exception as error:
            # an error that the sample did not cause
            if is_out_of_memory(error):
                raise
            raise BadSample(where, user_code.message(error)) from error
        last = len(self.classes) - 1
        try:
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise ValueError(f"it returned {_kind(sample)}; return (image, label)")
            image, label = sample
            out[:] = _pixels(image, self.image_size, self.options)
            is_name = isinstance(label, str) and not label.isdecimal()
            if is_name or np.asarray(label).size != 1:
                raise ValueError(
                    f"its label is {_kind(label)}; return an index into classes, which "
                    "is int(label.argmax()) for a one-hot label"
                )
            number = int(label)
            if number != float(label) or not 0 <= number <= last:
                raise ValueError(f"its label is {label!r}, not a whole number from 0 to {last}")
        except (ValueError, TypeError, OverflowError) as error:
            raise BadSample(where, str(error)) from error
        return number


def _are_places(labels: np.ndarray, length: int, classes: int) -> bool:
    """Returns whether ``labels`` are ``length`` > 0 whole numbers from 0, below ``classes``."""
    known = labels.dtype.kind in "iu" and labels.shape == (length,) and length
    return bool(known and 0 <= labels.min() <= labels.max() < classes)


def _targets(given: Any) -> np.ndarray:
    """Returns the labels in ``given``, or in the dataset that it is a subset of; may raise."""
    if isinstance(given, torch.utils.data.Subset):
        return _targets(given.dataset)[given.indices]
    if getattr(given, "target_transform", None) is not None:
        raise ValueError("the labels of samples differ from targets")
    return np.asarray(given.targets)


def open_own(data: DataConfig, seed: int) -> tuple[Source, Source] | tuple[OwnDataset, OwnDataset]:
    """Opens the training and validation sets with the user's function ``data.name``.

    With ``data.evaluate=test``, the second one is the test set. The function receives ``data`` and
    ``SPLIT_SEED``; ``seed`` is the run's seed.

    Raises:
        ConfigError: the function failed, or did not return two sources or two datasets.
    """
    splits = user_code.call("data.name", data.name, data, SPLIT_SEED)
    begin = f"data.name={data.name}"
    tests = data.evaluate is Evaluate.test
    pair = _pair(splits, tests, begin)
    wheres = f"{begin}: the training set", f"{begin}: the {'test' if tests else 'validation'} set"
    are_sources = [hasattr(part, "read") for part in pair]
    if len({*are_sources}) > 1:
        raise ConfigError(f"{begin}: return two sources or two Datasets, not one of each")
    with user_code.explained(f"{begin}: its classes cannot be read:"):
        known = (part for part in pair if getattr(part, "classes", None) is not None)
        of_sets = {_names(part.classes) for part in known}
    if len(of_sets) > 1:
        raise ConfigError(f"{begin}: the training and validation sets have different classes")
    if all(are_sources):
        train, val = (
            # built-in sources support arrays and the cache
            part
            if isinstance(part, ArraySource | FileSource | ShardSource | Subset)
            else OwnSource(part, where)
            for part, where in zip(pair, wheres, strict=True)
        )
        return train, val

    # classes from the returned value, else from the training set or its parent dataset
    named = splits if hasattr(splits, "classes") else pair[0]
    while not hasattr(named, "classes"):
        if not hasattr(named, "dataset"):
            raise ConfigError(
                f"{wheres[0]} has no classes; set its classes attribute to a list of names"
            )
        named = named.dataset
    with user_code.explained(f"{begin}: its classes cannot be read:"):
        classes = _names(named.classes)
    skips = data.on_error is OnError.skip
    first, second = (
        OwnDataset(part, where, classes, data.image_size, seed, data, skips)
        for part, where in zip(pair, wheres, strict=True)
    )
    # Reveals transform errors now, and unseeded random flips in 15 out of 16 starts.
    try:
        for dataset in () if first.skips else (first, second):
            _check_seeds(dataset)
    except BadSample as error:
        raise ConfigError(str(error)) from error
    return first, second


def _check_seeds(dataset: OwnDataset) -> None:
    """Warns if equal seeds give different samples; raises BadSample."""
    twice = np.empty((8, 3, dataset.image_size, dataset.image_size), np.uint8)
    for i, out in enumerate(twice):
        dataset.fill(0, i % 4, out)
    if (twice[:4] != twice[4:]).any():
        log.warning(
            "%s: samples differ although the seeds are equal. A private random generator "
            "may repeat its numbers in every worker and epoch; draw from random, numpy.random "
            "or torch instead",
            dataset.where,
        )


def _pair(splits: Any, tests: bool, begin: str) -> tuple[Any, Any]:
    """Returns the training set in ``splits``, and the set to evaluate.

    Raises:
        ConfigError: there are too few or too many sets.
    """
    sets = splits
    if hasattr(splits, "train") and hasattr(splits, "val"):
        names = ("train", "val", "test")
        sets = [getattr(splits, name) for name in names if hasattr(splits, name)]
    if not isinstance(sets, Sequence) or len(sets) not in (2 + tests, 3):
        raise ConfigError(
            f"{begin}: returned {_kind(splits)}; it must return two sets, training and validation, "
            "and a third for data.evaluate=test"
        )
    return sets[0], sets[1 + tests]


def _names(classes: Iterable[Any]) -> tuple[str, ...]:
    # the order of a Python set differs between processes
    if isinstance(classes, str | set | frozenset):
        raise TypeError(f"expected a list, got {type(classes).__name__}")
    return tuple(map(str, classes))


def _pixels(image: Any, size: int, options: DataConfig) -> np.ndarray:
    """Returns ``image`` as uint8 ``[3, size, size]``; Pillow images as if read from a file.

    Raises:
        ValueError: size, shape or values are wrong.
    """
    if isinstance(image, Image.Image):
        image = decode_opened(image, options).transpose(2, 0, 1)
    if isinstance(image, torch.Tensor):
        image = image.detach().numpy()
    kind = _kind(image)
    if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(
            f"it returned {kind}; return a Pillow image, or a tensor [3, S, S] of uint8 values or "
            "floats from 0 to 1"
        )
    if image.shape[1:] != (size, size):
        raise ValueError(
            f"its image is {kind}; have your transforms resize images to {size} x {size}, or set "
            "data.image_size to their output size"
        )
    if image.dtype != np.uint8:
        # rejects NaN too
        if not (image.dtype.kind == "f" and image.min() >= 0 and image.max() <= 1):
            raise ValueError(
                f"its values, {kind} from {image.min():.3g} to {image.max():.3g}, are neither "
                "uint8 nor floats from 0 to 1; leave Normalize to data.mean and data.std"
            )
        image = np.rint(255 * image)
    return np.broadcast_to(image, (3, size, size)).astype(np.uint8)


def _kind(value: Any) -> str:
    """Returns a description of the type of ``value``, with the shape if it is an array."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{len(value)} values"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, value))}"
    return type(value).__name__
