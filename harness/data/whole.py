"""Remembers which JPEGs were decoded whole without a fault, so that a part of each may do.

A file in the cache folder has a checksum of each image's bytes. All workers, local ranks and later
runs share it. An image whose bytes have changed is decoded whole again.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np
import xxhash

from ..config import DataConfig
from .libraries import decodes_parts
from .mapped import MappedFile, memory, path_of, reserve
from .shards import ShardSource
from .storage import FileSource, Source, Subset, cache_root

# raise it if decoding becomes stricter
_FORMAT = 1


@dataclass(eq=False)
class Whole:
    """The checksums of images, 0 of one that was not decoded yet, in their order.

    A process that is killed leaves a checksum or none: eight bytes are written at once. Without a
    file all images count as decoded, for measurements of what parts cost.
    """

    file: MappedFile | None

    def __post_init__(self) -> None:
        if self.file is not None:
            self._sums = np.frombuffer(self.file.map, np.uint64)

    def __reduce__(self) -> tuple[object, ...]:
        return Whole, (self.file,)

    def has(self, i: int, checksum: int) -> bool:
        """Returns whether image ``i`` was decoded whole when its bytes had this checksum."""
        return self.file is None or int(self._sums[i]) == checksum

    def add(self, i: int, checksum: int) -> None:
        """Remembers that image ``i`` was decoded whole."""
        if self.file is not None:
            self._sums[i] = checksum


class Seen:
    """The checksums of images that this run decoded whole, most of them, by their own value.

    Workers share it. A newer image takes the place of an older one whose checksum falls on it.
    """

    # 32 MiB of addresses; memory, where it is written
    _SLOTS = 1 << 22

    def __init__(self, file: MappedFile | None = None) -> None:
        self.file = file or MappedFile(memory(8 * self._SLOTS), writable=True)
        self._sums = np.frombuffer(self.file.map, np.uint64)

    def __reduce__(self) -> tuple[object, ...]:
        return _seen, (path_of(self.file.fd),)

    def has(self, checksum: int) -> bool:
        """Returns whether an image of this checksum was decoded whole; it may be forgotten."""
        return int(self._sums[checksum % self._SLOTS]) == checksum

    def add(self, checksum: int) -> None:
        """Remembers that an image was decoded whole."""
        self._sums[checksum % self._SLOTS] = checksum


def _seen(path: str) -> Seen:
    """Returns the checksums in a process's file; new ones where that process has ended."""
    try:
        return Seen(MappedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC), writable=True))
    except OSError:
        return Seen()


def checksum(data: bytes) -> int:
    """Returns 64 bits of ``data``."""
    return xxhash.xxh3_64_intdigest(data)


def open_whole(source: Source, options: DataConfig) -> Whole | None:
    """Opens what is known of a folder's images; None: it would not be asked."""
    count = len(source)
    while isinstance(source, Subset):
        source = source.source
    if not isinstance(source, FileSource | ShardSource) or not decodes_parts():
        return None
    read = _FORMAT, count, options.exif_orientation, options.max_pixels
    name = hashlib.sha256(repr(read).encode() + os.fsencode(os.path.realpath(source.root)))
    path = cache_root() / "whole" / name.hexdigest()[:32]
    size = 8 * max(1, count)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        reserve(fd, size)
    except OSError:
        # known to this run alone
        fd = memory(size)
    return Whole(MappedFile(fd, writable=True))
