"""CIFAR-10 and CIFAR-100: the published archive, checked once, then kept as plain arrays."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickletools
import re
import tarfile
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.config import DataConfig
from harness.data.download import fetch, make_once, md5_of
from harness.data.storage import ArraySource, cache_root
from harness.runtime.errors import DataError
from harness.runtime.files import open_regular, read_json, read_regular

# Of the arrays' folder: another number makes every folder again.
_FORMAT = 1
_MARKER = "complete.json"
# of an archive, unpacked: they have 186 MB
_MOST_BYTES = 256 << 20

_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain
    plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


class _Published(NamedTuple):
    """An archive as https://www.cs.toronto.edu/~kriz/cifar.html describes it."""

    archive: str
    md5: str
    folder: str
    train: tuple[str, ...]
    val: tuple[str, ...]
    meta: str
    # of the keys of labels and their names
    prefix: str
    classes: tuple[str, ...]


_PUBLISHED = {
    "cifar10": _Published(
        archive="cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        val=("test_batch",),
        meta="batches.meta",
        prefix="",
        classes=tuple(_CIFAR10_CLASSES.split()),
    ),
    "cifar100": _Published(
        archive="cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        train=("train",),
        val=("test",),
        meta="meta",
        prefix="fine_",
        classes=tuple(_CIFAR100_CLASSES.split()),
    ),
}


def open_cifar(data: DataConfig) -> tuple[ArraySource, ArraySource]:
    """Opens the training and the test set, pixels mapped from the disk.

    CIFAR-100 comes with its 100 fine labels.

    The archive, or what other programs unpacked of it, is looked for in ``data.root``; else the
    archive is fetched to there, and stays. Arrays are made of it once, beside it or in the user's
    cache, and again if they are damaged. Then the archive may be deleted.

    Raises:
        DataError: the archive cannot be had, or is not what the publisher describes.
        DiskError: ``data.root`` cannot be written.
    """
    published = _PUBLISHED[data.name]
    root = Path(data.root or cache_root() / data.name).expanduser()
    md5 = (data.md5 or published.md5).lower()
    for place in (root, cache_root()):
        folder = place / f"{data.name}-arrays"
        if sources := _opened(folder, md5, data.name):
            return sources
    if not (root.exists() or data.download):
        # refused before anything is written
        _fetch(root / published.archive, root, data)
    if os.access(root, os.W_OK) or not root.exists():
        folder = root / folder.name

    def write(part: Path) -> None:
        for name, array in _arrays(data.name, _members(data, root, md5, part)).items():
            np.save(part / f"{name}.npy", array)
        (part / _MARKER).write_text(json.dumps(_marker(part, md5)), encoding="utf-8")

    make_once(folder, partial(_opened, folder, md5, data.name), write)
    sources = _opened(folder, md5, data.name)
    assert sources is not None
    return sources


def _opened(folder: Path, md5: str, name: str) -> tuple[ArraySource, ArraySource] | None:
    """Maps the arrays in ``folder``; None unless they are whole and of the archive ``md5``."""
    sources = []
    # numpy's reader raises anything on damaged bytes, and what follows on another form
    with suppress(Exception):
        if read_json(folder / _MARKER) == _marker(folder, md5):
            for split in ("train", "val"):
                images = np.load(folder / f"{split}_images.npy", mmap_mode="r")
                labels = np.load(folder / f"{split}_labels.npy", mmap_mode="r")
                classes = _PUBLISHED[name].classes
                sources.append(ArraySource(images, labels, classes, f"{name} {split}"))
            return sources[0], sources[1]
    return None


def _marker(folder: Path, md5: str) -> dict[str, object]:
    digests = {path.stem: md5_of(path) for path in folder.glob("*.npy")}
    return {"format": _FORMAT, "archive_md5": md5, "files": digests}


def _members(data: DataConfig, root: Path, md5: str, part: Path) -> dict[str, bytes]:
    """Returns the published files: those unpacked in ``root``, or the archive's.

    A fetched archive lies in ``part`` until its digest is known.
    """
    published = _PUBLISHED[data.name]
    names = published.meta, *published.train, *published.val
    archive = root / published.archive
    unpacked = root / published.folder
    is_unpacked = unpacked.is_dir() and not archive.exists()
    found = archive
    if not archive.is_file() and not is_unpacked:
        found = part / archive.name
        _fetch(archive, found, data)
    try:
        if is_unpacked:
            return {name: read_regular(unpacked / name, _MOST_BYTES) for name in names}
        digest = md5_of(found)
    except OSError as error:
        raise DataError(
            f"{error.filename or root}: cannot be read: {error.strerror or error}; mend it with "
            "chmod or delete it"
        ) from error
    if digest != md5:
        raise DataError(
            f"{archive}: the md5 digest differs: expected {md5}, got {digest}; get it from its "
            f"publisher, or set data.md5={digest} if this archive is meant"
        )
    members = read_members(found, [f"{published.folder}/{name}" for name in names])
    if found != archive and os.access(root, os.W_OK):
        os.replace(found, archive)
    return {name.rpartition("/")[2]: content for name, content in members.items()}


def _fetch(archive: Path, target: Path, data: DataConfig) -> None:
    way_out = (
        f"put {archive.name} into {archive.parent}, or take data=shapes, data=digits or "
        "data=fake: they need no network"
    )
    if not data.download:
        raise DataError(
            f"{archive}: not there, and data.download=false; set it to true, or {way_out}"
        )
    mirror = data.mirror or "https://www.cs.toronto.edu/~kriz"
    try:
        fetch(f"{mirror.rstrip('/')}/{archive.name}", target)
    except DataError as error:
        raise DataError(f"{error}; or {way_out}") from error


def _arrays(name: str, members: dict[str, bytes]) -> dict[str, np.ndarray]:
    """Returns images uint8 ``[N, 32, 32, 3]`` and labels int64 ``[N]`` of both sets."""
    published = _PUBLISHED[name]
    arrays: dict[str, np.ndarray] = {}
    part = published.meta
    try:
        values = _values(members[part])
        begin = values.index(f"{published.prefix}label_names") + 1
        if values[begin : begin + len(published.classes)] != [*published.classes]:
            raise ValueError(f"other classes than those of {name}, or another order")
        for split, batches in (("train", published.train), ("val", published.val)):
            images = []
            labels: list[int] = []
            for part in batches:
                pixels, given = _batch(members.pop(part), f"{published.prefix}labels")
                if not {*given} <= {*range(len(published.classes))}:
                    raise ValueError("a label is no class")
                # A row holds the red plane, the green one and the blue one.
                images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
                labels += given
            arrays[f"{split}_images"] = np.ascontiguousarray(np.concatenate(images))
            arrays[f"{split}_labels"] = np.array(labels, np.int64)
    except Exception as error:
        # a damaged pickle may raise anything
        raise DataError(
            f"{name}: member {part} is not as published: {error!r}; get the archive from its "
            "publisher"
        ) from error
    return arrays


def read_members(
    archive: Path, wanted: Collection[str], most_bytes: int = _MOST_BYTES
) -> dict[str, bytes]:
    """Returns the bytes of the members of a ``.tar.gz`` whose names are ``wanted``.

    tarfile's extract methods stay unused, also with ``filter="data"``: a chain of links longer than
    PATH_MAX leads that filter out of its folder (CVE-2025-4517). Here a member's name is only
    compared, never used as a path. Members that are not wanted are passed over, links and devices
    among them.

    Raises:
        DataError: the archive is damaged, unpacks to more than ``most_bytes``, or lacks a
            wanted one as a plain file.
    """
    found: dict[str, bytes] = {}
    try:
        with open(open_regular(archive), "rb") as file, gzip.open(file) as stream:
            # to the very end, where gzip keeps its checksum
            content = stream.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"unpacks to more than {most_bytes} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                # a sparse file may claim any size
                if member.name in wanted and member.isreg() and not member.issparse():
                    part = tar.extractfile(member)
                    assert part is not None
                    found[member.name] = part.read()
        if missing := sorted({*wanted} - found.keys()):
            raise ValueError(f"has no file {', '.join(missing)}")
    except Exception as error:
        # damage surfaces as OSError, EOFError, zlib.error, TarError, ValueError, RecursionError
        raise DataError(
            f"{archive}: damaged: {error!r}; delete the file and get it from its publisher"
        ) from error
    return found


def _values(content: bytes) -> list[Any]:
    """Returns the texts and numbers in a pickle of any protocol, in their order.

    Nothing is unpickled: pickletools lists the operations, so that a pickle calls nothing and takes
    no more memory than it has bytes. Bytes become texts. Of truth values there is ``True`` alone.
    """
    values: list[Any] = []
    for operation, argument, _ in pickletools.genops(content):
        if operation.name == "NEWTRUE":
            values.append(True)
        elif isinstance(argument, bytes | bytearray):
            values.append(argument.decode("latin-1"))
        # not the numbers of places in the memo and the like
        elif argument is not None and not re.search("GET|PUT|PROTO|FRAME|GLOBAL", operation.name):
            values.append(argument)
    return values


def _batch(content: bytes, key: str) -> tuple[np.ndarray, list[int]]:
    """Returns the rows, uint8 ``[N, 3072]``, and the labels behind ``key`` of a pickled batch."""
    values = _values(content)
    labels = [*takewhile(lambda value: type(value) is int, values[values.index(key) + 1 :])]
    rows = len(labels), 3072
    text = max((value for value in values if isinstance(value, str)), key=len)
    pixels = np.frombuffer(text.encode("latin-1"), np.uint8)
    if pixels.size != 3072 * len(labels) or "u1" not in values or rows not in pairwise(values):
        raise ValueError("data is not a row of 3072 bytes for each label, a whole number")
    # column by column, say a flag before the bytes or, since protocol 5, a letter
    by_columns = values[values.index(text) - 1] is True or "F" in values
    return pixels.reshape(rows, order="F" if by_columns else "C"), labels
