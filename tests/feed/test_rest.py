"""A feed that begins within an epoch gives what is left of it, then whole epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import samples
import torch

from harness.config import DataConfig
from harness.data.datasets import ImageDataset
from harness.data.storage import ArraySource
from harness.data.transforms import CropTransform
from harness.feed.base import Backend, HostBatch
from harness.feed.feeds import ArrayFeed, SyntheticFeed
from harness.feed.order import EpochRemainder, Order
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed

LENGTH = 19
EPOCH = 1
ORDER = Order(LENGTH, 4, seed=3)
MakeFeed = Callable[[Order], Backend]


def images(side: int) -> ImageDataset:
    """Random pixels of 8 x 8; those of any other ``side`` have to be made, by threads."""
    pixels = np.random.default_rng(0).integers(0, 256, (LENGTH, 8, 8, 3), np.uint8)
    source = ArraySource(pixels, np.arange(LENGTH) % 10, map(str, range(10)), "noise")
    return ImageDataset(source, CropTransform(side, crop="pad", pad=2), DataConfig(), side, seed=5)


def make(named: str, order: Order) -> Backend:
    """A feed of a backend, with so many workers, or images of such a side."""
    name, number = named.split()
    if name == "synthetic":
        labels = torch.arange(4)
        batch = HostBatch(torch.zeros(4, 3, 4, 4, dtype=torch.uint8), labels, labels)
        return SyntheticFeed(order, samples.settings(), batch, torch.device("cpu"))
    if name == "arrays":
        return ArrayFeed(images(int(number)), order, samples.settings())
    settings = samples.settings(int(number), persistent_workers=True)
    return {"processes": ProcessFeed, "threads": ThreadFeed}[name](
        samples.Noise(LENGTH), order, settings
    )


@pytest.fixture(
    params=[
        "processes 0",
        "processes 2",
        "threads 0",
        "threads 2",
        "arrays 8",
        "arrays 6",
        "synthetic 4",
    ]
)
def make_feed(request: pytest.FixtureRequest) -> Iterator[MakeFeed]:
    made: list[Backend] = []

    def make_one(order: Order) -> Backend:
        made.append(make(request.param, order))
        return made[-1]

    yield make_one
    for feed in made:
        feed.close()


def passed(feed: Backend, epoch: int, primed: bool = False) -> list[HostBatch]:
    """One pass, as long as the feed says; maybe begun ahead of time."""
    if primed:
        feed.prime(epoch)
    feed.set_epoch(epoch)
    batches = list(feed)
    assert len(batches) == len(feed)
    return batches


@pytest.mark.parametrize("primed", [False, True], ids=["plain", "primed"])
@pytest.mark.parametrize("position", [0, 1, 3, 4, 5])
def test_a_rest_gives_what_an_uninterrupted_pass_gives_from_there(
    make_feed: MakeFeed, position: int, primed: bool
) -> None:
    """Images, labels and indices are bitwise the same, also of the next epoch, which is whole."""
    rest = EpochRemainder(EPOCH, ORDER.taken(EPOCH, position), ORDER.taken(EPOCH))
    whole = make_feed(ORDER)
    feed = make_feed(replace(ORDER, rest=rest))
    samples.assert_same(passed(feed, EPOCH, primed), passed(whole, EPOCH)[position:])
    samples.assert_same(passed(feed, EPOCH + 1, primed), passed(whole, EPOCH + 1))
    samples.assert_same(passed(feed, EPOCH, primed), passed(whole, EPOCH)[position:])


def test_after_a_primed_rest_of_nothing_the_next_epoch_is_whole(make_feed: MakeFeed) -> None:
    """A pass without a batch ends what was begun for it."""
    feed = make_feed(replace(ORDER, rest=EpochRemainder(EPOCH, LENGTH, LENGTH)))
    assert passed(feed, EPOCH, primed=True) == []
    samples.assert_same(passed(feed, EPOCH + 1), passed(make_feed(ORDER), EPOCH + 1))


def test_an_epoch_that_is_chosen_during_a_pass_is_the_next_one(make_feed: MakeFeed) -> None:
    """The pass ends where it would have, whatever the length of the epoch that comes after it."""
    feed = make_feed(replace(ORDER, rest=EpochRemainder(EPOCH, 12, LENGTH)))
    whole = make_feed(ORDER)
    feed.set_epoch(EPOCH)
    batches = iter(feed)
    given = [next(batches)]
    feed.set_epoch(EPOCH + 1)
    samples.assert_same([*given, *batches], passed(whole, EPOCH)[3:])
    samples.assert_same(list(feed), passed(whole, EPOCH + 1))
