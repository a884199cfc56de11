"""Makes the data of ``run.py`` once: JPEG files like ImageNet's, and small arrays."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from harness.config import DataConfig
from harness.data.datasets import ImageDataset
from harness.data.download import make_once
from harness.data.shapes import class_name, draw
from harness.data.storage import ArraySource
from harness.data.transforms import CropTransform
from harness.runtime import limits

CLASSES = 10
JPEGS = 2000
# width and height of twenty images
_SIZES = [(500, 375)] * 11 + [(375, 500)] * 4 + [(500, 333)] * 3 + [(333, 500), (400, 300)]


def jpegs(folder: Path) -> Path:
    """Returns a tree of 4:2:0 files with the sizes and bytes of ImageNet's, 0.2 GB.

    Sizes are common in ImageNet, 461 x 396 on average; qualities of 92 to 96 give about 105 KB per
    file.
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


def cifar_like(folder: Path) -> ImageDataset:
    """Returns 50,000 mapped arrays of 32 x 32 pixels, cropped with padding."""
    root = folder / "cifar-like"
    make_once(root, root.is_dir, _write_arrays)
    images = np.lib.format.open_memmap(root / "images.npy", mode="r")
    source = ArraySource(
        images, np.arange(len(images)) % CLASSES, map(str, range(CLASSES)), "cifar-like"
    )
    return ImageDataset(source, CropTransform(32, crop="pad"), DataConfig(), 32, seed=0)


def _write_arrays(folder: Path) -> None:
    pixels = np.random.Generator(np.random.Philox(0)).integers(
        0, 256, (50_000, 32, 32, 3), np.uint8
    )
    np.save(folder / "images.npy", pixels)


def warm(folder: Path) -> None:
    """Reads all files into the page cache, so that no measurement starts with a cold cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.read_bytes()
