"""PNG and WebP by their own libraries: Pillow's pixels, and Pillow's refusals."""

from __future__ import annotations

import random

import numpy as np
import pytest
from pictures import encoded, photo
from PIL import Image

from harness.config import DataConfig
from harness.data import libraries
from harness.data.decode import DecodeError, _by_pillow, decode

OPTIONS = DataConfig()
COLORS = photo()
TURNED = Image.Exif()
TURNED[274] = 6
CLEAR = np.dstack([np.asarray(COLORS), np.full((61, 97), 77, np.uint8)])
USUAL = {
    "rgb.png": encoded(COLORS, "PNG"),
    "gray.png": encoded(COLORS.convert("L"), "PNG"),
    "palette.png": encoded(COLORS.quantize(200), "PNG"),
    "palette of 4.png": encoded(COLORS.quantize(4), "PNG", bits=2),
    "turned.png": encoded(COLORS, "PNG", exif=TURNED),
    "lossy.webp": encoded(COLORS, "WEBP", quality=80),
    "lossless.webp": encoded(COLORS, "WEBP", lossless=True),
    "profile.webp": encoded(COLORS, "WEBP", icc_profile=b"x" * 500),
}
UNUSUAL = {
    "clear.png": encoded(Image.fromarray(CLEAR), "PNG"),
    "clear color.png": encoded(COLORS, "PNG", transparency=(1, 2, 3)),
    "clear palette.png": encoded(COLORS.quantize(16), "PNG", transparency=3),
    "bits.png": encoded(COLORS.convert("1"), "PNG"),
    "deep.png": encoded(Image.fromarray(CLEAR[..., 0].astype(np.uint16) * 257), "PNG"),
    "clear.webp": encoded(Image.fromarray(CLEAR), "WEBP"),
    "clear lossless.webp": encoded(Image.fromarray(CLEAR), "WEBP", lossless=True),
    "turned.webp": encoded(COLORS, "WEBP", exif=TURNED),
    "moving.webp": encoded(COLORS, "WEBP", save_all=True, append_images=[COLORS.rotate(9)]),
}


def quickly(data: bytes) -> np.ndarray | None:
    usual = libraries.decode_png if data.startswith(b"\x89PNG") else libraries.decode_webp
    return usual(data, OPTIONS.max_pixels)


@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL])
def test_pixels_are_those_of_pillow(name: str) -> None:
    data = (USUAL | UNUSUAL)[name]
    assert (quickly(data) is not None) == (name in USUAL)
    assert np.array_equal(decode(data, OPTIONS), _by_pillow(data, OPTIONS, None))


@pytest.mark.parametrize("name", [*USUAL])
def test_damage_is_refused_as_by_pillow(name: str) -> None:
    draws = random.Random(name)
    outcomes = set()
    for _ in range(60):
        damaged = bytearray(USUAL[name])
        at = draws.randrange(8, len(damaged))
        match draws.randrange(3):
            case 0:
                del damaged[at:]
            case 1:
                damaged[at] ^= 1 << draws.randrange(8)
            case _:
                damaged[at : at + 50] = bytes(len(damaged[at : at + 50]))
        found = []
        for made in (lambda d: decode(d, OPTIONS), lambda d: _by_pillow(d, OPTIONS, None)):
            try:
                found.append(np.asarray(made(bytes(damaged))).tobytes())
            except DecodeError:
                found.append(None)
        assert found[0] == found[1], at
        outcomes.add(found[0] is None)
    assert True in outcomes


def test_without_the_libraries_pillow_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_spng", lambda: None)
    monkeypatch.setattr(libraries, "_webp", lambda: None)
    for data in USUAL.values():
        assert quickly(data) is None
        assert np.array_equal(decode(data, OPTIONS), _by_pillow(data, OPTIONS, None))
