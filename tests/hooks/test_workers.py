"""What is seen of a sample that Pillow loads."""

from __future__ import annotations

import io
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image, ImageFile

from harness.clock.stages import DECODE, READ
from harness.hooks import workers


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's functions, hooked for one test."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", ImageFile.ImageFile.load)
    workers.hook_libraries()


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("kind", ["jpeg", "png", "tiff", "gif", "bmp", "webp"])
def test_reading_and_decoding_are_told_apart(kind: str, tmp_path: Path) -> None:
    """Each read of the file is one, whatever the decoder does between two; pixels stay."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    path = tmp_path / f"image.{kind}"
    Image.fromarray(pixels).save(path)
    with Image.open(path) as image:
        alone = np.asarray(image.convert("RGB"))
    for source in (path, io.BytesIO(path.read_bytes())):
        told: list[str] = []
        with patch.object(workers, "_lap", told.append), Image.open(source) as image:
            assert np.array_equal(image.convert("RGB"), alone)
            image.load()
        assert told[0] == READ and told[-1] == DECODE
        between = told[1:-1]
        assert between == [DECODE, READ] * (len(between) // 2)
        assert between or kind in ("bmp", "webp", "tiff", "gif")


@pytest.mark.usefixtures("hooked")
def test_a_torn_file_is_the_error_that_it_was(tmp_path: Path) -> None:
    """Pillow's own words reach the script."""
    whole = io.BytesIO()
    Image.new("RGB", (64, 64)).save(whole, "png")
    path = tmp_path / "torn.png"
    path.write_bytes(whole.getvalue()[:-40])

    def words() -> str:
        with Image.open(path) as image, pytest.raises(OSError, match="trunc") as caught:
            image.load()
        return str(caught.value)

    alone = words()
    with patch.object(workers, "_lap", lambda stage: None):
        assert words() == alone
