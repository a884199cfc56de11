"""The order in lanes: blocks are read once, batches are the same whatever the ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import samples
import torch

from harness.config import Config, ConfigError, DataConfig, LoaderConfig, OrderName
from harness.data.datasets import FakeDataset, ImageDataset, Splits
from harness.data.own import OwnSource
from harness.data.storage import ArraySource, Source, Subset
from harness.data.transforms import CropTransform
from harness.feed.feeds import Feeds, block_room
from harness.feed.order import Cursor, EpochRemainder, Lanes, Order, ProbeOrder
from harness.runtime.distributed import World
from scripts.bench.lanes import epoch_reads

Composed = Callable[..., Config]
Batches = list[list[int]]


def blocks_of(length: int, size: int, seed: int = 0) -> np.ndarray:
    """Blocks of about ``size`` samples, numbered without regard to the samples' numbers."""
    rng = np.random.default_rng(seed)
    return rng.permutation(np.arange(length, dtype=np.int32) // size)


def drawn(seed: int) -> tuple[random.Random, Order]:
    """An order of any length, blocks, lanes, batch, accumulation and drop_last, on one rank."""
    draw = random.Random(seed)
    length = draw.choice([1, 2, 7, 40, 130, draw.randint(1, 600)])
    blocks = blocks_of(length, draw.choice([1, 3, 8, 50, 1000]), seed)
    if draw.random() < 0.3:
        # of a subset: some blocks have no sample, and none begins with block 0
        blocks = blocks * 3 + 2
    lanes = Lanes(blocks, draw.choice([1, 2, 3, 4, 8, 64]), draw.choice([1, 2, 5, 16]))
    drop_last = draw.random() < 0.5
    batch = draw.choice([12, 24])
    order = Order(length, batch, seed, drop_last=drop_last, lanes=lanes)
    return draw, replace(order, accumulate_steps=draw.choice([1, 2, 3]))


def shared(order: Order, world_size: int) -> list[Order]:
    """The orders of so many ranks with the global batch of ``order``."""
    size = order.batch_size // world_size
    return [
        replace(order, batch_size=size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def global_batches(orders: list[Order], epoch: int) -> Batches:
    """What the ranks have of each global batch, one after the other."""
    parts = [[batch.tolist() for batch in order.batches(epoch)] for order in orders]
    return [
        list(chain(*(own[i] for own in parts if i < len(own)))) for i in range(max(map(len, parts)))
    ]


@pytest.mark.parametrize("seed", range(150))
def test_every_sample_once_in_the_same_batches_of_any_ranks(seed: int) -> None:
    """With drop_last, all of the whole updates; every epoch has another order."""
    _, order = drawn(seed)
    for epoch in (0, 3):
        whole = order.indices(epoch)
        assert sorted(whole.tolist()) == list(range(order.length))
        alone = global_batches([order], epoch)
        for world_size in (2, 3, 4):
            assert global_batches(shared(order, world_size), epoch) == alone
        assert Counter(chain(*alone)) == Counter(whole[: order.taken(epoch)].tolist())
    if order.length > 100:
        assert order.indices(0).tolist() != order.indices(3).tolist()


@pytest.mark.parametrize("seed", range(150))
def test_a_rest_has_what_is_left_whatever_the_ranks(seed: int) -> None:
    """From any position, for any ranks that can share it: the same global batches, together what
    the epoch's order has from there. From a batch's end on, they are the whole epoch's.
    """
    draw, order = drawn(seed)
    stop = order.taken(1)
    start = draw.randint(0, stop)
    rest = replace(order, rest=EpochRemainder(1, start, stop))
    alone = global_batches([rest], 1)
    assert Counter(chain(*alone)) == Counter(order.indices(1)[start:stop].tolist())
    short = (stop - start) % order.batch_size
    for world_size in (2, 3, 4):
        # with fewer samples than ranks at the end, the last two batches are others
        if short == 0 or short >= world_size:
            assert global_batches(shared(rest, world_size), 1) == alone
    position = draw.randint(0, order.count(1))
    later = replace(order, rest=EpochRemainder(1, order.taken(1, position), stop))
    assert global_batches([later], 1) == global_batches([order], 1)[position:]
    assert global_batches([later], 2) == global_batches([order], 2)


def test_the_ranks_may_change_within_an_epoch() -> None:
    """1, then 4, then 2 ranks, with another accumulation: together each sample once."""
    order = Order(1000, 48, seed=5, lanes=Lanes(blocks_of(1000, 9), 16, 3))
    given: list[int] = []
    start = 0
    for world_size, count in ((1, 5), (4, 7), (2, None)):
        rest = EpochRemainder(2, start, 1000)
        ranks = shared(
            replace(order, rest=rest, batch_size=48 // world_size * world_size), world_size
        )
        given += chain(*global_batches(ranks, 2)[:count])
        start = ranks[0].taken(2, count)
    assert Counter(given) == Counter(range(1000))


def test_the_order_follows_from_seed_epoch_and_blocks() -> None:
    """Each of them, lanes and window change it; asked again, it is the same."""
    blocks = blocks_of(500, 10)
    orders = [
        Lanes(blocks, 8, 2).indices(1, 0),
        Lanes(blocks, 8, 2).indices(2, 0),
        Lanes(blocks, 8, 2).indices(1, 1),
        Lanes(blocks, 8, 3).indices(1, 0),
        Lanes(blocks, 4, 2).indices(1, 0),
        Lanes(blocks_of(500, 10, 1), 8, 2).indices(1, 0),
    ]
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert Lanes(blocks, 8, 2).indices(1, 0).tobytes() == orders[0].tobytes()
    assert len({str(Lanes(blocks, *each)) for each in ((8, 2), (8, 3), (4, 2))}) == 3
    assert str(Lanes(blocks, 8, 2)) != str(Lanes(blocks_of(500, 10, 1), 8, 2))


@pytest.mark.parametrize("window", [1, 2, 16])
def test_a_lane_reads_one_window_after_the_other(window: int) -> None:
    """Windows of ``window`` blocks, the first one of lane l (l + 1) / lanes of that; a block lies
    in one lane, or in two neighbors of which it ends one.
    """
    blocks = blocks_of(20_000, 10)
    order = Lanes(blocks, 8, window).indices(0, 0)
    where: dict[int, set[int]] = {}
    for lane in range(8):
        own = blocks[order[lane::8]]
        for block in np.unique(own):
            where.setdefault(int(block), set()).add(lane)
        first = np.unique(own, return_index=True)[1]
        last = len(own) - 1 - np.unique(own[::-1], return_index=True)[1]
        begins, ends = np.sort(first), np.sort(last)
        # a window is over where all blocks that have begun have ended
        over = [i + 1 for i, end in enumerate(ends[:-1]) if end < begins[i + 1]]
        sizes = np.diff([0, *over, len(begins)])
        short = -(-(lane + 1) * window // 8)
        assert sizes[0] == short
        assert set(sizes[1:-1]) <= {window} and sizes[-1] <= window
    assert max(map(len, where.values())) <= 2
    assert sum(len(lanes) == 2 for lanes in where.values()) <= 7


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_rank_reads_its_own_lanes_only(world_size: int) -> None:
    """Where the ranks divide the lanes and the lanes the global batch, also amid an epoch."""
    order = Order(4000, 64, seed=1, drop_last=True, lanes=Lanes(blocks_of(4000, 10), 16, 2))
    place = {index: at for at, index in enumerate(order.indices(0).tolist())}
    rest = replace(order, rest=EpochRemainder(0, 320, order.taken(0)))
    for rank, own in enumerate(shared(rest, world_size)):
        lanes = {place[i] % 16 for batch in own.batches(0) for i in batch.tolist()}
        count = 16 // world_size
        assert lanes == set(range(rank * count, (rank + 1) * count))


def test_few_samples_have_as_many_lanes() -> None:
    """Lanes without a sample, and blocks of one sample, are no special case."""
    for length in (1, 2, 5):
        for lanes in (1, 4, 64):
            order = Lanes(np.zeros(length, np.int32), lanes, 3).indices(0, 0)
            assert sorted(order.tolist()) == list(range(length))


def test_probes_read_in_lanes() -> None:
    """The tuner's batches are those of an order in lanes, and repeat the same if asked to."""
    order = Order(400, 16, seed=3, drop_last=True, lanes=Lanes(blocks_of(400, 10), 8, 2))
    cursor = Cursor()
    given = [batch.tolist() for batch in islice(ProbeOrder(order, cursor).batches(0), 5)]
    assert given == [batch.tolist() for batch in islice(order.batches(2**31), 5)]
    cursor.saw(5)
    again = ProbeOrder(order, cursor, again=True).batches(0)
    assert [next(again).tolist() for _ in range(5)] == given


class Stored(ArraySource):
    """Ten classes of noise in blocks: numbered in the folder's order, by class."""

    def __init__(self, length: int, blocks: np.ndarray | None) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (length, 8, 8, 3), np.uint8)
        labels = np.arange(length) * 10 // length
        super().__init__(pixels, labels, map(str, range(10)), "noise")
        if blocks is not None:
            self.blocks = blocks


def feeds_of(source: Source, world_size: int = 1, **loader: Any) -> Feeds:
    """Feeds in lanes; of windows of one block, for 64 lanes."""
    loader = {"batch_size": 64, "window_mb": 512, **loader}
    config = Config(loader=LoaderConfig(order=OrderName.lanes, **loader))
    images = ImageDataset(source, CropTransform(8, crop="pad", pad=2), DataConfig(), 8, seed=0)
    world = World(0, world_size, 0, world_size, torch.device("cpu"))
    return Feeds(Splits(images, images, source.classes, "noise", ""), config, world)


@pytest.mark.parametrize("backend", ["threads", "processes", "arrays"])
def test_every_backend_gives_the_same_batches(backend: str) -> None:
    """Images, labels and numbers, with and without workers."""
    feeds = feeds_of(Stored(640, blocks_of(640, 10)), batch_size=32, lanes=8)
    order = feeds._train_order()
    for workers in (0, 2):
        settings = replace(samples.settings(workers, batch_size=32), backend=backend)
        feed = feeds.train(settings)
        indices = [batch.indices.tolist() for batch in feed]
        feed.close()
        assert indices == [batch.tolist() for batch in order.batches(0)]


def test_a_part_of_a_source_has_its_blocks() -> None:
    """A subset of a subset, too; of a source without blocks there are none."""
    source = Stored(50, blocks_of(50, 5))
    part = Subset(Subset(source, np.arange(0, 50, 2)), np.array([3, 1, 20]))
    assert part.blocks.tolist() == source.blocks[[6, 2, 40]].tolist()
    assert feeds_of(part, batch_size=3).lanes is not None


def test_a_source_of_the_users_has_its_blocks() -> None:
    """A list will do; one of another length is refused."""
    given = Stored(50, None)
    given.blocks = (np.arange(50) // 5).tolist()  # type: ignore[assignment]
    blocks = OwnSource(given, "x").blocks
    assert blocks.dtype == np.int32
    assert feeds_of(OwnSource(given, "x"), batch_size=10).steps_per_epoch() == 5
    given.blocks = given.blocks[1:]  # type: ignore[index]
    with pytest.raises(ConfigError, match="^x: a source .*: ValueError: "):
        OwnSource(given, "x")


def test_data_without_blocks_are_refused() -> None:
    """The line names the setting and both ways out."""
    text = "loader.order=lanes: .* no blocks; .* wellfed pack, or set loader.order=uniform$"
    with pytest.raises(ConfigError, match=text):
        feeds_of(Stored(100, None))
    fake = FakeDataset(100, 8)
    config = Config(loader=LoaderConfig(order=OrderName.lanes))
    splits = Splits(fake, fake, ("a", "b"), "fake", "")
    with pytest.raises(ConfigError, match=text):
        Feeds(splits, config, World(0, 1, 0, 1, torch.device("cpu")))


def test_what_is_only_evaluated_needs_no_blocks() -> None:
    """The order of training says nothing about it."""
    feeds = feeds_of(Stored(100, blocks_of(100, 5)))
    splits = replace(feeds.splits, trains=False)
    assert Feeds(splits, feeds.config, feeds.world).lanes is None


@pytest.mark.parametrize(
    "typed",
    [
        ("loader.order=lanes", "data.balance=0.5"),
        ("loader.order=lanes", "data.repeats=2"),
        ("loader.lanes=32",),
        ("loader.window_mb=100",),
    ],
)
def test_what_has_no_effect_is_refused(composed: Composed, typed: tuple[str, ...]) -> None:
    """Draws with repeats beside lanes, and the lanes' settings without them."""
    with pytest.raises(ConfigError, match="has no effect with loader.order="):
        composed(*typed)


@pytest.mark.parametrize(
    ("lanes", "window_mb", "window"),
    [(64, 1024, 2), (64, 1, 1), (64, 1535, 2), (8, 1024, 16), (1, 8, 1), (1, 23, 2)],
)
def test_the_window_is_what_all_lanes_shuffle(lanes: int, window_mb: int, window: int) -> None:
    """In blocks of 8 MiB, rounded down, at least one."""
    found = feeds_of(Stored(640, blocks_of(640, 5)), lanes=lanes, window_mb=window_mb).lanes
    assert found is not None and (found.lanes, found.window) == (lanes, window)


@pytest.mark.parametrize(
    ("blocks", "is_told"),
    [
        pytest.param(np.arange(6400) // 10, True, id="as a folder lies"),
        pytest.param(blocks_of(6400, 10), False, id="permuted"),
        pytest.param(np.arange(6400) // 6400, False, id="one block of all"),
        pytest.param(np.arange(6400), False, id="blocks of one"),
    ],
)
def test_shards_that_lie_by_class_are_told(
    blocks: np.ndarray, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Classes of a window are counted against chance; the line has both ways out."""
    feeds_of(Stored(6400, blocks.astype(np.int32)))
    told = [text for text in caplog.messages if "sorted by class" in text]
    assert len(told) == is_told
    assert all("wellfed pack" in text and "loader.order=uniform" in text for text in told)


@pytest.mark.parametrize(
    ("world_size", "batch", "is_told"),
    [(1, 50, False), (2, 64, False), (8, 8, False), (3, 64, True), (2, 50, True)],
)
def test_ranks_that_read_each_others_blocks_are_told(
    world_size: int,
    batch: int,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, if they do not divide the lanes, or the lanes their batch; the batches stay."""
    feeds = feeds_of(Stored(6400, blocks_of(6400, 10)), world_size, batch_size=batch)
    feeds.steps_per_epoch()
    feeds.steps_per_epoch()
    assert sum("read the same blocks" in text for text in caplog.messages) == is_told


def test_classes_are_counted_against_chance() -> None:
    """1,000 classes in windows of 2 blocks of 76 images, sorted by class and permuted."""
    labels = np.arange(76_000) // 76
    sorted_ = Lanes(np.arange(76_000, dtype=np.int32) // 76, 64, 2).variety(labels)
    assert sorted_ == pytest.approx(2 / (1000 * (1 - 0.999**152)), rel=0.02)
    assert Lanes(blocks_of(76_000, 76), 64, 2).variety(labels) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_blocks_at_borders_are_read_by_both_lanes_at_once(world_size: int) -> None:
    """A small set with four blocks a lane: at most 1.1 reads a block, with room for the windows."""
    blocks = blocks_of(20_000, 76)
    lanes = Lanes(blocks, 64, 2)
    order = Order(20_000, 512 // world_size, drop_last=True, world_size=world_size, lanes=lanes)
    reads = epoch_reads(order, blocks, block_room(lanes, world_size))
    assert reads <= 1.1 * len(np.unique(blocks))
