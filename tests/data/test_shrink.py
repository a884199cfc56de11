"""Folders with their large images made smaller."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, photo
from PIL import Image

from harness.config import ConfigError
from harness.data.shrink import RECORD, Copy, main, shrink


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for split in ("train", "val"):
        (root / split / "a cat").mkdir(parents=True)
        (root / split / "a cat" / "large.jpg").write_bytes(encoded(photo(300, 200), quality=95))
        (root / split / "a cat" / "small.JPG").write_bytes(encoded(photo(90, 50)))
    turned = Image.Exif()
    turned[274] = 6
    (root / "train" / "turned.jpg").write_bytes(encoded(photo(300, 200), exif=turned))
    (root / "train" / "large.png").write_bytes(encoded(photo(200, 300), "PNG"))
    (root / "labels.csv").write_text("a,b\n")
    (root / "train" / "link.jpg").symlink_to("a cat/large.jpg")
    (root / "also").symlink_to("train")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far.webp").write_bytes(encoded(photo(400, 100), "WEBP"))
    (root / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(root)
    return root


def contents(root: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(root))] = os.readlink(path)
        elif path.is_file() and path.name != RECORD:
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


def opened(data: bytes | str) -> Image.Image:
    assert isinstance(data, bytes)
    return Image.open(io.BytesIO(data))


def test_large_images_are_made_smaller_and_all_else_stays(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([str(tree), str(out), "--max-side", "100", "--quality", "80"]) == 0
    before, after = contents(tree), contents(out)
    linked = {"linked/far.webp", "linked/back"}
    assert {*after} - linked == {*before} - {"linked"}
    same = {name for name in before if before[name] == after.get(name)}
    assert same == {
        "labels.csv", "train/a cat/small.JPG", "val/a cat/small.JPG", "train/link.jpg", "also"
    }  # fmt: skip
    sizes = {}
    for name, data in after.items():
        if isinstance(data, bytes) and name != "labels.csv":
            image = opened(data)
            sizes[name] = image.format, image.size
    assert sizes == {
        "linked/far.webp": ("WEBP", (100, 25)),
        "train/a cat/large.jpg": ("JPEG", (100, 67)),
        "train/a cat/small.JPG": ("JPEG", (90, 50)),
        "train/large.png": ("PNG", (67, 100)),
        "train/turned.jpg": ("JPEG", (67, 100)),
        "val/a cat/large.jpg": ("JPEG", (100, 67)),
        "val/a cat/small.JPG": ("JPEG", (90, 50)),
    }
    wanted = np.asarray(photo(200, 300).resize((67, 100), Image.Resampling.BICUBIC), np.int16)
    small = np.asarray(opened(after["train/large.png"]), np.int16)
    assert np.abs(small - wanted).max() <= 1
    assert Copy.at(out / "train") == Copy(str(tree), 100, 80)


def test_the_bytes_are_the_same_each_time(tree: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shrink(tree, tmp_path / name, 100, 80)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_second_call_makes_what_is_missing_or_older(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shrink(tree, out, 100, 80)
    made = contents(out)
    kept = out / "train/large.png"
    was = kept.stat().st_ino
    (out / "val/a cat/large.jpg").unlink()
    newer = encoded(photo(200, 400), quality=95)
    (tree / "train/a cat/large.jpg").write_bytes(newer)
    shrink(tree, out, 100, 80)
    assert kept.stat().st_ino == was
    assert contents(out)["val/a cat/large.jpg"] == made["val/a cat/large.jpg"]
    assert opened(contents(out)["train/a cat/large.jpg"]).size == (50, 100)


def test_an_unreadable_image_is_listed_and_copied(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tree / "train/a cat/bad.jpg"
    bad.write_bytes(encoded(photo(300, 200))[:900])
    for _ in range(2):
        assert main([str(tree), str(tmp_path / "out"), "--max-side", "100"]) == 3
        assert str(bad) in capsys.readouterr().err
    after = contents(tmp_path / "out")
    assert after["train/a cat/bad.jpg"] == bad.read_bytes()
    assert len(after["val/a cat/large.jpg"]) < 9000


def test_a_full_disk_ends_with_its_code(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main([str(tree), str(tmp_path / "out")]) == 7


def test_folders_in_each_other_and_other_copies_are_refused(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shrink(tree, out, 100, 80)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    for source, target, side in (
        (tree, tree / "small", 100), (tree / "train", tree, 100), (tree, tree, 100),
        (tree, out, 200), (tree / "train", out, 100), (tree, full, 100), (tmp_path / "no", out, 1),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="specify a (new )?folder|no such folder"):
            shrink(source, target, side, 80)
