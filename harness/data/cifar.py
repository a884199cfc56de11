"""Downloads, checks and unpacks CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import re
import tarfile
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..config import DataConfig
from ..runtime.errors import DataError
from ..runtime.files import open_regular, read_regular
from .download import fetch, make_once
from .mapped import memory, path_of
from .storage import ArraySource, cache_root


class _Unpickler(pickle.Unpickler):
    """Loads dictionaries, lists, text, numbers and arrays, because anything else could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the parts of an array, under their names in numpy 1 and 2."""
        full = f"{module}.{name}"
        parts = r"numpy\.(_?core\.\w+\.(_reconstruct|_frombuffer)|ndarray|dtype)"
        if not re.fullmatch(parts, full):
            raise pickle.UnpicklingError(f"it contains {full}")
        return super().find_class(module, name)


def _published(name: str) -> Any:
    """Returns torchvision's class, which has the facts of the published archive."""
    # slow to import
    from torchvision import datasets

    return getattr(datasets, name.upper())


def open_cifar(data: DataConfig) -> tuple[ArraySource, ArraySource]:
    """Opens the training and test sets; all local processes share the pixels.

    CIFAR-100 uses its 100 fine labels.

    ``data.root`` may contain the archive, or its files if another program has unpacked them. If
    both are missing, the archive is downloaded there and kept. It is unpacked once, next to the
    archive or in the user's cache, and can then be deleted.

    Raises:
        DataError: the archive is unavailable, or differs from the published one.
        DiskError: ``data.root`` cannot be written.
    """
    published = _published(data.name)
    root = Path(data.root or cache_root() / data.name).expanduser()
    archive = root / published.filename
    md5 = (data.md5 or published.tgz_md5).lower()
    kept = [place / f"{data.name}-{md5[:16]}" for place in (root, cache_root())]
    # what torchvision unpacked
    known = kept if archive.exists() else [*kept, root / published.base_folder]
    folder = next(filter(Path.is_dir, known), None)
    if folder is None:
        if not (root.exists() or data.download):
            # raised before anything is written
            _fetch(archive, root, data)
        beside, cached = kept
        folder = beside if os.access(root, os.W_OK) or not root.exists() else cached
        make_once(folder, folder.is_dir, partial(_unpack, data, archive, md5))
    return _sources(data.name, folder)


def _unpack(data: DataConfig, archive: Path, md5: str, part: Path) -> None:
    """Writes the published files into the folder ``part`` after checking them.

    A downloaded archive is also stored there until its digest is checked.
    """
    published = _published(data.name)
    found = archive
    if not archive.is_file():
        found = part / archive.name
        _fetch(archive, found, data)
    try:
        with open(open_regular(found), "rb") as file:
            md5_of = partial(hashlib.md5, usedforsecurity=False)
            digest = hashlib.file_digest(file, md5_of).hexdigest()
    except OSError as error:
        raise DataError(
            f"{archive}: cannot be read ({error}); fix its permissions or delete it"
        ) from error
    if digest != md5:
        raise DataError(
            f"{archive}: wrong MD5 digest: expected {md5}, got {digest}; get it from its "
            f"publisher, or set data.md5={digest} to accept this archive"
        )
    files = published.train_list + published.test_list
    names = [published.meta["filename"], *(name for name, _ in files)]
    try:
        with tarfile.open(found) as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if name in names and (content := tar.extractfile(member)):
                    (part / name).write_bytes(content.read())
    except (EOFError, tarfile.TarError) as error:
        raise DataError(
            f"{archive} is corrupt ({error!r}); delete it and download it again from its publisher"
        ) from error
    _sources(data.name, part)
    if found != archive and os.access(archive.parent, os.W_OK):
        os.replace(found, archive)


def _fetch(archive: Path, target: Path, data: DataConfig) -> None:
    way_out = (
        f"put {archive.name} into {archive.parent}, or use data=shapes, data=digits or "
        "data=fake, which work offline"
    )
    if not data.download:
        raise DataError(
            f"{archive} is missing, and data.download=false; set it to true, or {way_out}"
        )
    mirror = data.mirror or "https://www.cs.toronto.edu/~kriz"
    try:
        fetch(f"{mirror.rstrip('/')}/{archive.name}", target)
    except DataError as error:
        raise DataError(f"{error}; or {way_out}") from error


def _sources(name: str, folder: Path) -> tuple[ArraySource, ArraySource]:
    """Returns the sets in ``folder``'s published files: images are uint8 ``[N, 32, 32, 3]``."""
    published = _published(name)
    sources = []
    part = published.meta["filename"]
    key = published.meta["key"]
    try:
        classes = tuple(_load(folder / part)[key])
        for split, batches in (("train", published.train_list), ("val", published.test_list)):
            images = []
            labels: list[int] = []
            for part, _ in batches:
                batch = _load(folder / part)
                pixels = batch["data"]
                given = batch[key.replace("label_names", "labels")]
                if pixels.dtype != np.uint8 or pixels.shape != (len(given), 3072):
                    raise ValueError("data is not one row of 3072 bytes per label")
                if not {*given} <= {*range(len(classes))}:
                    raise ValueError("a label is out of range")
                # a row has a red, a green and a blue plane
                images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
                labels += given
            shape = len(labels), 32, 32, 3
            # a map, so that workers share it
            fd = memory(math.prod(shape))
            shared = np.memmap(path_of(fd), np.uint8, "r+", shape=shape)
            weakref.finalize(shared, os.close, fd)
            np.concatenate(images, out=shared)
            sources.append(ArraySource(shared, np.array(labels), classes, f"{name} {split}"))
    except OSError as error:
        raise DataError(
            f"{folder / part}: cannot be read ({error}); fix its permissions or delete it"
        ) from error
    except Exception as error:
        # a corrupt pickle may raise anything
        raise DataError(
            f"{name}: member {part} does not match the published archive: {error!r}; download the "
            "archive from its publisher"
        ) from error
    return sources[0], sources[1]


def _load(path: Path) -> Any:
    """Returns the content of a pickle written by Python 2 or 3."""
    content = io.BytesIO(read_regular(path))
    return _Unpickler(content, encoding="latin1").load()
