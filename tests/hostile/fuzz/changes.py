"""Changes of a file's bytes, by chance: of any file, of JSON and of YAML."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Change = Callable[[bytearray, Random, Sequence[bytes]], bytearray]

# what no reader may believe, in two and four bytes
_HUGE = (0, 1, 0x7F, 0xFF, 7000, 0x7FFF, 0xFFFF, 40_000, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)
# in the place of a value of JSON
_ODD = (
    "null", "-5", "-1", "0", "1.5", "true", '"x"', '""', '"\\u0000\\ud800"', "[]", "{}", "[1]",
    '{"x":1}', "1e999", "-1e999", "NaN", "1e300", "9" * 25, "9" * 400, "9" * 5000,
    "[" * 10_000 + "]" * 10_000, "[" * 900 + "]" * 900, "[" * 960 + "]" * 960,
    '{"a":' * 10_000 + "1" + "}" * 10_000,
)  # fmt: skip
_WORDS = (
    "null", "-5", "x", "1e999", ".nan", ".inf", "[]", "{}", "[1]", "9" * 5000, "???", "${seed}",
    "${oc.env:NONE}", "${x", "${seed}${seed}", "*a", "&a [*a]", "!!python/name:os.system", "!x 1",
    "!!binary x", "'", "\x00", "\x1b[31m", "\ud7ff", "2001-01-01", "0x10", "1_0", "on", "@",
    "[" * 500 + "]" * 500, "? x", "|", "- - -", "<<: [1]", "{a: 1, a: 2}",
)  # fmt: skip


def place(data: bytearray, rng: Random) -> int:
    """Returns a place in ``data``; half of the time it is near the begin, where headers are."""
    return rng.randrange(max(1, min(len(data), rng.choice((64, 1 << 40)))))


def _flip(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    at = place(data, rng)
    data[at : at + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1])
    return data


def _set(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    at = place(data, rng)
    data[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))])
    return data


def _number(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    at = place(data, rng)
    size = rng.choice((2, 4, 8))
    value = rng.choice(_HUGE) % (1 << 8 * size)
    data[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))
    return data


def _cut(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    return data[: place(data, rng)]


def _block(data: bytearray, rng: Random) -> tuple[int, int]:
    at = place(data, rng)
    return at, at + rng.choice((1, 4, 16, 64, 512))


def _delete(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    begin, end = _block(data, rng)
    del data[begin:end]
    return data


def _copy(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    begin, end = _block(data, rng)
    at = place(data, rng)
    data[at:at] = data[begin:end] * rng.choice((1, 1, 2, 100))
    return data


def _swap(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    begin, end = _block(data, rng)
    at = place(data, rng)
    one, other = data[begin:end], data[at : at + end - begin]
    data[begin:end], data[at : at + end - begin] = other, one
    return data


def _insert(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    at = place(data, rng)
    data[at:at] = rng.choice((rng.randbytes(8), bytes(64), b"\xff" * 64))
    return data


def _join(data: bytearray, rng: Random, others: Sequence[bytes]) -> bytearray:
    other = rng.choice(others)
    return data[: place(data, rng)] + other[rng.randrange(len(other) + 1) :]


_CHANGES: tuple[Change, ...] = (
    _flip, _flip, _set, _set, _number, _number, _cut, _delete, _copy, _swap, _insert, _join,
)  # fmt: skip


def mutated(seeds: Sequence[bytes], rng: Random) -> bytes:
    """Returns one of ``seeds`` with one to eight changes, anywhere."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        data = rng.choice(_CHANGES)(data, rng, seeds)
    return bytes(data)


def mutated_json(seeds: Sequence[bytes], rng: Random) -> bytes:
    """Returns one of ``seeds``, JSON or lines of JSON, most often with odd values in their form."""
    if rng.random() < 0.3:
        return mutated(seeds, rng)
    text = rng.choice(seeds)
    lines = text.splitlines(keepends=True) if b"}\n{" in text else [text]
    at = rng.randrange(len(lines))
    for _ in range(rng.choice((1, 1, 2, 3))):
        lines[at] = _odd_value(lines[at], rng)
    return b"".join(lines)


def _odd_value(text: bytes, rng: Random) -> bytes:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return text
    holders: list[Any] = [[whole]]
    for holder in holders:
        inner = holder.values() if isinstance(holder, dict) else holder
        holders += [item for item in inner if isinstance(item, dict | list) and item]
    holder = rng.choice(holders)
    keys = [*holder] if isinstance(holder, dict) else [*range(len(holder))]
    key = rng.choice(keys)
    kind = rng.randrange(10)
    if kind == 0 and holder is not holders[0]:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder["more"] = holder[key]
    else:
        holder[key] = "@odd@"
    return json.dumps(holders[0][0]).encode().replace(b'"@odd@"', rng.choice(_ODD).encode()) + b"\n"


def mutated_yaml(seeds: Sequence[bytes], rng: Random) -> bytes:
    """Returns one of ``seeds``, YAML, most often with odd words as values or names."""
    if rng.random() < 0.3:
        return mutated(seeds, rng)
    text = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 2))):
        found = [*re.finditer(rb"(?m)(?<=: ).+$|^ *\w+(?=:)", text)]
        if found:
            spot = rng.choice(found)
            word = rng.choice(_WORDS).encode()
            text = text[: spot.start()] + word + text[spot.end() :]
    return text


def png_sealed(data: bytes) -> bytes:
    """Returns a PNG with the right checksum at each chunk."""
    parts = [data[:8]]
    at = 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        parts += [data[at:end], zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")]
        at = end + 4
    return b"".join(parts)
