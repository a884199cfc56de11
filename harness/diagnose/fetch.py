"""How fast storage gives cold files, as far as a process without privileges can tell."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from harness.data.decode import reader
from harness.data.storage import FolderSource, Source, Subset, spread
from harness.runtime.files import open_regular


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


def files_of(source: Source) -> list[str]:
    """Returns the samples' files, at most 20,000 in random order, if each has its own."""
    whole = source
    while isinstance(whole, Subset):
        whole = whole.source
    if not isinstance(whole, FolderSource):
        return []
    count = len(source)
    return [source.where(i) for i in random.Random().sample(range(count), min(count, 20_000))]


def short_sides(source: Source, now: Callable[[], float] = time.perf_counter) -> list[int]:
    """Returns the shorter sides in pixels of some 24 samples, as many as a second allows.

    Samples that are no image files are left out.
    """
    found: list[int] = []
    end = now() + 1.0
    for i in spread(len(source), 24):
        if now() > end:
            break
        # what is no image file raises something, and damaged bytes make Pillow raise anything
        with suppress(Exception):
            data: Any = source.read(i)[0]
            plugin: Any = reader(data)
            found.append(min(plugin(io.BytesIO(data)).size))
    return found


def from_storage_bytes() -> int:
    """Returns the bytes that this process has had from storage, not from the page cache.

    Raises:
        UnmeasuredError: this system does not say.
    """
    try:
        return int(psutil.Process().io_counters().read_bytes)
    # psutil raises all of these
    except (AttributeError, RuntimeError, psutil.Error, OSError) as error:
        raise UnmeasuredError(
            "this system does not tell what comes from storage and what from the page cache"
        ) from error


def cold_fetch(
    files: list[str],
    readers: int,
    limit_s: float,
    *,
    came_bytes: Callable[[], int] = from_storage_bytes,
    now: Callable[[], float] = time.perf_counter,
) -> Fetch:
    """Drops files from the page cache and reads them, ``readers`` at a time.

    Other caches stay as they are: those of a disk, of a virtual machine's host or of a file server.
    ``came_bytes`` tells what this process has had from storage so far.

    Raises:
        UnmeasuredError: there are no files, a file cannot be read, or the bytes came from the page
            cache all the same.
    """
    if not files:
        raise UnmeasuredError("the samples are no files of their own")
    sizes: list[int] = []
    before = came_bytes()
    begin = now()

    def work(path: str) -> None:
        # one file at least
        if sizes and now() >= begin + limit_s:
            return
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                sizes.append(len(file.readall()))
        except OSError as error:
            raise UnmeasuredError(f"{path}: cannot be read: {error.strerror or error}") from error

    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(work, files):
            pass
    seconds = now() - begin
    share = (came_bytes() - before) / max(1, sum(sizes))
    if share < 0.9:
        came = f"{share:.0%} of the bytes came from storage"
        raise UnmeasuredError(f"the page cache could not be emptied of these files ({came})")
    return Fetch(len(sizes), sum(sizes), seconds, readers)
