"""Decodes images to 8-bit RGB: common JPEG, PNG and WebP with format libraries, others with Pillow.

``decode`` serves data sets and ``wellfed.load``; ``decode_jpeg`` also serves ``wellfed.faster``.
The format is detected from the bytes, never from the file name, and every error becomes
``DecodeError``. Calling libjpeg-turbo, libspng and libwebp directly gives the same pixels in less
time.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from PIL import ExifTags, Image, ImageChops
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from ..config import DataConfig
from .libraries import decode_png, decode_webp, webp_sides

try:
    import simplejpeg
except ImportError:
    # no wheel for this Python or platform; Pillow decodes JPEG
    simplejpeg = None
try:
    from PIL.AvifImagePlugin import AvifImageFile
except ImportError:
    # before Pillow 11.3
    AvifImageFile = None  # type: ignore[assignment, misc]
try:
    # from the heif extra
    from pillow_heif import HeifImageFile
except ImportError:
    HeifImageFile = None

# bytes that ``reader`` and ``foreign`` inspect
HEAD_BYTES = 64

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
# Damage that libjpeg-turbo fills with gray. Extra bytes in a header or at the end are harmless.
# Before a restart marker, table or scan, they may hide more damage, because the decoder keeps only
# its first warning.
_LOSS = re.compile(
    r"premature end|bad \w+ code|of RST|progression|marker 0x(c4|d[0-8a])", re.IGNORECASE
)
_USUAL_COLORS = ("Gray", "YCbCr", "RGB")
# arithmetic decoding never warns about a bad code; leftover bytes are pixels
_ARITHMETIC = re.compile(rb"\xff[\xc9\xca]")

# by EXIF orientation
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class _Jpeg(JpegImageFile):
    """Pillow's reader without the EXIF resolution, which is slow to read and causes warnings."""

    def _read_dpi_from_exif(self) -> None:
        pass


_READERS: tuple[tuple[bytes, type[ImageFile]], ...] = (
    (_JPEG, _Jpeg),
    (_PNG, PngImageFile),
    (b"GIF87a", GifImageFile),
    (b"GIF89a", GifImageFile),
    (b"BM", BmpImageFile),
    *((start, TiffImageFile) for start in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    *((b"P%c" % kind, PpmImageFile) for kind in b"123456f"),
)

# formats read only with the heif extra, or not at all; an ISO media brand follows "ftyp"
_FOREIGN = re.compile(
    rb"(?s)(?P<HEIC>.{4}ftyp(he|mif1|msf1))|(?P<JXL>\xff\n|\0\0\0\x0cJXL )"
    rb"|(?P<JP2>\0\0\0\x0cjP  |\xffO\xffQ)|(?P<RAW>.{4}ftypcrx|FUJIFILM|IIR[OS]|MMOR|IIU\0|FOVb)"
)


class DecodeError(ValueError):
    """Bytes cannot be decoded to an image."""


def reader(head: bytes) -> type[ImageFile] | None:
    """Returns Pillow's reader for a file that starts with ``head``; None if it is unsupported.

    The first ``HEAD_BYTES`` of the file suffice.
    """
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return WebPImageFile
    if head[4:8] == b"ftyp" and re.search(b"avi[fs]", head[:HEAD_BYTES]):
        return AvifImageFile  # None if this Pillow has no reader
    if foreign(head) == "HEIC" and HeifImageFile is not None:
        found: type[ImageFile] = HeifImageFile
        return found
    return next((plugin for start, plugin in _READERS if head.startswith(start)), None)


def foreign(head: bytes) -> str | None:
    """Returns the format of an unsupported image, detected from its first bytes."""
    found = _FOREIGN.match(head)
    return found and found.lastgroup


def way_to_read(formats: Iterable[str]) -> str:
    """Returns advice on images in unsupported ``formats``; empty if there are none."""
    advice = []
    if "HEIC" in formats:
        advice.append('to read HEIC, pip install -e ".[heif]" or uv sync --extra heif')
    if others := [name for name in formats if name != "HEIC"]:
        advice.append(f"convert {' and '.join(others)} to PNG")
    return "; ".join(advice)


def decode(data: bytes, options: DataConfig) -> np.ndarray:
    """Returns the first image in the encoded file ``data``, uint8 ``[H, W, 3]``.

    Raises:
        DecodeError: the image is unsupported, corrupt, or larger than ``data.max_pixels``.
    """
    return decoded(data, options)[0]


def decoded(data: bytes, options: DataConfig) -> tuple[np.ndarray, bool]:
    """Returns the pixels as ``decode`` does, and whether they are the unrotated ones of a JPEG.

    Raises:
        DecodeError: as ``decode``.
    """
    pixels = None
    # an orientation is stored in an EXIF or XMP block, which begins like this
    turns: tuple[bytes, ...] = ()
    is_jpeg = data.startswith(_JPEG)
    if is_jpeg:
        pixels = decode_jpeg(data, options.max_pixels)
        turns = (b"\xff\xe1",)
    elif data.startswith(_PNG):
        pixels = decode_png(data, options.max_pixels)
        turns = b"eXIf", b"exif", b"adobe"
    elif data[:4] == b"RIFF":
        pixels = decode_webp(data, options.max_pixels)
    if pixels is None or (options.exif_orientation and any(turn in data for turn in turns)):
        image = np.asarray(_by_pillow(data, options, pixels))
        return image, is_jpeg and pixels is not None and np.array_equal(image, pixels)
    return pixels, is_jpeg


def decode_opened(image: Image.Image, options: DataConfig) -> np.ndarray:
    """Returns the pixels in a Pillow ``image`` as ``decode`` would, uint8 ``[H, W, 3]``."""
    image.load()
    return np.asarray(_turned(_to_rgb(image, options.background), image, options))


def decode_jpeg(data: bytes, max_pixels: int) -> np.ndarray | None:
    """Returns the pixels in the JPEG ``data``, uint8 ``[H, W, 3]``; None: left to Pillow.

    Pillow decodes CMYK images, images larger than ``max_pixels``, and images that libjpeg-turbo
    cannot read or warns about although all pixels are present. The GIL is released while decoding.
    Each call allocates; a buffer per thread was no faster.

    Raises:
        DecodeError: the data is truncated or corrupt, or has too many scans.
    """
    if simplejpeg is None:
        return None
    try:
        # checked first, because decoding allocates whatever size the header claims
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if width * height > max_pixels:
            return None
        # Even a ten-byte scan visits all pixels; libjpeg writes 10 scans for RGB, and 18 for CMYK.
        # Counting is slow, and smaller images are decoded within seconds in any case.
        if width * height * len(data) > 2**35:
            flat = np.frombuffer(data, np.uint8)
            scans = (flat[:-2] == 0xFF) & (flat[1:-1] == 0xDA) & (flat[2:] == 0)
            if np.count_nonzero(scans) > 32:
                raise DecodeError("progressive JPEG with more than 32 scans; re-encode it")
        pixels: np.ndarray = simplejpeg.decode_jpeg(data)
    except DecodeError:
        raise
    except (ValueError, KeyError, RuntimeError) as error:
        # corrupt data, an unknown color space, or no decoder
        if _LOSS.search(str(error)) or ("extraneous" in str(error) and _ARITHMETIC.search(data)):
            raise DecodeError(f"truncated or corrupt JPEG ({error})") from error
        return None
    # Decoding showed that the data is complete. Pillow converts other color spaces differently.
    return pixels if colors in _USUAL_COLORS else None


def jpeg_size(data: bytes, max_pixels: int) -> tuple[int, int] | None:
    """Returns width and height if ``decode_jpeg`` can decode the JPEG; None: left to Pillow."""
    if simplejpeg is None:
        return None
    with suppress(ValueError, KeyError, RuntimeError):
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if colors in _USUAL_COLORS and width * height <= max_pixels:
            return width, height
    return None


def _by_pillow(data: bytes, options: DataConfig, pixels: np.ndarray | None) -> Image.Image:
    """Returns the image in mode RGB, from ``pixels`` if given.

    Pillow reads every format and decides whether a file is corrupt.
    """
    plugin = reader(data)
    if plugin is None:
        if data.startswith(b"version https://git-lfs.github.com/spec/"):
            raise DecodeError(
                "a Git LFS pointer, not the image itself; run `git lfs pull` in the data set's "
                "repository"
            )
        if found := foreign(data):
            raise DecodeError(f"{found} is not supported; {way_to_read([found])}")
        raise DecodeError(
            "not an image of a supported format (JPEG, PNG, WebP, AVIF, BMP, TIFF, GIF, PPM)"
            if data
            else "empty file"
        )
    # Pillow's limit is global and warns first; it must not be lower than the user's.
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, options.max_pixels)
    try:
        # Pillow's WebP reader allocates the whole canvas when it opens
        _check_size(*webp_sides(data), options)
        # Not Image.open, which tries other formats and warns about images rejected below.
        image = plugin(io.BytesIO(data))
        _check_size(*image.size, options)
        # width and height of a TIFF tile, which may be larger than the image
        tags = getattr(image, "tag_v2", {})
        _check_size(tags.get(322, 0), tags.get(323, 0), options)
        if pixels is not None:
            rgb = Image.fromarray(pixels)
        else:
            if isinstance(image, PngImageFile):
                _load_png(image, data)
            image.load()
            rgb = _to_rgb(image, options.background)
        return _turned(rgb, image, options)
    except DecodeError:
        raise
    except Exception as error:
        # Pillow's readers raise anything on corrupt bytes
        text = str(error) or type(error).__name__
        kind = "truncated file" if "truncated" in text.lower() else "cannot be decoded"
        raise DecodeError(f"{kind}: {text}") from error


def _turned(rgb: Image.Image, image: Image.Image, options: DataConfig) -> Image.Image:
    """Returns ``rgb``, rotated according to the EXIF orientation of ``image`` if enabled."""
    turn = None
    if options.exif_orientation:
        # even with a corrupt EXIF block, the pixels are complete
        with suppress(Exception):
            turn = _TURNS[image.getexif()[ExifTags.Base.Orientation]]
    return rgb if turn is None else rgb.transpose(turn)


def _check_size(width: int, height: int, options: DataConfig) -> None:
    if width * height > options.max_pixels:
        raise DecodeError(
            f"too large: {width}x{height} pixels, more than data.max_pixels={options.max_pixels}; "
            "raise it, or shrink the file"
        )


def _load_png(image: PngImageFile, data: bytes) -> None:
    """Loads ``image`` from ``data``, whose compressed pixels may be truncated.

    Raises:
        DecodeError: pixels are missing, which Pillow leaves uninitialized.
    """
    # a value that few images end with
    memory = Image.new(image.mode, image.size, 77)
    unread = memory.getpixel((0, 0))
    image.im = memory.im
    image.load()
    if image.info.get("interlace") or image.getpixel((image.width - 1, image.height - 1)) == unread:
        # after decoding again into black memory, missing pixels differ
        again = PngImageFile(io.BytesIO(data))
        again.load()
        if again.tobytes() != image.tobytes():
            raise DecodeError("truncated file: rows of pixels are missing")


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Returns a loaded ``image`` in mode RGB.

    Raises:
        ValueError: a gray value is out of range, so the white level is unknown.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        # scale 16-bit gray, or float gray in 0..1, which Pillow's conversion would saturate
        values = np.asarray(image)
        white = 1.0 if image.mode == "F" else 65535.0
        tags = getattr(image, "tag_v2", {})
        if tags.get(BITSPERSAMPLE) == (12,):
            white = 4095.0
        # rejects NaN too
        if not (values.min() >= 0 and values.max() <= white):
            raise ValueError(f"pixels of mode {image.mode} outside 0..{white:g}")
        # float32 rounds the same and takes half the memory
        gray = np.rint(values * np.float32(255.0 / white)).astype(np.uint8)
        if tags.get(PHOTOMETRIC_INTERPRETATION) == 0:
            gray = 255 - gray
        rgb = Image.fromarray(gray).convert("RGB")
        clear = image.info.get("transparency")
        if clear is not None:
            rgb.paste(background, mask=Image.fromarray(values == clear))
        return rgb
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, background)
        canvas.paste(rgba, mask=rgba)
        return canvas
    if image.mode == "RGB":
        return image
    if image.mode == "CMYK" and isinstance(image, JpegImageFile) and "adobe" not in image.info:
        # Pillow treats every CMYK JPEG as inverted, as Adobe's are
        return ImageChops.invert(image).convert("RGB")
    return image.convert("RGB")
