"""From a source's sample to a row of a batch."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pictures import photograph
from samples import eval_transform, numbers

from harness.config import DataConfig
from harness.data.datasets import ImageDataset
from harness.data.storage import ArraySource, FolderSource
from harness.data.transforms import CropTransform, resized
from harness.runtime.errors import BadSample

OPTIONS = DataConfig()


def dataset(transform: Any = None, source: Any = None, seed: int = 0) -> ImageDataset:
    return ImageDataset(source or numbers(), transform or CropTransform(8), OPTIONS, 8, seed)


def filled(images: ImageDataset, epoch: int, index: int) -> np.ndarray:
    out = np.empty((3, images.image_size, images.image_size), np.uint8)
    images.fill(epoch, index, out)
    return out


@pytest.fixture
def folder(tmp_path: Path) -> FolderSource:
    """A photograph in five sizes, two classes and two formats."""
    for number, scale in enumerate((1.0, 0.8, 0.6, 0.4, 0.2)):
        image = photograph("china").reduce(2).resize((round(320 * scale), round(213 * scale)))
        path = tmp_path / ("cat", "dog")[number % 2] / f"{number}.{('jpg', 'png')[number % 2]}"
        path.parent.mkdir(exist_ok=True)
        image.save(path)
    return FolderSource(tmp_path)


class Kept:
    """A cache that notes what it is asked."""

    def __init__(self) -> None:
        self.pixels: dict[int, np.ndarray] = {}

    def get(self, i: int) -> np.ndarray | None:
        return self.pixels.get(i)

    def put(self, i: int, pixels: np.ndarray) -> np.ndarray:
        self.pixels[i] = kept = pixels.copy()
        kept.flags.writeable = False
        return pixels


@dataclass
class Failing:
    """A transform that raises."""

    error: BaseException
    stages = ("fail",)

    def __call__(self, *args: object) -> None:
        raise self.error


def test_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    """The pixels change with each of the three, and with nothing else."""
    first = filled(dataset(), 1, 2)
    other = dataset()
    for index in (5, 0, 3):
        filled(other, 7, index)
    random.seed(99)
    assert np.array_equal(first, filled(pickle.loads(pickle.dumps(other)), 1, 2))
    assert not np.array_equal(first, filled(other, 2, 2))
    assert not np.array_equal(first, filled(dataset(seed=1), 1, 2))
    source = numbers()
    source.images[:] = source.images[0]
    assert not np.array_equal(
        filled(dataset(source=source), 1, 2), filled(dataset(source=source), 1, 3)
    )


def test_labels_go_to_a_worker_as_the_source_sends_them() -> None:
    """A source that pickles as the name of a mapped file makes a small message of the whole data
    set.
    """

    class Mapped(ArraySource):
        def __reduce__(self) -> tuple[object, ...]:
            return str, ("a file's name",)

    source = numbers(10_000, 1)
    images = dataset(source=Mapped(source.images, source.labels, source.classes, "mapped"))
    assert len(pickle.dumps(images)) < 2000
    assert (
        len(images.source.labels) == len(images) == 10_000
        and images.source.where(5) == "mapped[5]"
        and images.source.classes == ("a", "b", "c")
    )


def test_a_row_of_a_batch_is_filled() -> None:
    """Fill writes its own row alone and returns the label."""
    batch = np.full((3, 3, 8, 8), 77, np.uint8)
    assert dataset(eval_transform(8, 8)).fill(0, 4, batch[1]) == 1
    assert np.array_equal(batch[1].transpose(1, 2, 0), resized(numbers().images[4], 8, 8))
    assert (batch[[0, 2]] == 77).all()


TRANSFORMS: dict[str, CropTransform] = {
    "random_resized": CropTransform(32),
    "pad": CropTransform(32, crop="pad"),
    "eval": eval_transform(32),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_cached_pixels_give_the_same_samples(
    folder: FolderSource, transform: CropTransform
) -> None:
    """A sample is decoded once and kept; from then on its files may be gone, and every epoch is as
    without a cache.
    """
    plain = ImageDataset(folder, transform, OPTIONS, 32, 3)
    expected = [filled(plain, epoch, index) for epoch in range(3) for index in range(5)]
    cache = Kept()
    cached = ImageDataset(folder, transform, OPTIONS, 32, 3, cache)
    begun = [filled(cached, 0, index) for index in range(5)]
    for index in range(5):
        Path(folder.where(index)).unlink()
    later = [filled(cached, epoch, index) for epoch in range(1, 3) for index in range(5)]
    assert np.array_equal(begun + later, expected)
    assert cached.fill(1, 4, np.empty((3, 32, 32), np.uint8)) == plain.source.labels[4]


def test_a_cached_sample_is_read_and_not_decoded(folder: FolderSource) -> None:
    """The time of a look into the cache is part of reading; nothing is decoded."""
    images = ImageDataset(folder, CropTransform(32), OPTIONS, 32, 0, Kept())
    out = np.empty((3, 32, 32), np.uint8)
    told: list[list[str]] = [[], []]
    for laps in told:
        images.fill(0, 1, out, laps.append)
    assert told == [["read", "decode", "resize"], ["read", "resize"]]


@pytest.mark.parametrize("kind", ["files", "cached files", "arrays"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_many_threads_fill_one_batch(
    folder: FolderSource, transform: CropTransform, kind: str
) -> None:
    """Any number of threads at once give what one gives."""
    source = numbers(5) if kind == "arrays" else folder
    samples = [(epoch, index) for epoch in range(12) for index in range(5)]
    alone = ImageDataset(source, transform, OPTIONS, 32, 1)
    images = ImageDataset(
        source, transform, OPTIONS, 32, 1, Kept() if kind == "cached files" else None
    )
    batch = np.empty((len(samples), 32, 32, 3), np.uint8).transpose(0, 3, 1, 2)
    with ThreadPoolExecutor(8) as threads:
        labels = list(
            threads.map(
                lambda row, sample: images.fill(*sample, batch[row]), range(len(samples)), samples
            )
        )
    assert labels == [alone.source.labels[index] for _, index in samples]
    assert np.array_equal(batch, [filled(alone, *sample) for sample in samples])


def test_memory_does_not_grow(tmp_path: Path) -> None:
    """A thread that has decoded a large image gives its memory back, and what it does to small or
    damaged ones adds nothing.
    """
    image = photograph("china")
    large = 3600
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "0.jpg")
    image.resize((large, large)).save(tmp_path / "a" / "1.jpg")
    (tmp_path / "a" / "2.jpg").write_bytes((tmp_path / "a" / "0.jpg").read_bytes()[:-2000])
    images = ImageDataset(FolderSource(tmp_path), CropTransform(32), OPTIONS, 32, 0)
    out = np.empty((3, 32, 32), np.uint8)
    process = psutil.Process()
    held = []

    def fill_all() -> None:
        for epoch in range(60):
            images.fill(epoch, 0, out)
            with pytest.raises(BadSample, match="JPEG"):
                images.fill(epoch, 2, out)
        held.append(process.memory_info().rss)
        images.fill(0, 1, out)
        held.append(process.memory_info().rss)

    with ThreadPoolExecutor(1) as thread:
        for _ in range(3):
            thread.submit(fill_all).result()
    assert held[1] - held[0] < large * large  # a third of what its pixels take
    assert held[-1] - held[1] < 4 << 20


@pytest.mark.parametrize(
    "error", [StopIteration(), ValueError("odd"), KeyError("k"), OSError(5, "I/O")]
)
def test_every_fault_in_a_sample_is_a_bad_sample(error: Exception) -> None:
    """Whatever a transform raises comes out as one type that names the sample and the original."""
    with pytest.raises(BadSample, match=rf"^numbers\[2\]: {type(error).__name__}") as caught:
        filled(dataset(Failing(error)), 0, 2)
    assert caught.value.__cause__ is error


def test_a_fault_of_the_source_is_a_bad_sample() -> None:
    """Reading is covered as transforming is."""

    class Broken(ArraySource):
        def read(self, i: int) -> tuple[np.ndarray, int]:
            raise StopIteration

    source = numbers()
    broken = Broken(source.images, source.labels, source.classes, "broken")
    with pytest.raises(BadSample, match=r"^broken\[0\]: StopIteration"):
        filled(dataset(source=broken), 0, 0)


def test_a_bad_sample_keeps_its_reason(folder: FolderSource) -> None:
    """A refusal of the decoder is passed on, not wrapped, and what it refused is not kept."""
    Path(folder.where(0)).write_bytes(b"\xff\xd8\xff and no more")
    cache = Kept()
    with pytest.raises(BadSample, match=r"cat/0\.jpg: cannot be decoded"):
        filled(ImageDataset(folder, eval_transform(8), OPTIONS, 8, 0, cache), 0, 0)
    assert not cache.pixels


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=["interrupt", "memory"])
def test_what_is_no_fault_of_the_sample_passes(error: BaseException) -> None:
    """Ctrl-C and want of memory are not told as a bad sample."""
    with pytest.raises(type(error)):
        filled(dataset(Failing(error)), 0, 0)


@pytest.mark.parametrize("encoded", [True, False], ids=["files", "arrays"])
def test_laps_are_told_in_order_and_change_nothing(folder: FolderSource, encoded: bool) -> None:
    """fill() tells the end of its stages, in the order in which it names them, and gives the same
    pixels untimed.
    """
    images = dataset(source=folder if encoded else None)
    told: list[str] = []
    out = np.empty((3, 8, 8), np.uint8)
    assert images.fill(1, 4, out, told.append) == images.source.labels[4]
    assert tuple(told) == images.stages == ("read", "decode", "resize")
    assert np.array_equal(out, filled(images, 1, 4))


def test_the_stages_of_a_transform_of_one_s_own_are_named() -> None:
    """Between reading, decoding and the batch come the stages that the transform names."""
    assert dataset(Failing(ValueError())).stages == ("read", "decode", "fail")
