"""Calls C libraries that wheels bring: libspng, libwebp, and libjpeg-turbo for parts of images.

They come with pyspng, Pillow and turbojpeg. ctypes gives the interpreter lock back while they
decode, which pyspng's own module does not. Without a library, its function returns None.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

_ADDRESS = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
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


def decode_png(data: bytes, width: int, height: int) -> np.ndarray | None:
    """Decodes a PNG by libspng to uint8 ``[H, W, 3]``, without its transparency.

    Returns None unless the file is whole: all checksums are right up to its end.
    """
    if not (calls := _spng()):
        return None
    pixels = np.empty((height, width, 3), np.uint8)
    made, set_buffer, decode, decode_rest, free = calls
    context = made(0)
    try:
        bad = (
            set_buffer(context, data, len(data))
            or decode(context, pixels.ctypes.data, pixels.nbytes, _SPNG_RGB8, 0)
            or decode_rest(context)
        )
    finally:
        free(context)
    return None if bad else pixels


def decode_webp(data: bytes, width: int, height: int) -> np.ndarray | None:
    """Decodes a still WebP by libwebp to uint8 ``[H, W, 3]``, without its transparency.

    Returns None if anything is wrong with it.
    """
    if (call := _webp()) is None:
        return None
    pixels = np.empty((height, width, 3), np.uint8)
    done = call(data, len(data), pixels.ctypes.data, pixels.nbytes, 3 * width)
    return pixels if done else None


def decode_jpeg_part(
    data: bytes, choose: Callable[[int, int], _Box]
) -> tuple[np.ndarray, _Box] | None:
    """Decodes a part of a JPEG that was decoded whole before without a fault.

    What lies below the part is not read. The pixels are those that the whole image has: blocks are
    decoded whole, and one more on each side, for colours are interpolated between blocks.

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
    if (decoder := _decoder()) is None:
        return None
    try:
        return decoder.part(data, choose)
    except ValueError:
        # after an error a decoder decodes no other image
        del _own.decoder
        raise


def decodes_parts() -> bool:
    """Returns whether ``decode_jpeg_part`` has its library."""
    return _decoder() is not None


class _Region(ctypes.Structure):
    _fields_ = [(name, _INT) for name in ("x", "y", "w", "h")]


class _Decoder:
    """A decoder of libjpeg-turbo, for one thread."""

    def __init__(self, path: str) -> None:
        short, long = ctypes.PyDLL(path), ctypes.CDLL(path)
        self._free = _function(short.tj3Destroy, None, _ADDRESS)
        self._get = _function(short.tj3Get, _INT, _ADDRESS, _INT)
        self._header = _function(short.tj3DecompressHeader, _INT, _ADDRESS, ctypes.c_char_p, _SIZE)
        self._crop = _function(short.tj3SetCroppingRegion, _INT, _ADDRESS, _Region)
        self._decode = _function(
            long.tj3Decompress8, _INT, _ADDRESS, ctypes.c_char_p, _SIZE, _ADDRESS, _INT, _INT
        )
        self._handle = _function(short.tj3Init, _ADDRESS, _INT)(1)
        _function(short.tj3Set, _INT, _ADDRESS, _INT, _INT)(self._handle, _STOP_ON_WARNING, 1)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._free(self._handle)

    def part(
        self, data: bytes, choose: Callable[[int, int], _Box]
    ) -> tuple[np.ndarray, _Box] | None:
        """As ``decode_jpeg_part``."""
        own = self._handle
        if self._header(own, data, len(data)):
            raise ValueError("libjpeg-turbo cannot read the image's header")
        width, height, subsampling, colours, progressive = (
            self._get(own, asked)
            for asked in (_WIDTH, _HEIGHT, _SUBSAMPLING, _COLOURS, _PROGRESSIVE)
        )
        usual = colours in _USUAL_COLOURS and 0 <= subsampling < len(_BLOCKS)
        if not usual or progressive or width * height < _LEAST_PIXELS:
            return None
        left, top, part_width, part_height = choose(width, height)
        across, down = _BLOCKS[subsampling]
        x, end_x = _blocks_around(left, left + part_width, across, width)
        y, end_y = _blocks_around(top, top + part_height, down, height)
        pixels = np.empty((end_y - y, end_x - x, 3), np.uint8)
        # what is set here holds for the next image too, whose header does not undo it
        failed = self._crop(own, _Region(x, y, end_x - x, end_y - y)) or self._decode(
            own, data, len(data), pixels.ctypes.data, 0, 0
        )
        self._crop(own, _Region(0, 0, 0, 0))
        if failed:
            raise ValueError("libjpeg-turbo cannot decode a part of the image")
        return pixels, (left - x, top - y, part_width, part_height)


def _blocks_around(begin: int, end: int, block: int, whole: int) -> tuple[int, int]:
    """Returns begin and end in whole blocks, with one more on each side."""
    return max(0, begin // block - 1) * block, min(whole, (-(-end // block) + 1) * block)


_own = threading.local()


def _decoder() -> _Decoder | None:
    """Returns this thread's decoder; None: there is no library for it."""
    if not hasattr(_own, "decoder"):
        _own.decoder = None
        # the system's, of version 3
        for path in (*_beside("turbojpeg", "turbojpeg.libs/libturbojpeg*"), "libturbojpeg.so.0"):
            with suppress(OSError, AttributeError):
                _own.decoder = _Decoder(str(path))
                break
    found: _Decoder | None = _own.decoder
    return found


@cache
def _spng() -> tuple[ctypes._NamedFuncPointer, ...] | None:
    """Returns the functions of libspng in the order of their use; None: it is not here."""
    for path in _beside("pyspng", "_pyspng_c*.so"):
        with suppress(OSError, AttributeError):
            # for calls so short that others need not run meanwhile
            short, long = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
            return (
                _function(short.spng_ctx_new, _ADDRESS, _INT),
                _function(short.spng_set_png_buffer, _INT, _ADDRESS, ctypes.c_char_p, _SIZE),
                _function(long.spng_decode_image, _INT, _ADDRESS, _ADDRESS, _SIZE, _INT, _INT),
                _function(short.spng_decode_chunks, _INT, _ADDRESS),
                _function(short.spng_ctx_free, None, _ADDRESS),
            )
    return None


@cache
def _webp() -> ctypes._NamedFuncPointer | None:
    """Returns libwebp's function that decodes to RGB; None: Pillow's wheel does not bring it."""
    for pattern in ("../pillow.libs/libwebp-*", ".dylibs/libwebp.*"):
        for path in _beside("PIL", pattern):
            with suppress(OSError, AttributeError):
                call = ctypes.CDLL(str(path)).WebPDecodeRGBInto
                return _function(call, _ADDRESS, ctypes.c_char_p, _SIZE, _ADDRESS, _SIZE, _INT)
    return None


def _beside(package: str, pattern: str) -> list[Path]:
    """Returns the files of ``pattern`` in the folder of ``package``, which is not imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return []
    return [*Path(spec.origin).parent.glob(pattern)]


def _function(
    call: ctypes._NamedFuncPointer, result: type | None, *arguments: type
) -> ctypes._NamedFuncPointer:
    call.restype = result
    call.argtypes = arguments
    return call
