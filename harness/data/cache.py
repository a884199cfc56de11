"""Caches decoded pixels in one file, in memory or on disk, mapped by all local processes.

The file has a header, a table with one column per image, and an append-only pixel area, so views
stay valid. An image's offset is written last, so a killed writer leaves no partial entry. Pixels
from earlier runs are verified on first use, by a checksum that includes their source's size and
mtime. Only one run at a time writes to a file on disk; others read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import platform
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ConfigError, DataCache, DataConfig
from ..monitor.console import say
from ..runtime import limits
from ..runtime.files import open_regular
from ..runtime.folder import log
from .mapped import MappedFile, checksum, memory, path_of, reserve
from .shards import ShardSource
from .storage import FileSource, Source, Subset, cache_root
from .transforms import resized

# every rank's value in rank order, on every rank
Gathered = Callable[[Any], list[Any]]

# increase it if the file layout or the pixels from ``decode`` change
_FORMAT = 5
_HEAD = np.dtype([("key", "S64"), ("used", "<i8"), ("limit", "<i8")])
# offset (0: none), height, width, and a checksum of pixels and source, all int64
_COLUMN_BYTES = 32


@dataclass(eq=False)
class PixelCache:
    """The decoded images of ``source``: columns ``first`` onwards of ``file``."""

    # fields as set by ``open_caches``
    file: MappedFile
    # one byte per column, nonzero once this run has written or verified the image
    checked: MappedFile
    # the column of the source's first image
    first: int
    # all files in a folder, or some of them
    source: Any
    # maximum longer side in pixels; larger images are shrunk; None: unlimited
    max_side: int | None
    # interpolation used for shrinking
    interpolation: str

    def __post_init__(self) -> None:
        self._head = np.frombuffer(self.file.map, _HEAD, 1)[0]
        columns = slice(self.first, self.first + len(self.source))
        count = 4 * len(self.checked.map)
        self._table = np.frombuffer(self.file.map, np.int64, count, _HEAD.itemsize).reshape(4, -1)
        self._places, self._heights, self._widths, self._digests = self._table[:, columns]
        self._checked = np.frombuffer(self.checked.map, np.uint8)[columns]
        self._pixels = np.frombuffer(self.file.map, np.uint8)
        self._pixels.flags.writeable = False

    def __reduce__(self) -> tuple[object, ...]:
        return PixelCache, tuple(getattr(self, field.name) for field in fields(self))

    def get(self, i: int) -> np.ndarray | None:
        """Returns the pixels of image ``i`` as a permanent read-only view; None if not cached."""
        # in this order, because the image may be moved concurrently
        checked = self._checked[i]
        place = int(self._places[i])
        if not place:
            return None
        height = int(self._heights[i])
        width = int(self._widths[i])
        # the source file may be missing, and numbers may be corrupt
        with suppress(OSError, ValueError):
            flat = self._pixels[place : place + 3 * height * width]
            pixels = flat.reshape(height, width, 3)
            if checked:
                return pixels
            if self._digests[i] == self._digest(i, pixels):
                self._checked[i] = 1
                return pixels
        # the next put writes it again
        if self.file.writable:
            self._places[i] = 0
        return None

    def put(self, i: int, pixels: np.ndarray) -> np.ndarray:
        """Caches ``pixels`` if there is space, shrunk if too large, and returns them."""
        if self.max_side is not None:
            pixels = shrunk(pixels, self.max_side, self.interpolation)
        if self._places[i] or not self.file.writable:
            return pixels
        content = np.ascontiguousarray(pixels)
        # the source file is missing, or the disk filled up
        with suppress(OSError):
            digest = self._digest(i, content)
            place = self._room(content.nbytes)
            if place:
                self._heights[i], self._widths[i], _ = content.shape
                self._digests[i] = digest
                # Not through the map, which costs a fault per page and SIGBUS on a full disk. The
                # kernel's locks order the write before the offset on any CPU.
                if os.pwrite(self.file.fd, content.data, place) == content.nbytes:
                    self._places[i] = place
                    self._checked[i] = 1
        return pixels

    def _room(self, size: int) -> int:
        """Returns an offset for ``size`` bytes; 0 if the cache is full."""
        head = self._head
        # a full cache needs no lock
        if head["used"] + size > head["limit"]:
            return 0
        # Not the cache file's lock, which the run holds. A lock belongs to an open file, which
        # threads and forked processes share, and is released if its process is killed.
        with open(path_of(self.checked.fd), "r+b", buffering=0) as own:
            fcntl.flock(own, fcntl.LOCK_EX)
            place = int(head["used"])
            if place + size > head["limit"]:
                return 0
            head["used"] = place + size
        return place

    def _digest(self, i: int, pixels: np.ndarray) -> int:
        return checksum(pixels, *self.source.state(i))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that the cache may still allocate; 0 for a cache on disk."""
        if os.fstat(self.file.fd).st_nlink:
            return 0
        return max(0, int(self._head["limit"] - self._head["used"]))

    def stats(self) -> dict[str, int]:
        """Returns ``images`` of ``samples`` cached, and ``bytes`` used of ``limit``."""
        places = self._table[0]
        return {
            "images": int(np.count_nonzero(places)),
            "samples": len(places),
            "bytes": int(self._head["used"]),
            "limit": int(self._head["limit"]),
        }

    def summary(self) -> str:
        """Returns the fill level in one line."""
        images, samples, used, limit = self.stats().values()
        return f"{images} of {samples} images, {used / 1e9:.1f} of at most {limit / 1e9:.1f} GB"


def shrunk(pixels: np.ndarray, max_side: int, interpolation: str) -> np.ndarray:
    """Returns ``pixels``, uint8 ``[H, W, 3]``, shrunk to a longer side of at most ``max_side``."""
    height, width, _ = pixels.shape
    factor = min(1.0, max_side / max(height, width))
    sides = max(1, round(width * factor)), max(1, round(height * factor))
    return resized(pixels, *sides, interpolation)


def open_caches(
    sources: tuple[Source, Source], data: DataConfig, gathered: Gathered
) -> tuple[PixelCache, PixelCache]:
    """Opens the caches of two sources in one file, read-only in a second run.

    Every rank calls this. One rank on each machine opens the file, and the others map the same one.

    Raises:
        ConfigError: the sources have no files to decode, or the cache cannot be written.
    """
    # everything that affects the pixels except the file's bytes; torch shrinks large images
    packages = "pillow", *filter(find_spec, ["simplejpeg"]), "torch"
    software = list(map(version, packages))
    how = data.cache_max_side, data.interpolation.name
    pixels = data.exif_orientation, data.background, data.max_pixels
    made_by = _FORMAT, pixels, data.cache_max_side and how, software
    key = hashlib.sha256(json.dumps(made_by).encode())
    name = hashlib.sha256()
    for source in sources:
        folder, digest = _listed(source, data)
        name.update(os.fsencode(os.path.realpath(folder)) + b"\0")
        key.update(digest)
    # a file may have replaced another
    key.update(name.digest())
    path = cache_root() / "decoded" / name.hexdigest()[:32]
    count = sum(map(len, sources))
    file, checked = _shared(lambda: _opened(path, data, key.hexdigest(), count), gathered)
    train, val = sources
    first = PixelCache(file, checked, 0, train, *how)
    where = "in memory" if data.cache is DataCache.ram else path.parent
    say(f"decoded cache: {first.summary()} ({where})")
    return first, PixelCache(file, checked, len(train), val, *how)


def _listed(source: Source, data: DataConfig) -> tuple[str, bytes]:
    """Returns the folder of ``source``, and a digest of its image paths in order."""
    if isinstance(source, Subset):
        folder, digest = _listed(source.source, data)
        return folder, hashlib.sha256(digest + source.indices.tobytes()).digest()
    if isinstance(source, FileSource | ShardSource):
        return source.root, source.digest()
    raise ConfigError(
        f"data.cache={data.cache.name} has no effect for data={data.name}, whose pixels need no "
        "decoding"
    )


def _shared(make: Callable[[], Any], gathered: Gathered) -> Any:
    """Calls ``make`` in one process per machine; returns its result or raises its error in all."""
    machine = platform.node()
    with suppress(OSError):
        # containers on the same machine do not see each other
        machine = os.readlink("/proc/self/ns/pid")
        machine += Path("/proc/sys/kernel/random/boot_id").read_text()
    me = machine, os.getpid()
    everyone = gathered(me)
    first = [place for place, _ in everyone].index(machine)
    made = None
    failure = None
    if everyone[first] == me:
        try:
            made = make()
        except (ConfigError, OSError) as error:
            # raising only here would leave the others waiting
            failure = error
    # as bytes, because other machines' files cannot be opened here
    told = gathered((failure, pickle.dumps(made)))
    for refused, _ in told:
        if refused is not None:
            raise refused
    return made if everyone[first] == me else pickle.loads(told[first][1])


def _opened(path: Path, data: DataConfig, key: str, count: int) -> tuple[MappedFile, MappedFile]:
    """Opens the cache file, and creates one byte per image that marks it as checked."""
    if data.cache is DataCache.ram:
        budget_bytes = _budget(data, limits.measure().memory_bytes)
        file = _filled(memory(0), key, count, budget_bytes)
    else:
        file = _on_disk(path, data, key, count)
    return file, MappedFile(memory(count), writable=True)


def _budget(data: DataConfig, free_bytes: int) -> int:
    wanted = free_bytes // 2 if data.cache_gb is None else int(data.cache_gb * 1e9)
    return min(wanted, free_bytes)


def _on_disk(path: Path, data: DataConfig, key: str, count: int) -> MappedFile:
    """Opens the cache file for writing or, failing that, for reading, or an empty one in memory."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _to_fill(path, data, key, count)
    except OSError as error:
        is_filled = isinstance(error, BlockingIOError)
        reason = "another run is filling it" if is_filled else error.strerror or error
        with suppress(OSError):
            fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
            if _used_bytes(fd, key, count):
                log.warning("data.cache=disk: %s: %s; using it read-only", path, reason)
                return MappedFile(fd)
            os.close(fd)
        if not is_filled:
            raise ConfigError(
                f"data.cache=disk: {path}: {reason}; free space, set WELLFED_CACHE to a "
                "different folder, or use data.cache=ram"
            ) from error
        log.warning("data.cache=disk: %s: %s; this run decodes every image", path, reason)
        return _filled(memory(0), key, count, 0)


def _to_fill(path: Path, data: DataConfig, key: str, count: int) -> MappedFile:
    """Opens the file at ``path`` for writing, after rebuilding it unless its key is ``key``.

    Raises:
        BlockingIOError: another process is filling it.
    """
    fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, makes_way=True)
    with ExitStack() as opened:
        opened.callback(os.close, fd)
        # held while the file is open, as long as a thread may write
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_size and not _used_bytes(fd, key, count):
            log.warning("%s is corrupt or out of date; rebuilding", path)
            path.unlink()
            return _to_fill(path, data, key, count)
        # space that the file uses may stay in use
        free_bytes = shutil.disk_usage(path.parent).free + os.fstat(fd).st_blocks * 512
        file = _filled(fd, key, count, _budget(data, free_bytes))
        opened.pop_all()
    return file


def _used_bytes(fd: int, key: str, count: int) -> int:
    """Returns the number of bytes allocated in the file; 0 if it is not the cache with this key."""
    start = _HEAD.itemsize + _COLUMN_BYTES * count
    data = os.pread(fd, start, 0)
    if len(data) < start or data[:64] != key.encode():
        return 0
    table = np.frombuffer(data, np.int64, offset=_HEAD.itemsize).reshape(4, -1)
    # Not from the header, which may be older than the table after a power failure. Computed as
    # floats, because products of corrupt numbers may overflow.
    used = max(start, int((table[0] + 3.0 * table[1] * table[2]).max()))
    return used if used <= os.fstat(fd).st_size else 0


def _filled(fd: int, key: str, count: int, budget_bytes: int) -> MappedFile:
    """Maps the file for writing, with at least ``budget_bytes`` in total."""
    used = _used_bytes(fd, key, count)
    if not used:
        used = _HEAD.itemsize + _COLUMN_BYTES * count
        reserve(fd, used)
    limit = max(used, budget_bytes)
    # sparse until pixels are written
    os.ftruncate(fd, max(limit, os.fstat(fd).st_size))
    os.pwrite(fd, np.array([(key.encode(), used, limit)], _HEAD).tobytes(), 0)
    return MappedFile(fd, writable=True)
