"""The pictures of the README."""

from __future__ import annotations

import pytest
from PIL import Image

pytest.importorskip("selenium", reason="needs selenium (uv sync)")

from scripts import screenshots


def picture(height: int, colour: str) -> Image.Image:
    return Image.new("RGB", (10, height), colour)


def test_parts_of_two_pages_stand_beside_each_other() -> None:
    """Each page is a column. Each part is a row, as high as its higher picture."""
    left = [picture(5, "white"), picture(3, "red")]
    right = [picture(2, "green"), picture(4, "blue")]
    whole = screenshots.beside(left, right)
    second = 10 + screenshots.GAP
    assert whole.size == (second + 10, 9)
    assert [
        whole.getpixel(at) for at in [(0, 5), (second, 0), (second, 3), (second, 8), (12, 0)]
    ] == [
        (255, 0, 0),
        (0, 128, 0),
        (255, 255, 255),
        (0, 0, 255),
        (255, 255, 255),
    ]


def test_the_pictures_are_small() -> None:
    """All pictures of the documentation take at most 300 kB."""
    pictures = list(screenshots.PICTURES.iterdir())
    assert len(pictures) >= 3
    assert sum(path.stat().st_size for path in pictures) <= 300_000
