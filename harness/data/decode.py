"""Encoded bytes to pixels: eight-bit RGB from every format and mode that the data sets may hold.

The bytes decide what an image is, never the name of its file. Whatever is wrong with them ends as ``BadSample``.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

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

from harness.data.jpeg import decode_jpeg
from harness.runtime.errors import BadSample

FORMATS = "JPEG, PNG, WebP, BMP, TIFF, GIF, PPM"
HEAD_BYTES = 16  # as much of a file as ``reader`` looks at

_JPEG = b"\xff\xd8\xff"
_APP1 = b"\xff\xe1"  # begins a JPEG's EXIF block, and its XMP block: one of them may hold an orientation
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_NAMES = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
_TURNS = {orientation: Image.Transpose[name] for orientation, name in enumerate(_NAMES, start=2)}

# By the kind of the first chunk: the first bit of width and height, their mask, and what is to be added.
_WEBP_SIDES = {
    b"WEBPVP8 ": (208, 224, 0x3FFF, 0),
    b"WEBPVP8L": (168, 182, 0x3FFF, 1),
    b"WEBPVP8X": (192, 216, 0xFFFFFF, 1),
}


class _Jpeg(JpegImageFile):
    """Pillow's reader without its look for a resolution in the EXIF block: it takes time, and damaged blocks warn."""

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


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How an image is read."""

    exif_orientation: bool = False  # turn the image as its EXIF orientation says
    background: tuple[int, int, int] = (255, 255, 255)  # colour under transparent pixels, red, green, blue
    max_pixels: int = 50_000_000  # of the largest image that is decoded


def reader(head: bytes) -> type[ImageFile] | None:
    """Pillow's reader for a file that starts with ``head`` (``HEAD_BYTES`` are enough); None: no supported format."""
    webp = WebPImageFile if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None
    return next((plugin for start, plugin in _READERS if head.startswith(start)), webp)


def check_encoded(data: bytes, where: str) -> type[ImageFile]:
    """The reader for ``data``.

    Raises:
        BadSample: ``data`` is not an image of a supported format.
    """
    plugin = reader(data[:HEAD_BYTES])
    if plugin is not None:
        return plugin
    if not data:
        raise BadSample(where, "empty file")
    if data.startswith(_LFS_POINTER):
        raise BadSample(where, "a Git LFS pointer, not the image itself; run `git lfs pull` in the data set's repository")
    raise BadSample(where, f"not an image of a supported format ({FORMATS})")


def decode(data: bytes, where: str, options: DecodeOptions) -> np.ndarray:
    """The first image in ``data``, an encoded file that errors call ``where``: all of it, uint8 ``[H, W, 3]``.

    Raises:
        BadSample: not an image of a supported format, damaged, or more pixels than ``options.max_pixels``.
    """
    try:
        pixels = decode_jpeg(data, options.max_pixels) if data.startswith(_JPEG) else None
    except ValueError as error:
        raise BadSample(where, str(error)) from error
    if pixels is not None and not (options.exif_orientation and _APP1 in data):
        return pixels
    return np.asarray(_by_pillow(data, where, options, pixels))


def _by_pillow(data: bytes, where: str, options: DecodeOptions, pixels: np.ndarray | None) -> Image.Image:
    """Returns the image in mode RGB, made of ``pixels`` if those are known.

    Pillow reads every format, and what it says of damage is final.
    """
    plugin = check_encoded(data, where)
    # Pillow's own limit is one for the process and warns before it refuses: it must not be lower than the user's.
    if Image.MAX_IMAGE_PIXELS is not None and options.max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = options.max_pixels
    try:
        # Pillow's reader of WebP takes memory for the whole canvas as it is made.
        _check_size(_webp_canvas(data), where, options)
        # Not Image.open: it tries other formats as well, and warns of a large image that the next line refuses anyway.
        image = plugin(io.BytesIO(data))
        _check_size(image.size, where, options)
        if isinstance(image, TiffImageFile):
            # Width and height of a tile, which may be larger than the image.
            _check_size((image.tag_v2.get(322, 0), image.tag_v2.get(323, 0)), where, options)
        rgb = Image.fromarray(pixels) if pixels is not None else _to_rgb(image, options.background)
        return _turned(rgb, image) if options.exif_orientation else rgb
    except BadSample:
        raise
    except Exception as error:  # Pillow's readers raise anything on damaged bytes
        text = str(error) or type(error).__name__
        kind = "truncated file" if "truncated" in text.lower() else "cannot be decoded"
        raise BadSample(where, f"{kind}: {text}") from error


def _check_size(size: tuple[int, int], where: str, options: DecodeOptions) -> None:
    if size[0] * size[1] > options.max_pixels:
        text = f"{size[0]}x{size[1]} pixels, more than data.max_pixels={options.max_pixels}"
        raise BadSample(where, f"too large: {text}; raise it, or shrink the file")


def _webp_canvas(data: bytes) -> tuple[int, int]:
    """Returns the width and height that a WebP file's header claims; zeros for another file."""
    x, y, mask, more = _WEBP_SIDES.get(data[8:16], (0, 0, 0, 0))
    head = int.from_bytes(data[:30], "little")
    return (head >> x & mask) + more, (head >> y & mask) + more


def _turned(rgb: Image.Image, original: ImageFile) -> Image.Image:
    try:
        turn = _TURNS.get(original.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the pixels are whole; a damaged EXIF block just says nothing of the orientation
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
        return ImageChops.invert(image).convert("RGB")  # Pillow takes every CMYK JPEG for one of Adobe's inverted ones
    return image.convert("RGB")


def _eight_bit(image: ImageFile) -> Image.Image:
    """Grey of 16 bits (modes I;16 and I) or of fractions 0..1 (mode F), scaled; Pillow's own conversion saturates.

    Raises:
        ValueError: a value lies outside the range, so that nothing says what is white.
    """
    values = np.asarray(image)
    white, inverted = (1.0 if image.mode == "F" else 65535.0), False
    if isinstance(image, TiffImageFile):
        if image.tag_v2.get(BITSPERSAMPLE) == (12,):
            white = 4095.0
        inverted = image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0
    if not (values.min() >= 0 and values.max() <= white):  # so that NaN is refused too
        raise ValueError(f"pixels of mode {image.mode} outside 0..{white:g}")
    grey = np.rint(values * (255.0 / white)).astype(np.uint8)
    return Image.fromarray(255 - grey if inverted else grey)
