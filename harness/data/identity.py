"""Which data set this is, from a look at a sample of it: figures measured on one hold for no other."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np

from harness.data.datasets import Splits
from harness.data.images import ImageDataset
from harness.data.storage import FolderSource, Source, Subset

# files, and class folders, of a tree: a few milliseconds on a disk
_LOOKED_AT = 400
# samples of what is no tree of files
_READ = 16


def identity(splits: Splits) -> dict[str, Any]:
    """The training set's name, place, size, and a digest of a sample of it, as plain values.

    It changes when an image comes or goes, and when a file of the sample is written anew, which for
    a small set is any file; in a tree also when one image of a sampled class folder takes the place
    of another.
    """
    train = splits.train
    root = os.path.abspath(os.path.expanduser(splits.root)) if splits.root else ""
    found = {
        "name": splits.name,
        "root": root,
        "images": len(train),
        "classes": len(splits.classes),
    }
    return {**found, "digest": _digest(train.source)} if isinstance(train, ImageDataset) else found


def _digest(source: Source) -> str:
    digest = hashlib.sha256(os.fsencode("\n".join(source.classes)))
    whole = source
    while isinstance(whole, Subset):
        whole = whole.source
    if isinstance(whole, FolderSource):
        folders = [
            os.path.join(whole.root, whole.classes[i])
            for i in _spread(len(whole.classes), _LOOKED_AT)
        ]
        for path in (whole.root, *folders, *map(source.where, _spread(len(source), _LOOKED_AT))):
            digest.update(os.fsencode(f"{path} {_state(path)}\n"))
    else:
        for i in _spread(len(source), _READ):
            content, label = source.read(i)
            digest.update(
                f"{len(content) if isinstance(content, bytes) else content.shape} {label}".encode()
            )
            digest.update(content if isinstance(content, bytes) else content.tobytes())
    return digest.hexdigest()


def _spread(length: int, most: int) -> list[int]:
    """At most ``most`` of the places 0 to ``length`` - 1, evenly spread, the first and the last
    among them.
    """
    places: list[int] = np.unique(
        np.linspace(0, length - 1, min(length, most)).astype(np.int64)
    ).tolist()
    return places


def _state(path: str) -> tuple[int, int] | None:
    """Size in bytes and time of the last change in nanoseconds; None for what is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
