"""Opens the training and validation sets of ``data.name`` and loads their samples.

A new dataset requires a function from ``DataConfig`` to two sources, a line in ``DATASETS`` and in
``_SETTINGS``, a file in ``conf/data/`` and a test; or a user function, which ``harness.data.own``
calls.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..clock.stages import Lap
from ..config import (
    AugmentConfig,
    ConfigError,
    Crop,
    DataCache,
    DataConfig,
    Evaluate,
    OnError,
    OptimConfig,
)
from ..monitor.console import say
from ..runtime import user_code
from ..runtime.errors import BadSample, is_out_of_memory
from ..runtime.folder import log
from ..runtime.seeding import OWN, SampleRng, order_rng
from . import cifar, shapes
from .ahead import Ahead
from .cache import Gathered, PixelCache, open_caches
from .decode import DecodeError, decoded
from .folds import Fold, HeldOut
from .libraries import decode_jpeg_part, in_use
from .own import OwnAugment, OwnDataset, open_own
from .shard_index import open_shards
from .shards import ShardSource
from .storage import (
    SPLIT_SEED,
    ArraySource,
    FileSource,
    Source,
    Subset,
    evenly_spaced,
    open_evaluated,
    open_folder_splits,
    open_sets,
    part,
    split,
    undivided,
)
from .table import TableSource, open_evaluated_table, open_table_splits
from .transforms import Box, CropTransform
from .whole import Whole, open_whole


@dataclass(eq=False)
class ImageDataset:
    """A decoded, transformed source; a sample depends only on (seed, epoch, index)."""

    source: Source
    transform: CropTransform
    # how images are decoded
    options: DataConfig
    image_size: int
    seed: int
    cache: PixelCache | None = None
    # whether an unreadable sample is replaced
    skips: bool = False
    # whether black pixels replace it, because another sample may be unreadable too
    blanks: bool = False
    # images whose random crop can be decoded alone; None: all images are decoded in full
    whole: Whole | None = None
    # the user's augmentation, applied after the transform
    own: OwnAugment | None = None
    # number of shard blocks kept in memory; 0: samples are fetched individually
    block_room: int = 0

    def __len__(self) -> int:
        return len(self.source)

    @property
    def stages(self) -> tuple[str, ...]:
        """The lap names used by ``fill``, in order."""
        own = () if self.own is None else (self.own.setting,)
        return ("read", "decode", *self.transform.stages, *own)

    @property
    def ahead(self) -> Ahead | None:
        """Reads the source's samples before they are needed; None: nothing does."""
        store = getattr(undivided(self.source), "store", None)
        return store if isinstance(store, Ahead) else None

    def expect(self, indices: np.ndarray) -> int:
        """Announces samples by index; returns the number of bytes that the source reads ahead."""
        if self.ahead is None:
            return 0
        rows = indices % len(self)
        if self.cache is not None:
            rows = rows[[self.cache.get(row) is None for row in rows.tolist()]]
        source: Any = self.source
        wanted: int = source.expect(rows, self.block_room)
        return wanted

    def fill(
        self,
        epoch: int,
        index: int,
        out: np.ndarray,
        lap: Lap | None = None,
        instead: int | None = None,
    ) -> int:
        """Writes sample ``index`` of ``epoch`` into ``out``; returns its label.

        Several threads may call this concurrently.

        Args:
            epoch: seeds the sample's random numbers, together with the index.
            index: index into the source, plus its length for each repeat in an epoch.
            out: uint8 ``[3, image_size, image_size]``.
            lap: called at the end of each of the ``stages``, with its name.
            instead: index of another image to read.

        Raises:
            BadSample: the sample cannot be read.
            ConfigError: the user's augmentation failed.
        """
        if instead is not None and self.blanks:
            out[:] = 0
            return 0
        labels = self.source.labels
        place = index % len(labels) if instead is None else instead
        try:
            # the cache lookup is part of the first stage
            pixels = None if self.cache is None else self.cache.get(place)
            if pixels is None:
                image, _ = self.source.read(place)
            if lap is not None:
                lap("read")
            rng = SampleRng(self.seed, epoch, index)
            part = None
            if pixels is None:
                if isinstance(image, bytes):
                    pixels, part = self._decoded(place, image, rng)
                else:
                    pixels = image
                if self.cache is not None:
                    pixels = self.cache.put(place, pixels)
                if lap is not None:
                    lap("decode")
            self.transform(pixels, rng, out, lap, part)
            if self.own is not None:
                rows = out.transpose(1, 2, 0)
                rows[...] = self.own(rows, order_rng(self.seed, epoch, index, OWN))
                if lap is not None:
                    lap(self.own.setting)
            return int(labels[place])
        except Exception as error:
            if isinstance(error, BadSample | ConfigError) or is_out_of_memory(error):
                raise
            # any error, because a StopIteration would silently end a worker's epoch
            reason = str(error) if isinstance(error, DecodeError) else user_code.message(error)
            raise BadSample(self.source.where(place), reason) from error

    def sized(self, size: int) -> ImageDataset:
        """Returns the dataset with images of side length ``size`` and the same crops."""
        short = self.options.eval_resize
        short = short and round(short * size / self.options.image_size)
        transform = replace(self.transform, size=size, resize=short)
        return replace(self, transform=transform, image_size=size)

    def _decoded(self, place: int, data: bytes, rng: SampleRng) -> tuple[np.ndarray, Box | None]:
        """Returns the pixels in ``data``, or a region of them and the drawn crop within it."""
        whole = self.whole
        digest = 0 if whole is None else xxhash.xxh3_64_intdigest(data)
        if whole is not None and whole.has(place, digest):
            found = decode_jpeg_part(data, partial(self.transform.part, rng))
            if found is not None:
                return found
        pixels, is_plain = decoded(data, self.options)
        if whole is not None and is_plain:
            whole.add(place, digest)
        return pixels, None


@dataclass(frozen=True, slots=True)
class FakeDataset:
    """The length and image size of a dataset whose tensors are generated on the device."""

    length: int
    image_size: int  # side length in pixels

    def __len__(self) -> int:
        return self.length


AnyDataset = ImageDataset | OwnDataset | FakeDataset


@dataclass(frozen=True, slots=True)
class Splits:
    """A training and a validation set."""

    train: AnyDataset  # val is of the same kind
    val: AnyDataset
    classes: tuple[str, ...]
    name: str
    root: str  # empty if the dataset has its own location
    val_name: str = "validation images"  # or "test images", or "images" for all images below root
    trains: bool = True  # False: train is the same as val, for evaluation

    @property
    def cache(self) -> PixelCache | None:
        """The decoded cache for both sets, or None."""
        return self.train.cache if isinstance(self.train, ImageDataset) else None

    @property
    def fetched(self) -> dict[str, int] | None:
        """Requests to and bytes from a slow store so far; None if nothing is prefetched."""
        ahead = self.train.ahead if isinstance(self.train, ImageDataset) else None
        return ahead.counts() if ahead else None

    @property
    def labels(self) -> np.ndarray | None:
        """The training labels, int64 ``[N]``; None if there are none or they are unknown."""
        if not self.trains:
            return None
        if isinstance(self.train, ImageDataset):
            return self.train.source.labels
        return self.train.labels if isinstance(self.train, OwnDataset) else None

    def labels_for(self, setting: str) -> np.ndarray:
        """Returns ``labels``.

        Raises:
            ConfigError: they are unknown but ``setting`` needs them.
        """
        if self.labels is None:
            raise ConfigError(
                f"{setting} needs all training labels before images are read; give the Dataset "
                f"from data.name={self.name} a targets attribute, a list of integers as in "
                "torchvision datasets, or return a source"
            )
        return self.labels

    def class_weights(self, optim: OptimConfig) -> list[float] | None:
        """Returns the class weights set by ``optim``; None if all are 1.

        Raises:
            ConfigError: the numbers of weights and classes differ, or the labels are unknown.
        """
        weights = optim.class_weights
        classes = len(self.classes)
        if weights is None or not self.trains:
            return None
        if weights == "balanced":
            labels = self.labels_for("optim.class_weights=balanced")
            counts = np.bincount(labels, minlength=classes)
            # classes without images do not contribute to the loss
            weights = len(labels) / (np.count_nonzero(counts) * counts.clip(1))
        elif len(weights) != classes:
            raise ConfigError(
                f"optim.class_weights has {len(weights)} numbers, but {self.name} has {classes} "
                "classes; give one number per class, in order"
            )
        return [*map(float, weights)]

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the cache may still allocate, for all ranks on this machine."""
        return self.cache.reserved_bytes if self.cache is not None else 0

    def fingerprint(self) -> dict[str, Any]:
        """Returns the training set's name, location, sizes and digest as plain values.

        The digest changes if a file is added, removed or renamed, or if a sampled file is modified
        (up to 400 files are sampled). For other sources, 16 samples are read.
        """
        found: dict[str, Any] = {
            "name": self.name,
            "root": os.path.abspath(os.path.expanduser(self.root)) if self.root else "",
            "images": len(self.train),
            "image_size": self.train.image_size,
            "classes": len(self.classes),
        }
        if not isinstance(self.train, ImageDataset):
            return found
        source: Any = self.train.source
        whole = undivided(source)
        # names would miss a rewritten file
        digest = hashlib.sha256(os.fsencode("\n".join(source.classes)))
        if isinstance(whole, FileSource | ShardSource):
            digest.update(os.fsencode(whole.root) + whole.digest())
            for i in evenly_spaced(len(source), _LOOKED_AT):
                # a file may be missing
                with suppress(OSError):
                    digest.update(f"{i} {source.state(i)}\n".encode())
        else:
            for i in evenly_spaced(len(source), 16):
                # bad samples are reported when they are loaded
                with suppress(Exception):
                    content, label = source.read(i)
                    digest.update(f"{np.shape(content)} {len(content)} {label}".encode())
                    digest.update(content if isinstance(content, bytes) else content.tobytes())
        return found | {"digest": digest.hexdigest()}


# files sampled per tree, which takes a few milliseconds on a disk
_LOOKED_AT = 400


def open_digits(data: DataConfig) -> tuple[Source, Source]:
    """Opens 1797 handwritten digits of 8x8 gray pixels; a fifth of each class is for validation.

    The digits are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C.
    Kaynak, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0), in scikit-learn's order.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as held:
        pixels, labels = held["images"], held["labels"].astype(np.int64)
    # 0..16, one channel
    gray = np.rint(pixels * (255 / 16)).astype(np.uint8)
    images = np.repeat(gray[..., None], 3, axis=-1)
    source = ArraySource(images, labels, map(str, range(10)), "digits")
    return split(source, 0.2, SPLIT_SEED)


def open_folders(data: DataConfig) -> tuple[Source, Source]:
    """Opens a user's folder tree.

    Raises:
        ConfigError: ``data.root`` is not set.
    """
    return open_folder_splits(_root(data), _held_out(data))


# what opens all images in a table or in shards
_LISTINGS: dict[str, Any] = {"table": TableSource, "shards": open_shards}


def open_listed(data: DataConfig) -> tuple[Source, Source]:
    """Opens the images listed in a user's table, or the sets in tar shards.

    Raises:
        ConfigError: ``data.root`` or ``data.table`` is missing or wrong, or a pattern matches no
            shard.
        DataError: the table or the shards are rejected, or a set is empty.
    """
    return open_table_splits(_LISTINGS[data.name](_root(data), data), _held_out(data))


def _held_out(data: DataConfig) -> HeldOut:
    if data.fold is None:
        return data.split_fraction
    if data.split_fraction is not None:
        raise ConfigError(f"data.fold={data.fold} excludes data.split_fraction; set one to null")
    return Fold(data.fold, data.folds)


def _root(data: DataConfig) -> str:
    if data.root is None:
        raise ConfigError(
            f"data.root is required by data={data.name}, for example data.root=/data/{data.name}"
        )
    return data.root


DATASETS: dict[str, Callable[[DataConfig], tuple[Source, Source]]] = {
    "shapes": shapes.open_shapes,
    "digits": open_digits,
    "cifar10": cifar.open_cifar,
    "cifar100": cifar.open_cifar,
    "imagefolder": open_folders,
    "imagenet": open_folders,
    "table": open_listed,
    "shards": open_listed,
}
# has no source; created by load
FAKE = "fake"
_NAMES = ", ".join([*DATASETS, FAKE])

# settings that affect only some built-in datasets
_FILES = "root background cache cache_gb cache_max_side exif_orientation max_pixels"
_HELD_OUT = "split_fraction fold folds evaluate"
_CIFAR = "root download md5 mirror"
_SETTINGS = {
    "shapes": f"{_FILES} generate download",
    "digits": "",
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "imagefolder": f"{_FILES} {_HELD_OUT}",
    "imagenet": f"{_FILES} {_HELD_OUT}",
    "table": f"{_FILES} {_HELD_OUT} table columns",
    "shards": f"{_FILES} {_HELD_OUT} train val scratch scratch_gb",
    FAKE: "generate",
}


def load(
    data: DataConfig, augment: AugmentConfig, seed: int, gathered: Gathered = lambda value: [value]
) -> Splits:
    """Opens the dataset that ``data`` selects, augmented for training by ``augment`` and ``seed``.

    Every rank calls this. ``gathered`` returns the values from all ranks in rank order, for a
    shared cache.

    Raises:
        ConfigError: a name is unknown, or a setting has no effect or is missing.
        DataError: the dataset is missing, incomplete or unreadable.
    """
    _check_settings(data)
    root = data.root or ""
    size = data.image_size
    if data.name == FAKE:
        made = data.generate
        names = tuple(map(str, range(made.classes)))
        train = FakeDataset(made.train_images, size)
        return Splits(train, FakeDataset(made.val_images, size), names, FAKE, root)
    # two sources, or two user datasets, which need nothing else
    if user_code.is_own(data.name):
        opened: Any = open_own(data, seed)
        first, second = opened
        if isinstance(first, OwnDataset):
            if data.fraction < 1:
                raise ConfigError(
                    f"data.fraction={data.fraction:g}: {data.name} returns a Dataset, not a "
                    "source; return a torch.utils.data.Subset instead"
                )
            if augment.own:
                raise ConfigError(
                    f"augment.own={augment.own}: {data.name} returns a Dataset with its own "
                    "transforms; call the function there"
                )
            return Splits(first, second, first.classes, data.name, root)
    elif data.name in DATASETS:
        first, second = DATASETS[data.name](data)
    else:
        # from a checkpoint; the command line is already checked
        raise ConfigError(f"data.name={data.name}: no such dataset; choose from {_NAMES}")
    if data.fraction < 1:
        first = Subset(first, part(first.labels, data.fraction, SPLIT_SEED))
    kept = val_kept = None
    if data.cache is not DataCache.none:
        kept, val_kept = open_caches((first, second), data, gathered)
    transform = CropTransform.from_config(augment, data)
    skips = data.on_error is OnError.skip
    whole = None
    if kept is None and transform.crop == "random_resized":
        whole = open_whole(first, data)
    own = OwnAugment("augment.own", augment.own) if augment.own else None
    images = ImageDataset(first, transform, data, size, seed, kept, skips, whole=whole, own=own)
    val_images = ImageDataset(second, as_evaluated(data), data, size, seed, val_kept, skips)
    if data.cache_max_side is not None:
        say(
            f"data.cache_max_side={data.cache_max_side}: training crops change by "
            f"{crop_error(images):.2f} gray levels per pixel on average"
        )
    return Splits(images, val_images, first.classes, data.name, root)


def load_evaluated(data: DataConfig, seed: int, classes: tuple[str, ...]) -> Splits:
    """Opens the images on which to evaluate a network, also as the training set.

    A folder tree needs no other images. Labels are indices into the network's ``classes``, an empty
    tuple if the classes have no names.

    Raises:
        ConfigError, DataError: as ``load``.
    """
    opened = DATASETS.get(data.name)
    if opened not in (open_folders, open_listed):
        splits = load(data, AugmentConfig(), seed)
        val_name = "test images" if data.evaluate is Evaluate.test else splits.val_name
        return replace(splits, train=splits.val, val_name=val_name, trains=False)
    _check_settings(data)
    how = data.evaluate, _held_out(data), classes
    if opened is open_folders:
        source, name = open_evaluated(_root(data), *how)
    else:
        source, name = open_evaluated_table(_LISTINGS[data.name](_root(data), data), *how)
    skips = data.on_error is OnError.skip
    images = ImageDataset(source, as_evaluated(data), data, data.image_size, seed, skips=skips)
    return Splits(images, images, source.classes, data.name, str(data.root), name, False)


def load_sets(
    data: DataConfig, seed: int, gathered: Gathered
) -> tuple[Splits, dict[str, AnyDataset]]:
    """Opens all images in the dataset, by the name of their set: "" if there is only one.

    Arguments are as for ``load``.

    Raises:
        ConfigError, DataError: as ``load``.
    """
    opened = DATASETS.get(data.name)
    if opened not in (open_folders, open_listed):
        splits = load(data, AugmentConfig(), seed, gathered)
        return splits, {"training": splits.train, "validation": splits.val}
    _check_settings(data)
    if opened is open_folders:
        _, found = open_sets(_root(data))
    else:
        found = _LISTINGS[data.name](_root(data), data).sets()
    names = {"train": "training", "val": "validation"} if len(found) > 1 else {"train": ""}
    transform = as_evaluated(data)
    sets: dict[str, AnyDataset] = {
        names.get(name, name): ImageDataset(source, transform, data, data.image_size, seed)
        for name, source in found.items()
    }
    first = next(iter(sets.values()))
    return Splits(first, first, (), data.name, str(data.root), trains=False), sets


def as_evaluated(data: DataConfig) -> CropTransform:
    """Returns the evaluation transform."""
    return CropTransform.from_config(AugmentConfig(Crop.center, hflip=0.0), data)


def crop_error(images: ImageDataset) -> float:
    """Returns the mean change in crops due to the cache, in gray levels per pixel.

    Measured on at most 16 images, larger than ``data.cache_max_side`` or not.
    """
    plain = replace(images, cache=None)
    crops = np.empty((2, 3, images.image_size, images.image_size), np.uint8)
    errors = []
    for i in evenly_spaced(len(images), 16):
        # bad samples are reported when they are loaded
        with suppress(BadSample):
            for dataset, crop in zip((plain, images), crops, strict=True):
                dataset.fill(0, i, crop)
            errors.append(np.abs(np.diff(crops.astype(np.int16), axis=0)).mean())
    return float(np.mean(errors or 0.0))


def _check_settings(data: DataConfig) -> None:
    default = DataConfig()
    every = " ".join(_SETTINGS.values())
    idle = set(every.split()) - set(_SETTINGS.get(data.name, every).split())
    if user_code.is_own(data.name):
        idle = {"cache"}
    # first the setting with the fewest datasets, such as data.table
    for setting in sorted(idle, key=lambda each: (every.split().count(each), each)):
        value = getattr(data, setting)
        # false requests nothing
        if value not in (getattr(default, setting), False):
            users = [name for name, own in _SETTINGS.items() if setting in own.split()]
            instead = "" if user_code.is_own(data.name) else f"write data={' or '.join(users)}, or "
            raise ConfigError(
                f"data.{setting}={getattr(value, 'name', value)} has no effect with "
                f"data={data.name}; {instead}leave it out"
            )
    if "JPEG" not in in_use():
        log.warning(
            "Pillow decodes the JPEG images, which is slower; to avoid this, pip install simplejpeg"
        )
