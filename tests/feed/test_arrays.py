"""The arrays backend: the batches of processes, from images that lie in memory."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import samples
import torch
from emulator import Gpu, emulated
from PIL import Image

from harness.config import Config, DataConfig
from harness.data.datasets import FakeDataset, ImageDataset, Splits
from harness.data.storage import ArraySource, Source, Subset
from harness.data.transforms import CropTransform
from harness.feed.base import HostBatch
from harness.feed.feeds import ArrayFeed, Feeds, InMemoryImages, SyntheticFeed, pixel_bytes
from harness.feed.order import Cursor, Order, ProbeOrder
from harness.feed.processes import ProcessFeed
from harness.runtime.distributed import World
from harness.runtime.errors import BadSample

LENGTH = 19
SIDE = 8
ORDER = Order(LENGTH, 4, seed=3)
READING = samples.settings(2)


def arrays(side: int = SIDE, length: int = LENGTH) -> ArraySource:
    """Random pixels, mapped read-only as CIFAR's are."""
    images = np.random.default_rng(0).integers(0, 256, (length, side, side, 3), np.uint8)
    images.flags.writeable = False
    return ArraySource(images, np.arange(length) % 10, map(str, range(10)), "noise")


class Files:
    """PNG files in memory; counts how often each is read, and refuses ``bad`` ones."""

    classes = ("a", "b")

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad, self.labels, self.reads = bad, np.arange(LENGTH) % 2, [0] * LENGTH
        self._files = []
        for image in arrays(12).images:
            Image.fromarray(image).save(file := io.BytesIO(), "PNG")
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return LENGTH

    def where(self, i: int) -> str:
        return f"{i}.png"

    def read(self, i: int) -> tuple[bytes, int]:
        self.reads[i] += 1
        if i in self.bad:
            raise BadSample(self.where(i), "empty file")
        return self._files[i], int(self.labels[i])


def dataset(source: Source, transform: CropTransform | None = None) -> ImageDataset:
    return ImageDataset(
        source, transform or CropTransform(SIDE, crop="pad", pad=2), DataConfig(), SIDE, seed=5
    )


def feed(
    images: ImageDataset, pixels: InMemoryImages | None = None, order: Order = ORDER
) -> ArrayFeed:
    return ArrayFeed(images, order, samples.settings(batch_size=order.batch_size), pixels)


def epochs(made: ArrayFeed | ProcessFeed, *chosen: int) -> list[HostBatch]:
    batches = []
    for epoch in chosen:
        made.set_epoch(epoch)
        batches += list(made)
    return batches


def assert_same(found: list[HostBatch], expected: list[HostBatch]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))
        assert [tensor.dtype for tensor in one[:3]] == [torch.uint8, torch.int64, torch.int64]
        assert one.images.is_contiguous(memory_format=torch.channels_last)
        assert (one.failures, one.epoch) == ((), other.epoch)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(arrays, id="arrays"),
        pytest.param(
            lambda: Subset(Subset(arrays(length=40), np.arange(39, 9, -1)), np.arange(3, 22)),
            id="parts of arrays",
        ),
        pytest.param(lambda: arrays(11), id="arrays of another size"),
        pytest.param(Files, id="files"),
    ],
)
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(CropTransform(SIDE, crop="pad", pad=2), id="pad"),
        pytest.param(CropTransform(SIDE, crop="pad", pad=0), id="no pad"),
        pytest.param(CropTransform(SIDE, crop="pad", pad=11, hflip=1.0), id="more pad than image"),
        pytest.param(CropTransform(SIDE, crop="center"), id="center"),
        pytest.param(CropTransform(SIDE, crop="pad", pad=2, vflip=0.5), id="vertical flip"),
        pytest.param(
            CropTransform(SIDE, crop="center", resize=9, hflip=0.0), id="center of a resized image"
        ),
        pytest.param(samples.eval_transform(SIDE), id="evaluation"),
        pytest.param(samples.eval_transform(SIDE, resize=10), id="evaluation of a resized image"),
    ],
)
def test_batches_are_bitwise_those_of_processes(
    source: Callable[[], Source], transform: CropTransform
) -> None:
    """Images, labels and indices, in the first epoch, later ones and one that comes again, short
    batches too.
    """
    images = dataset(source(), transform)
    expected = ProcessFeed(images, ORDER, samples.settings())
    assert_same(epochs(feed(images), 0, 1, 7, 1), epochs(expected, 0, 1, 7, 1))


@pytest.mark.parametrize("source", [arrays, Files], ids=["arrays", "files"])
def test_a_device_s_way_makes_the_same_batches(source: Callable[[], Source]) -> None:
    """All samples at once, as on a GPU, gives what one by one gives on the host; what goes there is
    page-locked.
    """
    images = dataset(source(), CropTransform(SIDE, crop="pad", pad=2, vflip=0.5))
    expected = epochs(feed(images), 0, 3)
    with emulated(Gpu()) as gpu:
        made = feed(images, InMemoryImages(images, READING, gpu.device))
        assert made.made_on_device
        assert_same(epochs(made, 0, 3), expected)
    assert gpu.pinned


@pytest.mark.parametrize(("less", "there"), [(0, True), (1, False)], ids=["just", "not quite"])
def test_the_device_holds_what_half_of_its_free_memory_takes(
    caplog: pytest.LogCaptureFixture, less: int, there: bool
) -> None:
    """What torch has reserved is the network's and does not count; without room the host serves,
    and the log says so.
    """
    images = dataset(arrays())
    with (
        emulated(Gpu(free=2 * pixel_bytes(images) - less)) as gpu,
        caplog.at_level("INFO", "wellfed"),
    ):
        made = feed(images, InMemoryImages(images, READING, gpu.device))
        assert made.made_on_device is there
        assert_same(epochs(made, 0), epochs(feed(images), 0))
    assert ("arrays stay on the host: 0.0 GB" in caplog.text) is not there


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch has no team of threads here")
def test_making_batches_starts_no_threads() -> None:
    """Torch's own would wait for processors that the step has: a thread that makes batches is alone
    with it.
    """
    images = ImageDataset(arrays(64, 256), samples.eval_transform(64), DataConfig(), 64, seed=5)
    started = []

    def make() -> None:
        before = len(os.listdir("/proc/self/task"))
        epochs(feed(images, order=Order(256, 128)), 0)
        started.append(len(os.listdir("/proc/self/task")) - before)

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    assert started == [0]


def test_samples_are_counted_one_by_one_and_by_stage() -> None:
    """Each sample once, with what its batch took; there is one stage beside the batch's own."""
    made = feed(dataset(arrays()))
    made.times_samples = True
    epochs(made, 0, 1)
    work = made.meter.work()
    totals = made.meter and made.meter.read()
    assert totals is not None
    assert (work.samples, work.moved, totals.samples) == (2 * LENGTH, 1, 2 * LENGTH)
    assert 0 < work.wall_s <= totals.busy_s
    assert totals.stages["gather"].wall_s > 0.5 * totals.busy_s


def test_batches_are_in_memory_of_their_own() -> None:
    """A consumer may keep them, and change them."""
    made = feed(dataset(arrays()))
    first = epochs(made, 0)
    for batch in epochs(made, 0):
        batch.images.zero_()
    assert_same(epochs(made, 0), first)


def test_neighbors_share_the_zeros_between_them() -> None:
    """Each image takes one border of zeros, the last one two; without a crop there are none."""
    assert pixel_bytes(dataset(arrays())) == 3 * ((LENGTH * 10 + 2) * 10 + 2)
    assert pixel_bytes(dataset(arrays(), samples.eval_transform(SIDE))) == 3 * LENGTH * SIDE**2


def test_images_are_read_once_and_may_be_shared() -> None:
    """Each image of the files is read once, whatever feeds there are and wherever they begin."""
    source = Files()
    images = dataset(source)
    shared = InMemoryImages(images, READING)
    batches = iter(feed(images, shared))
    next(batches)
    assert_same(epochs(feed(images, shared), 3, 0), epochs(feed(dataset(Files())), 3, 0))
    assert source.reads == [1] * LENGTH


def test_an_image_that_cannot_be_read_is_told() -> None:
    """As by the other backends, when the images are read."""
    with pytest.raises(BadSample, match=r"^9.png: empty file$"):
        feed(dataset(Files((9,))))


def test_a_probe_s_order_goes_on_without_an_end() -> None:
    """Samples come in the order of the cursor, and are asked for when they are wanted."""
    cursor = Cursor()
    made = ArrayFeed(dataset(arrays()), ProbeOrder(ORDER, cursor), samples.settings())
    given = [batch.indices.numpy() for batch in islice(made, 12)]
    wanted = islice(ProbeOrder(ORDER, Cursor()).batches(0), 12)
    assert all(np.array_equal(one, other) for one, other in zip(given, wanted, strict=True))
    assert cursor.asked == 12


def test_images_and_labels_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of a batch, where both are copied."""
    pinned: list[torch.dtype] = []
    pin = lambda tensor: (pinned.append(tensor.dtype), tensor)[1]
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for wanted in (False, True):
        settings = samples.settings(pin_memory=wanted)
        images = dataset(arrays())
        next(iter(ArrayFeed(images, ORDER, settings, InMemoryImages(images, READING))))
        assert pinned == [torch.uint8, torch.int64] * wanted


def synthetic() -> SyntheticFeed:
    fake = FakeDataset(10, 6)
    world = World(0, 1, 0, 1, torch.device("cpu"))
    feeds = Feeds(Splits(fake, fake, ("a", "b", "c"), "fake", ""), Config(), world)
    feed = feeds.val(samples.settings())
    assert isinstance(feed, SyntheticFeed)
    return feed


def test_batches_have_the_shapes_of_a_real_feed() -> None:
    """uint8 images [N, 3, S, S] and int64 labels below the number of classes, the last batch as
    short as it would be.
    """
    batches = list(synthetic())
    assert [tuple(batch.images.shape) for batch in batches] == [
        (4, 3, 6, 6),
        (4, 3, 6, 6),
        (2, 3, 6, 6),
    ]
    assert {(batch.images.dtype, batch.labels.dtype) for batch in batches} == {
        (torch.uint8, torch.int64)
    }
    assert all(0 <= label < 3 for batch in batches for label in batch.labels.tolist())
    assert sorted(torch.cat([batch.indices for batch in batches]).tolist()) == list(range(10))


def test_the_same_memory_serves_every_batch() -> None:
    """Nothing is made or copied per batch."""
    feed = synthetic()
    assert {batch.images.data_ptr() for _ in range(2) for batch in feed} == {
        next(iter(feed)).images.data_ptr()
    }
    assert feed.made_on_device


def test_there_is_nothing_to_wait_for() -> None:
    """A polled pass is a plain one, primed or not, and no worker ever lives."""
    feed = synthetic()
    feed.prime(0)
    polled = [batch for batch in feed.polled(0.001) if batch is not None]
    assert [batch.indices.tolist() for batch in polled] == [
        batch.indices.tolist() for batch in feed
    ]
    assert feed.worker_pids == ()


class TestOnAGpu:
    """The whole set and the work on it on the device."""

    @pytest.mark.cuda_values
    @pytest.mark.parametrize("source", [arrays, Files], ids=["arrays", "files"])
    @pytest.mark.parametrize("crop", ["pad", "center"])
    def test_batches_are_bitwise_the_hosts(self, source: Callable[[], Source], crop: str) -> None:
        """They lie on the device, labels too, and hold the same pixels."""
        images = dataset(source(), CropTransform(SIDE, crop=crop, pad=2, vflip=0.5))
        device = torch.device("cuda", 0)
        made = feed(images, InMemoryImages(images, READING, device))
        found = epochs(made, 0, 3)
        assert made.made_on_device and all(
            batch.images.device == batch.labels.device == device for batch in found
        )
        assert_same(
            [b._replace(images=b.images.cpu(), labels=b.labels.cpu()) for b in found],
            epochs(feed(images), 0, 3),
        )

    @pytest.mark.cuda_order
    def test_memory_is_taken_at_once(self) -> None:
        """So that a second set sees what the first one leaves."""
        images = dataset(arrays())
        before = torch.cuda.memory_allocated()
        kept = InMemoryImages(images, READING, torch.device("cuda", 0))
        assert kept.on_device and torch.cuda.memory_allocated() - before >= pixel_bytes(images)

    @pytest.mark.cuda_order
    def test_no_step_waits_for_the_device(self) -> None:
        """Making batches of images that are there is a matter of launches alone."""
        images = dataset(arrays())
        made = feed(images, InMemoryImages(images, READING, torch.device("cuda", 0)))
        epochs(made, 0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            epochs(made, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.cuda_order
    def test_a_set_that_is_too_large_stays_on_the_host(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of which more than half of the free memory would be taken."""
        images = dataset(arrays())
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda _: (2 * pixel_bytes(images) - 1, 10**9)
        )
        kept = InMemoryImages(images, READING, torch.device("cuda", 0))
        assert not kept.on_device and not feed(images, kept).made_on_device
