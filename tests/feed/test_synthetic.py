"""The synthetic feed: batches that are on the device already."""

from __future__ import annotations

import samples
import torch
from samples import random_states

from harness.feed.order import Order
from harness.feed.synthetic import SyntheticFeed


def make(length: int = 10, drop_last: bool = False) -> SyntheticFeed:
    order = Order(length, 4, drop_last=drop_last)
    return SyntheticFeed(
        order, samples.settings(), image_size=6, classes=3, device=torch.device("cpu")
    )


def test_batches_have_the_shapes_of_a_real_feed() -> None:
    """uint8 images [N, 3, S, S] and int64 labels below the number of classes, the last batch as
    short as it would be.
    """
    batches = list(make())
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
    feed = make()
    assert {batch.images.data_ptr() for _ in range(2) for batch in feed} == {
        next(iter(feed)).images.data_ptr()
    }
    assert feed.on_device


def test_epochs_and_close_change_nothing() -> None:
    """Every epoch is the same, also after close()."""
    feed = make(8, drop_last=True)
    first = list(feed)
    feed.set_epoch(3)
    feed.close()
    assert len(feed) == len(first) == 2
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, feed, strict=True))


def test_there_is_nothing_to_wait_for() -> None:
    """A polled pass is a plain one, primed or not, and no worker ever lives."""
    feed = make()
    feed.prime(0)
    polled = [batch for batch in feed.polled(0.001) if batch is not None]
    assert [batch.indices.tolist() for batch in polled] == [
        batch.indices.tolist() for batch in feed
    ]
    assert feed.worker_pids == ()


def test_nothing_is_made_and_so_nothing_is_measured() -> None:
    """There is no meter, and no batch has stamps."""
    feed = make()
    assert feed.meter is None
    assert next(iter(feed)).stamps is None


def test_making_one_leaves_the_global_generators_alone() -> None:
    """The noise comes from a generator of its own."""
    before = random_states()
    list(make())
    assert random_states() == before
