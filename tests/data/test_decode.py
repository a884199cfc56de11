"""Encoded bytes to pixels."""

import io
import random
import re
import resource
import struct
import subprocess
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oddities import flip_bits
from pictures import encoded, photo
from PIL import Image
from PIL.WebPImagePlugin import WebPImageFile

from harness.config import DataConfig
from harness.data import decode as decode_room
from harness.data.decode import DecodeError, decode
from harness.runtime.errors import BadSample

RED = (255, 0, 0)
GREEN = (0, 255, 0)
BLUE = (0, 0, 255)
OPTIONS = DataConfig(background=(10, 20, 30))
GRAY = np.array([[0, 32768, 65535]], np.uint16)


def pixels(data: bytes, options: DataConfig = OPTIONS) -> np.ndarray:
    image = decode(data, options)
    assert image.dtype == np.uint8 and image.shape[2:] == (3,)
    return image.astype(int)


def reason(data: bytes, options: DataConfig = OPTIONS) -> str:
    with pytest.raises(DecodeError) as caught:
        decode(data, options)
    assert str(BadSample("a\nfile", str(caught.value))).isprintable()
    return str(caught.value)


def png(
    width: int,
    height: int,
    depth: int,
    kind: int,
    rows: bytes,
    extra: bytes = b"",
    interlaced: bool = False,
) -> bytes:
    """A PNG written by hand, for what Pillow reads and does not write."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    last = (depth, kind, 0, 0, interlaced)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *last))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + extra
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def ycck_jpeg(cmyk: tuple[int, int, int, int]) -> bytes:
    """Adobe's other four-channel JPEG: luminance, two color differences and black."""
    inks = np.asarray(Image.new("RGB", (16, 16), cmyk[:3]).convert("YCbCr"))
    # Pillow inverts all channels as it writes, of which YCCK has only black inverted, and marks "no
    # transform".
    written = np.dstack([255 - inks, np.full((16, 16), cmyk[3], np.uint8)])
    data = encoded(
        Image.frombytes("CMYK", (16, 16), written.tobytes()), "JPEG", quality=100, subsampling=0
    )
    at = data.index(b"Adobe")
    return data[: at + 11] + b"\x02" + data[at + 12 :]


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP", "JPEG"])
def test_every_format_gives_its_pixels(kind: str) -> None:
    """All formats are read: the lossless ones bit for bit, the others as closely as they can."""
    image = photo()
    if kind == "GIF":
        image = image.quantize(64).convert("RGB")
    data = encoded(image, kind, **({"quality": 95} if kind in ("JPEG", "WEBP") else {}))
    error = np.abs(pixels(data) - np.asarray(image).astype(int))
    assert error.max() == 0 if kind not in ("JPEG", "WEBP") else error.mean() < 4


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "jpeg"])
def test_compressed_tiff(compression: str) -> None:
    """TIFF's compressions are read."""
    assert (
        np.abs(
            pixels(encoded(photo(), "TIFF", compression=compression)) - np.asarray(photo())
        ).mean()
        < 4
    )


def test_the_first_frame_of_an_animation() -> None:
    """A GIF gives its first frame."""
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, BLUE)]
    assert (pixels(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])) == RED).all()


def over(color: tuple[int, int, int], alpha: float) -> np.ndarray:
    return np.array(color) * alpha + np.array(OPTIONS.background) * (1 - alpha)


def palette(transparency: int | bytes) -> bytes:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *GREEN])
    image.putpixel((1, 0), 1)
    return encoded(image, "PNG", transparency=transparency)


def two(mode: str, first: Any, second: Any) -> Image.Image:
    image = Image.new(mode, (2, 1), first)
    image.putpixel((1, 0), second)
    return image


MODES: dict[str, Any] = {
    "gray": (encoded(two("L", 7, 200), "PNG"), (7,) * 3, (200,) * 3),
    "one bit PNG": (encoded(two("1", 0, 1), "PNG"), (0,) * 3, (255,) * 3),
    "one bit TIFF": (encoded(two("1", 0, 1), "TIFF"), (0,) * 3, (255,) * 3),
    "palette, one color clear": (palette(0), OPTIONS.background, GREEN),
    "palette with alpha": (palette(bytes([255, 128])), RED, over(GREEN, 128 / 255)),
    "RGBA": (
        encoded(two("RGBA", (*RED, 0), (*GREEN, 51)), "PNG"),
        OPTIONS.background,
        over(GREEN, 0.2),
    ),
    "gray alpha": (encoded(two("LA", (100, 255), (100, 0)), "PNG"), (100,) * 3, OPTIONS.background),
    "palette alpha TIFF": (
        encoded(two("PA", (0, 255), (0, 0)), "TIFF"),
        (0,) * 3,
        OPTIONS.background,
    ),
    "RGB, one color clear": (
        encoded(two("RGB", RED, GREEN), "PNG", transparency=GREEN),
        RED,
        OPTIONS.background,
    ),
    "gray, one value clear": (
        encoded(two("L", 7, 200), "PNG", transparency=7),
        OPTIONS.background,
        (200,) * 3,
    ),
    "RGBA WebP": (
        encoded(two("RGBA", (*RED, 0), (*GREEN, 255)), "WEBP", lossless=True),
        OPTIONS.background,
        GREEN,
    ),
    "CMYK TIFF": (encoded(two("CMYK", (0, 255, 255, 0), (0, 0, 0, 255)), "TIFF"), RED, (0, 0, 0)),
    "YCbCr TIFF": (encoded(two("YCbCr", (76, 85, 255), (255, 128, 128)), "TIFF"), RED, (255,) * 3),
    "bitmap PBM": (b"P1 2 1 0 1", (255,) * 3, (0,) * 3),
    "16-bit RGB": (
        png(2, 1, 16, 2, b"\0" + struct.pack(">6H", 65535, 0, 0, 0, 65535, 32896)),
        RED,
        (0, 255, 128),
    ),
    "16-bit gray alpha": (
        png(2, 1, 16, 4, b"\0" + struct.pack(">4H", 32896, 65535, 9, 0)),
        (128,) * 3,
        OPTIONS.background,
    ),
}


@pytest.mark.parametrize(("data", "first", "second"), MODES.values(), ids=MODES)
def test_every_mode_gives_its_colors(data: bytes, first: Any, second: Any) -> None:
    """Every mode gives eight-bit RGB, transparency over the set background."""
    assert np.abs(pixels(data)[0] - np.array([first, second])).max() <= 2


def test_lab_is_converted() -> None:
    """CIE Lab's red and white come out as sRGB's, as far as eight bits of Lab can tell."""
    data = encoded(two("LAB", (138, 81 + 128, 70 + 128), (255, 128, 128)), "TIFF")
    assert np.abs(pixels(data)[0] - np.array([RED, (255,) * 3])).max() <= 6


CMYK_RED = Image.new("CMYK", (16, 16), (0, 255, 255, 0))


def without_adobe_marker(data: bytes) -> bytes:
    at = data.index(b"\xff\xee")
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]


@pytest.mark.parametrize(
    "data",
    [
        encoded(CMYK_RED, "JPEG", quality=100),
        without_adobe_marker(encoded(Image.eval(CMYK_RED, lambda v: 255 - v), "JPEG", quality=100)),
        ycck_jpeg((0, 255, 255, 0)),
    ],
    ids=["Adobe's inverted", "not inverted", "YCCK"],
)
def test_four_channel_jpegs_keep_their_colors(data: bytes) -> None:
    """Red ink is red in each of the three kinds of CMYK JPEG."""
    assert np.abs(pixels(data) - np.array(RED)).max() <= 3


DEEP: dict[str, Any] = {
    "PNG": encoded(Image.fromarray(GRAY), "PNG"),
    "TIFF": encoded(Image.fromarray(GRAY), "TIFF"),
    "big-endian TIFF": encoded(
        Image.frombytes("I;16B", (3, 1), GRAY.astype(">u2").tobytes()), "TIFF"
    ),
    "32-bit TIFF": encoded(Image.fromarray(GRAY.astype(np.int32)), "TIFF"),
    "PGM": b"P5 3 1 65535\n" + GRAY.astype(">u2").tobytes(),
    "PGM up to 1000": b"P5 3 1 1000\n" + np.array([0, 500, 1000], ">u2").tobytes(),
    "float TIFF": encoded(Image.fromarray((GRAY / 65535).astype(np.float32)), "TIFF"),
}


@pytest.mark.parametrize("data", DEEP.values(), ids=DEEP)
def test_deep_grays_are_scaled(data: bytes) -> None:
    """Black, mid-gray and white of 16 bits, 32 bits and fractions stay what they are."""
    assert (pixels(data)[0] == np.array([[0], [128], [255]])).all()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.array([[0, 70000]], np.int32), r"pixels of mode I outside 0\.\.65535"),
        (np.array([[0.0, 200.0]], np.float32), r"pixels of mode F outside 0\.\.1"),
        (np.array([[0.0, np.nan]], np.float32), r"pixels of mode F outside 0\.\.1"),
    ],
    ids=["beyond 16 bits", "beyond one", "nan"],
)
def test_grays_without_a_known_white_are_refused(values: np.ndarray, text: str) -> None:
    """Nothing says what is white: better no image than a wrong one."""
    with pytest.raises(DecodeError, match=text):
        pixels(encoded(Image.fromarray(values), "TIFF"))


def test_a_clear_value_of_sixteen_bits() -> None:
    """The one transparent gray of a 16-bit PNG shows the background, its neighbor does not."""
    chunk = (
        struct.pack(">I", 2)
        + b"tRNS"
        + b"\x80\x00"
        + struct.pack(">I", zlib.crc32(b"tRNS\x80\x00"))
    )
    data = png(2, 1, 16, 0, b"\0" + struct.pack(">2H", 32768, 32767), extra=chunk)
    assert (pixels(data)[0] == np.array([OPTIONS.background, (127,) * 3])).all()


def test_twelve_bits() -> None:
    """White of a 12-bit TIFF is 4095."""
    rows = bytes(
        [0x00, 0x08, 0x00, 0xFF, 0xF0, 0x00]
    )  # 0, 2048, 4095 and 0, two values in three bytes
    tags = {256: 4, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: len(rows)}
    entries = b"".join(
        struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, value)
        for tag, value in tags.items()
    )
    data = (
        b"II*\0" + struct.pack("<I", 14) + rows + struct.pack("<H", len(tags)) + entries + bytes(4)
    )
    assert (pixels(data)[0] == np.array([[0], [128], [255], [0]])).all()


def test_a_tiff_whose_zero_is_white() -> None:
    """The photometric interpretation of a 16-bit TIFF is respected."""
    data = encoded(Image.fromarray(GRAY), "TIFF", tiffinfo={262: 0})
    assert (pixels(data)[0] == np.array([[255], [127], [0]])).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_an_option(orientation: int, kind: str) -> None:
    """Off, the stored pixels; on, the upright ones, for each of the eight orientations."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(), kind, exif=exif.tobytes())
    stored = np.asarray(Image.open(io.BytesIO(data)))
    upright = stored
    upright = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
        5: upright.swapaxes(0, 1), 6: upright[::-1].swapaxes(0, 1),
        7: upright[::-1, ::-1].swapaxes(0, 1), 8: upright[:, ::-1].swapaxes(0, 1),
    }[orientation]  # fmt: skip
    assert (pixels(data) == stored).all()
    assert np.array_equal(pixels(data, DataConfig(exif_orientation=True)), upright)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_odd_tag_beside_the_orientation_does_not_count(kind: str) -> None:
    """A text in place of the resolution leaves the orientation as it is."""
    # the orientation, and a resolution of the kind of a text
    tags = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0), struct.pack("<HHI4s", 0x011A, 2, 4, b"abc")
    plain, odd = (
        encoded(
            photo(),
            kind,
            exif=b"Exif\0\0II*\0"
            + struct.pack("<IH", 8, count)
            + b"".join(tags[:count])
            + bytes(4),
        )
        for count in (1, 2)
    )
    option = DataConfig(exif_orientation=True)
    assert np.array_equal(pixels(odd, option), pixels(plain, option))
    assert pixels(odd, option).shape != pixels(odd).shape


def test_an_orientation_in_xmp_counts() -> None:
    """A JPEG that says in XMP alone how it is to be turned is turned as Pillow turns it."""
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    data = encoded(photo(), "JPEG", xmp=xmp)
    assert np.array_equal(
        pixels(data, DataConfig(exif_orientation=True)), np.rot90(pixels(data), -1)
    )


@pytest.mark.parametrize("option", [False, True], ids=["as stored", "upright"])
def test_pillow_is_not_asked_for_a_plain_jpeg(
    option: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usual JPEG is decoded without Pillow, whatever the orientation setting."""
    data = encoded(photo(), "JPEG")
    monkeypatch.setattr(decode_room, "_by_pillow", None)
    assert pixels(data, DataConfig(exif_orientation=option)).shape == (61, 97, 3)


@pytest.mark.parametrize(
    "block", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0garbage!"]
)
@pytest.mark.parametrize("option", [False, True])
def test_a_broken_exif_block_harms_nothing(block: bytes, option: bool) -> None:
    """The pixels are whole: nothing fails, and without the option nothing warns."""
    data = encoded(photo(), "JPEG", exif=block)
    assert pixels(data, DataConfig(exif_orientation=option)).shape == (61, 97, 3)


def cut(data: bytes, count: int) -> bytes:
    return data[:-count]


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


BAD: dict[str, Any] = {
    "empty": (b"", "empty file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "zeros": (
        bytes(65536),
        "not an image of a supported format (JPEG, PNG, WebP, AVIF, BMP, TIFF, GIF, PPM)",
    ),
    "html": (b"<html>not found</html>", "not an image of a supported format"),
    "eps": (EPS, "not an image of a supported format"),
    "pdf": (b"%PDF-1.4", "not an image of a supported format"),
    "zlib": (zlib.compress(encoded(photo(), "JPEG")), "not an image of a supported format"),
    "jpeg short of two bytes": (
        cut(encoded(photo(), "JPEG"), 2),
        "JPEG (Premature end of JPEG file)",
    ),
    "progressive jpeg cut": (
        cut(encoded(photo(256, 256), "JPEG", progressive=True), 2000),
        "Premature end of JPEG file",
    ),
    "png cut": (cut(encoded(photo(), "PNG"), 2000), "truncated file"),
    "jpeg header": (encoded(photo(), "JPEG")[:10], ""),
    "tiff header": (encoded(photo(), "TIFF")[:4], ""),
    "bmp header": (b"BM", ""),
    "gif header": (b"GIF89a", ""),
    "ppm header": (b"P6 9 9 255\n", "truncated file"),
    "webp header": (b"RIFF\0\0\0\0WEBP", ""),
}


@pytest.mark.parametrize(("data", "text"), BAD.values(), ids=BAD)
def test_bad_bytes_are_bad_samples(data: bytes, text: str) -> None:
    """Damage and strangers are refused in words, by the file's escaped name."""
    assert text in reason(data)


def test_a_text_bomb_in_a_png_is_refused() -> None:
    """A compressed comment of 50 MB is damage, not memory."""
    body = b"k\0\0" + zlib.compress(bytes(50 << 20))
    chunk = (
        struct.pack(">I", len(body))
        + b"zTXt"
        + body
        + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    )
    assert "cannot be decoded" in reason(png(1, 1, 8, 0, b"\0\0", extra=chunk))


LARGE: dict[str, Any] = {
    "claims 60000": (
        png(60000, 60000, 8, 2, b""),
        178_956_970,
        "60000x60000 pixels, more than data.max_pixels=178956970",
    ),
    "claims 15000": (png(15000, 15000, 8, 2, b""), 178_956_970, "15000x15000 pixels"),
    "beyond Pillow's warning": (b"P6 12000 12000 255\n", 100_000_000, "12000x12000 pixels"),
    "own limit": (
        encoded(photo(96, 64), "JPEG"),
        96 * 64 - 1,
        "96x64 pixels, more than data.max_pixels=6143",
    ),
    "webp": (encoded(photo(96, 64), "WEBP"), 1000, "96x64 pixels"),
}


@pytest.mark.parametrize(("data", "limit", "text"), LARGE.values(), ids=LARGE)
def test_too_many_pixels_are_refused_unread(data: bytes, limit: int, text: str) -> None:
    """The header is enough to refuse an image, without a warning of Pillow's."""
    assert text in reason(data, DataConfig(max_pixels=limit))


def claiming(data: bytes, at: int, width: bytes, height: bytes) -> bytes:
    """The same with other sides in its header."""
    return data[:at] + width + height + data[at + len(width + height) :]


def large_jpeg(data: bytes) -> bytes:
    found = re.search(rb"\xff[\xc0\xc2]\0[\x0b\x11\x14]\x08", data)
    assert found is not None
    return claiming(data, found.end(), SHORT[::-1], SHORT[::-1])


def tile(side: int) -> bytes:
    """A TIFF of 16x16 pixels in a tile that claims to be larger."""
    rows = zlib.compress(bytes(256))
    tags = {
        256: 16,
        257: 16,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: side,
        323: side,
        324: 134,
        325: len(rows),
    }
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4) + rows
    )


SIDE = 13_001
SHORT = SIDE.to_bytes(2, "little")
LONG = SIDE.to_bytes(4, "little")
ANIMATION = encoded(
    Image.new("RGB", (9, 9)), "WEBP", save_all=True, append_images=[Image.new("RGB", (9, 9), RED)]
)
LOSSLESS = encoded(photo(), "WEBP", lossless=True)
CLAIMS: dict[str, bytes] = {
    "JPEG": large_jpeg(encoded(photo(), "JPEG")),
    "progressive JPEG": large_jpeg(encoded(photo(), "JPEG", progressive=True)),
    "CMYK JPEG": large_jpeg(encoded(photo().convert("CMYK"), "JPEG")),
    "PNG": png(SIDE, SIDE, 8, 2, bytes(9)),
    "GIF": claiming(encoded(photo(), "GIF"), 6, SHORT, SHORT),
    "BMP": claiming(encoded(photo(), "BMP"), 18, LONG, LONG),
    "PPM": b"P6 13001 13001 255\n" + bytes(99),
    "plain PPM": b"P3 13001 13001 255\n1 2 3",
    "TIFF": encoded(Image.new("1", (SIDE, SIDE)), "TIFF", compression="group4"),
    "tile of a TIFF": tile(SIDE),
    "animated WebP": claiming(
        ANIMATION, 24, (SIDE - 1).to_bytes(3, "little"), (SIDE - 1).to_bytes(3, "little")
    ),
    "lossy WebP": claiming(encoded(photo(), "WEBP"), 26, SHORT, SHORT),
    "lossless WebP": LOSSLESS[:21]
    + (SIDE - 1 | SIDE - 1 << 14).to_bytes(4, "little")
    + LOSSLESS[25:],
}


@pytest.mark.parametrize("kind", CLAIMS)
def test_pixels_are_refused_before_they_take_memory(kind: str) -> None:
    """A few bytes that claim 169 megapixels take the memory of a few bytes."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert reason(CLAIMS[kind], DataConfig()) == (
        "too large: 13001x13001 pixels, more than data.max_pixels=50000000; raise it, or shrink "
        "the file"
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000


def test_no_reader_of_a_large_webp_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's reader takes memory for the canvas as it is made."""
    monkeypatch.setattr(WebPImageFile, "_open", lambda self: pytest.fail("made"))
    for kind in ("animated WebP", "lossy WebP", "lossless WebP"):
        assert "too large" in reason(CLAIMS[kind])


@pytest.mark.parametrize(
    "options",
    [{}, {"lossless": True}, {"exif": b"Exif\0\0"}],
    ids=["lossy", "lossless", "extended"],
)
def test_sides_of_a_webp_are_known(options: dict[str, Any]) -> None:
    """A WebP of exactly max_pixels is decoded, one of a row more is not."""
    data = encoded(photo(96, 64), "WEBP", **options)
    assert pixels(data, DataConfig(max_pixels=96 * 64)).shape == (64, 96, 3)
    assert "96x64 pixels" in reason(data, DataConfig(max_pixels=96 * 64 - 1))


def cut_with_an_end(image: Image.Image, **options: Any) -> bytes:
    data = encoded(image, "JPEG", **options)
    return data[: len(data) * 2 // 3] + b"\xff\xd9"


@pytest.mark.parametrize(
    "data",
    [
        cut_with_an_end(photo()),
        cut_with_an_end(photo(), exif=b"Exif\0\0"),
        cut_with_an_end(photo().convert("CMYK")),
        cut_with_an_end(photo().convert("L")),
        encoded(photo(), "JPEG").replace(b"\xff\xc0", b"\xff\xc9"),
    ],
    ids=["RGB", "with EXIF", "CMYK", "gray", "arithmetic"],
)
@pytest.mark.parametrize("upright", [False, True])
def test_a_jpeg_without_all_pixels_is_refused(data: bytes, upright: bool) -> None:
    """What libjpeg would paint in gray is damage, whoever decodes."""
    text = reason(data, DataConfig(exif_orientation=upright))
    assert "(Corrupt JPEG data: " in text


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("at", [-2, 20], ids=["before its end", "in its header"])
def test_a_jpeg_with_a_few_bytes_too_many_is_whole(at: int, upright: bool) -> None:
    """Bytes that belong to nothing change no pixel."""
    data = encoded(photo(), "JPEG", exif=b"Exif\0\0")
    assert (
        pixels(data[:at] + bytes(5) + data[at:], DataConfig(exif_orientation=upright))
        == pixels(data)
    ).all()


@pytest.mark.filterwarnings("error")
def test_large_images_within_the_limit_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between Pillow's limit and the user's, nothing warns."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert pixels(encoded(photo(96, 64), "PNG"), DataConfig(max_pixels=96 * 64)).shape == (
        64,
        96,
        3,
    )


def test_ghostscript_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS file starts no process, whatever its name."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert "not an image" in reason(EPS)
    assert "not an image" in reason(
        b"\xc5\xd0\xd3\xc6" + struct.pack("<6I", 30, len(EPS), 0, 0, 0, 0) + EPS
    )


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1)])
def test_smallest_images(size: tuple[int, int]) -> None:
    """One pixel, one row and one column are images."""
    assert pixels(encoded(photo(*size), "PNG")).shape == (size[1], size[0], 3)


def shorten(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def repeat_a_part(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at : at + 64] * 3 + data[at:]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM"])
@pytest.mark.parametrize("mutate", [flip_bits, shorten, repeat_a_part])
def test_mutated_files_give_pixels_or_are_undecodable(
    kind: str, mutate: Callable[[bytes, random.Random], bytes]
) -> None:
    """A damaged file never raises anything else."""
    data = encoded(photo(24, 16), kind)
    rng = random.Random(f"{kind} {mutate.__name__}")
    options = DataConfig(exif_orientation=True, max_pixels=1_000_000)
    for _ in range(120):
        try:
            assert decode(mutate(data, rng), options).shape[2:] == (3,)
        except DecodeError:
            continue


ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)]
ADAM7 += [(0, 1, 1, 2)]


def ended(pixels: np.ndarray, missing: int, *, interlaced: bool) -> bytes:
    """A PNG of gray ``pixels`` whose compressed data ends ``missing`` bytes early, but rightly."""
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = ADAM7
    rows = b"".join(
        b"\0" + row.tobytes()
        for x, y, right, down in passes
        for row in pixels[y::down, x::right]
        if row.size
    )
    height, width = pixels.shape
    return png(width, height, 8, 0, rows[: len(rows) - missing], interlaced=interlaced)


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 9), (5, 7), (16, 3)])
def test_a_png_that_ends_early_is_damaged(shape: tuple[int, int], interlaced: bool) -> None:
    """Its checksums are right, and Pillow would leave the missing rows black; black rows are not
    missing.
    """
    pixels = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    # black, or as the memory is before
    for last_row in (pixels[-1].copy(), 0, 77):
        pixels[-1] = last_row
        whole = decode(ended(pixels, 0, interlaced=interlaced), DataConfig())
        assert np.array_equal(whole[..., 0], pixels)
        for missing in range(1, pixels.size):
            with pytest.raises(DecodeError, match="^truncated file"):
                decode(ended(pixels, missing, interlaced=interlaced), DataConfig())
