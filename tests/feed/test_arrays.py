"""The arrays form: the batches of the processes form, from images that are read once and lie in
memory.
"""

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
from emulated import Gpu
from emulator import emulated
from PIL import Image, ImageOps
from samples import random_states

from harness.data.decode import DecodeOptions
from harness.data.images import ImageDataset
from harness.data.storage import ArraySource, Source, Subset
from harness.data.transforms import TrainTransform
from harness.feed import pixels
from harness.feed.arrays import ArrayFeed
from harness.feed.interface import HostBatch, in_form
from harness.feed.order import Cursor, Order, ProbeOrder
from harness.feed.pixels import InMemoryImages, has_one_form, pixel_bytes
from harness.feed.processes import ProcessFeed
from harness.runtime.errors import BadSample, LoaderError
from harness.runtime.seeding import SampleRng

LENGTH = 19
SIDE = 8
ORDER = Order(LENGTH, 4, seed=3)


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


def dataset(source: Source, transform: TrainTransform | None = None) -> ImageDataset:
    return ImageDataset(
        source, transform or TrainTransform(SIDE, crop="pad", pad=2), DecodeOptions(), SIDE, seed=5
    )


def feed(images: ImageDataset, order: Order = ORDER, **more: object) -> ArrayFeed:
    return ArrayFeed(images, order, samples.settings(batch_size=order.batch_size), **more)


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
        pytest.param(TrainTransform(SIDE, crop="pad", pad=2), id="pad"),
        pytest.param(TrainTransform(SIDE, crop="pad", pad=0), id="no pad"),
        pytest.param(TrainTransform(SIDE, crop="pad", pad=11, hflip=1.0), id="more pad than image"),
        pytest.param(TrainTransform(SIDE, crop="center"), id="center"),
        pytest.param(
            TrainTransform(SIDE, crop="center", resize=9, hflip=0.0), id="center of a resized image"
        ),
        pytest.param(samples.eval_transform(SIDE), id="evaluation"),
        pytest.param(samples.eval_transform(SIDE, resize=10), id="evaluation of a resized image"),
    ],
)
def test_batches_are_bitwise_those_of_processes(
    source: Callable[[], Source], transform: TrainTransform
) -> None:
    """Images, labels and indices, in the first epoch, later ones and one that comes again, short
    batches too.
    """
    images = dataset(source(), transform)
    expected = ProcessFeed(images, ORDER, samples.settings())
    assert_same(epochs(feed(images), 0, 1, 7, 1), epochs(expected, 0, 1, 7, 1))


def test_pixels_are_those_of_pillow() -> None:
    """Pad with zeros, cut out and mirror as PIL does, with the sample's own numbers: top, left,
    mirrored.
    """
    images = dataset(arrays())
    pad = 2
    for batch in epochs(feed(images), 4):
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            rng = SampleRng(5, 4, index)
            top = rng.randrange(2 * pad + 1)
            left = rng.randrange(2 * pad + 1)
            mirrored = rng.random() < 0.5
            whole = ImageOps.expand(Image.fromarray(images.source.read(index)[0]), pad)
            cut = whole.crop((left, top, left + SIDE, top + SIDE))
            expected = np.asarray(ImageOps.mirror(cut) if mirrored else cut)
            assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("source", [arrays, Files], ids=["arrays", "files"])
def test_a_device_s_way_makes_the_same_batches(source: Callable[[], Source]) -> None:
    """All samples at once, as on a GPU, gives what one by one gives on the host; what goes there is
    page-locked.
    """
    images = dataset(source())
    expected = epochs(feed(images), 0, 3)
    with emulated(Gpu()) as gpu:
        made = feed(images, pixels=InMemoryImages(images, gpu.device))
        assert made.on_device
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
        made = feed(images, pixels=InMemoryImages(images, gpu.device))
        assert made.on_device is there
        assert_same(epochs(made, 0), epochs(feed(images), 0))
    assert ("arrays lie on the host: 0.0 GB are more than half" in caplog.text) is not there


def test_a_feed_s_own_images_are_the_host_s() -> None:
    """Without pixels that were made for a device nothing is put there."""
    with emulated(Gpu()):
        assert not feed(dataset(arrays())).on_device


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch has no team of threads here")
def test_making_batches_starts_no_threads() -> None:
    """Torch's own would wait for processors that the step has: a thread that makes batches is alone
    with it.
    """
    images = ImageDataset(arrays(64, 256), samples.eval_transform(64), DecodeOptions(), 64, seed=5)
    started = []

    def make() -> None:
        before = len(os.listdir("/proc/self/task"))
        epochs(feed(images, Order(256, 128)), 0)
        started.append(len(os.listdir("/proc/self/task")) - before)

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    assert started == [0]


def test_files_are_read_once() -> None:
    """By the first pass that asks for them; those that its last short batch left out, by a later
    one.
    """
    source = Files()
    made = feed(dataset(source), Order(LENGTH, 4, seed=3, drop_last=True))
    epochs(made, 0)
    assert sorted(source.reads) == [0] * 3 + [1] * 16
    epochs(made, 1, 2, 3)
    assert source.reads == [1] * LENGTH


def test_what_is_there_is_no_matter_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sees its share of the set alone; a later pass over what it has seen needs no thread,
    and never waits.
    """
    source = Files()
    made = feed(dataset(source), Order(LENGTH, 4, shuffle=False, world_size=2))
    first = epochs(made, 0)
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    assert [batch is not None for batch in made.polled(0.01)] == [True] * len(first)
    assert sum(source.reads) == sum(len(batch.labels) for batch in first) < LENGTH


def test_of_a_batch_only_what_is_missing_is_read() -> None:
    """Batches that are partly there come in their turn, between those that are there and those that
    are not.
    """
    source = Files()
    images = dataset(source)
    shared = InMemoryImages(images)
    epochs(feed(images, Order(LENGTH, 7, seed=3, drop_last=True, world_size=2), pixels=shared), 0)
    assert_same(
        epochs(feed(images, pixels=shared), 1),
        epochs(ProcessFeed(dataset(Files()), ORDER, samples.settings()), 1),
    )
    assert source.reads == [1] * LENGTH


def test_a_feed_that_is_closed_amid_a_pass_tells() -> None:
    """What is not there can no longer be read."""
    made = feed(dataset(Files()))
    batches = iter(made)
    next(batches)
    made.close()
    with pytest.raises(LoaderError, match="ended after 1 of 5 batches"):
        list(batches)


def test_readers_that_cannot_start_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a way out that arrays allow."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    text = (
        r"^0 threads load, and not 3: can't start new thread; allow more \(ulimit -u\), or set "
        r"loader.backend=processes loader.num_workers=0$"
    )
    with pytest.raises(LoaderError, match=text):
        epochs(feed(dataset(Files()), readers=3), 0)


def test_a_read_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a way to find the sample that arrays allow."""
    gate = threading.Event()
    source = Files()
    monkeypatch.setattr("harness.feed.threads._JOIN_S", 0.05)
    monkeypatch.setattr(source, "read", lambda _: gate.wait(10.0))
    made = ArrayFeed(dataset(source), ORDER, samples.settings(timeout_s=0.05))
    with pytest.raises(
        LoaderError, match="find the sample with loader.backend=processes loader.num_workers=0$"
    ):
        epochs(made, 0)
    gate.set()
    assert samples.comes_true(lambda: samples.at_work() == [])


def test_a_read_that_hangs_once_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With loader.restart_workers what was read stays, and new threads read on."""
    gate = threading.Event()
    source = Files()
    read = source.read

    def hangs_once(i: int) -> tuple[bytes, int]:
        first = not source.reads[i]
        given = read(i)
        if i == 7 and first:
            gate.wait(30.0)
        return given

    monkeypatch.setattr("harness.feed.threads._JOIN_S", 0.05)
    monkeypatch.setattr(source, "read", hangs_once)
    made = ArrayFeed(dataset(source), ORDER, samples.settings(timeout_s=1.0))
    made.restarts = True
    assert_same(epochs(made, 0), epochs(feed(dataset(Files())), 0))
    assert source.reads[7] == 2
    gate.set()
    assert samples.comes_true(lambda: samples.at_work() == [])


def test_feeds_may_share_what_was_read() -> None:
    """A second feed over the same pixels reads nothing."""
    source = Files()
    images = dataset(source)
    shared = InMemoryImages(images)
    first, second = (epochs(feed(images, pixels=shared), 0) for _ in range(2))
    assert_same(second, first)
    assert source.reads == [1] * LENGTH


def test_a_sample_that_cannot_be_read_is_told_when_it_is_due() -> None:
    """With the text of the other forms, after the batches before it, and again in the next pass."""
    bad = int(ORDER.indices(0)[9])
    images = dataset(Files((bad,)))
    made = feed(images)
    for _ in range(2):
        batches = iter(made)
        assert len(list(islice(batches, 2))) == 2
        with pytest.raises(BadSample, match=f"^{bad}.png: empty file$"):
            next(batches)


def test_a_pass_may_be_left_and_begun_anew() -> None:
    """What came before is kept; the next pass is whole."""
    source = Files()
    made = feed(dataset(source))
    batches = iter(made)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    made.close()
    assert_same(
        epochs(made, 0), epochs(ProcessFeed(dataset(Files()), ORDER, samples.settings()), 0)
    )
    assert all(count in (1, 2) for count in source.reads)


def test_a_primed_pass_has_begun() -> None:
    """Threads read ahead of the first batch that is asked for; there is nothing to do for arrays,
    or once all was read.
    """
    source = Files()
    made = feed(dataset(source))
    made.prime(1)
    assert samples.comes_true(lambda: sum(source.reads) > 0)
    primed = epochs(made, 1)
    made.prime(2)
    assert_same(primed, epochs(ProcessFeed(dataset(Files()), ORDER, samples.settings()), 1))
    assert source.reads == [1] * LENGTH
    feed(dataset(arrays())).prime(0)


def test_nothing_but_files_is_waited_for() -> None:
    """polled() gives batches alone where the images lie in arrays."""
    assert [batch is not None for batch in feed(dataset(arrays())).polled(0.01)] == [True] * 5


def test_a_probes_order_goes_on_without_an_end() -> None:
    """Samples come in the order of the cursor, from files as from arrays."""
    for source in (arrays(), Files()):
        images = dataset(source)
        cursor = Cursor()
        made = ArrayFeed(images, ProbeOrder(ORDER, cursor), samples.settings())
        batches = iter(made)
        given = [batch.indices.numpy() for batch in islice(batches, 12)]
        batches.close()  # type: ignore[attr-defined]
        wanted = islice(ProbeOrder(ORDER, Cursor()).batches(0), 12)
        assert all(
            np.array_equal(found, expected) for found, expected in zip(given, wanted, strict=True)
        )
        assert 12 <= cursor.asked <= 12 + 4


def test_samples_are_counted_one_by_one_and_by_stage() -> None:
    """Each sample once, with what its batch took; there is one stage beside the batch's own."""
    made = feed(dataset(arrays()))
    made.times_samples = True
    epochs(made, 0, 1)
    work = made.meter.work()
    totals = made.meter and made.meter.read()
    assert totals is not None
    assert (work.samples, work.moved, totals.samples, totals.batches) == (
        2 * LENGTH,
        1,
        2 * LENGTH,
        10,
    )
    assert 0 < work.wall_s <= totals.busy_s
    assert totals.stages["gather"].wall_s > 0.5 * totals.busy_s


def test_the_meter_knows_what_reading_took() -> None:
    """Each sample counts once, read or not, and a pass that reads shows what that takes."""
    made = feed(dataset(Files()), readers=2)
    epochs(made, 0)
    assert made.meter is not None
    first = made.meter.read()
    assert (first.samples, first.batches) == (LENGTH, 5)
    assert first.stages["decode"].wall_s > 0 and first.stages["gather"].wall_s > 0
    epochs(made, 1)
    later = made.meter.read().since(first)
    assert (later.samples, later.batches, later.stages["decode"].wall_s) == (LENGTH, 5, 0.0)


def test_a_pass_leaves_the_global_generators_alone() -> None:
    """Python's, numpy's and torch's random states are after a pass what they were before."""
    before = random_states()
    epochs(feed(dataset(arrays())), 0)
    assert random_states() == before


def test_batches_are_in_memory_of_their_own() -> None:
    """A consumer may keep them, and change them."""
    made = feed(dataset(arrays()))
    first = epochs(made, 0)
    for batch in epochs(made, 0):
        batch.images.zero_()
    assert_same(epochs(made, 0), first)


def test_neighbours_share_the_zeros_between_them() -> None:
    """Each image takes one border of zeros, the last one two; without a crop there are none."""
    assert pixel_bytes(dataset(arrays())) == 3 * ((LENGTH * 10 + 2) * 10 + 2)
    assert pixel_bytes(dataset(arrays(), samples.eval_transform(SIDE))) == 3 * LENGTH * SIDE**2


def test_what_is_cut_from_whole_images_cannot_be_served() -> None:
    """Neither can what is no data set of images."""
    assert not has_one_form(dataset(arrays(), TrainTransform(SIDE)))
    assert not has_one_form(samples.Noise(4))


def test_settings_of_arrays_have_no_workers() -> None:
    """Whatever they were in another form; they have what they had otherwise."""
    settings = in_form(samples.settings(3, persistent_workers=True), "arrays")
    assert (
        settings.backend,
        settings.num_workers,
        settings.prefetch_factor,
        settings.persistent_workers,
    ) == (
        "arrays",
        0,
        None,
        False,
    )
    assert settings == in_form(samples.settings(0), "arrays")


def test_too_little_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of any other allocation, with the size."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pixels.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"images of 0\.0 MB \(Cannot allocate memory\)"):
        next(iter(feed(dataset(arrays()))))


def test_a_gpu_that_is_full_after_all_leaves_it_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is taken when the room is checked, not at the first batch."""

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    images = dataset(arrays())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        with emulated(Gpu()) as gpu:
            shared = InMemoryImages(images, gpu.device)
    assert not shared.on_device
    assert_same(epochs(feed(images, pixels=shared), 0), epochs(feed(images), 0))


def test_images_and_labels_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of a batch, where both are copied."""
    pinned: list[torch.dtype] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.dtype)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    pixels = InMemoryImages(dataset(arrays()))
    pixels.batch(0, np.arange(4), pin_memory=False)
    assert pinned == []
    pixels.batch(0, np.arange(4), pin_memory=True)
    assert pinned == [torch.uint8, torch.int64]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
class TestOnAGpu:
    """The whole set and the work on it on the device."""

    @pytest.mark.parametrize("source", [arrays, Files], ids=["arrays", "files"])
    @pytest.mark.parametrize("crop", ["pad", "center"])
    def test_batches_are_bitwise_the_hosts(self, source: Callable[[], Source], crop: str) -> None:
        """They lie on the device, labels too, and hold the same pixels."""
        images = dataset(source(), TrainTransform(SIDE, crop=crop, pad=2))
        device = torch.device("cuda", 0)
        made = feed(images, pixels=InMemoryImages(images, device))
        found = epochs(made, 0, 3)
        assert made.on_device and all(
            batch.images.device == batch.labels.device == device for batch in found
        )
        assert_same(
            [b._replace(images=b.images.cpu(), labels=b.labels.cpu()) for b in found],
            epochs(feed(images), 0, 3),
        )

    def test_memory_is_taken_at_once(self) -> None:
        """So that a second set sees what the first one leaves."""
        images = dataset(arrays())
        before = torch.cuda.memory_allocated()
        kept = InMemoryImages(images, torch.device("cuda", 0))
        assert kept.on_device and torch.cuda.memory_allocated() - before >= pixel_bytes(images)

    def test_batches_of_the_host_are_pinned(self) -> None:
        """Images and labels."""
        images, labels = InMemoryImages(dataset(arrays())).batch(0, np.arange(4), pin_memory=True)
        assert images.is_pinned() and labels.is_pinned()

    def test_no_step_waits_for_the_device(self) -> None:
        """Making batches of images that are there is a matter of launches alone."""
        images = dataset(arrays())
        made = feed(images, pixels=InMemoryImages(images, torch.device("cuda", 0)))
        epochs(made, 0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            epochs(made, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_set_that_is_too_large_stays_on_the_host(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of which more than half of the free memory would be taken."""
        images = dataset(arrays())
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda _: (2 * pixel_bytes(images) - 1, 10**9)
        )
        assert not feed(images, pixels=InMemoryImages(images, torch.device("cuda", 0))).on_device
