"""JPEGs past Pillow: the same pixels, or none."""

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simplejpeg
from oddities import flip_bits
from pictures import NAMES, encoded, photo, photograph
from PIL import Image

from harness.data.decode import decode_jpeg

LIMIT = 1_000_000  # pixels


def by_pillow(data: bytes) -> np.ndarray | None:
    """Pillow's pixels; None where it refuses the file."""
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            return np.asarray(image.convert("RGB"))
    except Exception:  # whatever it is that Pillow says
        return None


KINDS: dict[str, bytes] = {
    "4:2:0": encoded(photo(), quality=92),
    "4:2:2": encoded(photo(), subsampling="4:2:2"),
    "4:4:4": encoded(photo(), subsampling="4:4:4"),
    "progressive": encoded(photo(), progressive=True, quality=50),
    "gray": encoded(photo().convert("L")),
    "stored as RGB": encoded(photo(), keep_rgb=True),
    "restart markers": encoded(photo(), restart_marker_blocks=3),
    "own tables": encoded(photo(), optimize=True),
    "profile and comment": encoded(photo(), icc_profile=bytes(70_000), comment=b"a comment"),
    "one pixel": encoded(photo(1, 1)),
    "data behind its end": encoded(photo()) + bytes(100),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_pillows(kind: str) -> None:
    """Every ordinary kind of JPEG is decoded, and gives Pillow's pixels bit for bit."""
    pixels = decode_jpeg(KINDS[kind], LIMIT)
    assert pixels is not None and pixels.dtype == np.uint8
    assert np.array_equal(pixels, by_pillow(KINDS[kind]))


@pytest.mark.parametrize("progressive", [False, True], ids=["baseline", "progressive"])
@pytest.mark.parametrize("name", NAMES)
def test_photographs_are_pillows(name: str, progressive: bool) -> None:
    """So do photographs, in which damage to the last bit of a coefficient would show."""
    data = encoded(photograph(name), quality=94, progressive=progressive)
    assert np.array_equal(decode_jpeg(data, LIMIT), by_pillow(data))


def grown(data: bytes) -> bytes:
    """The same with a header that claims 65,500 rows."""
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + (65_500).to_bytes(2, "big") + data[at + 7 :]


def with_junk(data: bytes, at: int, count: int) -> bytes:
    return data[:at] + bytes(count) + data[at:]


def adobe(data: bytes, transform: int) -> bytes:
    """The same with a mark of Adobe's for how colors are stored."""
    return data[:2] + b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform]) + data[20:]


def in_scan(data: bytes, content: bytes) -> bytes:
    at = data.index(b"\xff\xda") + 100
    return data[:at] + content + data[at + len(content) :]


def with_last_scan_twice(data: bytes) -> bytes:
    return data[:-2] + data[data.rindex(b"\xff\xda") :]


UNUSUAL: dict[str, Any] = {
    "inks": encoded(photo().convert("CMYK")),
    "bytes before its end": with_junk(KINDS["4:2:0"], -2, 7),
    "many bytes before its end": with_junk(KINDS["4:2:0"], -2, 2226),
    "bytes in its header": with_junk(KINDS["4:2:0"], 20, 3),
    "JFIF 7": KINDS["4:2:0"].replace(b"JFIF\0\1", b"JFIF\0\7"),
    "odd Adobe mark": adobe(encoded(photo()), 7),
    "three bytes": b"\xff\xd8\xff",
    "twelve bits": encoded(photo()).replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc1\x00\x11\x0c"),
}


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_the_unusual_is_left_to_pillow(data: bytes) -> None:
    """Four inks, harmless warnings and what libjpeg-turbo cannot read go to Pillow."""
    assert decode_jpeg(data, 10 * LIMIT) is None


LOSSES: dict[str, tuple[bytes, str]] = {
    "no end": (encoded(photo())[:-2], "Premature end of JPEG file"),
    "cut": (encoded(photo())[:-300], "Premature end of JPEG file"),
    "progressive, cut": (encoded(photo(), progressive=True)[:-300], "Premature end of JPEG file"),
    "header alone": (encoded(photo())[:640], "Premature end of JPEG file"),
    "too few rows": (grown(encoded(photo(16, 16))), "premature end of data segment"),
    **{
        f"{kind}, cut with an end behind": (
            KINDS[kind][:-400] + b"\xff\xd9",
            "premature end of data segment",
        )
        for kind in (
            "4:2:0",
            "4:4:4",
            "gray",
            "stored as RGB",
            "restart markers",
            "own tables",
            "progressive",
        )
    },
    "inks, cut with an end behind": (
        encoded(photo().convert("CMYK"))[:-500] + b"\xff\xd9",
        "premature end of data segment",
    ),
    "no pixels but restart markers": (
        KINDS["restart markers"][: KINDS["restart markers"].index(b"\xff\xd0")]
        + b"".join(b"\xff" + bytes([0xD0 + i % 8]) for i in range(40))
        + b"\xff\xd9",
        "premature end of data segment",
    ),
    "a restart marker lost": (
        KINDS["restart markers"].replace(b"\xff\xd2", b"\xff\xd5", 1),
        "instead of RST",
    ),
    "arithmetic": (
        KINDS["4:2:0"].replace(b"\xff\xc0", b"\xff\xc9"),
        "extraneous bytes before marker 0xd9",
    ),
    "no Huffman code": (in_scan(KINDS["4:2:0"], b"\xff\0" * 40), "bad Huffman code"),
    "scans in disorder": (with_last_scan_twice(KINDS["progressive"]), "Inconsistent progression"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_missing_pixels_are_refused(kind: str) -> None:
    """Wherever libjpeg-turbo would paint what is missing in gray, its warning is the reason."""
    data, text = LOSSES[kind]
    with pytest.raises(ValueError, match=rf"JPEG \(.*{text}.*\)$"):
        decode_jpeg(data, 100 * LIMIT)


@pytest.mark.parametrize("pad", [0, 10_000], ids=["plain", "with a profile"])
def test_many_scans_are_refused(pad: int) -> None:
    """Each scan of ten bytes would go through all pixels; as many as libjpeg writes are read."""
    data = encoded(Image.new("L", (3000, 3000)), progressive=True, icc_profile=bytes(pad))
    start, end = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"][:2]
    scan = (
        data[start : start + 9] + b"\0" + data[start + 10 : end]
    )  # of all bits, for else they must differ
    assert decode_jpeg(data[:start] + scan * 32 + data[-2:], 10 * LIMIT) is not None
    with pytest.raises(ValueError, match=r"more than 32 scans"):
        decode_jpeg(data[:start] + scan * 40 + data[-2:], 10 * LIMIT)


def test_too_many_pixels_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is enough to turn an image away; one of exactly the limit is decoded."""
    data = KINDS["4:2:0"]
    assert decode_jpeg(data, 97 * 61) is not None
    monkeypatch.setattr(simplejpeg, "decode_jpeg", None)
    assert decode_jpeg(data, 97 * 61 - 1) is None


def test_memory_that_cannot_be_had_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MemoryError passes: Pillow would need as much."""

    def full(data: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(simplejpeg, "decode_jpeg", full)
    with pytest.raises(MemoryError):
        decode_jpeg(KINDS["4:2:0"], LIMIT)


def flip_in_the_header(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(3, 640)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def drop_a_part(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(3, len(data))
    return data[:at] + data[at + rng.randrange(1, 40) :]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("mutate", [flip_bits, flip_in_the_header, drop_a_part])
@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "gray", "restart markers"])
def test_damage_gives_pillows_pixels_or_none(
    kind: str, mutate: Callable[[bytes, random.Random], bytes]
) -> None:
    """A damaged file gives Pillow's pixels, or none if some are missing."""
    rng = random.Random(f"{kind} {mutate.__name__}")
    decoded = 0
    for _ in range(100):
        data = mutate(KINDS[kind], rng)
        try:
            pixels = decode_jpeg(data, LIMIT)
        except ValueError:
            continue
        if pixels is not None:
            decoded += 1
            assert np.array_equal(pixels, by_pillow(data))
    assert decoded  # else nothing was compared
