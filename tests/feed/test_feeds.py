"""A rank's feeds: which backend, which order, and what probes have read."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import samples
import torch

from harness.config import (
    BackendName,
    Config,
    ConfigError,
    Crop,
    LoaderConfig,
    TunerName,
    ValLoaderConfig,
)
from harness.data.datasets import FakeDataset, Splits
from harness.data.decode import DecodeOptions
from harness.data.images import ImageDataset
from harness.data.storage import ArraySource
from harness.data.transforms import TrainTransform
from harness.feed.arrays import ArrayFeed, SyntheticFeed
from harness.feed.feeds import BACKENDS, Feeds
from harness.feed.interface import Backend
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed
from harness.runtime import limits
from harness.runtime.distributed import World
from harness.runtime.limits import Limits

CPU = World(0, 1, 0, 1, torch.device("cpu"))
SETTINGS = samples.settings()  # batches of 4


@pytest.fixture
def feeds() -> Feeds:
    """Feeds over 20 training and 6 validation samples."""
    config = Config()
    config.loader.batch_size = 4
    train = samples.Noise(20)
    val = samples.Noise(6)
    return Feeds(Splits(train, val, ("a",), "noise", ""), config, CPU)  # type: ignore[arg-type]


def indices(feed: Backend, batches: int | None = None) -> list[int]:
    return [index for batch in islice(feed, batches) for index in batch.indices.tolist()]


def test_a_batch_larger_than_the_set_is_refused(feeds: Feeds) -> None:
    """The line has both numbers and the ways out; a short batch is one of them."""
    feeds.config.loader.batch_size = 21
    settings = samples.settings(batch_size=21)
    with pytest.raises(ConfigError, match=r"an update takes 21 images, and there are 20 .*lower"):
        feeds.train(settings)
    feeds.config.loader.drop_last = False
    assert len(feeds.train(settings)) == 1


def test_training_and_validation_replace_lost_workers(feeds: Feeds) -> None:
    """As loader.restart_workers has it; a probe is to see what its settings do."""
    feeds.config.loader.restart_workers = True
    assert feeds.train(SETTINGS).restarts and feeds.val(SETTINGS).restarts
    assert not feeds.probe(SETTINGS).restarts


def test_what_a_probe_s_workers_have_asked_for_counts_as_read(feeds: Feeds) -> None:
    """Batches in flight when a probe ends are not asked for by the next one."""
    feed = feeds.probe(samples.settings(1, prefetch_factor=2))
    taken = indices(feed, 1)
    feed.close()
    assert feeds.cursor.asked == 3
    rest = indices(feeds.probe(SETTINGS), 2)
    assert len(rest) == 8 and set(taken).isdisjoint(rest)


def test_probes_leave_training_alone(feeds: Feeds) -> None:
    """The training feed's batches are the same before and after a probe."""

    def images() -> torch.Tensor:
        return torch.cat([batch.images for batch in feeds.train(SETTINGS)])

    before = images()
    indices(feeds.probe(SETTINGS), 3)
    assert torch.equal(images(), before)


def test_a_probe_counts_single_samples(feeds: Feeds) -> None:
    """What the probe's samples took is in its meter, where that is asked for; training counts
    none.
    """
    feed = feeds.probe(SETTINGS)
    feed.times_samples = True
    indices(feed, 2)
    assert feed.meter.work().samples == 8
    train = feeds.train(SETTINGS)
    indices(train, 2)
    assert (train.meter.work().samples, train.meter.read().samples) == (0, 8)


def test_the_bytes_of_a_batch_are_its_tensors(feeds: Feeds) -> None:
    """batch_bytes is what one batch's tensors hold."""
    batch = next(iter(feeds.train(SETTINGS)))
    assert feeds.batch_bytes(SETTINGS) == sum(tensor.nbytes for tensor in batch[:3])


def test_the_backend_is_the_one_that_the_settings_name(
    feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class in BACKENDS is among the names to choose from, and made where settings name it."""

    class Other(ProcessFeed):
        pass

    assert feeds.backends == ("processes", "threads")
    monkeypatch.setitem(BACKENDS, "other", Other)
    assert feeds.backends == ("processes", "threads", "other")
    assert type(feeds.train(replace(SETTINGS, backend="other"))) is Other
    assert type(feeds.train(SETTINGS)) is ProcessFeed


def test_a_data_set_that_does_not_exist_is_made_on_the_device(feeds: Feeds) -> None:
    """Over a FakeDataset every feed, an endless probe too, is the synthetic one."""
    fake = Feeds(
        Splits(FakeDataset(8, 4, 2), FakeDataset(4, 4, 2), ("a", "b"), "fake", ""),
        feeds.config,
        CPU,
    )
    feed = fake.probe(SETTINGS)
    assert isinstance(feed, SyntheticFeed) and feed.made_on_device
    assert len(indices(feed, 5)) == 20
    assert fake.batch_bytes(SETTINGS) == 4 * (3 * 4 * 4 + 16)


LIMITS = Limits(cores=4.0, memory_bytes=10**9, shm_bytes=10**9, open_files=1000)
HELD = (
    3 * ((20 * 10 + 2) * 10 + 2) + 3 * 6 * 8**2
)  # of the sets below, the training images with their zeros


def small(backend: BackendName | None = None, crop: Crop = Crop.pad, **loader: object) -> Feeds:
    """Feeds over 20 training and 6 validation images in arrays."""
    config = Config(loader=LoaderConfig(batch_size=4, backend=backend, **loader))  # type: ignore

    def images(length: int, transform: TrainTransform) -> ImageDataset:
        pixels = np.random.default_rng(length).integers(0, 256, (length, 8, 8, 3), np.uint8)
        source = ArraySource(pixels, np.zeros(length), ("a",), "noise")
        return ImageDataset(source, transform, DecodeOptions(), 8, seed=0)

    train = images(20, TrainTransform(8, crop=crop.name, pad=2))
    return Feeds(
        Splits(train, images(6, samples.eval_transform(8)), ("a",), "noise", ""), config, CPU
    )


@pytest.mark.parametrize(
    ("backend", "crop", "expected"),
    [
        pytest.param(None, Crop.pad, ("processes", "threads", "arrays"), id="not said"),
        pytest.param(BackendName.auto, Crop.center, ("processes", "threads", "arrays"), id="auto"),
        pytest.param(
            BackendName.auto,
            Crop.random_resized,
            ("processes", "threads"),
            id="auto, with crops of all sizes",
        ),
        pytest.param(BackendName.threads, Crop.pad, ("threads",), id="threads"),
        pytest.param(BackendName.arrays, Crop.pad, ("arrays",), id="arrays"),
    ],
)
def test_the_backends_to_choose_from(
    backend: BackendName | None, crop: Crop, expected: tuple[str, ...]
) -> None:
    """The one that was named, or all that can serve the data set."""
    assert small(backend, crop).backends == expected


@pytest.mark.parametrize(
    ("loader", "backend", "workers"),
    [
        pytest.param({}, "threads", 4, id="nothing said"),
        pytest.param({"num_workers": 2}, "processes", 2, id="workers"),
        pytest.param({"num_workers": 0}, "processes", 0, id="no workers"),
        pytest.param(
            {"val": ValLoaderConfig(num_workers=1)}, "processes", 4, id="workers of validation"
        ),
        pytest.param({"backend": BackendName.processes}, "processes", 4, id="named"),
        pytest.param(
            {"backend": BackendName.auto, "autotune": True}, "threads", 4, id="before tuning"
        ),
    ],
)
def test_the_backend_before_any_tuning(loader: dict[str, Any], backend: str, workers: int) -> None:
    """The one that was named; processes where workers are; else threads."""
    settings = small(**loader).settings(LIMITS)
    assert (settings.backend, settings.num_workers) == (backend, workers)


def test_the_grid_begins_with_processes() -> None:
    """tuner=grid looks at processes alone."""
    feeds = small(None, autotune=True)
    feeds.config.tuner.name = TunerName.grid
    assert feeds.settings(LIMITS).backend == "processes"


@pytest.mark.parametrize(
    ("backend", "kind", "workers"),
    [
        pytest.param(BackendName.processes, ProcessFeed, 4, id="processes"),
        pytest.param(BackendName.threads, ThreadFeed, 4, id="threads"),
        pytest.param(BackendName.arrays, ArrayFeed, 0, id="arrays"),
    ],
)
def test_validation_takes_the_backend_of_training(
    backend: BackendName, kind: type[Backend], workers: int
) -> None:
    """Both feeds have one backend, with its workers, and give every sample."""
    feeds = small(backend)
    train = feeds.settings(LIMITS)
    val = feeds.val_settings(train)
    made = feeds.train(train), feeds.val(replace(val, num_workers=0, prefetch_factor=None))
    assert (train.num_workers, val.num_workers) == (workers, workers)
    assert {type(feed) for feed in made} == {kind}
    assert indices(made[1]) == list(range(6))


def test_arrays_have_no_validation_workers() -> None:
    """Whatever was said of them: the tuner may choose arrays where
    the user had thought of workers.
    """
    feeds = small(None)
    feeds.config.loader.val.num_workers, feeds.config.loader.val.prefetch_factor = 2, 3
    val = feeds.val_settings(replace(SETTINGS, backend="arrays"))
    assert (val.num_workers, val.prefetch_factor) == (0, None)


@pytest.mark.parametrize(
    ("crop", "memory_bytes", "other"),
    [
        pytest.param(
            Crop.random_resized,
            10**9,
            "augment.crop=pad",
            id="crops of all sizes",
        ),
        pytest.param(Crop.pad, HELD, "data.image_size", id="too large"),
    ],
)
def test_arrays_that_cannot_serve_are_refused(crop: Crop, memory_bytes: int, other: str) -> None:
    """The setting is named, and another one that would help."""
    with pytest.raises(ConfigError, match=f"^loader.backend=arrays: .*{other}"):
        small(BackendName.arrays, crop).settings(replace(LIMITS, memory_bytes=memory_bytes))


def test_what_a_backend_holds() -> None:
    """Arrays hold the images of both sets, other backends nothing."""
    feeds = small(None)
    assert feeds.held_bytes(replace(SETTINGS, backend="arrays")) == HELD
    assert feeds.held_bytes(SETTINGS) == feeds.held_bytes(replace(SETTINGS, backend="threads")) == 0


def test_probes_and_training_share_the_images_in_memory() -> None:
    """They are made once for all feeds of a set, and dropped when another backend is chosen."""
    feeds = small(None)
    arrays = replace(SETTINGS, backend="arrays")
    probe = feeds.probe(arrays)
    train = feeds.train(arrays)
    val = feeds.val(arrays)
    assert (
        isinstance(probe, ArrayFeed) and isinstance(train, ArrayFeed) and isinstance(val, ArrayFeed)
    )
    assert probe.pixels is train.pixels is not val.pixels
    feeds.train(SETTINGS)
    again = feeds.probe(arrays)
    assert isinstance(again, ArrayFeed) and again.pixels is not probe.pixels


def test_files_are_read_by_as_many_threads_as_there_are_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of this rank, whatever torch's own threads are."""
    monkeypatch.setattr(limits, "measure", lambda ranks: replace(LIMITS, cores=7.5 / ranks))
    read = []
    begin = ThreadFeed.begin
    monkeypatch.setattr(
        ThreadFeed, "begin", lambda feed, *given: (read.append(feed.settings), begin(feed, *given))
    )
    feeds = small(BackendName.arrays)
    feeds.world = replace(CPU, local_size=2)
    feeds.train(feeds.settings(LIMITS))
    assert [settings.num_workers for settings in read] == [3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_backend_changes_the_batches(num_workers: int) -> None:
    """Two epochs are bitwise the same by every backend."""
    seen = []
    for backend in (BackendName.processes, BackendName.threads, BackendName.arrays):
        feeds = small(backend)
        settings = samples.settings(num_workers if backend is not BackendName.arrays else 0)
        feed = feeds.train(replace(settings, backend=backend.name))
        batches = []
        for epoch in (0, 1):
            feed.set_epoch(epoch)
            batches += [batch.images.clone() for batch in feed]
        feed.close()
        seen.append(torch.cat(batches))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
