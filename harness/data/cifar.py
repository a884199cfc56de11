"""CIFAR-10 and CIFAR-100: the published archive, fetched and checked once, then kept as plain
arrays beside it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.config import DataConfig
from harness.data.archive import read_members
from harness.data.download import fetch, make_once, md5_of
from harness.data.storage import ArraySource, cache_root
from harness.runtime.errors import DataError, printable
from harness.runtime.files import read_json, remove
from harness.runtime.folder import LOGGER

_PUBLISHER = "https://www.cs.toronto.edu/~kriz"
_PIXELS = 3 * 32 * 32
_META_BYTES = 1 << 20
# of the arrays' folder; another number makes every folder anew
_FORMAT = 1
_MARKER = "complete.json"
_SPLITS = ("train", "val")
_ARRAYS = ("train_images", "train_labels", "val_images", "val_labels")

_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
    forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
    mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
    sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
    wolf woman worm
"""

_log = logging.getLogger(LOGGER)

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """An archive as https://www.cs.toronto.edu/~kriz/cifar.html describes it."""

    name: str
    archive: str
    md5: str
    train: tuple[str, ...]
    val: tuple[str, ...]
    # most that a file of train or val may have; the real ones have 31 and 155 MB
    batch_bytes: int
    meta: str
    # of the keys of labels and their names
    prefix: str
    classes: tuple[str, ...]


_CIFAR10 = _Published(
    name="cifar10",
    archive="cifar-10-python.tar.gz",
    md5="c58f30108f718f92721af3b95e74349a",
    train=tuple(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)),
    val=("cifar-10-batches-py/test_batch",),
    batch_bytes=40 << 20,
    meta="cifar-10-batches-py/batches.meta",
    prefix="",
    classes=tuple(_CIFAR10_CLASSES.split()),
)
_CIFAR100 = _Published(
    name="cifar100",
    archive="cifar-100-python.tar.gz",
    md5="eb9058c3a382ffc7106e4002c42a8d85",
    train=("cifar-100-python/train",),
    val=("cifar-100-python/test",),
    batch_bytes=192 << 20,
    meta="cifar-100-python/meta",
    prefix="fine_",
    classes=tuple(_CIFAR100_CLASSES.split()),
)


def _open(published: _Published, data: DataConfig) -> tuple[ArraySource, ArraySource]:
    """The training and the test set, pixels mapped from the disk; CIFAR-100 has its 100 fine
    labels.

    The archive is looked for in ``data.root``, or fetched to there, and stays; its arrays lie
    beside it, and are made anew if they are damaged. With the arrays there, neither the archive nor
    leave to write is needed.

    Raises:
        DataError: the archive cannot be had, or is not what the publisher describes.
        DiskError: ``data.root`` cannot be written.
    """
    root = Path(data.root).expanduser() if data.root else cache_root() / published.name
    archive = root / published.archive
    folder = root / f"{published.name}-arrays"
    md5 = (data.md5 or published.md5).lower()
    classes = published.classes
    arrays = _open_arrays(folder, md5, len(classes))
    if arrays is None:
        _obtain(published, archive, md5, data)
        is_made = lambda: _open_arrays(folder, md5, len(classes)) is not None
        make_once(
            folder, is_made, lambda part: _write_arrays(published, archive, md5, folder, part)
        )
        arrays = _open_arrays(folder, md5, len(classes))
        assert arrays is not None
    train, val = (
        ArraySource(arrays[f"{s}_images"], arrays[f"{s}_labels"], classes, f"{published.name} {s}")
        for s in _SPLITS
    )
    return train, val


open_cifar10 = partial(_open, _CIFAR10)
open_cifar100 = partial(_open, _CIFAR100)


def _obtain(published: _Published, archive: Path, md5: str, data: DataConfig) -> None:
    """Make sure that the archive is there and has the right digest, whoever put it there."""
    where = printable(str(archive))
    if not archive.is_file():
        root = printable(str(archive.parent))
        way_out = (
            f"put {published.archive} into {root}, or take data=shapes, data=digits or "
            "data=fake: they need no network"
        )
        if not data.download:
            raise DataError(f"{where}: not there, and data.download=false; {way_out}")
        try:
            fetch(
                f"{(data.mirror or _PUBLISHER).rstrip('/')}/{published.archive}", archive, md5=md5
            )
        except DataError as error:
            raise DataError(f"{error}; or {way_out}") from error
    try:
        digest = md5_of(archive)
    except OSError as error:
        raise DataError(
            f"{where}: cannot be read: {error.strerror}; mend it with chmod or get it anew"
        ) from error
    if digest != md5:
        raise DataError(
            f"{where}: the md5 digest differs: expected {printable(md5)}, got {digest}; delete the "
            "file and get it anew, "
            f"or set data.md5={digest} if this archive is meant"
        )


def _open_arrays(folder: Path, md5: str, classes: int) -> Arrays | None:
    """The arrays in ``folder``, mapped; None unless they are whole and were made from the archive
    with this digest.
    """
    try:
        if read_json(folder / _MARKER) != _marker(folder, md5):
            return None
        arrays: Arrays = {
            name: np.lib.format.open_memmap(folder / f"{name}.npy", mode="r") for name in _ARRAYS
        }
        for split in _SPLITS:
            images = arrays[f"{split}_images"]
            labels = arrays[f"{split}_labels"]
            if images.dtype != np.uint8 or labels.dtype != np.int64 or labels.ndim != 1:
                return None
            if images.shape != (len(labels), 32, 32, 3):
                return None
            if not 0 <= labels.min() <= labels.max() < classes:
                return None
    except (OSError, ValueError):
        return None
    return arrays


def _marker(folder: Path, md5: str) -> dict[str, object]:
    return {
        "format": _FORMAT,
        "archive_md5": md5,
        "files": {name: md5_of(folder / f"{name}.npy") for name in _ARRAYS},
    }


def _write_arrays(published: _Published, archive: Path, md5: str, folder: Path, part: Path) -> None:
    """Write the arrays into ``part``, and take away what lies at ``folder``, their place."""
    if os.path.lexists(folder):
        _log.warning("%s: damaged, or of another archive: made anew", folder)
    for name, array in _read_archive(published, archive).items():
        np.save(part / f"{name}.npy", array, allow_pickle=False)
    (part / _MARKER).write_text(json.dumps(_marker(part, md5)), encoding="utf-8")
    remove(folder)


def _read_archive(published: _Published, archive: Path) -> Arrays:
    """The arrays of the whole archive, images as uint8 ``[N, 32, 32, 3]``, labels as int64 ``[N]``."""
    batches = dict.fromkeys((*published.train, *published.val), published.batch_bytes)
    members = read_members(archive, batches | {published.meta: _META_BYTES})
    arrays: Arrays = {}
    name = published.meta
    try:
        _check_classes(published, _unpickled(members[name]))
        for split, names in (("train", published.train), ("val", published.val)):
            parts = []
            for name in names:
                parts.append(_images_and_labels(published, _unpickled(members.pop(name))))
            arrays[f"{split}_images"], arrays[f"{split}_labels"] = map(
                np.concatenate, zip(*parts, strict=True)
            )
    except Exception as error:
        # a damaged pickle may raise anything
        reason = (
            f"is not as published: {printable(str(error) or type(error).__name__)}; get the "
            "archive from its publisher"
        )
        raise DataError(f"{printable(str(archive))}: member {name} {reason}") from error
    return arrays


def _check_classes(published: _Published, meta: dict[str, object]) -> None:
    names = meta.get(f"{published.prefix}label_names")
    if not isinstance(names, list) or not all(isinstance(name, (str, bytes)) for name in names):
        raise ValueError(f"no list of class names under {published.prefix}label_names")
    found = tuple(name.decode() if isinstance(name, bytes) else name for name in names)
    if found != published.classes:
        other = next(
            (name for name in found if name not in published.classes),
            f"{len(found)} names or another order",
        )
        raise ValueError(f"its classes are not those of {published.name}: {other[:80]}")


def _images_and_labels(
    published: _Published, batch: dict[str, object]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    pixels = _pixels(batch.get("data"))
    labels = batch.get(f"{published.prefix}labels")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise ValueError(
            f"{published.prefix}labels is not a list of {len(pixels)} labels, one for each row of "
            "data"
        )
    if not all(type(label) is int and 0 <= label < len(published.classes) for label in labels):
        raise ValueError(f"a label is not a whole number from 0 to {len(published.classes) - 1}")
    # A row holds the red plane, the green one and the blue one.
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), np.array(
        labels, np.int64
    )


class _StandIn:
    """What a name of numpy stands for while a pickle is read: it keeps what it is given, and does
    nothing.

    To allow numpy's own functions would not be safe: a pickled dtype sets its own flags, and an
    array of objects whose flags deny that it holds any takes bytes of the file for addresses in
    memory.
    """

    state: Any = None

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _pixels(value: object) -> NDArray[np.uint8]:
    """The array uint8 ``[N, 3072]`` that ``value`` stands for, as numpy pickles it up to protocol 4
    or from 5 on.
    """
    match value:
        case _StandIn(
            name="_reconstruct",
            state=(1, shape, _StandIn(name="dtype", args=("u1" | b"u1", *_)), fortran, raw),
        ):
            pass
        case _StandIn(
            name="_frombuffer", args=(raw, _StandIn(name="dtype", args=("u1", *_)), shape, order)
        ):
            fortran = order == "F"
        case _:
            raise ValueError("data is not an array of bytes")
    rows = len(raw) // _PIXELS
    if rows == 0 or shape != (rows, _PIXELS):
        raise ValueError(f"data is not rows of {_PIXELS} bytes")
    pixels: NDArray[np.uint8] = np.frombuffer(raw, np.uint8).reshape(
        shape, order="F" if fortran else "C"
    )
    return pixels


_NUMPY = {"numpy.ndarray", "numpy.dtype"} | {
    f"numpy.{core}.{name}"
    # numpy 1 and 2
    for core in ("core", "_core")
    for name in ("multiarray._reconstruct", "numeric._frombuffer")
}


def _flat(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """``load`` with a limit: hashing a million tuples inside each other overflows the stack and
    ends the process.
    """

    def checked(reader: Any) -> None:
        load(reader)
        if any(
            isinstance(item, tuple)
            for inner in reader.stack[-1]
            if isinstance(inner, tuple)
            for item in inner
        ):
            raise pickle.UnpicklingError("tuples in tuples in tuples")

    return checked


class _Reader(pickle._Unpickler):
    """The unpickler, with nothing that a pickle could call.

    It is the one written in Python: the one in C takes as much memory as a number in the pickle
    says (a memo's index).
    """

    dispatch = pickle._Unpickler.dispatch | {
        code[0]: _flat(pickle._Unpickler.dispatch[code[0]])
        for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    }

    def find_class(self, module: str, name: str) -> Any:
        # A new object each time, since a pickle may set attributes of what it was given.
        # for bytes in protocols that have none; always with Latin-1
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode("latin-1")
        if f"{module}.{name}" not in _NUMPY:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return partial(_StandIn, name)


def _unpickled(content: bytes) -> dict[str, object]:
    batch = _Reader(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(batch, dict):
        raise pickle.UnpicklingError("not a dictionary")
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
