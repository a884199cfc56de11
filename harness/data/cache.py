"""Keeps decoded pixels in one file, mapped by all workers and local ranks.

The file, in memory or on disk, has a head, a table with a column for each image, and room for
entries: an image's sides, its checksum and its pixels. Entries are only appended, so views stay
valid. Where an image's entry begins is one word, written last: a killed writer leaves no half
entry, and a reader sees the old entry or the new one. Entries of earlier runs, or of other ones,
are verified on first use by a checksum of the pixels and of the source's size and time of change,
which finds files that have changed and pages that a power failure took away. Entries of this run
need no check. Pages that the disk fails to read are damage like any other.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import time
from contextlib import suppress

import numpy as np

from harness.data.mapped import MappedFile, checksum
from harness.data.storage import Source
from harness.data.transforms import resized

# raise it when the file's content changes
FORMAT = 4
_HEAD = np.dtype([("facts", "S64"), ("used", "<i8"), ("limit", "<i8")])
_TABLE_START = 128
# where its entry begins, 0: nowhere; the bytes of the entry
_COLUMNS = 2
# height, width; checksum of the pixels with the size and time of change of the source file
_ENTRY = struct.Struct("<IIq")
# a file changed so shortly before may change again without another time of change
_RACY_S = 2.0
# pages that a process has read so shortly before are still in the page cache: no disk is asked
_STAYS_S = 60.0


class PixelCache:
    """The decoded images of ``source``: rows ``first`` onwards of ``file``.

    Args:
        file: as ``set_budget`` leaves it; read-only where another run fills it.
        checked: a byte for each row, zero until a process of this run has written the row, or found
            it to be right.
        first: the row of the source's first image.
        source: a folder's files, or a part of them.
        max_side: most pixels of an image's longer side, larger ones are shrunk; None: any.
        interpolation: the filter that shrinks them.
    """

    def __init__(
        self,
        file: MappedFile,
        checked: MappedFile,
        first: int,
        source: Source,
        max_side: int | None,
        interpolation: str = "bilinear",
    ) -> None:
        self._args = file, checked, first, source, max_side, interpolation
        self._file = file
        self._source = source
        self._max_side = max_side
        self._interpolation = interpolation
        self._on_disk = os.fstat(file.fd).st_nlink > 0
        self._head = np.frombuffer(file.map, _HEAD, 1)[0]
        cells = np.frombuffer(file.map, np.int64, _COLUMNS * len(checked.map), _TABLE_START)
        self._table = cells.reshape(_COLUMNS, -1)
        rows = slice(first, first + len(source))
        self._places, self._sizes = self._table[:, rows]
        self._checked = np.frombuffer(checked.map, np.uint8)[rows]
        # not the file itself, which the run has locked against others
        self._lock = checked.fd
        # when this process last read each image's pages, on time.monotonic
        self._read_s = np.full(len(source), -math.inf, np.float32)
        self._pixels = np.frombuffer(file.map, np.uint8)
        self._pixels.flags.writeable = False

    def __reduce__(self) -> tuple[object, ...]:
        return PixelCache, self._args

    def get(self, i: int) -> np.ndarray | None:
        """Returns the pixels of image ``i``, a read-only view that stays valid; None: not here."""
        # in this order: the image may just now be given another place
        checked = self._checked[i]
        start = int(self._places[i])
        if not start:
            return None
        pixels = None
        begin = start + _ENTRY.size
        stop = start + int(self._sizes[i])
        # else it is damaged, or in a part by which another run made the file longer
        known = start > 0 and begin < stop <= len(self._pixels)
        if known and self._on_disk and (now_s := time.monotonic()) - self._read_s[i] > _STAYS_S:
            known = self._file.is_readable(start, stop)
            self._read_s[i] = now_s
        if known:
            height, width, digest = _ENTRY.unpack_from(self._file.map, start)
            end = begin + height * width * 3
            if begin < end <= stop:
                pixels = self._pixels[begin:end].reshape(height, width, 3)
        if checked and pixels is not None:
            return pixels
        # The source file may be gone.
        with suppress(OSError):
            status = os.stat(self._source.where(i))
            facts = status.st_size, status.st_mtime_ns
            if pixels is not None and digest == checksum(pixels, *facts):
                self._checked[i] = 1
                return pixels
        if self._file.writable:
            # so that the next put gives it another
            self._places[i] = 0
        return None

    def put(self, i: int, pixels: np.ndarray) -> np.ndarray:
        """Keeps ``pixels``, shrunk if they are too large, while there is room; returns them."""
        if self._max_side is not None:
            pixels = shrunk(pixels, self._max_side, self._interpolation)
        if not self._file.writable or self._places[i]:
            return pixels
        height, width, _ = pixels.shape
        try:
            status = os.stat(self._source.where(i))
        except OSError:
            return pixels
        # Looked at after it was decoded: one that changed in between has changed just now.
        if time.time() - status.st_ctime < _RACY_S:
            return pixels
        content = np.ascontiguousarray(pixels)
        size = _ENTRY.size + content.nbytes
        head = self._head
        # most often once it is full, and then without the lock
        if head["used"] + size > head["limit"]:
            return pixels
        # The lock belongs to one opening of a file, which a thread shares with the others, and a
        # process with those it forks. A process that is killed unlocks.
        with open(f"/proc/self/fd/{self._lock}", "r+b", buffering=0) as own:
            fcntl.flock(own, fcntl.LOCK_EX)
            start = int(head["used"])
            if start + size > head["limit"]:
                return pixels
            head["used"] = start + size
        self._sizes[i] = size
        digest = checksum(content, status.st_size, status.st_mtime_ns)
        entry = _ENTRY.pack(height, width, digest)
        written = 0
        # Not through the map: a fault for each page, and SIGBUS on a full disk.
        with suppress(OSError):
            written = os.pwritev(self._file.fd, [entry, content.data], start)
        if written < size:
            # the disk has less left than there was at first
            head["limit"] = start
            return pixels
        # The kernel's locks around the write order all of it before this store, on any processor.
        self._places[i] = start
        self._checked[i] = 1
        return pixels

    @property
    def reserved_bytes(self) -> int:
        """Memory that the cache may still take; 0 on a disk."""
        if self._on_disk:
            return 0
        return max(0, int(self._head["limit"] - self._head["used"]))

    def stats(self) -> dict[str, int]:
        """Returns how many ``images`` of all ``samples`` take how many ``bytes`` of ``limit``."""
        places = self._table[0]
        return {
            "images": int(np.count_nonzero(places)),
            "samples": len(places),
            "bytes": int(self._head["used"]),
            "limit": int(self._head["limit"]),
        }

    def summary(self) -> str:
        """Returns how much is kept, in a line."""
        images, samples, used, limit = self.stats().values()
        text = f"{images} of {samples} images, {used / 1e9:.1f} of at most {limit / 1e9:.1f} GB"
        if images < samples and used + used // max(1, images) > limit:
            text += ", full: the others are decoded each time"
        return text


def shrunk(pixels: np.ndarray, max_side: int, interpolation: str) -> np.ndarray:
    """Returns ``pixels``, uint8 ``[H, W, 3]``, with a longer side of at most ``max_side``."""
    height, width, _ = pixels.shape
    factor = min(1.0, max_side / max(height, width))
    sides = max(1, round(width * factor)), max(1, round(height * factor))
    return resized(pixels, *sides, interpolation)


def taken_bytes(fd: int, facts: str, rows: int) -> tuple[int, int]:
    """Returns how many bytes of the file are given out, and how many in use.

    Images of files that have changed are not in use. 0 and 0: it has other facts, or is no cache.
    """
    data = os.pread(fd, _HEAD.itemsize, 0).ljust(_HEAD.itemsize, b"\0")
    head = np.frombuffer(data, _HEAD)[0]
    size = os.fstat(fd).st_size
    start = _pixels_start(rows)
    if head["facts"] != facts.encode() or not start <= head["limit"] <= size:
        return 0, 0
    table = np.frombuffer(os.pread(fd, start - _TABLE_START, _TABLE_START), np.int64)
    places, sizes = table.reshape(_COLUMNS, -1)
    ends = places + sizes
    whole = (places > 0) & (ends <= size)
    in_use = start + int(sizes.sum(where=whole))
    # A power failure may leave a head that is older than the table: what lies in a place must not
    # be given out again.
    return max(int(head["used"]), int(ends.max(where=whole, initial=start))), in_use


def set_budget(fd: int, facts: str, rows: int, used: int, budget_bytes: int) -> None:
    """Lets a file take ``budget_bytes``, or what it has if more.

    Args:
        fd: open for writing by nobody else.
        facts: 64 hexadecimal digits that tell what the pixels of a row depend on.
        rows: one for each image.
        used: bytes that are given out (``taken_bytes``); 0: an empty file, which gets empty rows.
        budget_bytes: of which the most is a hole until pixels come.

    Raises:
        OSError: there is no room for the table.
    """
    if not used:
        used = _pixels_start(rows)
        os.posix_fallocate(fd, 0, used)
    limit = max(used, budget_bytes)
    if os.fstat(fd).st_size < limit:
        os.ftruncate(fd, limit)
    os.pwrite(fd, np.array([(facts.encode(), used, limit)], _HEAD).tobytes(), 0)


def _pixels_start(rows: int) -> int:
    return _TABLE_START + _COLUMNS * 8 * rows
