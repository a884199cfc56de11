"""Decoded pixels, kept for the next epoch: one file, in memory or on disk, mapped by all workers,
threads and local ranks.

The file has a head, a table with a column for each image, and room for pixels, which is given out
once and never again: a view of an image's pixels stays what it is, whatever happens. An image's
place, one word of 64 bits, is written last, so that a process may be killed at any time. Whoever
first reads an image of an earlier run, or of another one, looks at its source file and at the
checksum of its pixels. That finds files that have changed, and pages that a power failure took
away. What a process of this run has written needs neither: its source was looked at as it was
written, and until the machine stops all see the same pages of it. A page that the disk fails to
read ends the process, as it does with any mapped file.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from harness.data.mapped import MappedFile, checksum
from harness.data.storage import Source
from harness.data.transforms import resized
from harness.runtime.errors import printable

# whoever changes what the file holds raises it
FORMAT = 2
_HEAD = np.dtype([("facts", "S64"), ("used", "<i8"), ("limit", "<i8")])
_TABLE_START = 128
# place, checksum, size and time of change of the source file
_COLUMNS = 4
# pixels begin at multiples of it
_UNIT_BYTES = 512
_SIDE_BITS = 15
_SIDE_MASK = 2**_SIDE_BITS - 1
# a file changed so shortly before may change again without another time of change
_RACY_S = 2.0


class PixelCache:
    """The decoded images of ``source``: rows ``first`` onwards of ``file``, which may hold those of
    several sources.

    Args:
        file: as ``make_blank`` makes it; read-only where another run fills it.
        checked: a byte for each row, zero until a process of this run has written the row, or found
            it to be right.
        first: the row of the source's first image.
        source: a folder's files, or a part of them.
        max_side: of the longer side of an image in pixels, larger ones are shrunk; None: none is.
    """

    def __init__(
        self,
        file: MappedFile,
        checked: MappedFile,
        first: int,
        source: Source,
        max_side: int | None,
    ) -> None:
        self._args = file, checked, first, source, max_side
        self._file = file
        self._source = source
        self._max_side = max_side
        self._head = np.frombuffer(file.map, _HEAD, 1)
        self._table = np.frombuffer(
            file.map, np.int64, _COLUMNS * len(checked.map), _TABLE_START
        ).reshape(_COLUMNS, -1)
        rows = slice(first, first + len(source))
        self._places, self._sums, self._sizes, self._changed_ns = self._table[:, rows]
        self._checked = np.frombuffer(checked.map, np.uint8)[rows]
        self._pixels = np.frombuffer(file.map, np.uint8)
        self._pixels.flags.writeable = False

    def __reduce__(self) -> tuple[object, ...]:
        return PixelCache, self._args

    def get(self, i: int) -> np.ndarray | None:
        """The pixels of image ``i``, uint8 ``[H, W, 3]``, a read-only view that stays valid; None:
        not here.
        """
        # in this order: the image may just now be given another place
        checked = self._checked[i]
        place = int(self._places[i])
        if not place or not (checked or self._is_right(i, place)):
            return None
        return self._view(place)

    def put(self, i: int, pixels: np.ndarray) -> np.ndarray:
        """What to go on with: ``pixels``, uint8 ``[H, W, 3]``, shrunk if they are too large; kept
        if there is room.
        """
        if self._max_side is not None:
            pixels = shrunk(pixels, self._max_side)
        if self._file.writable and not self._places[i]:
            self._keep(i, pixels)
        return pixels

    @property
    def reserved_bytes(self) -> int:
        """Memory that it may still take; none where it lies on a disk."""
        return (
            0 if self._is_on_disk() else max(0, int(self._head[0]["limit"] - self._head[0]["used"]))
        )

    def stats(self) -> dict[str, int]:
        """How many ``images`` of all ``samples`` are kept, and how many ``bytes`` of ``limit`` they
        take.
        """
        head = self._head[0]
        places = self._table[0]
        images = int(np.count_nonzero(places))
        return {
            "images": images,
            "samples": len(places),
            "bytes": int(head["used"]),
            "limit": int(head["limit"]),
        }

    def summary(self) -> str:
        """How much is kept, in a line."""
        s = self.stats()
        full = (
            s["images"] < s["samples"]
            and s["bytes"] + s["bytes"] // max(1, s["images"]) > s["limit"]
        )
        end = ", full: the others are decoded each time" if full else ""
        # where a part may be of files that have changed since
        if full and self._is_on_disk():
            path = os.readlink(f"/proc/self/fd/{self._file.fd}")
            end += (
                f"; if files of the data set were replaced, delete {printable(path)} to keep "
                "the new ones"
            )
        sizes = f"{s['bytes'] / 1e9:.1f} of at most {s['limit'] / 1e9:.1f} GB"
        return f"{s['images']} of {s['samples']} images, {sizes}{end}"

    def _is_on_disk(self) -> bool:
        return os.fstat(self._file.fd).st_nlink > 0

    def _view(self, place: int) -> np.ndarray | None:
        start = (place >> 2 * _SIDE_BITS) * _UNIT_BYTES
        height = place >> _SIDE_BITS & _SIDE_MASK
        width = place & _SIDE_MASK
        end = start + height * width * 3
        # damaged, or in a part by which another run made the file longer
        if not 0 <= start < end <= len(self._pixels):
            return None
        return self._pixels[start:end].reshape(height, width, 3)

    def _is_right(self, i: int, place: int) -> bool:
        pixels = self._view(place)
        with suppress(OSError):
            # where the source file is gone
            status = os.stat(self._source.where(i))
            expected = self._sums[i], self._sizes[i], self._changed_ns[i]
            if (
                pixels is not None
                and (checksum(pixels), status.st_size, status.st_mtime_ns) == expected
            ):
                self._checked[i] = 1
                return True
        if self._file.writable:
            # so that the next put gives it another
            self._places[i] = 0
        return False

    def _keep(self, i: int, pixels: np.ndarray) -> None:
        height, width, _ = pixels.shape
        try:
            status = os.stat(self._source.where(i))
        except OSError:
            return
        # Looked at after it was decoded: one that changed in between has changed just now.
        if time.time() - status.st_ctime < _RACY_S or max(height, width) > _SIDE_MASK:
            return
        pixels = np.ascontiguousarray(pixels)
        if (start := self._written(pixels)) is None:
            return
        self._sums[i] = checksum(pixels)
        self._sizes[i] = status.st_size
        self._changed_ns[i] = status.st_mtime_ns
        # The kernel's locks around the write order it before this store, whatever the processor.
        self._places[i] = (start // _UNIT_BYTES) << 2 * _SIDE_BITS | height << _SIDE_BITS | width
        self._checked[i] = 1

    def _written(self, pixels: np.ndarray) -> int | None:
        """Where ``pixels`` begin, which have bytes of their own now; None where so many are not
        left.
        """
        head = self._head[0]
        size = _rounded(pixels.nbytes)
        # so it is most often once it is full
        if head["used"] + size > head["limit"]:
            return None
        with _alone_with(self._file.fd):
            start = int(head["used"])
            if start + size > head["limit"]:
                return None
            head["used"] = start + size
        try:
            # Not through the map: that costs a fault for each page, and on a full disk it would end
            # the process (SIGBUS).
            if os.pwrite(self._file.fd, pixels.data, start) == pixels.nbytes:
                return start
        except OSError:
            pass
        # the disk has not so much left as there was at first
        head["limit"] = start
        return None


def shrunk(pixels: np.ndarray, max_side: int) -> np.ndarray:
    """``pixels``, uint8 ``[H, W, 3]``, with a longer side of at most ``max_side``."""
    height, width, _ = pixels.shape
    factor = max_side / max(height, width)
    return (
        pixels
        if factor >= 1
        else resized(pixels, max(1, round(width * factor)), max(1, round(height * factor)))
    )


def make_blank(fd: int, facts: str, rows: int, budget_bytes: int) -> None:
    """Make of the empty file ``fd`` one with so many ``rows``, none of them filled, that takes
    ``budget_bytes`` at most.

    Args:
        fd: open for writing.
        facts: 64 hexadecimal digits that tell what the pixels of a row depend on.
        rows: one for each image.
        budget_bytes: of which the most is a hole until pixels come.

    Raises:
        OSError: there is no room for the table.
    """
    start = _pixels_start(rows)
    os.posix_fallocate(fd, 0, start)
    _write_head(fd, facts, start, max(start, budget_bytes))


def taken_bytes(fd: int, facts: str, rows: int) -> tuple[int, int] | None:
    """How much of the file ``fd`` is given out, and how much of that is in use: images of files
    that have changed are not.

    None where it has other facts, or is none of these files.
    """
    head = np.frombuffer(os.pread(fd, _HEAD.itemsize, 0).ljust(_HEAD.itemsize, b"\0"), _HEAD)[0]
    size = os.fstat(fd).st_size
    if head["facts"].decode("latin-1") != facts or not _pixels_start(rows) <= head["limit"] <= size:
        return None
    places = np.frombuffer(os.pread(fd, 8 * rows, _TABLE_START), np.int64)
    images = (places >> _SIDE_BITS & _SIDE_MASK) * (places & _SIDE_MASK) * 3
    # A power failure may leave a head that is older than the table: what lies in a place must not
    # be given out again.
    ends = np.append((places >> 2 * _SIDE_BITS) * _UNIT_BYTES + images, head["used"])
    start = _pixels_start(rows)
    in_use = start + int((-(-images // _UNIT_BYTES)).sum(where=ends[:-1] <= size)) * _UNIT_BYTES
    return _rounded(int(ends.max(where=ends <= size, initial=start))), in_use


def set_budget(fd: int, facts: str, rows: int, budget_bytes: int) -> None:
    """Let the file ``fd`` of an earlier run take ``budget_bytes`` in all, or what it has if that is
    more.
    """
    with _alone_with(fd):
        taken = taken_bytes(fd, facts, rows)
        assert taken is not None
        _write_head(fd, facts, taken[0], max(taken[0], budget_bytes))


def _write_head(fd: int, facts: str, used: int, limit: int) -> None:
    if os.fstat(fd).st_size < limit:
        os.ftruncate(fd, limit)
    os.pwrite(fd, np.array([(facts.encode(), used, limit)], _HEAD).tobytes(), 0)


def _pixels_start(rows: int) -> int:
    return _rounded(_TABLE_START + _COLUMNS * 8 * rows)


def _rounded(size: int) -> int:
    return -(-size // _UNIT_BYTES) * _UNIT_BYTES


@contextmanager
def _alone_with(fd: int) -> Iterator[None]:
    """Inside the block no other thread or process is in such a block of the same file; a killed one
    leaves it.
    """
    # The lock belongs to one opening of a file, which a thread shares with the others, and a
    # process with those it forks.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(own, fcntl.LOCK_EX)
        yield
    finally:
        os.close(own)
