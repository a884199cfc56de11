"""Reading cold files: what counts, and when a figure is refused."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from harness.data.storage import ArraySource, FolderSource, split
from harness.diagnose.fetch import (
    UnmeasuredError,
    cold_fetch,
    files_of,
    from_storage_bytes,
    short_sides,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes of four PNG files of 30 x 20 pixels."""
    for i in range(8):
        (tmp_path / f"class{i % 2}").mkdir(exist_ok=True)
        Image.new("RGB", (30, 20), (i, 0, 0)).save(tmp_path / f"class{i % 2}" / f"{i}.png")
    return tmp_path


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that the kernel was asked to drop."""
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *_: asked.append(os.fstat(file).st_size))
    return asked


def files(tree: Path) -> list[str]:
    return sorted(map(str, tree.rglob("*.png")))


def coming(tree: Path, share: float) -> Callable[[], int]:
    """A counter of bytes from storage that grows, over one chunk, by
    a share of the tree's bytes.
    """
    total = sum(os.path.getsize(path) for path in files(tree))
    counts: Iterator[float] = iter((0, share * total))
    return lambda: int(next(counts))


def test_files_are_dropped_and_then_read(tree: Path, dropped: list[int]) -> None:
    """Every file once, and the bytes that they have."""
    sizes = sorted(os.path.getsize(path) for path in files(tree))
    found = cold_fetch(files(tree), 2, 10.0, came_bytes=coming(tree, 1.0))
    assert sorted(dropped) == sizes
    assert (found.files, found.size_bytes, found.readers) == (8, sum(sizes), 2)
    assert found.images_per_s == pytest.approx(8 / found.seconds)


def test_bytes_from_the_page_cache_are_no_figure(tree: Path, dropped: list[int]) -> None:
    """Where the kernel keeps the pages, F is refused with the share that came from storage."""
    with pytest.raises(
        UnmeasuredError,
        match=r"could not be emptied of these files \(49% of the bytes came from storage\)",
    ):
        cold_fetch(files(tree), 1, 10.0, came_bytes=coming(tree, 0.495))


def test_the_time_bounds_what_is_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file takes a second, five seconds are enough for five of eight files."""
    passed: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: passed.append(1))
    came = itertools.count(0, 10**6)
    found = cold_fetch(
        files(tree), 1, 5.0, came_bytes=lambda: next(came), now=lambda: float(len(passed))
    )
    assert found.files == 5


def test_samples_that_are_no_files(dropped: list[int]) -> None:
    """Arrays in memory have none to fetch."""
    arrays = ArraySource(
        np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 0, 1, 1]), ("a", "b"), "digits"
    )
    assert not list(files_of(arrays))
    assert short_sides(arrays) == []
    with pytest.raises(UnmeasuredError, match="no files of their own"):
        cold_fetch(files_of(arrays), 1, 1.0)


def test_a_part_of_a_folder_has_its_own_files_alone(tree: Path) -> None:
    """The training part's, not the validation part's."""
    train, val = split(FolderSource(tree), 0.25, 0)
    assert sorted([*files_of(train), *files_of(val)]) == files(tree)
    assert len(list(files_of(train))) == 6


def test_a_file_that_is_gone(tree: Path) -> None:
    """It is named."""
    lost = tree / "class0" / "0.png"
    lost.unlink()
    with pytest.raises(UnmeasuredError, match="class0/0.png: cannot be read: No such file"):
        cold_fetch([str(lost)], 1, 1.0, came_bytes=lambda: 0)


def test_a_system_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the permission to read its own counters a process
    cannot know where bytes came from.
    """

    def refuse(self: psutil.Process) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "io_counters", refuse, raising=False)
    with pytest.raises(UnmeasuredError, match="does not tell what comes from storage"):
        from_storage_bytes()


def test_a_pipe_is_not_waited_for(tree: Path) -> None:
    """What is no regular file is named."""
    pipe = tree / "class0" / "never.png"
    os.mkfifo(pipe)
    with pytest.raises(UnmeasuredError, match="never.png: cannot be read: not a regular file"):
        cold_fetch([str(pipe)], 8, 0.05, came_bytes=lambda: 0)


def test_the_sizes_of_stored_images(tree: Path) -> None:
    """The shorter sides, by their headers; an image that cannot be read is left out."""
    source = FolderSource(tree)
    (tree / "class0" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert short_sides(source) == [20] * 7
    ticks = iter((0.0, 0.5, 0.9, 1.1))
    assert len(short_sides(source, lambda: next(ticks))) <= 2
