"""CIFAR-10 and CIFAR-100, by torchvision: the published archive, checked and unpacked once."""

from __future__ import annotations

import math
import os
import tarfile
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import DataConfig
from harness.data.download import fetch, make_once, md5_of
from harness.data.mapped import memory
from harness.data.storage import ArraySource, cache_root
from harness.runtime.errors import DataError

# of a published file: they have 150 MB at most
_MOST_BYTES = 256 << 20


def open_cifar(data: DataConfig) -> tuple[ArraySource, ArraySource]:
    """Opens the training and the test set, whose pixels all processes of this machine share.

    CIFAR-100 comes with its 100 fine labels.

    The archive, or what torchvision unpacked of it, is looked for in ``data.root``; else the
    archive is fetched to there, and stays. Its files are unpacked once, beside it or in the user's
    cache. Then the archive may be deleted. No file is unpickled whose digest, or whose archive's,
    is not the publisher's or ``data.md5``.

    Raises:
        DataError: the archive cannot be had, or is not what the publisher describes.
        DiskError: ``data.root`` cannot be written.
    """
    # takes a while to import
    from torchvision.datasets import CIFAR10, CIFAR100

    kind: Any = {"cifar10": CIFAR10, "cifar100": CIFAR100}[data.name]
    root = Path(data.root or cache_root() / data.name).expanduser()
    archive = root / kind.filename
    md5 = (data.md5 or kind.tgz_md5).lower()
    beside, cached = (place / f"{data.name}-{md5[:16]}" for place in (root, cache_root()))
    places = [beside, cached]
    if data.md5:
        # the archive's digest stands for its files'
        unchecked = {
            part: [(name, None) for name, _ in getattr(kind, part)]
            for part in ("train_list", "test_list")
        }
        kind = type(kind.__name__, (kind,), {**unchecked, "meta": {**kind.meta, "md5": None}})
    else:
        places.append(root)
    place = next((place for place in places if (place / kind.base_folder).is_dir()), None)
    if place is None:
        if not (root.exists() or data.download):
            # refused before anything is written
            _fetch(archive, root, data)
        place = beside if os.access(root, os.W_OK) or not root.exists() else cached
        make_once(place, place.is_dir, partial(_unpack, data, kind, archive, md5))
    try:
        train, val = kind(place, train=True), kind(place, train=False)
        return _source(train, f"{data.name} train"), _source(val, f"{data.name} val")
    except Exception as error:
        # a damaged pickle may raise anything
        raise DataError(
            f"{place / kind.base_folder}: its files are not as published: {error!r}; delete the "
            f"folder, and put {archive.name} into {root}"
        ) from error


def _source(found: Any, name: str) -> ArraySource:
    """Returns torchvision's data set as a source, its pixels in memory that workers map."""
    labels = np.array(found.targets)
    if not {*labels.tolist()} <= {*range(len(found.classes))} or found.data.dtype != np.uint8:
        raise ValueError("a label is no class, or pixels are not bytes")
    fd = memory(math.prod(found.data.shape))
    place = f"/proc/{os.getpid()}/fd/{fd}"
    images = np.memmap(place, np.uint8, "r+", shape=found.data.shape)
    weakref.finalize(images, os.close, fd)
    images[...] = found.data
    return ArraySource(images, labels, found.classes, name)


def _unpack(data: DataConfig, kind: Any, archive: Path, md5: str, part: Path) -> None:
    """Writes the published files into the folder ``part``.

    A fetched archive lies there too until its digest is known.
    """
    found = archive
    if not archive.is_file():
        found = part / archive.name
        _fetch(archive, found, data)
    try:
        digest = md5_of(found)
    except OSError as error:
        raise DataError(f"{archive}: cannot be read: {error}; mend it or delete it") from error
    if digest != md5:
        raise DataError(
            f"{archive}: the md5 digest differs: expected {md5}, got {digest}; get it from its "
            f"publisher, or set data.md5={digest} if this archive is meant and trusted"
        )
    names = [kind.meta["filename"], *(name for name, _ in (*kind.train_list, *kind.test_list))]
    try:
        with tarfile.open(found) as tar:
            # only compared: an archive's names and links lead nowhere
            members = [tar.getmember(f"{kind.base_folder}/{name}") for name in names]
            if any(not member.isreg() or member.size > _MOST_BYTES for member in members):
                raise ValueError("not all are files of the published size")
            contents = [tar.extractfile(member).read() for member in members]  # type: ignore
    except Exception as error:
        # damage surfaces as OSError, EOFError, zlib.error, TarError, ValueError
        raise DataError(f"{archive}: damaged: {error!r}; get it from its publisher") from error
    (part / kind.base_folder).mkdir()
    for name, content in zip(names, contents, strict=True):
        (part / kind.base_folder / name).write_bytes(content)
    if found != archive and os.access(archive.parent, os.W_OK):
        os.replace(found, archive)


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
