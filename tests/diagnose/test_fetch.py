"""Reading cold files: what counts, and when a figure is refused."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from PIL import Image

from harness.data.storage import ArraySource, FolderSource, split
from harness.diagnose import diagnosis
from harness.diagnose.diagnosis import cold_fetch, files_of, short_sides
from harness.tuning.measures import Rate


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


Coming = Callable[[Iterable[float]], None]


@pytest.fixture
def coming(monkeypatch: pytest.MonkeyPatch) -> Coming:
    """Sets what the counter of bytes from storage shows, one time after another."""

    def set_(counts: Iterable[float]) -> None:
        left = iter(counts)
        monkeypatch.setattr(
            psutil.Process,
            "io_counters",
            lambda _: SimpleNamespace(read_bytes=next(left)),
            raising=False,
        )

    return set_


def test_files_are_dropped_and_then_read(tree: Path, dropped: list[int], coming: Coming) -> None:
    """Every file once, and the bytes that they have."""
    sizes = sorted(os.path.getsize(path) for path in files(tree))
    coming((0, sum(sizes)))
    found = cold_fetch(files(tree), 2, 10.0)
    assert isinstance(found, Rate) and found.images_per_s > 0
    assert sorted(dropped) == sizes


def test_bytes_from_the_page_cache_are_no_figure(
    tree: Path, dropped: list[int], coming: Coming
) -> None:
    """Where the kernel keeps the pages, cold files have no rate, but the share that was stored."""
    coming((0, 0.49 * sum(os.path.getsize(path) for path in files(tree))))
    said = "could not be emptied of these files (49% of the bytes came from storage)"
    assert said in str(cold_fetch(files(tree), 1, 10.0))


def test_the_time_bounds_what_is_read(
    tree: Path, monkeypatch: pytest.MonkeyPatch, coming: Coming
) -> None:
    """Where a file takes a second, five seconds are enough for five of eight files."""
    passed: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: passed.append(1))
    coming(itertools.count(0, 10**6))
    monkeypatch.setattr(diagnosis, "time", SimpleNamespace(perf_counter=lambda: float(len(passed))))
    found = cold_fetch(files(tree), 1, 5.0)
    # five files in five seconds
    assert isinstance(found, Rate) and found.images_per_s == 1.0
    assert len(passed) == 5


def test_samples_that_are_no_files(dropped: list[int]) -> None:
    """Arrays in memory have none to fetch."""
    arrays = ArraySource(
        np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 0, 1, 1]), ("a", "b"), "digits"
    )
    assert not list(files_of(arrays))
    assert short_sides(arrays) == []
    assert "not files of their own" in str(cold_fetch(files_of(arrays), 1, 1.0))


def test_a_part_of_a_folder_has_its_own_files_alone(tree: Path) -> None:
    """The training part's, not the validation part's."""
    train, val = split(FolderSource(tree), 0.25, 0)
    assert sorted([*files_of(train), *files_of(val)]) == files(tree)
    assert len(list(files_of(train))) == 6


def test_a_file_that_is_gone(tree: Path) -> None:
    """It is named."""
    lost = tree / "class0" / "0.png"
    lost.unlink()
    assert "class0/0.png cannot be read: No such file" in str(cold_fetch([str(lost)], 1, 1.0))


def test_a_system_that_does_not_count(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the permission to read its own counters a process
    cannot know where bytes came from.
    """

    def refuse(self: psutil.Process) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "io_counters", refuse, raising=False)
    assert "page-cache" in str(cold_fetch(files(tree), 1, 1.0))


def test_a_pipe_is_not_waited_for(tree: Path) -> None:
    """What is no regular file is named."""
    pipe = tree / "class0" / "never.png"
    os.mkfifo(pipe)
    said = "never.png cannot be read: not a regular file"
    assert said in str(cold_fetch([str(pipe)], 8, 0.05))


def test_the_sizes_of_stored_images(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shorter sides, by their headers; an image that cannot be read is left out."""
    source = FolderSource(tree)
    (tree / "class0" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert short_sides(source) == [20] * 7
    ticks = iter((0.0, 0.5, 0.9, 1.1))
    monkeypatch.setattr(diagnosis, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert len(short_sides(source)) <= 2
