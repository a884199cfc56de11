"""What worker processes do with a decoded cache, and files for the cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from harness.data import cache
from harness.data.cache import PixelCache
from harness.data.mapped import MappedFile, memory
from harness.data.storage import FolderSource, Source

KEY = "f" * 64


def source_of(root: Path, count: int) -> FolderSource:
    """A folder of ``count`` files."""
    (root / "a").mkdir(parents=True)
    for i in range(count):
        (root / "a" / f"{i:04d}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(i % 7))
    return FolderSource(root)


def pixels_of(i: int, change: int = 0) -> np.ndarray:
    """Uint8 ``[H, W, 3]``, of another size and content for each image."""
    rng = np.random.default_rng((i, change))
    return rng.integers(0, 256, (5 + i % 11, 300 + i % 13, 3), dtype=np.uint8)


def cache_of(
    source: Source, budget_bytes: int = 1 << 22, max_side: int | None = None
) -> PixelCache:
    """An empty cache in memory."""
    return over(cache._filled(memory(0), KEY, len(source), budget_bytes), source, max_side)


def over(file: MappedFile, source: Source, max_side: int | None = None) -> PixelCache:
    """What a run that begins now has of ``file``."""
    checked = MappedFile(memory(len(source)), writable=True)
    return PixelCache(file, checked, 0, source, max_side, "bilinear")


def put_all(kept: PixelCache, indices: Sequence[int]) -> None:
    """Put these images, as a worker process."""
    for i in indices:
        kept.put(i, pixels_of(i))


def putting(kept: PixelCache, indices: Sequence[int]) -> BaseProcess:
    """A process that does so, started."""
    process = multiprocessing.get_context("forkserver").Process(
        target=put_all, args=(kept, indices), daemon=True
    )
    process.start()
    return process


def right(kept: PixelCache, count: int) -> list[int]:
    """The images that are there; each has its own pixels."""
    found = {i: pixels for i in range(count) if (pixels := kept.get(i)) is not None}
    assert all(np.array_equal(pixels, pixels_of(i)) for i, pixels in found.items())
    return list(found)
