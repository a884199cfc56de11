"""Datasets that are each slow in one way, for runs that should detect it."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harness.clock.stages import Lap
from harness.config import DataConfig
from harness.data.datasets import ImageDataset, Splits
from harness.data.storage import ArraySource, FolderSource, Source
from harness.data.transforms import Box, CropTransform
from harness.runtime.seeding import SampleRng

# image side in pixels, if the size does not matter
SIDE = 16
BATCH = 4
IMAGES = 4096
OPTIONS = DataConfig(max_pixels=10**9)


class Memory(ArraySource):
    """Images in memory."""

    def __init__(self, count: int = IMAGES) -> None:
        super().__init__(
            np.zeros((count, SIDE, SIDE, 3), np.uint8),
            np.zeros(count, np.int64),
            ["a", "b"],
            "planted",
        )


class SlowDisk(Memory):
    """Each read sleeps, as from a remote disk."""

    def __init__(self, read_s: float) -> None:
        super().__init__()
        self.read_s = read_s

    def read(self, i: int) -> tuple[np.ndarray, int]:
        time.sleep(self.read_s)
        return super().read(i)


class Paced(Memory):
    """Each read ends ``read_s`` after the previous one, regardless of anything in between."""

    def __init__(self, read_s: float) -> None:
        super().__init__()
        self.read_s = read_s
        self.due_s = 0.0

    def read(self, i: int) -> tuple[np.ndarray, int]:
        self.due_s = max(self.due_s, time.perf_counter() - self.read_s) + self.read_s
        time.sleep(max(0.0, self.due_s - time.perf_counter()))
        return super().read(i)


class Encoded(Memory):
    """Identical JPEGs of noise, ``side`` pixels wide and high."""

    def __init__(self, side: int) -> None:
        super().__init__()
        file = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
        Image.fromarray(noise).save(file, "jpeg", quality=90)
        self.data = file.getvalue()

    def read(self, i: int) -> tuple[Any, int]:
        return self.data, 0


class ColdFolder(FolderSource):
    """A few files, read repeatedly, that leave the page cache before each read."""

    def __init__(self, root: Path, cold: bool) -> None:
        self.cold = cold
        super().__init__(root)

    @property
    def labels(self) -> np.ndarray:
        return np.resize(super().labels, IMAGES)

    def __len__(self) -> int:
        return IMAGES

    def where(self, i: int) -> str:
        return super().where(i % len(self.index.labels))

    def read(self, i: int) -> tuple[bytes, int]:
        if self.cold:
            file = os.open(self.where(i), os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        return super().read(i)


class Blur:
    """A transform followed by a delay."""

    def __init__(self, before: CropTransform, blur_s: float) -> None:
        self.before = before
        self.blur_s = blur_s
        self.crop = before.crop
        self.stages = (*before.stages, "blur")

    def __call__(
        self,
        image: np.ndarray,
        rng: SampleRng,
        out: np.ndarray,
        lap: Lap | None = None,
        part: Box | None = None,
    ) -> None:
        self.before(image, rng, out, lap, part)
        time.sleep(self.blur_s)
        if lap is not None:
            lap("blur")


class SlowToCollate(ImageDataset):
    """Returns a batch's size only after a delay."""

    filling = False

    def __init__(self, collate_s: float) -> None:
        self.collate_s = collate_s
        super().__init__(Memory(), CropTransform(SIDE), OPTIONS, SIDE, 0)

    @property
    def image_size(self) -> int:
        if not self.filling:
            time.sleep(self.collate_s)
        return SIDE

    @image_size.setter
    def image_size(self, side: int) -> None: ...

    def fill(
        self,
        epoch: int,
        index: int,
        out: np.ndarray,
        lap: Lap | None = None,
        instead: int | None = None,
    ) -> int:
        self.filling = True
        try:
            return super().fill(epoch, index, out, lap, instead)
        finally:
            self.filling = False


class Huge(ImageDataset):
    """Large images without load time; a batch has ``megabytes``."""

    def __init__(self, megabytes: float) -> None:
        side = round((megabytes * 2**20 / 3 / BATCH) ** 0.5)
        super().__init__(Memory(), CropTransform(side), OPTIONS, side, 0)

    def fill(
        self,
        epoch: int,
        index: int,
        out: np.ndarray,
        lap: Lap | None = None,
        instead: int | None = None,
    ) -> int:
        out[0, 0, 0] = 0
        if lap is not None:
            lap("read")
        return 0


def splits(train: ImageDataset) -> Splits:
    """Returns ``train`` with a small validation set."""
    center = CropTransform(SIDE, crop="center", hflip=0.0)
    val = ImageDataset(Memory(8), center, OPTIONS, SIDE, 0)
    return Splits(train, val, ("a", "b"), "planted", "")


def images(source: Source, transform: Any = None) -> Splits:
    """Returns the images of ``source`` as a training set."""
    return splits(ImageDataset(source, transform or CropTransform(SIDE), OPTIONS, SIDE, 0))
