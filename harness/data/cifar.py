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
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.config import DataConfig
from harness.data.download import fetch, make_once, md5_of
from harness.data.storage import ArraySource, cache_root
from harness.runtime import signals
from harness.runtime.errors import DataError, Interrupted
from harness.runtime.files import open_regular, read_json, remove
from harness.runtime.folder import log

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

    The archive is looked for in ``data.root``, or fetched to there, and stays. Its arrays lie
    beside it, and are made again if they are damaged. Once the arrays exist the archive may be
    deleted and the folder read-only.

    Raises:
        DataError: the archive cannot be had, or is not what the publisher describes.
        DiskError: ``data.root`` cannot be written.
    """
    published = _PUBLISHED[data.name]
    root = Path(data.root or cache_root() / data.name).expanduser()
    archive = root / published.archive
    folder = root / f"{data.name}-arrays"
    md5 = (data.md5 or published.md5).lower()
    opened = partial(_opened, folder, md5, data.name)

    def write(part: Path) -> None:
        if os.path.lexists(folder):
            log.warning("%s: damaged, or of another archive: made again", folder)
        for name, array in _read_archive(data.name, archive).items():
            np.save(part / f"{name}.npy", array, allow_pickle=False)
        (part / _MARKER).write_text(json.dumps(_marker(part, md5)), encoding="utf-8")
        # what lies in their place
        remove(folder)

    # Most runs find whole arrays, and need neither the archive nor the lock.
    sources = opened()
    if sources is None:
        _obtain(archive, md5, data)
        make_once(folder, opened, write)
        sources = opened()
        assert sources is not None
    return sources


def _opened(folder: Path, md5: str, name: str) -> tuple[ArraySource, ArraySource] | None:
    """Maps the arrays in ``folder``; None unless they are whole and of the archive ``md5``."""
    classes = _PUBLISHED[name].classes
    sources = []
    try:
        if read_json(folder / _MARKER) != _marker(folder, md5):
            return None
        for split in ("train", "val"):
            images = np.load(folder / f"{split}_images.npy", mmap_mode="r")
            labels = np.load(folder / f"{split}_labels.npy", mmap_mode="r")
            if not 0 <= labels.min() <= labels.max() < len(classes):
                return None
            sources.append(ArraySource(images, labels, classes, f"{name} {split}"))
    except Exception:
        # numpy's reader raises anything on damaged bytes, and what follows on another form
        return None
    return sources[0], sources[1]


def _marker(folder: Path, md5: str) -> dict[str, object]:
    digests = {path.stem: md5_of(path) for path in folder.glob("*.npy")}
    return {"format": _FORMAT, "archive_md5": md5, "files": digests}


def _obtain(archive: Path, md5: str, data: DataConfig) -> None:
    """Makes sure that the archive is there and has the right digest."""
    if not archive.is_file():
        way_out = (
            f"put {archive.name} into {archive.parent}, or take data=shapes, "
            "data=digits or data=fake: they need no network"
        )
        if not data.download:
            raise DataError(
                f"{archive}: not there, and data.download=false; set it to true, or {way_out}"
            )
        mirror = data.mirror or "https://www.cs.toronto.edu/~kriz"
        try:
            fetch(f"{mirror.rstrip('/')}/{archive.name}", archive, md5=md5)
        except DataError as error:
            raise DataError(f"{error}; or {way_out}") from error
    try:
        digest = md5_of(archive)
    except OSError as error:
        raise DataError(
            f"{archive}: cannot be read: {error.strerror}; mend it with chmod or delete it"
        ) from error
    if digest != md5:
        raise DataError(
            f"{archive}: the md5 digest differs: expected {md5}, got {digest}; delete the "
            f"file, or set data.md5={digest} if this archive is meant"
        )


def _read_archive(name: str, archive: Path) -> dict[str, NDArray[Any]]:
    """Returns all arrays of the archive, images uint8 ``[N, 32, 32, 3]``, labels int64 ``[N]``."""
    published = _PUBLISHED[name]
    count = len(published.classes)
    parts = published.meta, *published.train, *published.val
    members = read_members(archive, [f"{published.folder}/{part}" for part in parts])
    arrays: dict[str, NDArray[Any]] = {}
    member = f"{published.folder}/{published.meta}"
    try:
        key = f"{published.prefix}label_names"
        values = _values(members[member])
        begin = values.index(key) + 1
        if values[begin : begin + count] != [*published.classes]:
            raise ValueError(f"{key} are not the {count} classes of {name}, in their order")

        for split, batches in (("train", published.train), ("val", published.val)):
            images = []
            labels: list[int] = []
            for part in batches:
                member = f"{published.folder}/{part}"
                values = _values(members.pop(member))
                # A row holds the red plane, the green one and the blue one.
                rows = _pixels(values)
                images.append(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
                key = f"{published.prefix}labels"
                behind = values[values.index(key) + 1 :]
                given = list(takewhile(lambda value: type(value) is int, behind))
                if len(given) != len(rows) or not 0 <= min(given) <= max(given) < count:
                    raise ValueError(
                        f"{key} is not a list of {len(rows)} whole numbers from 0 to {count - 1}, "
                        "one for each row"
                    )
                labels += given
            arrays[f"{split}_images"] = np.ascontiguousarray(np.concatenate(images))
            arrays[f"{split}_labels"] = np.array(labels, np.int64)
    except Exception as error:
        # a damaged pickle may raise anything
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{archive}: member {member} is not as published: {reason}; get the "
            "archive from its publisher"
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
        content = io.BytesIO()
        with open(open_regular(archive), "rb") as file, gzip.open(file) as stream:
            # to the very end, where gzip keeps its checksum
            while chunk := stream.read(1 << 18):
                signals.check()
                content.write(chunk)
                if content.tell() > most_bytes:
                    raise ValueError(f"unpacks to more than {most_bytes} bytes")
        content.seek(0)
        with tarfile.open(fileobj=content, mode="r:") as tar:
            for member in tar:
                # a sparse file may claim any size
                if member.name in wanted and member.isreg() and not member.issparse():
                    part = tar.extractfile(member)
                    assert part is not None
                    found[member.name] = part.read()
        if missing := sorted({*wanted} - found.keys()):
            raise ValueError(f"has no file {', '.join(missing)}")
        return found
    except Interrupted:
        raise
    except Exception as error:
        # damage surfaces as OSError, EOFError, zlib.error, TarError, ValueError, RecursionError
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{archive}: damaged: {reason}; delete the file and get it from its publisher"
        ) from error


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


def _pixels(values: list[Any]) -> NDArray[np.uint8]:
    """Returns the array uint8 ``[N, 3072]`` among the values of a batch."""
    raw = max((value for value in values if isinstance(value, str)), key=len)
    rows = len(raw) // 3072
    if rows == 0 or "u1" not in values or (rows, 3072) not in pairwise(values):
        raise ValueError("data is not rows of 3072 bytes")
    pixels = np.frombuffer(raw.encode("latin-1"), np.uint8)
    # column by column, say a flag before the bytes or, since protocol 5, a letter
    if values[values.index(raw) - 1] is True or "F" in values:
        return pixels.reshape(3072, rows).T
    return pixels.reshape(rows, 3072)
