"""Images of phones, browsers and cameras: read, or counted by their format."""

from __future__ import annotations

import io
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.config import DataConfig
from harness.data import decode as module
from harness.data.decode import DecodeError, decode
from harness.data.storage import FolderSource

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
FILES = {
    "1.HEIC": HEIC,
    "2.heif": b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic",
    "1.jxl": b"\xff\x0a" + bytes(99),
    "2.jxl": b"\0\0\0\x0cJXL \r\n\x87\n",
    "1.jp2": b"\0\0\0\x0cjP  \r\n\x87\n",
    "1.CR3": b"\0\0\0\x18ftypcrx \0\0\0\1crx isom",
    "1.raf": b"FUJIFILMCCD-RAW 0201",
    "1.nef": b"MM\0*\0\0\0\x08",
    "clip.mov": b"\0\0\0\x14ftypqt  \0\0\0\0qt  ",
}


def test_formats_that_are_not_read_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the format and the extra that reads it; a video is no image."""
    monkeypatch.setattr(module, "HeifImageFile", None)
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "cat/a.jpg")
    for name, content in FILES.items():
        (tmp_path / "cat" / name).write_bytes(content)
    source = FolderSource(tmp_path)
    assert len(source) == 1
    formats = {"HEIC": 2, "JXL": 2, "JP2": 1, "RAW": 2, "NEF": 1}
    assert source.index.skipped == {**formats, "not an image": 1}
    extra = re.search("uv sync --extra ([a-z]+)", caplog.text)
    assert extra
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert "pillow-heif" in project["optional-dependencies"][extra[1]][0]


def test_a_photo_of_a_phone_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEIC content is named, whatever the file is called."""
    monkeypatch.setattr(module, "HeifImageFile", None)
    with pytest.raises(DecodeError, match="^HEIC"):
        decode(HEIC, DataConfig())


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
def test_images_of_phones_and_browsers_are_read(tmp_path: Path, format: str) -> None:
    """AVIF by Pillow, HEIC by the extra ``heif``, within two gray levels, in folders too."""
    if format == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    else:
        pytest.importorskip("PIL.AvifImagePlugin", reason="Pillow reads AVIF from 11.3 on")
    pixels = np.tile(np.linspace(0, 255, 64).astype(np.uint8)[:, None], (1, 48, 3))
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, quality=95)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.dat").write_bytes(file.getvalue())
    source = FolderSource(tmp_path)
    found = decode(source.read(0)[0], DataConfig())
    assert np.abs(found.astype(int) - pixels).mean() < 2
