"""Writes files whole or not at all, and checks files as it reads them."""

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

# of a text, which has kilobytes
_MOST_BYTES = 16 << 20
# no number that is kept is so large, and an integer of JSON may be too long for a float
_LARGEST = 1e18
# a spreadsheet would compute it
_FORMULA = re.compile(r"[=+@-](?![\d.]*$)")

# the run's logger: the file with its name is too heavy for the page to import
_log = logging.getLogger("wellfed")


def open_regular(path: AnyPath, flags: int = os.O_RDONLY, *, makes_way: bool = False) -> int:
    """Returns a descriptor of the regular file at ``path``; never waits, as for a FIFO.

    What is no regular file is set aside first if it ``makes_way``, with a line in the log.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    if makes_way:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                _log.warning("%s: not a regular file: made again", path)
                quarantine(Path(os.fsdecode(path)))
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError("not a regular file")


def read_regular(path: AnyPath, most_bytes: int = sys.maxsize, flags: int = os.O_RDONLY) -> bytes:
    """Returns the content of the regular file at ``path``.

    Raises:
        OSError: it cannot be read, is something else, or has more than ``most_bytes``.
    """
    file = open_regular(path, flags)
    try:
        size = os.fstat(file).st_size
        if size > most_bytes:
            raise OSError(f"more than {most_bytes >> 20} MiB")
        # most often all: a thread asks for the interpreter after each call
        data = os.read(file, size + 1)
        if len(data) != size:
            # the file has grown or shrunk meanwhile, or is read in pieces
            with open(file, "rb", closefd=False) as rest:
                data += rest.read()
        return data
    finally:
        os.close(file)


def read_inside(folder: Path, name: str) -> bytes:
    """Returns the content of the file ``name`` in ``folder``, to which no link may lead away.

    Raises:
        OSError: it cannot be read, is somewhere else, or is no regular file of at most 16 MiB.
    """
    path = os.path.realpath(folder / name)
    if path != os.path.join(os.path.realpath(folder), name):
        raise OSError("a link to another place")
    return read_regular(path, _MOST_BYTES)


def read_json(path: Path) -> Any:
    """Returns the value in the JSON file at ``path``.

    Raises:
        OSError: it cannot be read, or is a link or no regular file of at most 16 MiB.
        ValueError: it is damaged.
    """
    try:
        return json.loads(read_regular(path, _MOST_BYTES, os.O_NOFOLLOW))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def sheet(rows: Iterable[Iterable[Any]]) -> str:
    """Returns ``rows`` as CSV; an apostrophe keeps text from being computed as a formula."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell for cell in row]
        for row in rows
    )
    return text.getvalue()


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of the file at ``path``, as far as one with more than 1 MiB.

    Raises:
        OSError: it cannot be read, or is a link or no regular file.
    """
    with open(open_regular(path, os.O_NOFOLLOW), "rb") as file:
        while 0 < len(line := file.readline(1 << 20)) < 1 << 20:
            yield line


def read_written(path: Path, kind: type = dict) -> Any:
    """Returns what a run wrote into the JSON file at ``path``: an object, or another ``kind``.

    Nulls of objects are left out, and so are numbers that are no figures.

    Raises:
        OSError: it cannot be read, or is no regular file of at most 16 MiB.
        ValueError: it is damaged, or holds something else.
    """
    try:
        found = known(read_json(path))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, kind):
        raise ValueError("it does not hold what a run writes")
    return found


def known(value: Any) -> Any:
    """Returns ``value``, parsed from JSON, without nulls and numbers that are no figures."""
    if isinstance(value, dict):
        items = {name: known(item) for name, item in value.items()}
        return {name: item for name, item in items.items() if item is not None}
    if isinstance(value, list):
        return [known(item) for item in value]
    return number(value) if type(value) in (int, float) else value


def number(value: Any) -> float | None:
    """Returns ``value``, parsed from JSON, if it is a finite number; None: it is not."""
    # beyond 1e300 is no figure, and an integer of JSON may be too long for a float
    if type(value) in (int, float) and abs(value) < 1e300:
        return value  # type: ignore[no-any-return]
    return None


def natural(name: str) -> list[str | int]:
    """Returns a key for sorting by which job 10 comes after job 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def from_json(kind: Any, value: Any) -> Any:
    """Returns ``value``, parsed from JSON, as a ``kind``, with dataclasses and tuples made again.

    For a float of a dataclass, null leaves the default. Texts are printable, numbers finite and not
    negative.

    Raises:
        ValueError: the value is not of that kind.
        TypeError: null for a float without a default.
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
    raise ValueError("a value does not fit")


def write_kept(path: Path, key: bytes, content: bytes) -> None:
    """Writes ``content`` into a cache's file, sealed with its ``key``; only warns if it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _seal(key, content) + content)
    except OSError as error:
        why = error.strerror or error
        _log.warning("%s: %s; it is not remembered; set WELLFED_CACHE", path, why)


def read_kept(path: Path, key: bytes) -> bytes | None:
    """Returns what ``write_kept`` wrote with this ``key``; None: nothing, or no more.

    What is damaged or lies in its place gives way, with a warning.
    """
    why: object = "its digest differs"
    try:
        data = read_regular(path, flags=os.O_RDONLY | os.O_NOFOLLOW)
        content = data[16:]
        if data[:16] == _seal(key, content):
            return content
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = error
    _log.warning("%s: damaged (%s): made again", path, why)
    with suppress(OSError):
        quarantine(path)
    return None


def _seal(key: bytes, content: bytes) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()


def quarantine(path: Path) -> None:
    """Removes what lies at ``path``; a folder gets another name instead.

    Raises:
        OSError: the system refuses.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rename(path.with_name(f"{path.name}.{time.time_ns()}"))


def remove(path: Path) -> None:
    """Removes what lies at ``path``, with all that is inside, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | memoryview, *, links: bool = False) -> None:
    """Writes the file ``path``, whole or not at all; its content, then its name, are synced.

    If it ``links``, it is made a link to the file of the name ``data``, where links can be made.
    """
    # not named by the process alone: two machines that share the folder may have the same number
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
        # on a disk that fails, the first error is the one to tell
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        # not every file system can, and not every folder may be read
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
            raise
