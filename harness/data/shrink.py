"""Copies a folder of images and shrinks the large ones: ``wellfed shrink``.

    wellfed shrink /data/photos /data/photos-500 --max-side 500 --quality 90

Folders, names and links are kept. An image with a longer side is resized, rotated by its EXIF
orientation, and saved in its own format. All other files are copied unchanged, including unreadable
images, which are listed. A second call resumes an interrupted one. Exit codes: 0; 2: wrong folders
or options; 3: an image is unreadable.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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

# in the copy, describes its source
RECORD = ".wellfed-shrink.json"
_FILTER = "bicubic"
MAX_SIDE = 500
QUALITY = 90
# number of images, and seconds, to measure the speedup of a copy
_TRIED = 64
_TRIED_S = 2.0
_OPTIONS = DataConfig(exif_orientation=True)


@dataclass(frozen=True, slots=True)
class Copy:
    """Source and options of a copy."""

    source: str
    # largest longer side, in pixels
    max_side: int
    # of JPEG and WebP
    quality: int

    def __str__(self) -> str:
        return f"a copy of {self.source} by --max-side {self.max_side} --quality {self.quality}"

    @classmethod
    def at(cls, folder: Path) -> Copy | None:
        """Returns the source of ``folder`` or of a parent; None if it is not a copy."""
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
    parser.add_argument("folder", type=Path, help="folder of images, nested as you like")
    parser.add_argument("out", type=Path, help="folder for the copy")
    parser.add_argument(
        "--max-side",
        type=int,
        default=MAX_SIDE,
        help="largest longer side in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--quality",
        type=int,
        default=QUALITY,
        help="JPEG and WebP quality, 1 to 100 (default: %(default)s)",
    )
    typed = parser.parse_args(arguments)
    if typed.max_side < 1 or not 1 <= typed.quality <= 100:
        parser.error("--max-side must be at least 1, and --quality 1 to 100")
    try:
        shrink(typed.folder, typed.out, typed.max_side, typed.quality)
    except (ConfigError, DataError, OSError, KeyboardInterrupt) as error:
        return tell([error])
    return 0


def shrink(folder: Path, out: Path, max_side: int, quality: int) -> None:
    """Copies ``folder`` to ``out``, with one thread per core.

    Raises:
        ConfigError: one folder contains the other, or ``out`` has other contents.
        DataError: an image is unreadable; all others are copied.
    """
    source, target = folder.resolve(), out.resolve()
    if not source.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(f"{out}: overlaps {folder}; name a folder next to it")
    wanted = Copy(str(source), max_side, quality)
    found = Copy.at(target) if (target / RECORD).exists() else None
    if target.exists() and found != wanted and any(target.iterdir()):
        raise ConfigError(f"{out}: contains {found or 'other files'}; name a new folder")
    target.mkdir(parents=True, exist_ok=True)
    write_whole(target / RECORD, json.dumps(asdict(wanted)).encode())
    files = [*_files(source, target)]
    unreadable: list[str] = []
    cores = max(1, int(limits.measure().cores))
    with (
        progress("shrink", len(files), "files") as bar,
        ThreadPoolExecutor(cores) as threads,
    ):
        running: deque[Future[str | None]] = deque()
        for file, place in files:
            running.append(threads.submit(_copy, file, place, max_side, quality))
            if len(running) >= 8 * cores:
                unreadable += filter(None, [running.popleft().result()])
                bar.advance(1)
        while running:
            unreadable += filter(None, [running.popleft().result()])
            bar.advance(1)
    before, after = (sum(os.path.getsize(pair[i]) for pair in files) for i in (0, 1))
    say(f"{out}: {len(files)} files, {after / 1e6:.0f} MB; the original has {before / 1e6:.0f} MB")
    if unreadable:
        raise DataError(
            f"{len(unreadable)} images cannot be read and were copied unchanged: "
            f"{listed(unreadable)}"
        )


def _files(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """Yields each file with the path of its copy; creates folders, and links within the tree."""
    # with the real parent folders, to which a link may lead back
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


def _copy(path: Path, place: Path, max_side: int, quality: int) -> str | None:
    """Copies a file, shrunk if it is a large image; returns the error of an unreadable one."""
    state = path.stat()
    # as left by an earlier call
    if place.exists() and place.stat().st_mtime_ns == state.st_mtime_ns:
        return None
    data = path.read_bytes()
    wrong = None
    try:
        if reader(data[:HEAD_BYTES]) is not None:
            data = reduced(data, max_side, quality)
    except DecodeError as error:
        wrong = f"{path}: {error}"
    part = place.with_name(f".{place.name}.part")
    part.write_bytes(data)
    # check an unreadable image again
    if wrong is None:
        os.utime(part, ns=(state.st_atime_ns, state.st_mtime_ns))
    part.replace(place)
    return wrong


def reduced(data: bytes, max_side: int, quality: int) -> bytes:
    """Returns an encoded image in its own format, shrunk if it is too large.

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
    """Returns the speedup of loading samples from a copy by ``wellfed shrink``.

    Shrinks at most 64 files in memory, for about two seconds, then decodes, crops and resizes both
    versions and compares this thread's CPU time. None if there are no files, or decoded images are
    cached.
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
