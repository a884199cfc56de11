"""Capacity: what a setting needs is reckoned, and refused in words, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import room

from harness.feed.base import FeedSettings
from harness.runtime.limits import Limits
from harness.tuning.lab import LoaderBenchmark, Needs

MB = 10**6
ROOMY = Limits(cores=8.0, memory_bytes=100_000 * MB, shm_bytes=100_000 * MB, open_files=100_000)


def settings(
    num_workers: int,
    prefetch_factor: int | None = 2,
    *,
    pin_memory: bool = False,
    backend: str = "processes",
) -> FeedSettings:
    return FeedSettings(
        batch_size=4,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0,
        timeout_s=60.0,
        start_method="forkserver",
        backend=backend,
    )


def sums(taken: Needs) -> tuple[int, int, int]:
    """Shared memory, memory and open files."""
    return taken.shm, taken.memory, taken.open_files


@pytest.mark.parametrize(
    ("what", "batch_bytes", "expected"),
    [
        pytest.param(settings(0), 10, (0, 30, 0), id="in the trainer"),
        pytest.param(
            settings(4, 8),
            10,
            (350, 4 * 1000 + 350, 4 * 58),
            id="workers and what they have in flight",
        ),
        pytest.param(
            settings(1, 1, pin_memory=True),
            164,
            (656, 1000 + 656 + 4 * (128 + 32), 16),
            id="pinned tensors",
        ),
        pytest.param(
            settings(0, pin_memory=True),
            128,
            (0, 3 * (128 + 64 + 32), 0),
            id="a power of two stays",
        ),
        pytest.param(
            settings(2, 2, pin_memory=True),
            None,
            (0, 2000, 44),
            id="batches of unknown size are left out",
        ),
        pytest.param(
            settings(4, None, backend="threads"), 10, (0, 50, 0), id="threads share a few batches"
        ),
        pytest.param(
            settings(4, None, backend="threads", pin_memory=True),
            164,
            (0, 5 * (128 + 32) + 32, 0),
            id="pinned batches of threads",
        ),
        pytest.param(
            settings(0, backend="threads"),
            10,
            (0, 30, 0),
            id="the threads form without threads",
        ),
    ],
)
def test_the_needs_of_a_feed(
    what: FeedSettings, batch_bytes: int | None, expected: tuple[int, int, int]
) -> None:
    """Shared memory, memory and open files follow from the settings, the batch and the worker."""
    assert sums(room(batch_bytes, 1000).needs(what)) == expected


def test_images_that_are_held_are_memory() -> None:
    """Beside the batches, and a refusal counts both."""
    arrays = settings(0, backend="arrays")
    assert sums(room(10, 1000, 500).needs(arrays)) == (0, 530, 0)
    small = replace(ROOMY, memory_bytes=200 * MB)
    said = room(MB, 0, 180 * MB, small).refusal(arrays) or ""
    assert "memory: 183.0 MB needed" in said and "200.0 MB" in said


def test_threads_need_no_shared_memory() -> None:
    """Their batches are refused for want of memory alone, with the sum."""
    threads = settings(4, None, backend="threads")
    without = replace(ROOMY, shm_bytes=0, open_files=64)
    assert room(MB, 10**12, limits=without).refusal(threads) is None
    assert "memory: 5.0 MB needed" in (
        room(MB, limits=replace(ROOMY, memory_bytes=5 * MB)).refusal(threads) or ""
    )


@pytest.mark.parametrize(
    ("what", "limits", "asked", "free"),
    [
        (settings(4, 8), {"shm_bytes": 64 * MB}, "shared memory: 675.5 MB", "64.0 MB"),
        (
            settings(4, 8, pin_memory=True),
            {"memory_bytes": 1500 * MB},
            "memory: 2.6 GB",
            "1.5 GB",
        ),
        (settings(0), {"memory_bytes": 40 * MB}, "memory: 57.9 MB", "40.0 MB"),
        (settings(4, 8), {"open_files": 300, "files_open": 10}, "ulimit -n): 232", "290"),
    ],
    ids=["shared memory", "memory", "memory without workers", "open files"],
)
def test_a_refusal_shows_the_sum(
    what: FeedSettings, limits: dict[str, int], asked: str, free: str
) -> None:
    """The line says what the settings take, and what is free."""
    small = replace(ROOMY, **limits)
    said = room(19_300_000, 200 * MB, limits=small).refusal(what) or ""
    assert f"{asked} needed, {free} free" in said


@pytest.mark.parametrize("kind", ["shm", "memory", "open_files"])
def test_what_another_feed_takes_is_not_free(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, or to the file."""
    limits = replace(ROOMY, shm_bytes=1000, memory_bytes=1000, open_files=64 + 800)
    monkeypatch.setattr(LoaderBenchmark, "needs", lambda *_: Needs(**{kind: 500}))
    lab = room(0, limits=limits)
    assert lab.refusal(settings(1), Needs(**{kind: 300})) is None
    assert lab.refusal(settings(1), Needs(**{kind: 301})) is not None


@pytest.mark.parametrize(
    ("what", "edge"),
    [
        pytest.param(settings(1, 1), {"shm_bytes": 500}, id="shared memory"),
        pytest.param(settings(1, 1), {"memory_bytes": 625}, id="memory"),
        pytest.param(settings(2, 2), {"open_files": 44 + 64 + 6, "files_open": 6}, id="open files"),
    ],
)
def test_what_just_fits_is_tried(what: FeedSettings, edge: dict[str, int]) -> None:
    """Four fifths of the memory and all but 64 of the files may be taken, and not a byte or a file
    more.
    """
    limits = replace(ROOMY, **edge)
    assert room(100, 100, limits=limits).refusal(what) is None
    less = {name: value - 1 for name, value in edge.items() if name != "files_open"}
    assert "not tried" in (room(100, 100, limits=replace(limits, **less)).refusal(what) or "")


def test_without_shared_memory_there_is_no_bound_on_it() -> None:
    """Where there is no /dev/shm to look at, memory alone is reckoned with."""
    assert room(MB, MB, limits=replace(ROOMY, shm_bytes=None)).refusal(settings(8, 8)) is None
