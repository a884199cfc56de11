"""How fast storage gives files that are not in the page cache, as far as a process without
privileges can tell.
"""

from __future__ import annotations

import io
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil

from harness.data.decode import HEAD_BYTES, reader
from harness.data.storage import FolderSource, Source, Subset

# dropped at once: no more than these leave the page cache without coming back
_CHUNK_BYTES = 64 << 20
_CHUNK_FILES = 2000
_MOST_BYTES = 1 << 30
_MOST_FILES = 20_000
_GENUINE = 0.9  # of the bytes read must have come from storage
_DIRTY_S = (
    60.0  # the kernel writes a changed page back within half of it; until then it cannot be dropped
)
_STUCK_S = 5.0  # longer than the limit, and a file that is being read is given up
_LOOKED_AT = 24
_LOOK_S = 1.0

Clock = Callable[[], float]


class UnmeasuredError(Exception):
    """A figure that cannot be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """What reading cold files gave: their bytes alone, nothing decoded.

    Attributes:
        files: how many were read.
        size_bytes: in all.
        seconds: of reading.
        readers: files that were read at the same time.
    """

    files: int
    size_bytes: int
    seconds: float
    readers: int

    @property
    def images_per_s(self) -> float:
        """Files per second."""
        return self.files / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second."""
        return self.size_bytes / self.seconds


def files_of(source: Source) -> Iterator[str]:
    """Up to 20,000 of the files that hold the samples, in random order; none where samples lie in
    memory or one large file.
    """
    whole = source
    while isinstance(whole, Subset):
        whole = whole.source
    if isinstance(whole, FolderSource):
        count = len(source)
        yield from map(source.where, random.Random().sample(range(count), min(count, _MOST_FILES)))


def image_sizes(source: Source, now: Clock = time.perf_counter) -> tuple[tuple[int, int], ...]:
    """Width and height in pixels of some encoded samples, by their headers: at most 24, and as many
    as a second allows.
    """
    found: list[tuple[int, int]] = []
    end = now() + _LOOK_S
    for i in random.Random(0).sample(range(len(source)), min(len(source), _LOOKED_AT)):
        if now() > end:
            break
        try:
            data, _ = source.read(i)
            plugin = reader(data[:HEAD_BYTES]) if isinstance(data, bytes) else None
            if isinstance(data, bytes) and plugin is not None:
                found.append(plugin(io.BytesIO(data)).size)
        except (
            Exception
        ):  # Pillow's readers raise anything on damaged bytes; whoever loads the sample will tell
            continue
    return tuple(found)


def from_storage_bytes() -> int:
    """Bytes that this process has had from storage so far, without those that lay in the page
    cache.

    Raises:
        UnmeasuredError: this system does not say.
    """
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (
        AttributeError,
        RuntimeError,
        psutil.Error,
        OSError,
    ) as error:  # psutil raises all of these
        raise UnmeasuredError(
            "this system does not tell what comes from storage and what from the page cache"
        ) from error


def cold_fetch(
    paths: Iterable[str],
    readers: int,
    limit_s: float,
    *,
    came_bytes: Callable[[], int] = from_storage_bytes,
    now: Clock = time.perf_counter,
) -> Fetch:
    """Drop files from the page cache, then read them, so many at a time, for about ``limit_s``
    seconds.

    Other caches stay as they are: those of a disk, of its controller, of a virtual machine's host
    or of a file server.

    Args:
        paths: the files.
        readers: how many are read at a time, as workers would.
        limit_s: of dropping and reading together; a file that is being read then is finished.
        came_bytes: what this process has had from storage so far.
        now: the clock.

    Raises:
        UnmeasuredError: there are no files, a file cannot be read, or the bytes came from the page
            cache all the same.
    """
    left = deque(paths)
    end = now() + limit_s
    if not left:
        raise UnmeasuredError("the samples are no files of their own")
    files = size_bytes = came = 0
    seconds = 0.0
    while left and now() < end and size_bytes < _MOST_BYTES:
        chunk = _dropped(left, end, now)
        before = came_bytes()
        begin = now()
        sizes = _read(chunk, readers, end, now)
        seconds += now() - begin
        came += came_bytes() - before
        files += len(sizes)
        size_bytes += sum(sizes)
    if came < _GENUINE * size_bytes:
        share = f"{came / size_bytes:.0%} of the bytes came from storage"
        raise UnmeasuredError(f"the page cache could not be emptied of these files ({share})")
    return Fetch(files, size_bytes, seconds, readers)


def _dropped(left: deque[str], end: float, now: Clock) -> deque[str]:
    """The next files of ``left``, at least one, which are in the page cache no more."""
    chunk: deque[str] = deque()
    size_bytes = 0
    while (
        left
        and len(chunk) < _CHUNK_FILES
        and size_bytes < _CHUNK_BYTES
        and (not chunk or now() < end)
    ):
        chunk.append(left.popleft())
        size_bytes += _drop(chunk[-1])
    return chunk


def _drop(path: str) -> int:
    """Ask the kernel to drop the pages of a file; its size in bytes."""
    if not hasattr(os, "posix_fadvise"):
        raise UnmeasuredError("this system cannot drop files from the page cache")
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(file)
            if time.time() - state.st_mtime < _DIRTY_S:
                os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            return state.st_size
        finally:
            os.close(file)
    except OSError as error:
        raise UnmeasuredError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(chunk: deque[str], readers: int, end: float, now: Clock) -> list[int]:
    """The sizes in bytes of the files of ``chunk`` that were read before ``end``, by threads:
    reading holds no lock.
    """
    sizes: list[int] = []
    failed: list[OSError] = []

    def work() -> None:
        try:
            while not sizes or now() < end:
                with open(chunk.popleft(), "rb", buffering=0) as file:
                    sizes.append(len(file.readall()))
        except IndexError:  # all are taken
            return
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, name="fetch", daemon=True) for _ in range(readers)]
    given_up = max(end, now()) + _STUCK_S  # on all of them together
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, given_up - now()))
    if failed:
        raise UnmeasuredError(
            f"{failed[0].filename}: cannot be read: {failed[0].strerror or failed[0]}"
        )
    if any(thread.is_alive() for thread in threads):
        raise UnmeasuredError(f"the storage gave no file within {_STUCK_S:g} s")
    return sizes
