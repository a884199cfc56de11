"""Reads tar archive headers: ustar, GNU's long names and PAX, as in POSIX.1-2017."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

BLOCK = 512
# name, size, type, magic and prefix
_HEADER = struct.Struct("100s24x12s20xc100x5s83x155s12x")
# bytes read at once, which contain a short member and the next header
_WINDOW = 4096
_MOST_BYTES = 1 << 20


class TarError(ValueError):
    """The reason why an archive does not support random access, and a way out."""


def members(
    read: Callable[[int, int], bytes], size: int, wanted: tuple[bytes, ...] = (), at: int = 0
) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Yields the name, first byte's position, length and content of each regular member.

    Args:
        read: returns bytes from the archive, given an offset and a length.
        size: the archive's size in bytes.
        wanted: suffixes of names whose contents are yielded; other contents are empty.
        at: the offset of the first header.

    Raises:
        TarError: the archive is damaged, truncated or compressed, or a member is not a regular
            file or is outside the archive's folder.
        OSError: it cannot be read.
    """
    base, window = at, b""

    def take(place: int, length: int) -> bytes:
        nonlocal base, window
        if place + length > base + len(window):
            if place + length > size:
                raise TarError(f"is cut off at byte {size}; fetch or write it again")
            base, window = place, read(place, min(max(length, _WINDOW), size - place))
        return window[place - base : place - base + length]

    # values from the headers that precede a member's own
    more: dict[bytes, bytes] = {}
    while (header := take(at, BLOCK)).strip(b"\0"):
        name, digits, kind, magic, prefix = _HEADER.unpack(header)
        if magic != b"ustar":
            raise TarError(f"has no tar header at byte {at}; decompress it, or write it again")
        name = name.partition(b"\0")[0]
        if prefix[0]:
            name = prefix.partition(b"\0")[0] + b"/" + name
        at += BLOCK
        length = _number(digits)
        if kind in b"xLgK":
            if length > _MOST_BYTES:
                raise TarError(f"has a name of {length} bytes; write it again")
            content = take(at, length)
            more |= _records(content) if kind == b"x" else {}
            if kind == b"L":
                more[b"path"] = content.rstrip(b"\0")
        else:
            name = more.get(b"path", name)
            length = int(more.get(b"size", length))
            if kind not in b"0\x0057" or any(key.startswith(b"GNU.sparse") for key in more):
                raise TarError(f"{name!r} is a link or sparse file; use tar -h, without -S")
            more = {}
            if name[:1] == b"/" or b".." in name.split(b"/"):
                raise TarError(f"{name!r} is outside; write it again from within its folder")
            # after a truncated member, the next header is missing
            if kind != b"5":
                yield name, at, length, take(at, length) if name.endswith(wanted) else b""
        at += padded(length)
    if take(at, min(_MOST_BYTES, size - at)).strip(b"\0"):
        raise TarError(f"has data after its end, at byte {at}; write it again as one archive")


def _number(field: bytes) -> int:
    if field[0] == 0x80:
        # a size above eight gigabytes
        return int.from_bytes(field[1:], "big")
    text = field.strip(b"\0 ") or b"0"
    if not text.isdigit():
        raise TarError(f"has {field!r} as a size; fetch or write it again")
    return int(text, 8)


def _records(content: bytes) -> dict[bytes, bytes]:
    """Returns the values in a PAX header by key."""
    found = {}
    while content:
        count = content.partition(b" ")[0]
        key, _, value = content[len(count) + 1 : int(count) - 1].partition(b"=")
        found[key] = value
        content = content[max(1, int(count)) :]
    return found


def padded(length: Any) -> Any:
    """Returns ``length``, in bytes, rounded up to whole blocks."""
    return -(-length // BLOCK) * BLOCK
