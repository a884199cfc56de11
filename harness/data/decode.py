"""Encoded bytes to pixels: eight-bit RGB from every format and mode that the data sets may hold.

The bytes decide what an image is, never the name of its file. Whatever is wrong with them ends as
``Undecodable``. JPEGs are decoded by libjpeg-turbo itself, without Pillow in between: the same
pixels in three quarters of the time.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageChops
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

FORMATS = "JPEG, PNG, WebP, BMP, TIFF, GIF, PPM"
# as much of a file as ``reader`` looks at
HEAD_BYTES = 16

_JPEG = b"\xff\xd8\xff"
# begins a JPEG's EXIF block, and its XMP block: one of them may hold an orientation
_APP1 = b"\xff\xe1"
# what libjpeg-turbo turns into RGB as Pillow has it turned
_COLOURS = frozenset({"Gray", "YCbCr", "RGB"})
# each goes through all pixels, even one of ten bytes; libjpeg writes 10 of three colours, 18 of
# four inks
_SCANS = 32
# What libjpeg-turbo paints over in grey. Bytes too many are harmless in a header and at the image's
# end: all pixels are there. Before a restart, a table or a scan they may hide more damage, for the
# decoder keeps its first warning alone.
_LOSS = re.compile(
    r"premature end|bad \w+ code|of RST|progression|marker 0x(c4|d[0-8a])", re.IGNORECASE
)
# Arithmetic coding, which never warns of a bad code: what it leaves over are pixels.
_ARITHMETIC = re.compile(rb"\xff[\xc9\xca]")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_NAMES = (
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)
_TURNS = {orientation: Image.Transpose[name] for orientation, name in enumerate(_NAMES, start=2)}

# By the kind of the first chunk: the first bit of width and height, their mask, and what is to be
# added.
_WEBP_SIDES = {
    b"WEBPVP8 ": (208, 224, 0x3FFF, 0),
    b"WEBPVP8L": (168, 182, 0x3FFF, 1),
    b"WEBPVP8X": (192, 216, 0xFFFFFF, 1),
}


class _Jpeg(JpegImageFile):
    """Pillow's reader without its look for a resolution in the EXIF block: it takes time, and
    damaged blocks warn.
    """

    def _read_dpi_from_exif(self) -> None:
        pass


_READERS: tuple[tuple[bytes, type[ImageFile]], ...] = (
    (_JPEG, _Jpeg),
    (b"\x89PNG\r\n\x1a\n", PngImageFile),
    (b"GIF87a", GifImageFile),
    (b"GIF89a", GifImageFile),
    (b"BM", BmpImageFile),
    *((start, TiffImageFile) for start in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    *((b"P%c" % kind, PpmImageFile) for kind in b"123456f"),
)


class Undecodable(ValueError):
    """Why bytes cannot be decoded to an image."""


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How an image is read."""

    # turn the image as its EXIF orientation says
    exif_orientation: bool = False
    # colour under transparent pixels, red, green, blue
    background: tuple[int, int, int] = (255, 255, 255)
    # of the largest image that is decoded
    max_pixels: int = 50_000_000


def reader(head: bytes) -> type[ImageFile] | None:
    """Pillow's reader for a file that starts with ``head`` (``HEAD_BYTES`` are enough); None: no
    supported format.
    """
    webp = WebPImageFile if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None
    return next((plugin for start, plugin in _READERS if head.startswith(start)), webp)


def decode(data: bytes, options: DecodeOptions) -> np.ndarray:
    """Returns the first image in ``data``, an encoded file: all of it, uint8 ``[H, W, 3]``.

    Raises:
        Undecodable: not an image of a supported format, damaged, or more pixels than
            ``options.max_pixels``.
    """
    pixels = decode_jpeg(data, options.max_pixels) if data.startswith(_JPEG) else None
    if pixels is not None and not (options.exif_orientation and _APP1 in data):
        return pixels
    return np.asarray(_by_pillow(data, options, pixels))


def decode_jpeg(data: bytes, max_pixels: int) -> np.ndarray | None:
    """Returns the image in ``data``, uint8 ``[H, W, 3]``; None where anything is unusual: Pillow is
    then to be asked.

    That is an image of four inks, of more than ``max_pixels``, or what libjpeg-turbo cannot read,
    or warns of although all pixels are there. The interpreter lock is released meanwhile, and any
    number of threads may decode. The memory is new each time: the allocator hands out what the
    image before gave back, and a buffer kept for each thread was no faster.

    Raises:
        Undecodable: libjpeg-turbo warned of missing or corrupt data, or there are too many scans.
    """
    try:
        # first, for decoding asks for the memory unasked, whatever size the header claims
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if width * height > max_pixels:
            return None
        # Counting takes time. Of fewer pixels and bytes, no number of scans takes more than
        # seconds.
        many = width * height * len(data) > 2**35 and _count_scans(data) > _SCANS
        pixels: np.ndarray = np.empty(0) if many else simplejpeg.decode_jpeg(data)
    except (ValueError, KeyError, RuntimeError) as error:
        # damaged, of an unknown colour space, or no decoder to be had
        if _LOSS.search(str(error)) or ("extraneous" in str(error) and _ARITHMETIC.search(data)):
            raise Undecodable(f"damaged: the decoder reported missing data ({error})") from error
        return None
    if many:
        raise Undecodable(f"more than {_SCANS} scans, which take too long; encode the file again")
    # Decoding showed that the data is whole.
    return pixels if colours in _COLOURS else None


def _count_scans(data: bytes) -> int:
    flat = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((flat[:-2] == 0xFF) & (flat[1:-1] == 0xDA) & (flat[2:] == 0)))


def _by_pillow(data: bytes, options: DecodeOptions, pixels: np.ndarray | None) -> Image.Image:
    """Returns the image in mode RGB, made of ``pixels`` if those are known.

    Pillow reads every format, and what it says of damage is final.
    """
    plugin = reader(data[:HEAD_BYTES])
    if plugin is None:
        raise Undecodable(_why_no_image(data))
    # Pillow's own limit is one for the process and warns before it refuses: it must not be lower
    # than the user's.
    if Image.MAX_IMAGE_PIXELS is not None and options.max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = options.max_pixels
    try:
        # Pillow's reader of WebP takes memory for the whole canvas as it is made.
        _check_size(_webp_canvas(data), options)
        # Not Image.open: it tries other formats as well, and warns of a large image that the next
        # line refuses anyway.
        image = plugin(io.BytesIO(data))
        _check_size(image.size, options)
        if isinstance(image, TiffImageFile):
            # Width and height of a tile, which may be larger than the image.
            _check_size((image.tag_v2.get(322, 0), image.tag_v2.get(323, 0)), options)
        rgb = Image.fromarray(pixels) if pixels is not None else _to_rgb(image, options.background)
        return _turned(rgb, image) if options.exif_orientation else rgb
    except Undecodable:
        raise
    except Exception as error:
        # Pillow's readers raise anything on damaged bytes
        text = str(error) or type(error).__name__
        kind = "truncated file" if "truncated" in text.lower() else "cannot be decoded"
        raise Undecodable(f"{kind}: {text}") from error


def _why_no_image(data: bytes) -> str:
    if not data:
        return "empty file"
    if data.startswith(_LFS_POINTER):
        return (
            "a Git LFS pointer, not the image itself; run `git lfs pull` in the data set's "
            "repository"
        )
    return f"not an image of a supported format ({FORMATS})"


def _check_size(size: tuple[int, int], options: DecodeOptions) -> None:
    if size[0] * size[1] > options.max_pixels:
        text = f"{size[0]}x{size[1]} pixels, more than data.max_pixels={options.max_pixels}"
        raise Undecodable(f"too large: {text}; raise it, or shrink the file")


def _webp_canvas(data: bytes) -> tuple[int, int]:
    """Returns the width and height that a WebP file's header claims; zeros for another file."""
    x, y, mask, more = _WEBP_SIDES.get(data[8:16], (0, 0, 0, 0))
    head = int.from_bytes(data[:30], "little")
    return (head >> x & mask) + more, (head >> y & mask) + more


def _turned(rgb: Image.Image, original: ImageFile) -> Image.Image:
    try:
        turn = _TURNS.get(original.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        # the pixels are whole; a damaged EXIF block just says nothing of the orientation
        turn = None
    return rgb if turn is None else rgb.transpose(turn)


def _to_rgb(image: ImageFile, background: tuple[int, int, int]) -> Image.Image:
    image.load()
    if image.mode == "F" or image.mode.startswith("I"):
        rgb = _eight_bit(image).convert("RGB")
        if (clear := image.info.get("transparency")) is not None:
            rgb.paste(background, mask=Image.fromarray(np.asarray(image) == clear))
        return rgb
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, background)
        canvas.paste(rgba, mask=rgba)
        return canvas
    if image.mode == "RGB":
        return image
    if image.mode == "CMYK" and isinstance(image, _Jpeg) and "adobe" not in image.info:
        # Pillow takes every CMYK JPEG for one of Adobe's inverted ones
        return ImageChops.invert(image).convert("RGB")
    return image.convert("RGB")


def _eight_bit(image: ImageFile) -> Image.Image:
    """Grey of 16 bits (modes I;16 and I) or of fractions 0..1 (mode F), scaled; Pillow's own
    conversion saturates.

    Raises:
        ValueError: a value lies outside the range, so that nothing says what is white.
    """
    values = np.asarray(image)
    white = 1.0 if image.mode == "F" else 65535.0
    inverted = False
    if isinstance(image, TiffImageFile):
        if image.tag_v2.get(BITSPERSAMPLE) == (12,):
            white = 4095.0
        inverted = image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0
    # so that NaN is refused too
    if not (values.min() >= 0 and values.max() <= white):
        raise ValueError(f"pixels of mode {image.mode} outside 0..{white:g}")
    grey = np.rint(values * (255.0 / white)).astype(np.uint8)
    return Image.fromarray(255 - grey if inverted else grey)
