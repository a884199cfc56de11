"""Records which JPEGs were decoded in full without errors, so that crops can be decoded alone.

A file in the cache folder contains a checksum of each image's bytes, shared by all workers, local
ranks and later runs. An image whose bytes changed is decoded in full again.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np

from ..config import DataConfig
from .libraries import in_use
from .mapped import MappedFile, memory, opened, path_of, reserve
from .shards import ShardSource
from .storage import FileSource, Source, cache_root, undivided

# increase it if decoding becomes stricter
_FORMAT = 1


@dataclass(eq=False)
class Whole:
    """The image checksums by number; 0 if an image has not been decoded yet.

    Numbers beyond the last one wrap around. Eight bytes are written at once, so a killed process
    leaves no partial checksum. Without a file, all images are treated as decoded, to measure the
    cost of crops.
    """

    file: MappedFile | None

    def __post_init__(self) -> None:
        if self.file is not None:
            self._sums = np.frombuffer(self.file.map, np.uint64)

    def __reduce__(self) -> tuple[object, ...]:
        return Whole, (self.file,)

    def has(self, i: int, checksum: int) -> bool:
        """Returns whether image ``i``, with this checksum, was decoded in full."""
        return self.file is None or int(self._sums[i % len(self._sums)]) == checksum

    def add(self, i: int, checksum: int) -> None:
        """Records that image ``i`` was decoded in full."""
        if self.file is not None:
            self._sums[i % len(self._sums)] = checksum


class Seen(Whole):
    """A lossy table of images that this run decoded in full, numbered by their checksums.

    Workers share it. A colliding checksum replaces the older one.
    """

    def __init__(self, file: MappedFile | None = None) -> None:
        # 32 MiB of address space, allocated on write
        super().__init__(file or MappedFile(memory(32 << 20), writable=True))

    def __reduce__(self) -> tuple[object, ...]:
        assert self.file is not None
        return _seen, (path_of(self.file.fd),)


def _seen(path: str) -> Seen:
    """Returns the checksums in a process's file, or a new table if that process has ended."""
    try:
        return Seen(opened(path, writable=True))
    except OSError:
        return Seen()


def open_whole(source: Source, options: DataConfig) -> Whole | None:
    """Opens the checksums for a source's images; None if they are not needed."""
    count = len(source)
    whole = undivided(source)
    if not isinstance(whole, FileSource | ShardSource) or "parts of JPEG" not in in_use():
        return None
    read = _FORMAT, count, options.exif_orientation, options.max_pixels
    name = hashlib.sha256(repr(read).encode() + os.fsencode(os.path.realpath(whole.root)))
    path = cache_root() / "whole" / name.hexdigest()[:32]
    size = 8 * count
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        reserve(fd, size)
    except OSError:
        # kept for this run only
        fd = memory(size)
    return Whole(MappedFile(fd, writable=True))
