"""Determines the samples in each batch from seed, epoch and position."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ..data.storage import by_class
from ..runtime.seeding import order_rng


@dataclass(frozen=True, slots=True)
class EpochRemainder:
    """The remaining samples in ``epoch``, ``start`` to ``stop`` in its order, for all ranks."""

    epoch: int
    start: int
    stop: int


def balanced(labels: np.ndarray, strength: float, seed: int, epoch: int) -> np.ndarray:
    """Returns an epoch's draws, with more samples from rare classes and fewer from common ones.

    A class's share is proportional to its number of samples to the power of 1 - ``strength``: 0.5
    is the square-root sampling in Mahajan et al. 2018 (arXiv 1805.00932), and 1 gives all classes
    equal shares. The samples in a class take turns across epochs; at the end of an epoch, their
    draw counts differ by at most one.

    Args:
        labels: sample labels, int64 ``[N]``.
        strength: 0 to 1.
        seed: the run's seed.
        epoch: epoch of the draws.

    Returns:
        int64 ``[N]``, in random order, as in ``Order.indices``.
    """
    length = len(labels)
    members = [own for own in by_class(labels) if len(own)]
    shares = np.cumsum([len(own) ** (1 - strength) for own in members])
    # rounded to fill the epoch, with at least one sample per class
    ends = np.floor(shares / shares[-1] * length + 0.5).astype(np.int64)
    drawn = []
    for part, (own, quota) in enumerate(zip(members, np.diff(ends, prepend=0), strict=True), 1):
        turns, rest = divmod(int(quota), len(own))
        drawn.append(np.add.outer(length * np.arange(turns), own).ravel())
        # partial turns start where the previous epoch stopped; each turn has its own order
        turn, first = divmod(epoch * rest, len(own))
        two = [
            order_rng(seed, turn + more, part).permutation(own) + (turns + more) * length
            for more in (0, 1)
        ]
        drawn.append(np.concatenate(two)[first : first + rest])
    return order_rng(seed, epoch).permutation(np.concatenate(drawn))


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """An order that keeps a block's samples close together, so a cache reads each block once.

    The blocks in random order form a stream of samples, which is cut into ``lanes`` equal
    stretches. A lane shuffles the samples in each ``window`` of its blocks. Position p in an
    epoch's order is position p // lanes in lane p % lanes for any number of ranks, like the
    canonical nodes in Mosaic's StreamingDataset. Every other lane runs backward, so the two lanes
    that share a block at their border read it at the same time. The first windows differ in size,
    so that lanes do not all change windows at once.

    Attributes:
        blocks: block of each sample, int32 ``[N]``, from 0.
        lanes: number of lanes.
        window: number of blocks in a lane that are shuffled together.
    """

    blocks: np.ndarray
    lanes: int
    window: int

    def __str__(self) -> str:
        """Returns everything that determines the order except the seed and the epoch."""
        digest = zlib.crc32(self.blocks.tobytes())
        return f"{self.lanes} lanes with windows of {self.window} blocks, digest {digest:08x}"

    def indices(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the order of the whole data set in ``epoch``, int64 ``[N]``."""
        rng = order_rng(seed, epoch)
        turns = rng.permutation(self.blocks.max() + 1)[self.blocks]
        order = np.empty(len(turns), np.int64)
        for lane, own in enumerate(np.array_split(_grouped(turns, rng), self.lanes)):
            _, passed = np.unique(turns[own] * (-1) ** lane, return_inverse=True)
            # lanes 2k and 2k + 1 end together at their border; 2k + 1 and 2k + 2 begin together
            passed += (self.lanes - 1 - lane) * self.window // self.lanes
            order[lane :: self.lanes] = own[_grouped(passed // self.window, rng)]
        return order

    def variety(self, labels: np.ndarray) -> float:
        """Returns the number of classes in a window as a fraction of the number expected.

        ``labels`` are int64 ``[N]``, and the windows contain blocks in shard order.
        """
        windows = self.blocks // self.window * (labels.max() + 1)
        mixed = order_rng(0, 0).permutation(labels)
        return len(np.unique(windows + labels)) / len(np.unique(windows + mixed))


def _grouped(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the positions in ``groups``, int64 ``[N]``, by group, in random order within each."""
    mixed = rng.permutation(len(groups))
    return mixed[np.argsort(groups[mixed], kind="stable")]


@dataclass(frozen=True, slots=True)
class Order:
    """One rank's batches.

    A global batch is ``batch_size * world_size`` consecutive samples in the epoch's order, of which
    each rank takes a contiguous part. Global batches depend only on the global batch size, not on
    the number of ranks. Without ``drop_last``, exactly one rank gets each sample, without padding.
    With ``lanes``, a global batch is first sorted by lane, so a rank has its own lanes if the
    number of ranks divides the number of lanes, which in turn divides the global batch size.

    A rest begins with a full global batch at any position, and all ranks have the same number of
    batches in it; the last, short global batch is divided evenly. If it has fewer samples than
    there are ranks, the last two batches are replaced by two of about half the size.

    Attributes:
        length: number of samples in the dataset.
        batch_size: number of samples per batch and rank.
        shuffle: whether each epoch has a new order; otherwise, the order is 0, 1, 2, ...
        drop_last: whether to drop the last batches if they do not fill an optimizer step.
        accumulate_steps: number of global batches per optimizer step.
        repeats: number of consecutive uses of each sample in a shuffled epoch.
        balance: labels and strength for ``balanced`` shuffled epochs; None: each sample once.
        lanes: order in a shuffled epoch without repeats and balance; None: uniform.
        rest: remainder of one epoch; None: full epochs.

    Raises:
        ValueError: the rest is out of range, or the ranks cannot share it.
    """

    length: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    rest: EpochRemainder | None = None
    accumulate_steps: int = 1
    repeats: int = 1
    balance: tuple[np.ndarray, float] | None = field(default=None, compare=False)
    lanes: Lanes | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        rest = self.rest
        if rest is None:
            return
        shared = rest.stop - rest.start >= self.count(rest.epoch) * self.world_size
        if rest.start < 0 or rest.stop > self.length or not shared:
            raise ValueError(
                f"epoch {rest.epoch}: {self.world_size} ranks cannot share samples {rest.start} to "
                f"{rest.stop} of {self.length} evenly in batches of at most {self.batch_size}; use "
                "fewer ranks or raise loader.batch_size"
            )

    def __len__(self) -> int:
        """Returns the number of batches in a full epoch."""
        return replace(self, rest=None).count(0)

    def count(self, epoch: int) -> int:
        """Returns the number of batches in ``epoch``."""
        places, sizes = _plan(self, epoch)
        # the last, short batch in a full epoch may only have samples for the first ranks
        own = [size * self.rank // self.world_size for size in sizes]
        return sum(begin + first < places[-1] for begin, first in zip(places, own, strict=False))

    def taken(self, epoch: int, batches: int | None = None) -> int:
        """Returns the position in the order of ``epoch`` after ``batches`` per rank, or its end."""
        places, _ = _plan(self, epoch)
        return places[-1 if batches is None else min(batches, len(places) - 1)]

    def indices(self, epoch: int) -> np.ndarray:
        """Returns the order of the whole dataset in ``epoch``, int64 ``[length]``.

        For each repeat of a sample, ``length`` is added to its index, which changes its random
        numbers; the sample's index is the remainder modulo ``length``.
        """
        if not self.shuffle:
            return np.arange(self.length)
        if self.lanes is not None:
            return self.lanes.indices(self.seed, epoch)
        if self.balance is not None:
            return balanced(*self.balance, self.seed, epoch)
        order = order_rng(self.seed, epoch).permutation(self.length)
        if self.repeats == 1:
            return order
        # Hoffer et al. 2020 (arXiv 1901.09335); the epoch length is kept as in torchvision's script
        few = order[: -(-self.length // self.repeats), None]
        again: np.ndarray = few + self.length * np.arange(self.repeats)
        return again.reshape(-1)[: self.length]

    def batches(self, epoch: int, first: int = 0) -> Iterator[np.ndarray]:
        """Iterates over this rank's batches in ``epoch``, from batch ``first``.

        Each batch is int64 ``[<= batch_size]``.
        """
        order = self.indices(epoch)
        places, sizes = _plan(self, epoch)
        for begin, size in zip(places[first:], sizes[first:], strict=False):
            whole = order[begin : begin + size]
            if self.lanes is not None:
                own = np.arange(begin, begin + len(whole)) % self.lanes.lanes
                whole = whole[np.argsort(own, kind="stable")]
            start = size * self.rank // self.world_size
            share = whole[start : size * (self.rank + 1) // self.world_size]
            if len(share):
                yield share


@lru_cache(maxsize=8)
def _plan(order: Order, epoch: int) -> tuple[list[int], list[int]]:
    """Returns the bounds of the epoch's global batches, and the numbers of samples to divide."""
    step = order.batch_size * order.world_size
    rest = order.rest
    if rest is None or rest.epoch != epoch:
        stop = order.length
        if order.drop_last:
            stop -= stop % (step * order.accumulate_steps)
        begins = [*range(0, stop, step)]
        return [*begins, stop], [step] * len(begins)
    places = [*range(rest.start, rest.stop, step), rest.stop]
    short = (rest.stop - rest.start) % step
    if len(places) > 1 and 0 < short < order.world_size:
        places[-2] -= (step - short) // 2
    return places, [end - begin for begin, end in itertools.pairwise(places)]


@dataclass(slots=True)
class Cursor:
    """The position of a run's probes.

    Attributes:
        asked: number of batches requested by all probes.
        begin: start of the last advancing probe.
        seen: batches from the last advancing probe, which ``again`` repeats.
    """

    asked: int = 0
    begin: int = 0
    seen: range = range(0)

    def saw(self, batches: int) -> None:
        """Records that the last advancing probe returned ``batches``, which are readable."""
        self.seen = range(self.begin, self.begin + batches)


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Endless batches in ``order``, from epochs that training never sees; moves ``cursor``.

    Probes that share a cursor continue where the last one stopped, and request every sample once
    before repeating any, if ``order`` does.

    Attributes:
        again: whether to repeat the batches seen, without moving the cursor.
    """

    order: Order
    cursor: Cursor
    again: bool = False

    def __post_init__(self) -> None:
        if not self.again:
            self.cursor.begin = self.cursor.asked

    def count(self, epoch: int) -> int:
        """Returns a practically infinite number of batches."""
        return sys.maxsize

    def batches(self, epoch: int, first: int = 0) -> Iterator[np.ndarray]:
        """Iterates over the next batches; ``epoch`` and ``first`` are ignored."""
        repeated = itertools.cycle(self.cursor.seen if self.again else ())
        # keeps those in the latest epoch
        batches = lru_cache(1)(lambda turn: [*self.order.batches(turn)])
        whole = len(self.order)
        while True:
            position = next(repeated, None)
            if position is None:
                position = self.cursor.asked
                self.cursor.asked += 1
            # far from any training epoch
            yield batches(2**31 + position // whole)[position % whole]


AnyOrder = Order | ProbeOrder
