"""Decoded pixels that are kept: what comes back, what does not, concurrent writers."""

from __future__ import annotations

import errno
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_workers import KEY, cache_of, over, pixels_of, put_all, putting, right, source_of

from harness.data import cache
from harness.data.cache import PixelCache
from harness.data.mapped import memory
from harness.data.storage import FolderSource

COUNT = 40


@pytest.fixture
def source(tmp_path: Path) -> FolderSource:
    """A folder of files."""
    return source_of(tmp_path / "set", COUNT)


def next_run(kept: PixelCache, source: FolderSource) -> PixelCache:
    return over(kept.file, source)


def test_pixels_come_back_as_a_view(source: FolderSource) -> None:
    """What was put is given back bit by bit, for reading, and each time from the same memory."""
    kept = cache_of(source)
    assert kept.get(3) is None
    pixels = pixels_of(3)
    assert kept.put(3, pixels) is pixels
    first = kept.get(3)
    second = kept.get(3)
    assert first is not None and second is not None
    assert np.array_equal(first, pixels)
    assert np.shares_memory(first, second) and not np.shares_memory(first, pixels)
    assert not first.flags.writeable
    assert right(kept, COUNT) == [3]


def test_any_strides_are_kept(source: FolderSource) -> None:
    """Pixels need not lie in order."""
    kept = cache_of(source)
    kept.put(0, pixels_of(0)[:, ::-1][:, ::-1])
    assert right(kept, COUNT) == [0]


def test_large_images_are_shrunk_at_once(source: FolderSource) -> None:
    """With a longest side, the first epoch has the same pixels as later ones."""
    kept = cache_of(source, max_side=100)
    small = pixels_of(1)[:5, :100]
    shrunk = kept.put(0, pixels_of(0))
    assert shrunk.shape == (2, 100, 3)
    assert np.array_equal(kept.get(0), shrunk)  # type: ignore[arg-type]
    assert kept.put(1, small) is small


def rewrite(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"\xff\xd8\xff and more")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch(path: Path) -> None:
    os.utime(path, (1e9, 1e9))


@pytest.mark.parametrize("change", [rewrite, touch], ids=["size", "time"])
def test_a_changed_file_is_decoded_again(
    source: FolderSource, change: Callable[[Path], None]
) -> None:
    """A later run decodes a changed file again and keeps it; old views stay."""
    kept = cache_of(source)
    kept.put(0, pixels_of(0))
    kept.put(1, pixels_of(1))
    view = kept.get(0)
    change(Path(source.where(0)))
    later = next_run(kept, source)
    assert later.get(0) is None
    later.put(0, pixels_of(0, change=1))
    assert np.array_equal(later.get(0), pixels_of(0, change=1))  # type: ignore[arg-type]
    assert np.array_equal(view, pixels_of(0))  # type: ignore[arg-type]
    assert np.array_equal(later.get(1), pixels_of(1))  # type: ignore[arg-type]


def test_a_file_is_looked_at_once_in_a_run(
    source: FolderSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first read of an image asks for its file, whichever process has it."""
    first = cache_of(source)
    first.put(0, pixels_of(0))
    later = next_run(first, source)
    looks: list[str] = []
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path: looks.append(path) or real(path))
    for one in (later, pickle.loads(pickle.dumps(later)), later):
        assert one.get(0) is not None
    assert looks == [source.where(0)]


def test_what_a_run_has_kept_it_need_not_check(
    source: FolderSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that wrote an image checks neither its file nor its checksum."""
    kept = cache_of(source)
    kept.put(0, pixels_of(0))
    monkeypatch.setattr(FolderSource, "where", lambda self, i: pytest.fail("looks for the file"))
    monkeypatch.setattr(cache, "checksum", lambda *args: pytest.fail("reads the pixels"))
    for one in (kept, pickle.loads(pickle.dumps(kept))):
        assert np.array_equal(one.get(0), pixels_of(0))  # type: ignore[arg-type]


def test_a_file_that_went_has_no_pixels(source: FolderSource) -> None:
    """Neither are its pixels given to a later run, nor kept: its reader reports it."""
    first = cache_of(source)
    first.put(0, pixels_of(0))
    Path(source.where(0)).unlink()
    kept = next_run(first, source)
    assert kept.get(0) is None
    kept.put(0, pixels_of(0))
    assert kept.stats()["images"] == 0


def lost_page(pixels: np.ndarray) -> None:
    pixels[-4096:] = 0


def flipped_bits(pixels: np.ndarray) -> None:
    pixels[7::8] ^= 0x80


def swapped_rows(pixels: np.ndarray) -> None:
    pixels[:1024] = pixels[:1024].reshape(2, 512)[::-1].reshape(-1)


@pytest.mark.parametrize("damage", [lost_page, flipped_bits, swapped_rows])
def test_damaged_pixels_are_not_used(
    source: FolderSource, damage: Callable[[np.ndarray], None]
) -> None:
    """Pixels that are not those that were kept cost that image alone, and once."""
    kept = cache_of(source)
    put_all(kept, range(3))
    damage(np.frombuffer(kept.file.map, np.uint8)[kept._places[2] : kept.stats()["bytes"]])
    later = next_run(kept, source)
    assert right(later, COUNT) == [0, 1]
    put_all(later, [2])
    assert right(later, COUNT) == [0, 1, 2]


def test_sides_that_were_swapped_are_not_used(source: FolderSource) -> None:
    """Height and width that changed places lead to the same bytes, and to another image."""
    kept = cache_of(source)
    kept.put(0, np.arange(120, dtype=np.uint8).reshape(4, 10, 3))
    kept._heights[0], kept._widths[0] = 10, 4
    assert next_run(kept, source).get(0) is None


@pytest.mark.parametrize("row", range(4), ids=["place", "height", "width", "checksum"])
@pytest.mark.parametrize("value", [-1, 0, 1, 2**20, 2**62])
def test_a_damaged_row_leads_nowhere(source: FolderSource, row: int, value: int) -> None:
    """Whatever the table says, only checked pixels are given."""
    kept = cache_of(source)
    kept.put(0, pixels_of(0))
    kept._table[row, 0] = value
    assert next_run(kept, source).get(0) is None
    assert cache._used_bytes(kept.file.fd, KEY, COUNT) <= kept.stats()["limit"]


def test_a_full_cache_keeps_what_fits(source: FolderSource) -> None:
    """Room is bounded; what does not fit is left out without an error, and the line says so."""
    kept = cache_of(source, budget_bytes=100_000)
    put_all(kept, range(COUNT))
    found = right(kept, COUNT)
    stats = kept.stats()
    assert 0 < len(found) == stats["images"] < COUNT == stats["samples"]
    assert stats["bytes"] <= stats["limit"] == 100_000
    assert kept.summary() == f"{len(found)} of 40 images, 0.0 of at most 0.0 GB"
    assert os.fstat(kept.file.fd).st_size == 100_000


def test_a_long_image_is_kept(source: FolderSource) -> None:
    """A side may have any number of pixels."""
    kept = cache_of(source)
    kept.put(0, np.zeros((1, 2**17, 3), np.uint8))
    found = kept.get(0)
    assert found is not None and found.shape == (1, 2**17, 3)


@pytest.mark.parametrize("short", [True, False], ids=["short", "error"])
def test_a_full_disk_ends_the_filling(
    source: FolderSource, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with less room than at first: what was kept stays."""
    kept = cache_of(source)
    put_all(kept, range(3))
    real = os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        if short:
            return real(fd, data[:1], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    put_all(kept, range(3, COUNT))
    assert right(kept, COUNT) == [0, 1, 2]


def test_processes_fill_at_once(source: FolderSource) -> None:
    """Two processes that put the same images share no byte and lose none."""
    kept = cache_of(source)
    workers = [putting(kept, order) for order in (range(COUNT), range(COUNT - 1, -1, -1))]
    for worker in workers:
        worker.join()
    assert right(kept, COUNT) == list(range(COUNT))


def test_a_killed_writer_leaves_whole_images(tmp_path: Path) -> None:
    """Killed in the midst, a process leaves images that are whole, and the file free for others."""
    source = source_of(tmp_path / "set", 1000)
    kept = cache_of(source, budget_bytes=1 << 26)
    worker = putting(kept, range(1000))
    end_s = time.monotonic() + 60
    while kept.stats()["images"] < 20 and time.monotonic() < end_s:
        worker.join(0.005)
    worker.kill()
    worker.join()
    found = right(kept, 1000)
    assert 20 <= len(found) < 1000
    put_all(kept, range(990, 1000))
    assert right(kept, 1000) == found + [i for i in range(990, 1000) if i not in found]


def test_what_lies_in_a_place_is_not_given_out_again(source: FolderSource) -> None:
    """Room that an image has is not free, even if a power failure left an older head."""
    kept = cache_of(source)
    put_all(kept, range(3))
    kept._head["used"] = kept._places[0]
    later = over(cache._filled(os.dup(kept.file.fd), KEY, COUNT, 1 << 22), source)
    put_all(later, range(3, 6))
    assert right(later, COUNT) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 100, bytes(1 << 16), KEY.encode(), KEY.encode() + b"\x7f" * (1 << 16)],
    ids=["empty", "short", "zeros", "cut", "noise"],
)
def test_another_file_is_not_taken(content: bytes) -> None:
    """What has another key, or is shorter than it says, is none of these files."""
    fd = memory(len(content))
    os.pwrite(fd, content, 0)
    assert cache._used_bytes(fd, KEY, COUNT) == 0
    os.close(fd)
