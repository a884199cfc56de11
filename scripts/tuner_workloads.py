"""The workloads of ``bench_tuner.py``: real loaders with consumers of known speed."""

from __future__ import annotations

import fcntl
import mmap
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from harness.config import AugmentConfig, DataConfig, GenerateConfig
from harness.data import datasets
from harness.data.datasets import ImageDataset
from harness.data.decode import DecodeOptions
from harness.data.download import make_once
from harness.data.storage import ArraySource, FolderSource, Source
from harness.data.transforms import CropTransform
from harness.feed.base import FillableDataset

CLASSES = 10
# the generator wants a validation set
_VAL_IMAGES = CLASSES


@dataclass(frozen=True, slots=True)
class Workload:
    """One data set with its consumer.

    Attributes:
        about: what it is, for the table.
        make: the data set, whose files lie below the folder given; they are made once.
        batch_size: images in a batch.
        step_s: how long the consumer is busy with a batch, sleeping as a host does that waits for a
            device; None: the harness's own training step, which shares the processors with the
            workers.
        cores: what every strategy is told to have; None: what this machine has.
        shm_mb: size of a /dev/shm of its own; None: the machine's.
        seconds: least window of a measurement where samples are so uneven that the common one would
            measure luck.
        changes: the workload that this one varies; only ``auto``'s choice is then of interest.
    """

    name: str
    about: str
    make: Callable[[Path], FillableDataset]
    batch_size: int
    step_s: float | None
    cores: int | None = None
    shm_mb: int | None = None
    seconds: float = 0.0
    changes: str | None = None

    @property
    def demand(self) -> float | None:
        """Images/s that the consumer takes; None where only measuring tells."""
        return None if self.step_s is None else self.batch_size / self.step_s


@dataclass(slots=True)
class Sleeper:
    """Samples that wait ``sleep_s`` each, and every hundredth ``tail_s`` if not 0."""

    image_size: int
    length: int
    sleep_s: float
    tail_s: float = 0.0
    skips: bool = False

    def __len__(self) -> int:
        return self.length

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        """Wait, write one grey image and return its label."""
        time.sleep(self.tail_s if self.tail_s and index % 100 == 0 else self.sleep_s)
        out[:] = index % 256
        return index % CLASSES


class RateLimitedSource:
    """``source`` behind a disk that gives ``bytes_per_s`` to all processes together.

    When the disk will be free is one number in a file, which all of them map; whoever reads moves
    it on under a lock, by the time its bytes take, and waits until then.
    """

    def __init__(self, source: Source, bytes_per_s: float, clock_file: Path) -> None:
        self.source = source
        self.bytes_per_s = bytes_per_s
        self.clock_file = clock_file
        self.classes = source.classes
        self.labels = source.labels
        self.where = source.where
        clock_file.write_bytes(struct.pack("d", 0.0))

    def __len__(self) -> int:
        return len(self.source)

    def read(self, i: int) -> tuple[bytes | np.ndarray, int]:
        """As ``source`` reads it, after its turn at the disk."""
        data, label = self.source.read(i)
        size = len(data) if isinstance(data, bytes) else data.nbytes
        free_at = self._reserve(size / self.bytes_per_s)
        time.sleep(max(0.0, free_at - time.monotonic()))
        return data, label

    def _reserve(self, seconds: float) -> float:
        """When the disk is through with this read, on the clock that all processes share."""
        with self.clock_file.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with mmap.mmap(file.fileno(), 8) as shared:
                (free_at,) = struct.unpack("d", shared)
                free_at = max(free_at, time.monotonic()) + seconds
                shared[:] = struct.pack("d", free_at)
        return float(free_at)


def warm(folder: Path) -> None:
    """Reads all files into the page cache: no measurement is to pay for having been the first."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.read_bytes()


def jpegs(folder: Path, image_size: int, width: int, height: int, count: int) -> ImageDataset:
    """Generated JPEG files with the augmentation of ImageNet."""
    numbers = GenerateConfig(
        classes=CLASSES, train_images=count, val_images=_VAL_IMAGES, width=width, height=height
    )
    root = str(folder / f"jpeg-{width}x{height}-{count}")
    data = DataConfig(name="shapes", root=root, image_size=image_size, generate=numbers)
    train = datasets.load(data, AugmentConfig(), seed=0).train
    assert isinstance(train, ImageDataset)
    return train


def big_jpegs(folder: Path) -> ImageDataset:
    """Files as large as ImageNet's, seen at 224 pixels."""
    return jpegs(folder, 224, 500, 400, 1200)


def small_jpegs(folder: Path) -> ImageDataset:
    """Files of 80 x 80 pixels, seen at 64."""
    return jpegs(folder, 64, 80, 80, 6000)


def throttled_jpegs(folder: Path) -> ImageDataset:
    """The small files on a disk of 4 MB/s."""
    dataset = small_jpegs(folder)
    dataset.source = RateLimitedSource(dataset.source, 4e6, folder / "disk-clock")
    return dataset


def pngs(folder: Path) -> ImageDataset:
    """PNG files of 250 x 200 pixels, seen at 128."""
    root = folder / "png-250x200-1200"
    make_once(root, root.is_dir, lambda part: _write_pngs(big_jpegs(folder).source, part))
    return ImageDataset(FolderSource(root), CropTransform(128), DecodeOptions(), 128, seed=0)


def _write_pngs(source: Source, folder: Path) -> None:
    for index in range(len(source)):
        data, label = source.read(index)
        assert isinstance(data, bytes)
        place = folder / source.classes[label]
        place.mkdir(exist_ok=True)
        Image.open(BytesIO(data)).resize((250, 200)).save(place / f"{index:05d}.png")


def cifar_like(folder: Path) -> ImageDataset:
    """Returns 50,000 mapped arrays of 32 x 32 pixels, cropped with padding."""
    root = folder / "cifar-like"
    make_once(root, root.is_dir, _write_arrays)
    images = np.lib.format.open_memmap(root / "images.npy", mode="r")
    source = ArraySource(
        images, np.arange(len(images)) % CLASSES, map(str, range(CLASSES)), "cifar-like"
    )
    return ImageDataset(source, CropTransform(32, crop="pad"), DecodeOptions(), 32, seed=0)


def _write_arrays(folder: Path) -> None:
    pixels = np.random.Generator(np.random.Philox(0)).integers(
        0, 256, (50_000, 32, 32, 3), np.uint8
    )
    np.save(folder / "images.npy", pixels)


def _sleeper(
    image_size: int, sleep_s: float, tail_s: float = 0.0
) -> Callable[[Path], FillableDataset]:
    return lambda folder: Sleeper(image_size, 50_000, sleep_s, tail_s)


_ALL = (
    Workload(
        "jpeg_224", "JPEG 500x400 at 224, more wanted than two cores give", big_jpegs, 64, 0.032
    ),
    Workload("jpeg_64", "JPEG 80x80 at 64, between one worker and two", small_jpegs, 128, 0.016),
    Workload("cifar", "arrays 32x32, pad-crop", cifar_like, 256, 0.016),
    Workload("png", "PNG 250x200 at 128, more than one worker gives", pngs, 64, 0.050),
    Workload("sleep_2", "2 ms of waiting a sample", _sleeper(32, 0.002), 256, 0.150, cores=8),
    Workload("sleep_10", "10 ms of waiting a sample", _sleeper(32, 0.010), 128, 0.178, cores=8),
    Workload("sleep_50", "50 ms of waiting a sample", _sleeper(32, 0.050), 32, 0.142, cores=8),
    Workload(
        "heavy_tail",
        "2 ms, every hundredth 0.5 s",
        _sleeper(32, 0.002, 0.5),
        64,
        0.114,
        cores=8,
        seconds=8.0,
    ),
    Workload("slow_disk", "JPEG 80x80 at 64 from a disk of 4 MB/s", throttled_jpegs, 64, 0.032),
    Workload(
        "small_shm",
        "512x512, 6 MB a batch, /dev/shm of 64 MB",
        _sleeper(512, 0.008),
        8,
        0.026,
        cores=4,
        shm_mb=64,
    ),
    Workload("slow_consumer", "JPEG 80x80 at 64, a step of 0.4 s", small_jpegs, 64, 0.4),
    Workload("fast_consumer", "JPEG 80x80 at 64, a step of 1 ms", small_jpegs, 64, 0.001),
    Workload(
        "cpu_step", "JPEG 80x80 at 64, the real step on the same cores", small_jpegs, 64, None
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}


def _variants() -> Iterator[Workload]:
    base = WORKLOADS["sleep_10"]
    assert base.step_s is not None
    yield replace(
        base,
        name="slowed_step",
        about="sleep_10 with a step of four times the time",
        step_s=4 * base.step_s,
        changes=base.name,
    )
    base = WORKLOADS["jpeg_64"]
    yield replace(
        base,
        name="slowed_disk",
        about="jpeg_64 from a disk of 4 MB/s",
        make=throttled_jpegs,
        changes=base.name,
    )


VARIANTS = {workload.name: workload for workload in _variants()}
