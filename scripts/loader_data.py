"""Makes the data of ``bench_loader.py`` once.

JPEG files like ImageNet's, small arrays, a tree of a million empty files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from harness.data.download import make_once
from harness.data.shapes import class_name, draw
from harness.runtime import limits

CLASSES = 10
JPEGS = 2000
# width and height, as often as of twenty images
_SIZES = [(500, 375)] * 11 + [(375, 500)] * 4 + [(500, 333)] * 3 + [(333, 500), (400, 300)]
_FILES_A_FOLDER = 1000


def jpegs(folder: Path) -> Path:
    """Returns a tree of 4:2:0 files with the sizes and bytes of ImageNet's, 0.2 GB.

    Side lengths are ImageNet's common ones, 461 x 396 in the mean; qualities of 92 to 96 make some
    105 KB of that.
    """
    root = folder / f"jpeg-{JPEGS}"
    if not root.is_dir():
        make_once(root, root.is_dir, _write_jpegs)
    return root


def _write_jpegs(root: Path) -> None:
    images = [("train", index) for index in range(JPEGS)] + [
        ("val", index) for index in range(CLASSES)
    ]
    for split in ("train", "val"):
        for label in range(CLASSES):
            (root / split / class_name(label, CLASSES)).mkdir(parents=True)
    with ProcessPoolExecutor(
        max(1, int(limits.measure().cores)), get_context("forkserver")
    ) as pool:
        for _ in pool.map(partial(_write_jpeg, root), images, chunksize=50):
            pass


def _write_jpeg(root: Path, image: tuple[str, int]) -> None:
    split, index = image
    rng = np.random.default_rng((len(split), index))
    width, height = _SIZES[int(len(_SIZES) * rng.random())]
    label = index % CLASSES
    quality = int(rng.integers(92, 97))
    picture = Image.fromarray(draw(label, CLASSES, width, height, rng))
    picture.save(root / split / class_name(label, CLASSES) / f"{index:05d}.jpg", quality=quality)


@contextmanager
def many_files(folder: Path, count: int) -> Iterator[Path]:
    """Makes a tree of ``count`` empty ``.jpg`` files, which is gone afterwards.

    Raises:
        OSError: the file system has no room for so many files.
    """
    free = os.statvfs(folder).f_favail
    needed = count + 2 * (count // _FILES_A_FOLDER + 1)
    if needed > free:
        raise OSError(
            f"{folder}: {needed} files are wanted, the file system has room for {free}; set "
            "--folder or --files"
        )
    root = folder / "many-files"
    # of a run that was killed
    shutil.rmtree(root, ignore_errors=True)
    try:
        for first in range(0, count, _FILES_A_FOLDER):
            name = f"c{first // _FILES_A_FOLDER:04d}"
            _write_empty(root / "train" / name, range(first, min(count, first + _FILES_A_FOLDER)))
            _write_empty(root / "val" / name, range(1))
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _write_empty(folder: Path, numbers: range) -> None:
    folder.mkdir(parents=True)
    for number in numbers:
        os.mknod(folder / f"image_{number:08d}.jpg")
