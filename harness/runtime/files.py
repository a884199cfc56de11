"""Writes files atomically and validates files when reading them."""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints
from uuid import uuid4

import xxhash

AnyPath = str | bytes | os.PathLike[str]

# size limit for a text file, which usually takes kilobytes
_MOST_BYTES = 16 << 20
# larger than any stored number; a JSON integer may overflow a float
_LARGEST = 1e18
# a spreadsheet would evaluate such a cell
_FORMULA = re.compile(r"[=+@-](?![\d.]*$)")

# the run's logger, whose module is too heavy for the report to import
_log = logging.getLogger("wellfed")


def open_regular(path: AnyPath, flags: int = os.O_RDONLY, *, makes_way: bool = False) -> int:
    """Returns a descriptor for the regular file at ``path``; never blocks, even on a FIFO.

    Anything else is moved aside, with a warning, if ``makes_way`` is set.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    if makes_way:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                _log.warning("%s is not a regular file; rebuilding it", path)
                quarantine(Path(os.fsdecode(path)))
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError("not a regular file")


def read_regular(path: AnyPath, most_bytes: int = sys.maxsize, flags: int = os.O_RDONLY) -> bytes:
    """Returns the content of the regular file at ``path``.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than ``most_bytes``.
    """
    file = open_regular(path, flags)
    try:
        size = os.fstat(file).st_size
        if size > most_bytes:
            raise OSError(f"more than {most_bytes >> 20} MiB")
        # usually reads all of it, because each call reacquires the GIL
        data = os.read(file, size + 1)
        if len(data) != size:
            # the file has changed size, or is read in pieces
            with open(file, "rb", closefd=False) as rest:
                data += rest.read()
        return data
    finally:
        os.close(file)


def read_inside(folder: Path, name: str) -> bytes:
    """Returns the content of the file ``name`` in ``folder``, without following links.

    Raises:
        OSError: it cannot be read, links elsewhere, or is not a regular file of at most 16 MiB.
    """
    path = os.path.realpath(folder / name)
    if path != os.path.join(os.path.realpath(folder), name):
        raise OSError("a link to another location")
    return read_regular(path, _MOST_BYTES)


def read_json(path: Path) -> Any:
    """Returns the value in the JSON file at ``path``.

    Raises:
        OSError: it cannot be read, is a link, or is not a regular file of at most 16 MiB.
        ValueError: it is corrupt.
    """
    try:
        return json.loads(read_regular(path, _MOST_BYTES, os.O_NOFOLLOW))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def sheet(rows: Iterable[Iterable[Any]]) -> str:
    """Returns ``rows`` as CSV; an apostrophe protects text that looks like a formula."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell for cell in row]
        for row in rows
    )
    return text.getvalue()


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of the file at ``path``, until the first one longer than 1 MiB.

    Raises:
        OSError: it cannot be read, is a link, or is not a regular file.
    """
    with open(open_regular(path, os.O_NOFOLLOW), "rb") as file:
        while 0 < len(line := file.readline(1 << 20)) < 1 << 20:
            yield line


def read_written(path: Path, kind: type = dict) -> Any:
    """Returns the JSON value that a run wrote to ``path``: an object, or a value of type ``kind``.

    Drops null values in objects, and invalid numbers.

    Raises:
        OSError: it cannot be read, or is not a regular file of at most 16 MiB.
        ValueError: it is corrupt, or of another kind.
    """
    try:
        found = known(read_json(path))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, kind):
        raise ValueError("not written by a run")
    return found


def known(value: Any) -> Any:
    """Returns ``value``, parsed from JSON, without nulls and invalid numbers."""
    if isinstance(value, dict):
        items = {name: known(item) for name, item in value.items()}
        return {name: item for name, item in items.items() if item is not None}
    if isinstance(value, list):
        return [known(item) for item in value]
    return number(value) if type(value) in (int, float) else value


def number(value: Any) -> float | None:
    """Returns ``value``, parsed from JSON, if it is a finite number; otherwise, None."""
    # values beyond 1e300 are invalid; a JSON integer may overflow a float
    if type(value) in (int, float) and abs(value) < 1e300:
        return value  # type: ignore[no-any-return]
    return None


def natural(name: str) -> list[str | int]:
    """Returns a natural sort key: job 10 follows job 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def from_json(kind: Any, value: Any) -> Any:
    """Returns ``value``, parsed from JSON, as a ``kind``, including dataclasses and tuples.

    Null keeps the default of a dataclass's float field. Strings must be printable; numbers must be
    finite and not negative.

    Raises:
        ValueError: the value is of another kind.
        TypeError: the value is null for a float field without a default.
    """
    origin = get_origin(kind)
    inner = get_args(kind)
    if isinstance(value, dict) and hasattr(kind, "__dataclass_fields__"):
        hints = get_type_hints(kind)
        if value.keys() == hints.keys():
            items = {
                name: item for name, item in value.items() if (hints[name], item) != (float, None)
            }
            return kind(**{name: from_json(hints[name], item) for name, item in items.items()})
    elif isinstance(value, list) and origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(from_json(*pair) for pair in zip(kinds, value, strict=True))
    elif origin is UnionType:
        return value if value is None else from_json(inner[0], value)
    elif value in inner or type(value) is kind or (kind is float and type(value) is int):
        fits = value.isprintable() if isinstance(value, str) else 0 <= value < _LARGEST
        if fits:
            return value
    raise ValueError("a value has the wrong type")


def write_kept(path: Path, key: bytes, content: bytes) -> None:
    """Writes ``content`` to a cache file with a digest of its ``key``; warns on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _seal(key, content) + content)
    except OSError as error:
        why = error.strerror or error
        _log.warning(
            "%s: %s; not cached: set WELLFED_CACHE to a folder that you can write to", path, why
        )


def read_kept(path: Path, key: bytes) -> bytes | None:
    """Returns the content that ``write_kept`` wrote with this ``key``, or None.

    Corrupt or foreign files are moved aside with a warning.
    """
    why: object = "wrong digest"
    try:
        data = read_regular(path, flags=os.O_RDONLY | os.O_NOFOLLOW)
        content = data[16:]
        if data[:16] == _seal(key, content):
            return content
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = error
    _log.warning("%s is corrupt (%s); rebuilding it", path, why)
    with suppress(OSError):
        quarantine(path)
    return None


def _seal(key: bytes, content: bytes) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()


def quarantine(path: Path) -> None:
    """Removes the file at ``path``; renames a folder instead.

    Raises:
        OSError: permission denied or similar.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rename(path.with_name(f"{path.name}.{time.time_ns()}"))


def remove(path: Path) -> None:
    """Removes ``path`` recursively, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | memoryview, *, links: bool = False) -> None:
    """Writes the file ``path`` atomically; syncs its content, then its name.

    If ``links`` is set and links are supported, creates a link to the file named ``data``.
    """
    # a process ID is not enough: machines that share the folder may have the same one
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        if links:
            try:
                os.symlink(bytes(data), temporary)
            except OSError:
                links = False
        if not links:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        # on a failing disk, report the first error
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        # not supported by every file system, and not every folder is readable
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
            raise
