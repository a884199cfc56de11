"""Copies an image folder and shrinks the large images: ``wellfed shrink``.

    wellfed shrink /data/photos /data/photos-500 --max-side 500 --quality 90

Folders, names and links are kept. A larger image is resized, rotated according to its EXIF
orientation, and saved in its original format. All other files are copied unchanged, including
unreadable images, which are listed. A second call resumes an interrupted one. Exit codes:
0: success; 2: wrong folders or options; 3: an image is unreadable.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from ..config import ConfigError, DataConfig
from ..monitor.console import progress, say
from ..runtime import limits
from ..runtime.errors import DataError, listed, tell
from ..runtime.files import read_json, write_whole
from ..runtime.seeding import SampleRng
from .cache import shrunk
from .datasets import AnyDataset, ImageDataset
from .decode import HEAD_BYTES, DecodeError, decode, reader
from .storage import evenly_spaced

# file in the copy that describes its source
RECORD = ".wellfed-shrink.json"
_FILTER = "bicubic"
MAX_SIDE = 500
QUALITY = 90
# number of images and seconds used to measure the speedup from a copy
_TRIED = 64
_TRIED_S = 2.0
_OPTIONS = DataConfig(exif_orientation=True)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Copy:
    """Source and options of a copy."""

    source: str
    # maximum longer side in pixels; None: unlimited
    max_side: int | None
    # JPEG and WebP quality
    quality: int
    # other options, for shards
    packed: str = ""

    def __str__(self) -> str:
        sizes = f" --max-side {self.max_side} --quality {self.quality}" if self.max_side else ""
        return f"a copy of {self.source} by{sizes}{self.packed}"

    @classmethod
    def at(cls, folder: Path) -> Copy | None:
        """Returns the record in ``folder`` or in a parent; None if it is not a copy."""
        for place in (folder, *folder.absolute().parents):
            if (place / RECORD).is_file():
                return cls(**read_json(place / RECORD))
        return None


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="wellfed shrink", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="folder with images, nested in any way")
    parser.add_argument("out", type=Path, help="folder for the copy")
    return command(parser, MAX_SIDE, arguments, shrink)


def command(
    parser: argparse.ArgumentParser,
    max_side: int | None,
    arguments: Sequence[str],
    work: Callable[..., None],
) -> int:
    """Adds the size options, calls ``work`` with the arguments, and returns the exit code."""
    parser.add_argument(
        "--max-side",
        type=positive,
        default=max_side,
        help="maximum longer side in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--quality",
        type=int,
        default=QUALITY,
        help="JPEG and WebP quality, 1 to 100 (default: %(default)s)",
    )
    typed = parser.parse_args(arguments)
    if not 1 <= typed.quality <= 100:
        parser.error("--quality must be 1 to 100")
    try:
        work(**vars(typed))
    except (ConfigError, DataError, OSError, KeyboardInterrupt) as error:
        if isinstance(error, OSError):
            # write errors do not name a file
            error.filename = error.filename or typed.out
        return tell([error])
    return 0


def positive(text: str) -> int:
    """Parses an integer of at least 1, for ``argparse``; raises ValueError otherwise."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def shrink(folder: Path, out: Path, max_side: int, quality: int) -> None:
    """Copies ``folder`` to ``out``, with one thread per core.

    Raises:
        ConfigError: as ``claim``.
        DataError: an image is unreadable; all others are copied.
    """
    claim(folder, out, Copy(str(folder.resolve()), max_side, quality))
    files = [*_files(folder.resolve(), out.resolve())]
    copy = partial(_copy, max_side=max_side, quality=quality)
    with progress("shrink", len(files), "files") as bar:
        unreadable = [*filter(None, bar.over(in_order(copy, files, cores())))]
    before, after = (sum(os.path.getsize(pair[i]) for pair in files) for i in (0, 1))
    say(f"{out} has {len(files)} files, {after / 1e6:.0f} MB; {folder} has {before / 1e6:.0f} MB")
    check_read(unreadable)


def claim(folder: Path, out: Path, wanted: Copy) -> None:
    """Creates the folder ``out`` for a copy of ``folder``, or reuses the one from an earlier call.

    Raises:
        ConfigError: one folder contains the other, or ``out`` has other contents.
    """
    source, target = folder.resolve(), out.resolve()
    if not source.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(f"{out} overlaps {folder}; specify a folder next to it")
    found = Copy.at(target) if (target / RECORD).exists() else None
    if target.exists() and found != wanted and any(target.iterdir()):
        raise ConfigError(f"{out} contains {found or 'other files'}; specify a new folder")
    target.mkdir(parents=True, exist_ok=True)
    write_whole(target / RECORD, json.dumps(asdict(wanted)).encode())


def cores() -> int:
    """Returns the number of usable cores."""
    return max(1, int(limits.measure().cores))


def in_order(work: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """Yields the results from ``work`` in the order of ``items``, computed by ``jobs`` threads."""
    with ThreadPoolExecutor(jobs) as threads:
        running: deque[Future[Result]] = deque()
        for item in items:
            running.append(threads.submit(work, item))
            if len(running) >= 8 * jobs:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def check_read(unreadable: Sequence[str]) -> None:
    """Raises DataError if there are ``unreadable`` images, given with their reasons."""
    if unreadable:
        raise DataError(
            f"{len(unreadable)} images cannot be read and were copied unchanged: "
            f"{listed(unreadable)}"
        )


def _files(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """Yields each file with its copy's path; creates folders, and links within the tree."""
    # each with its real parent folders, to which a link may lead back
    pending = [(source, target, {source})]
    while pending:
        folder, made, around = pending.pop()
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            path, place = Path(entry.path), made / entry.name
            real = path.resolve()
            if entry.name == RECORD:
                continue
            if entry.is_symlink() and (source in real.parents or not real.exists()):
                inside = os.path.relpath(real, folder.resolve())
                if not os.path.lexists(place):
                    place.symlink_to(inside if source in real.parents else os.readlink(path))
            elif entry.is_file():
                yield path, place
            elif entry.is_dir() and real not in around:
                place.mkdir(exist_ok=True)
                pending.append((path, place, around | {real}))


def _copy(pair: tuple[Path, Path], max_side: int, quality: int) -> str | None:
    """Copies a file, shrunk if it is a large image; returns its error if it is unreadable."""
    path, place = pair
    state = path.stat()
    # copied by an earlier call
    if place.exists() and place.stat().st_mtime_ns == state.st_mtime_ns:
        return None
    data, wrong = attempted(path.read_bytes(), str(path), max_side, quality)
    part = place.with_name(f".{place.name}.part")
    part.write_bytes(data)
    # check an unreadable image again
    if wrong is None:
        os.utime(part, ns=(state.st_atime_ns, state.st_mtime_ns))
    part.replace(place)
    return wrong


def attempted(data: bytes, where: str, max_side: int, quality: int) -> tuple[bytes, str | None]:
    """Returns ``data``, ``reduced`` if it is an image, and its error if it is unreadable."""
    try:
        if reader(data[:HEAD_BYTES]) is not None:
            return reduced(data, max_side, quality), None
    except DecodeError as error:
        return data, f"{where}: {error}"
    return data, None


def reduced(data: bytes, max_side: int, quality: int) -> bytes:
    """Returns an encoded image in its original format, shrunk if it is too large.

    Raises:
        DecodeError: as ``decode``.
    """
    pixels = decode(data, _OPTIONS)
    if max(pixels.shape) <= max_side:
        return data
    pixels = np.ascontiguousarray(shrunk(pixels, max_side, _FILTER))
    plugin = reader(data)
    assert plugin is not None
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, str(plugin.format), quality=quality)
    return buffer.getvalue()


def speedup(images: AnyDataset) -> float | None:
    """Returns the speedup from loading samples from a copy made by ``wellfed shrink``.

    Shrinks up to 64 files in memory, for about two seconds, decodes, crops and resizes both
    versions and compares this thread's CPU times. None if there are no files, or if decoded images
    are cached.
    """
    if not isinstance(images, ImageDataset) or images.cache is not None:
        return None
    out = np.empty((3, images.image_size, images.image_size), np.uint8)
    spent_s = np.zeros(2)
    until_s = time.monotonic() + _TRIED_S
    for i in evenly_spaced(len(images), _TRIED):
        if time.monotonic() > until_s:
            break
        # bad samples are reported when they are loaded
        with suppress(DecodeError, OSError, ValueError):
            content, _ = images.source.read(i)
            if not isinstance(content, bytes):
                return None
            forms = content, reduced(content, MAX_SIDE, QUALITY)
            for form, data in enumerate(forms):
                begin_s = time.thread_time()
                pixels = decode(data, images.options)
                images.transform(pixels, SampleRng(images.seed, 0, i), out)
                spent_s[form] += time.thread_time() - begin_s
    return float(spent_s[0] / spent_s[1]) if spent_s.all() else None
