"""Calls C libraries from wheels: libspng, libwebp, and libjpeg-turbo for parts of images.

The libraries are installed with pyspng, Pillow and turbojpeg. ctypes releases the GIL while they
decode; pyspng's own module does not. If a library is missing, its function returns None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

_ADDRESS = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_BYTES = ctypes.c_char_p
# left, top, width and height in pixels
_Box = tuple[int, int, int, int]

# turbojpeg.h: parameters of tj3Get and tj3Set
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _COLORS, _PROGRESSIVE = 0, 4, 5, 6, 8, 12
# block width and height by subsampling, from 4:4:4 to 4:1:1
_BLOCKS = ((8, 8), (16, 8), (16, 16), (8, 8), (8, 16), (32, 8))
# gray and YCbCr; other color spaces are decoded differently
_USUAL_COLORS = (1, 2)
# below this many pixels, decoding a part takes as long as decoding the whole image
_LEAST_PIXELS = 60_000
# spng.h: format RGB8; converts gray and palettes
_SPNG_RGB8 = 4
# size limit of a comment or a profile, as in Pillow
_CHUNK_BYTES = 1 << 20
# by the type of the first WebP chunk: first bit of width and height, mask, offset
_WEBP_SIDES = {
    b"WEBPVP8 ": (208, 224, 0x3FFF, 0),
    b"WEBPVP8L": (168, 182, 0x3FFF, 1),
    b"WEBPVP8X": (192, 216, 0xFFFFFF, 1),
}


def decode_png(data: bytes, max_pixels: int) -> np.ndarray | None:
    """Decodes an opaque 8-bit gray, RGB or palette PNG with libspng to uint8 ``[H, W, 3]``.

    Returns None for other images, and unless the file is complete and all checksums match.
    """
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    usual = data[24:26] in (b"\x08\0", b"\x08\x02") or data[25:26] == b"\x03"
    if not usual or width * height > max_pixels or b"tRNS" in data or not (spng := _spng()):
        return None
    pixels = np.empty((height, width, 3), np.uint8)
    context = spng.ctx_new(0)
    try:
        bad = (
            spng.set_chunk_limits(context, _CHUNK_BYTES, _CHUNK_BYTES)
            or spng.set_png_buffer(context, data, len(data))
            or spng.decode_image(context, pixels.ctypes.data, pixels.nbytes, _SPNG_RGB8, 0)
            or spng.decode_chunks(context)
        )
    finally:
        spng.ctx_free(context)
    return None if bad else pixels


def decode_webp(data: bytes, max_pixels: int) -> np.ndarray | None:
    """Decodes a still WebP with libwebp to uint8 ``[H, W, 3]``.

    Returns None for an image that has transparency, has metadata other than a color profile, or has
    anything wrong with it.
    """
    kind = data[12:16]
    unusual = {b"VP8 ": 0, b"VP8L": data[24:25] >= b"\x10", b"VP8X": data[20:21] not in b"\0\x20"}
    width, height = webp_sides(data)
    cut = len(data) < 8 + int.from_bytes(data[4:8], "little")
    if unusual.get(kind, True) or cut or width * height > max_pixels or not (webp := _webp()):
        return None
    pixels = np.empty((height, width, 3), np.uint8)
    given = data, len(data), pixels.ctypes.data, pixels.nbytes, 3 * width
    return pixels if webp.DecodeRGBInto(*given) else None


def webp_sides(data: bytes) -> tuple[int, int]:
    """Returns the width and height from a WebP header; 1 and 1 for other formats."""
    x, y, mask, more = _WEBP_SIDES.get(data[8:16], (0, 0, 0, 1))
    head = int.from_bytes(data[:30], "little")
    return (head >> x & mask) + more, (head >> y & mask) + more


def decode_jpeg_part(
    data: bytes, choose: Callable[[int, int], _Box]
) -> tuple[np.ndarray, _Box] | None:
    """Decodes part of a JPEG that was previously decoded in full without errors.

    Data below the part is not read. The pixels equal those in the full image. Whole blocks are
    decoded, plus a neighboring block if colors are interpolated across the edge.

    Args:
        data: the file's bytes.
        choose: returns left, top, width and height of the part, given the image's width and height;
            called once, or never if the result is None.

    Returns:
        uint8 ``[H, W, 3]`` and the position of the part in it; None for a small or unusual image,
        or if the library is missing.

    Raises:
        ValueError: the decoder reports an error.
    """
    if not (turbo := _turbojpeg()):
        return None
    handle = turbo.Init(1)
    try:
        turbo.Set(handle, _STOP_ON_WARNING, 1)
        bad = turbo.DecompressHeader(handle, data, len(data))
        width, height, subsampling, colors, progressive = (
            turbo.Get(handle, asked)
            for asked in (_WIDTH, _HEIGHT, _SUBSAMPLING, _COLORS, _PROGRESSIVE)
        )
        usual = colors in _USUAL_COLORS and 0 <= subsampling < len(_BLOCKS)
        if bad or not usual or progressive or width * height < _LEAST_PIXELS:
            return None
        left, top, part_width, part_height = choose(width, height)
        across, down = _BLOCKS[subsampling]
        # the adjacent color to the left and right; the library decodes those above and below
        color = across // 8
        x, end_x = _blocks_around(left - color, left + part_width + color, across, width)
        y, end_y = _blocks_around(top, top + part_height, down, height)
        pixels = np.empty((end_y - y, end_x - x, 3), np.uint8)
        region = _Region(x, y, end_x - x, end_y - y)
        given = data, len(data), pixels.ctypes.data, 0, 0
        if turbo.SetCroppingRegion(handle, region) or turbo.Decompress8(handle, *given):
            raise ValueError("libjpeg-turbo cannot decode part of the image")
    finally:
        turbo.Destroy(handle)
    return pixels, (left - x, top - y, part_width, part_height)


def in_use() -> list[str]:
    """Returns the libraries that decode images instead of Pillow."""
    libraries = {
        "JPEG": find_spec("simplejpeg"),
        "parts of JPEG": _turbojpeg(),
        "PNG": _spng(),
        "WebP": _webp(),
    }
    return [name for name, library in libraries.items() if library]


class _Region(ctypes.Structure):
    _fields_ = [(name, _INT) for name in ("x", "y", "w", "h")]


def _blocks_around(begin: int, end: int, block: int, whole: int) -> tuple[int, int]:
    """Returns begin and end, rounded outward to whole blocks within ``whole``."""
    return max(0, begin // block * block), min(whole, -(-end // block) * block)


@cache
def _turbojpeg() -> SimpleNamespace | None:
    return _library(
        # then the system library, version 3
        [*_beside("turbojpeg", "turbojpeg.libs/libturbojpeg*"), "libturbojpeg.so.0"],
        "tj3",
        "Decompress8",
        Init=(_ADDRESS, _INT),
        Destroy=(None, _ADDRESS),
        Set=(_INT, _ADDRESS, _INT, _INT),
        Get=(_INT, _ADDRESS, _INT),
        DecompressHeader=(_INT, _ADDRESS, _BYTES, _SIZE),
        SetCroppingRegion=(_INT, _ADDRESS, _Region),
        Decompress8=(_INT, _ADDRESS, _BYTES, _SIZE, _ADDRESS, _INT, _INT),
    )


@cache
def _spng() -> SimpleNamespace | None:
    return _library(
        _beside("pyspng", "_pyspng_c*.so"),
        "spng_",
        "decode_image",
        ctx_new=(_ADDRESS, _INT),
        ctx_free=(None, _ADDRESS),
        set_chunk_limits=(_INT, _ADDRESS, _SIZE, _SIZE),
        set_png_buffer=(_INT, _ADDRESS, _BYTES, _SIZE),
        decode_image=(_INT, _ADDRESS, _ADDRESS, _SIZE, _INT, _INT),
        decode_chunks=(_INT, _ADDRESS),
    )


@cache
def _webp() -> SimpleNamespace | None:
    return _library(
        [*_beside("PIL", "../pillow.libs/libwebp-*"), *_beside("PIL", ".dylibs/libwebp.*")],
        "WebP",
        "DecodeRGBInto",
        DecodeRGBInto=(_ADDRESS, _BYTES, _SIZE, _ADDRESS, _SIZE, _INT),
    )


def _library(
    paths: Sequence[str], prefix: str, long: str, **types: tuple[Any, ...]
) -> SimpleNamespace | None:
    """Returns functions from the first library that has them, or None.

    Args:
        paths: candidate files.
        prefix: prefix of the function names.
        long: the function that releases the GIL; the others are too short for it.
        types: result and argument types of each function.
    """
    for path in paths:
        with suppress(OSError, AttributeError):
            found = SimpleNamespace()
            for name, (result, *arguments) in types.items():
                library = ctypes.CDLL(path) if name == long else ctypes.PyDLL(path)
                call = getattr(library, prefix + name)
                call.restype, call.argtypes = result, arguments
                setattr(found, name, call)
            return found
    return None


def _beside(package: str, pattern: str) -> list[str]:
    """Returns the files matching ``pattern`` in the folder of ``package``, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return []
    return [str(path) for path in Path(spec.origin).parent.glob(pattern)]
