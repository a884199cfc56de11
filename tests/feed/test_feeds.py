"""A rank's feeds: which backend, which order, and what probes have read."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import samples
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from harness.clock.stages import Stamps
from harness.config import (
    BackendName,
    Config,
    ConfigError,
    Crop,
    DataConfig,
    LoaderConfig,
    StartMethod,
    TunerName,
    ValLoaderConfig,
)
from harness.data.datasets import FakeDataset, ImageDataset, Splits
from harness.data.storage import ArraySource
from harness.data.transforms import CropTransform
from harness.feed.base import Backend, FeedSettings, HostBatch
from harness.feed.feeds import BACKENDS, ArrayFeed, Feeds, InMemoryImages, SyntheticFeed
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
    with pytest.raises(ConfigError, match=r"loader\.batch_size=.* 21 images.* 20; lower"):
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
        Splits(FakeDataset(8, 4), FakeDataset(4, 4), ("a", "b"), "fake", ""),
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

    def images(length: int, transform: CropTransform) -> ImageDataset:
        pixels = np.random.default_rng(length).integers(0, 256, (length, 8, 8, 3), np.uint8)
        source = ArraySource(pixels, np.zeros(length), ("a",), "noise")
        return ImageDataset(source, transform, DataConfig(), 8, seed=0)

    train = images(20, CropTransform(8, crop=crop.name, pad=2))
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
        pytest.param({"num_workers": 2}, "threads", 2, id="workers"),
        pytest.param({"num_workers": 0}, "threads", 0, id="no workers"),
        pytest.param(
            {"prefetch_factor": 3, "persistent_workers": True}, "threads", 4, id="of processes"
        ),
        pytest.param({"backend": BackendName.processes}, "processes", 4, id="named"),
        pytest.param(
            {"backend": BackendName.auto, "autotune": True}, "threads", 4, id="before tuning"
        ),
    ],
)
def test_the_backend_before_any_tuning(loader: dict[str, Any], backend: str, workers: int) -> None:
    """The one that was named, else threads, whatever is said of workers."""
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
    with pytest.raises(ConfigError, match=f"^loader.backend=arrays.*{other}"):
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

    def noted(images: ImageDataset, settings: FeedSettings, device: torch.device) -> InMemoryImages:
        read.append(settings)
        return InMemoryImages(images, settings, device)

    monkeypatch.setattr("harness.feed.feeds.InMemoryImages", noted)
    feeds = small(BackendName.arrays)
    feeds.world = replace(CPU, local_size=2)
    feeds.train(feeds.settings(LIMITS))
    assert [(one.backend, one.num_workers) for one in read] == [("threads", 3)]


def derived(cores: float = 4.0, device: str = "cuda", **loader: object) -> FeedSettings:
    feeds = small(**loader)
    feeds.world = replace(CPU, device=torch.device(device, 0))
    return feeds.settings(replace(LIMITS, cores=cores))


@pytest.mark.parametrize(("cores", "workers"), [(0.5, 1), (1.0, 1), (2.0, 2), (3.7, 3), (64.0, 16)])
def test_workers_are_derived_from_the_cores(cores: float, workers: int) -> None:
    """num_workers=null is one worker a usable core, at least one and at most 16."""
    assert derived(cores).num_workers == workers


@pytest.mark.parametrize(
    ("pin_memory", "device", "pinned"),
    [
        (None, "cuda", True),
        (None, "cpu", False),
        (True, "cuda", True),
        (True, "cpu", False),
        (False, "cuda", False),
    ],
)
def test_memory_is_pinned_where_that_has_a_use(
    pin_memory: bool | None, device: str, pinned: bool
) -> None:
    """pin_memory=null pins where there is a CUDA device; nothing pins without one."""
    assert derived(device=device, pin_memory=pin_memory).pin_memory is pinned


def test_explicit_settings_are_kept() -> None:
    """What the user set is what the feed gets."""
    found = derived(
        backend=BackendName.processes,
        num_workers=3,
        pin_memory=False,
        prefetch_factor=5,
        persistent_workers=False,
        timeout_s=9.0,
        start_method=StartMethod.spawn,
    )
    assert asdict(found) == {
        "batch_size": 4,
        "num_workers": 3,
        "pin_memory": False,
        "prefetch_factor": 5,
        "persistent_workers": False,
        "timeout_s": 9.0,
        "start_method": "spawn",
        "backend": "processes",
    }


def test_validation_has_settings_of_its_own() -> None:
    """loader.val.* replaces what the training feed has."""
    own = ValLoaderConfig(batch_size=100, num_workers=1, prefetch_factor=4)
    feeds = small(num_workers=3, val=own)
    val = feeds.val_settings(feeds.settings(LIMITS))
    assert (val.batch_size, val.num_workers, val.prefetch_factor) == (100, 1, 4)


def test_settings_with_and_without_workers() -> None:
    """What goes with workers comes and goes with them: their queue, and that they stay."""
    for settings, workers, expected in (
        (samples.settings(0), 4, samples.settings(4, persistent_workers=True)),
        (samples.settings(3, persistent_workers=True), 0, samples.settings(0)),
        (samples.settings(3, prefetch_factor=5), 4, samples.settings(4, prefetch_factor=5)),
    ):
        assert replace(settings, num_workers=workers) == expected
    assert replace(samples.settings(3), backend="arrays").num_workers == 0


def test_torch_pins_a_batch_and_then_its_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own pinning keeps what is no tensor, and stamps the batch after the last tensor."""
    times = itertools.count(10.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda tensor: tensor + next(times))
    images, labels, indices = torch.zeros(3, 1).unbind()
    batch = HostBatch(
        images, labels, indices, (("cats/7.jpg", "empty file"),), 7, Stamps(2.0, 3.0, 3.0)
    )
    pinned = pin_memory(batch)
    assert type(pinned) is HostBatch
    assert [tensor.item() for tensor in pinned[:3]] == [10.0, 11.0, 0.0]
    assert (pinned.failures, pinned.epoch) == (batch.failures, 7)
    assert pinned.stamps == Stamps(2.0, 3.0, 12.0)
    assert pin_memory(batch._replace(stamps=None)).stamps is None
