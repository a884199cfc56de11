"""Classes drawn evenly: shares, turns, and the same samples whatever the ranks and the feed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import samples
import torch
from emulator import Gpu, emulated

from harness.config import BackendName, Config, ConfigError, Crop, DataConfig, LoaderConfig
from harness.data.datasets import ImageDataset, Splits
from harness.data.own import OwnDataset
from harness.data.storage import ArraySource, Source
from harness.data.transforms import CropTransform
from harness.feed.base import HostBatch
from harness.feed.feeds import ArrayFeed, Feeds, InMemoryImages
from harness.feed.order import EpochRemainder, Order
from harness.runtime.distributed import World

CPU = World(0, 1, 0, 1, torch.device("cpu"))
# 30 images, of a class that is never seen, a rare one, and two others
SIZES = (0, 2, 9, 19)


def labels_of(sizes: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Labels in no order, so many of each class."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


FIRST_RARE = int(np.flatnonzero(labels_of(SIZES) == 1)[0])


def order_of(sizes: tuple[int, ...], strength: float = 1.0, batch: int = 6) -> Order:
    labels = labels_of(sizes)
    return Order(len(labels), batch, seed=5, balance=(labels, strength))


@pytest.mark.parametrize(
    ("strength", "quotas"),
    [
        pytest.param(0.0, [2, 9, 19], id="as they are"),
        pytest.param(0.5, [5, 10, 15], id="square roots: 1.41, 3, 4.36"),
        pytest.param(1.0, [10, 10, 10], id="even"),
    ],
)
def test_the_shares_go_by_the_strength(strength: float, quotas: list[int]) -> None:
    """Each epoch has as many samples as the set, with the shares that the strength asks for."""
    labels = labels_of(SIZES)
    order = order_of(SIZES, strength)
    for epoch in range(4):
        places = order.indices(epoch) % len(labels)
        assert np.bincount(labels[places], minlength=4).tolist() == [0, *quotas]


@pytest.mark.parametrize("strength", [0.3, 1.0])
def test_the_images_of_a_class_take_turns(strength: float) -> None:
    """At each epoch's end no image was drawn more than once oftener than another of its class, and
    no draw of an epoch has the number of another: the random numbers of each are its own.
    """
    labels = labels_of(SIZES)
    order = order_of(SIZES, strength)
    drawn = np.zeros(30, int)
    for epoch in range(12):
        indices = order.indices(epoch)
        assert len(np.unique(indices)) == 30
        drawn += np.bincount(indices % 30, minlength=30)
        for label in (1, 2, 3):
            assert np.ptp(drawn[labels == label]) <= 1
    assert not np.array_equal(order.indices(0), order.indices(1))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_same_global_batches(world_size: int) -> None:
    """Two and three ranks together have one rank's batches, and as many updates."""
    alone = order_of(SIZES)
    ranks = [
        replace(alone, batch_size=6 // world_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    together = [list(order.batches(3)) for order in ranks]
    joined = [np.concatenate(parts) for parts in zip(*together, strict=True)]
    assert [part.tolist() for part in joined] == [part.tolist() for part in alone.batches(3)]
    assert len(joined) == len(alone) == 5


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_rest_of_an_epoch_is_what_was_left(world_size: int) -> None:
    """A run that goes on within an epoch sees the draws that are left, and no others."""
    whole = order_of(SIZES)
    ranks = [
        replace(
            whole, batch_size=2, rank=rank, world_size=world_size, rest=EpochRemainder(1, 12, 30)
        )
        for rank in range(world_size)
    ]
    left = zip(*(order.batches(1) for order in ranks), strict=True)
    assert [i for parts in left for part in parts for i in part] == whole.indices(1)[12:].tolist()


def feeds_of(backend: str, *, skips: bool = False, **loader: object) -> Feeds:
    """Feeds over 30 images that are told apart by any pixel, each class as often."""
    config = Config(loader=LoaderConfig(batch_size=6, backend=BackendName[backend], **loader))  # type: ignore[arg-type]
    config.data.balance = 1.0
    pixels = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), np.uint8)
    source: Source = ArraySource(pixels, labels_of(SIZES), "abcd", "x")
    if skips:
        source = Broken(source)
    transform = CropTransform(8, crop=Crop.pad.name, pad=2)
    images = ImageDataset(source, transform, DataConfig(), 8, seed=0, skips=skips)
    return Feeds(Splits(images, images, tuple("abcd"), "x", ""), config, CPU)


class Broken:
    """A source of which the first image of the rare class cannot be read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.classes = source.classes
        self.labels = source.labels

    def __len__(self) -> int:
        return len(self._source)

    def read(self, i: int) -> tuple[bytes | np.ndarray, int]:
        if i == FIRST_RARE:
            raise OSError("gone")
        return self._source.read(i)

    def where(self, i: int) -> str:
        return self._source.where(i)


def passed(backend: str, num_workers: int, *, skips: bool = False) -> list[HostBatch]:
    """Two epochs."""
    feed = feeds_of(backend, skips=skips).train(
        replace(samples.settings(num_workers, batch_size=6), backend=backend)
    )
    batches = [
        batch._replace(images=batch.images.clone(), labels=batch.labels.clone())
        for batch in samples.passes(feed)
    ]
    feed.close()
    return batches


@pytest.mark.parametrize("skips", [False, True], ids=["whole", "one cannot be read"])
def test_a_device_s_way_makes_the_same_batches(skips: bool) -> None:
    """Images that lie in a GPU's memory are drawn and cut there as on the host."""
    feeds = feeds_of("arrays", skips=skips)
    images = feeds.splits.train
    assert isinstance(images, ImageDataset)
    settings = replace(samples.settings(0, batch_size=6), backend="arrays")
    with emulated(Gpu()) as gpu:
        held = InMemoryImages(images, samples.settings(2), gpu.device)
        feed = ArrayFeed(images, feeds._train_order(), settings, held)
        assert feed.made_on_device
        samples.assert_same(samples.passes(feed), passed("threads", 0, skips=skips))
        feed.close()


def test_an_image_that_comes_again_is_augmented_differently() -> None:
    """The ten draws of two images are not ten times the same two crops."""
    batches = passed("threads", 0)[:5]
    images = torch.cat([batch.images for batch in batches]).flatten(1)
    indices = torch.cat([batch.indices for batch in batches]) % 30
    crops = images[indices == FIRST_RARE]
    assert len(crops) == 5
    assert len(torch.unique(crops, dim=0)) >= 4


def test_evaluation_has_every_image_once() -> None:
    """The validation feed is as the data are."""
    feed = feeds_of("threads").val(samples.settings(0))
    assert torch.cat([batch.indices for batch in feed]).tolist() == list(range(30))


class Labeled(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A data set of torch's, whose targets are its labels if it has any."""

    classes = ("a", "b", "c", "d")

    def __init__(self, targets: object = None, target_transform: object = None) -> None:
        if targets is not None:
            self.targets = targets
        self.target_transform = target_transform

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3, 8, 8), int(labels_of(SIZES)[i])


def own_feeds(given: torch.utils.data.Dataset[tuple[torch.Tensor, int]]) -> Feeds:
    dataset = OwnDataset(given, "the training set", Labeled.classes, 8, 0, DataConfig())
    config = Config(loader=LoaderConfig(batch_size=6))
    config.data.balance = 1.0
    return Feeds(Splits(dataset, dataset, dataset.classes, "mine:splits", ""), config, CPU)


def test_a_data_set_of_torchs_is_balanced_by_its_targets() -> None:
    """Also if it is a part of another, whose images then come again with other random numbers."""
    labels = labels_of(SIZES)
    part = torch.utils.data.Subset(Labeled(torch.from_numpy(labels)), range(1, 30))
    feed = own_feeds(part).train(samples.settings(0, batch_size=6))
    batches = list(feed)
    seen = torch.cat([batch.labels for batch in batches])
    assert np.ptp(np.bincount(seen.numpy(), minlength=4)[1:]) <= 5
    images = torch.cat([batch.images for batch in batches]).flatten(1)
    assert len(torch.unique(images, dim=0)) == len(images) == 24


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(Labeled(), id="none"),
        pytest.param(Labeled([0.5] * 30), id="no integers"),
        pytest.param(Labeled([4] * 30), id="no class"),
        pytest.param(Labeled([1] * 29), id="too few"),
        pytest.param(Labeled([[1]] * 30), id="lists"),
        pytest.param(Labeled([1] * 30, target_transform=abs), id="changed afterwards"),
    ],
)
def test_a_data_set_without_labels_is_refused(given: Labeled) -> None:
    """The line names the setting and the way out."""
    with pytest.raises(ConfigError, match="^data.balance=1 .* data.name=mine:splits .*targets"):
        own_feeds(given).steps_per_epoch()
