"""Calls C libraries that wheels bring: libspng, libwebp, and libjpeg-turbo for parts of images.

They come with pyspng, Pillow and turbojpeg. ctypes gives the interpreter lock back while they
decode, which pyspng's own module does not. Without a library, its function returns None.
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

# turbojpeg.h: what tj3Get and tj3Set are asked for
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _COLOURS, _PROGRESSIVE = 0, 4, 5, 6, 8, 12
# by the subsampling, from 4:4:4 to 4:1:1, width and height of a block of all colours
_BLOCKS = ((8, 8), (16, 8), (16, 16), (8, 8), (8, 16), (32, 8))
# grey and YCbCr; the decoder makes other colours differently
_USUAL_COLOURS = (1, 2)
# of fewer pixels a part takes as long as the whole
_LEAST_PIXELS = 60_000
# spng.h: the format RGB8; grey and palette become RGB
_SPNG_RGB8 = 4
# of a comment or a profile, as Pillow allows
_CHUNK_BYTES = 1 << 20


def decode_png(data: bytes, width: int, height: int) -> np.ndarray | None:
    """Decodes a PNG by libspng to uint8 ``[H, W, 3]``, without its transparency.

    Returns None unless the file is whole: all checksums are right up to its end.
    """
    if not (spng := _spng()):
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


def decode_webp(data: bytes, width: int, height: int) -> np.ndarray | None:
    """Decodes a still WebP by libwebp to uint8 ``[H, W, 3]``, without its transparency.

    Returns None if anything is wrong with it.
    """
    if not (webp := _webp()):
        return None
    pixels = np.empty((height, width, 3), np.uint8)
    given = data, len(data), pixels.ctypes.data, pixels.nbytes, 3 * width
    return pixels if webp.DecodeRGBInto(*given) else None


def decode_jpeg_part(
    data: bytes, choose: Callable[[int, int], _Box]
) -> tuple[np.ndarray, _Box] | None:
    """Decodes a part of a JPEG that was decoded whole before without a fault.

    What lies below the part is not read. The pixels are those that the whole image has: blocks are
    decoded whole, and one more beside them if a colour of theirs is interpolated at the edge.

    Args:
        data: the file's bytes.
        choose: returns left, top, width and height of the part of an image of this width and
            height; called once, or not at all if None is returned.

    Returns:
        uint8 ``[H, W, 3]`` and the place of the part in it; None: a small or unusual image, or no
        library.

    Raises:
        ValueError: the decoder complains.
    """
    if not (turbo := _turbojpeg()):
        return None
    handle = turbo.Init(1)
    try:
        turbo.Set(handle, _STOP_ON_WARNING, 1)
        bad = turbo.DecompressHeader(handle, data, len(data))
        width, height, subsampling, colours, progressive = (
            turbo.Get(handle, asked)
            for asked in (_WIDTH, _HEIGHT, _SUBSAMPLING, _COLOURS, _PROGRESSIVE)
        )
        usual = colours in _USUAL_COLOURS and 0 <= subsampling < len(_BLOCKS)
        if bad or not usual or progressive or width * height < _LEAST_PIXELS:
            return None
        left, top, part_width, part_height = choose(width, height)
        across, down = _BLOCKS[subsampling]
        # the next colour to the left and to the right; above and below, the library decodes it
        colour = across // 8
        x, end_x = _blocks_around(left - colour, left + part_width + colour, across, width)
        y, end_y = _blocks_around(top, top + part_height, down, height)
        pixels = np.empty((end_y - y, end_x - x, 3), np.uint8)
        region = _Region(x, y, end_x - x, end_y - y)
        given = data, len(data), pixels.ctypes.data, 0, 0
        if turbo.SetCroppingRegion(handle, region) or turbo.Decompress8(handle, *given):
            raise ValueError("libjpeg-turbo cannot decode a part of the image")
    finally:
        turbo.Destroy(handle)
    return pixels, (left - x, top - y, part_width, part_height)


def decodes_parts() -> bool:
    """Returns whether ``decode_jpeg_part`` has its library."""
    return _turbojpeg() is not None


def in_use() -> list[str]:
    """Returns what decodes images in place of Pillow."""
    libraries = {"parts of JPEG": _turbojpeg(), "PNG": _spng(), "WebP": _webp()}
    return ["JPEG", *(name for name, library in libraries.items() if library)]


class _Region(ctypes.Structure):
    _fields_ = [(name, _INT) for name in ("x", "y", "w", "h")]


def _blocks_around(begin: int, end: int, block: int, whole: int) -> tuple[int, int]:
    """Returns begin and end in whole blocks, within the ``whole``."""
    return max(0, begin // block * block), min(whole, -(-end // block) * block)


@cache
def _turbojpeg() -> SimpleNamespace | None:
    return _library(
        # the system's, of version 3
        [*_beside("turbojpeg", "turbojpeg.libs/libturbojpeg*"), "libturbojpeg.so.0"],
        "tj3",
        {"Decompress8"},
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
        {"decode_image"},
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
        {"DecodeRGBInto"},
        DecodeRGBInto=(_ADDRESS, _BYTES, _SIZE, _ADDRESS, _SIZE, _INT),
    )


def _library(
    paths: Sequence[str], prefix: str, long: set[str], **types: tuple[Any, ...]
) -> SimpleNamespace | None:
    """Returns functions of the first library that has them; None: there is none.

    Args:
        paths: where it may be.
        prefix: of the functions' names.
        long: those during which other threads run; others are too short for it.
        types: of each function, its result's and its arguments'.
    """
    for path in paths:
        with suppress(OSError, AttributeError):
            found = SimpleNamespace()
            for name, (result, *arguments) in types.items():
                library = ctypes.CDLL(path) if name in long else ctypes.PyDLL(path)
                call = getattr(library, prefix + name)
                call.restype, call.argtypes = result, arguments
                setattr(found, name, call)
            return found
    return None


def _beside(package: str, pattern: str) -> list[str]:
    """Returns the files of ``pattern`` in the folder of ``package``, which is not imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return []
    return [str(path) for path in Path(spec.origin).parent.glob(pattern)]
