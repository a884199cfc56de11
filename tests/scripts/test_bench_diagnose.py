"""The benchmark of the diagnosis: its arithmetic, its page, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.bench_diagnose import make_photos, row, show, workloads


def found(ceilings: list[float]) -> dict[str, Any]:
    """Rounds in which cached batches give twice, three times and four times the images."""
    return {
        "diagnose": [
            {"ceiling": ceiling, "class": "decode", "seconds": 30.0, "G": 300.0, "A": 100.0}
            for ceiling in ceilings
        ],
        "real": [{"images_per_s": 100.0}] * 3,
        "cached": [{"images_per_s": rate} for rate in (200.0, 300.0, 400.0)],
    }


@pytest.mark.parametrize(
    ("ceilings", "off", "within"),
    [
        pytest.param([2.0, 3.3, 4.0], "+10.0%", "yes", id="at the limit"),
        pytest.param([2.0, 2.6, 4.0], "-13.3%", "NO", id="too low"),
    ],
)
def test_the_medians_are_compared(
    ceilings: list[float], off: str, within: str, tmp_path: Path
) -> None:
    """The median ceiling over the median speed-up; 10 % are allowed."""
    line = row("shapes", workloads(tmp_path, 1)["shapes"], found(ceilings))
    assert (line["off"], line["within 10 %"], line["classes"], line["n"]) == (
        off,
        within,
        "3 decode",
        3,
    )


def test_the_page_says_how_it_was_measured(tmp_path: Path) -> None:
    """The rounds, the length, the threads and how busy the machine was."""
    line = row("shapes", workloads(tmp_path, 1)["shapes"], found([3.0] * 3))
    page = show([line], 8.0, [0.5, 2.25], 1)
    assert (
        "of 3 rounds" in page
        and "at least 8 s" in page
        and "on 1 of torch's threads" in page
        and "0.5 to 2.2" in page
    )


def test_photographs_are_made_once(tmp_path: Path) -> None:
    """Large JPEG files in two classes; a second call leaves them alone."""
    make_photos(tmp_path, 2)
    files = sorted(tmp_path.rglob("*.jpg"))
    written = [file.stat().st_mtime_ns for file in files]
    make_photos(tmp_path, 2)
    assert [file.parent.name for file in files] == ["class0", "class1"]
    assert [file.stat().st_mtime_ns for file in files] == written
    with Image.open(files[0]) as image:
        assert image.size == (1400, 1000)
