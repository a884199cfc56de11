"""Small images of all formats that are read, with what their files may hold besides pixels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageCms
from PIL.PngImagePlugin import PngInfo

WIDTH = 37
HEIGHT = 29


def seeds() -> Mapping[str, Sequence[bytes]]:
    """Returns the files by format."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.Software] = "x" * 40
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    notes = PngInfo()
    notes.add_text("a", "b" * 50, zip=True)
    notes.add_itxt("c", "d" * 50, zip=True)

    def frames() -> dict[str, Any]:
        # saving leaves traces in an image
        return {"save_all": True, "append_images": [_image("RGB", 1)]}

    made: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
        "JPEG": [
            ("RGB", "JPEG", {"exif": exif}),
            ("RGB", "JPEG", {"progressive": True, "icc_profile": profile}),
            ("RGB", "JPEG", {"subsampling": 0, "restart_marker_blocks": 2, "comment": "x" * 30}),
            ("L", "JPEG", {}),
            ("CMYK", "JPEG", {"progressive": True}),
            ("RGB", "MPO", {**frames(), "exif": exif}),
        ],
        "PNG": [
            ("RGB", "PNG", {"exif": exif, "icc_profile": profile}),
            ("RGBA", "PNG", {"pnginfo": notes}),
            ("P", "PNG", {"transparency": 3}),
            ("LA", "PNG", {}),
            ("I;16", "PNG", {}),
            ("1", "PNG", {}),
            ("RGB", "PNG", frames()),
        ],
        "WebP": [
            ("RGB", "WEBP", {"exif": exif, "icc_profile": profile}),
            ("RGBA", "WEBP", {"lossless": True}),
            ("RGBA", "WEBP", {"quality": 30}),
            ("RGB", "WEBP", frames()),
        ],
        "GIF": [
            ("P", "GIF", {}),
            ("RGB", "GIF", {**frames(), "loop": 0}),
            ("P", "GIF", {"transparency": 1, "comment": b"x" * 30}),
            ("L", "GIF", {"interlace": 1}),
        ],
        "BMP": [(mode, "BMP", {}) for mode in ("RGB", "RGBA", "P", "L", "1")],
        "TIFF": [
            ("RGB", "TIFF", {"exif": exif, "icc_profile": profile}),
            *(
                (mode, "TIFF", {"compression": kind})
                for mode, kind in (
                    ("RGB", "tiff_lzw"),
                    ("RGB", "tiff_adobe_deflate"),
                    ("RGB", "jpeg"),
                    ("RGBA", "packbits"),
                    ("1", "group4"),
                    ("CMYK", "zstd"),
                )
            ),
            ("I;16", "TIFF", {}),
            ("F", "TIFF", {}),
            ("P", "TIFF", {}),
            ("RGB", "TIFF", {**frames(), "big_tiff": True}),
        ],
        "PPM": [(mode, "PPM", {}) for mode in ("RGB", "L", "1", "I;16", "F")],
    }
    found = {kind: [_saved(*each) for each in images] for kind, images in made.items()}
    found["PPM"].append(b"P3\n# a\n2 2\n255\n" + b"1 2 3  " * 4)
    return found


def _image(mode: str, change: int = 0) -> Image.Image:
    rng = np.random.default_rng(change)
    noise = rng.integers(0, 40, (HEIGHT, WIDTH, 3))
    ramp = np.linspace(0, 200, WIDTH)[None, :, None]
    image = Image.fromarray((noise + ramp).astype(np.uint8))
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    if mode == "F":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.float32) / 255)
    if mode == "RGBA":
        image.putalpha(image.convert("L"))
        return image
    return image.convert(mode)


def _saved(mode: str, kind: str, options: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    _image(mode).save(file, kind, **options)
    return file.getvalue()
