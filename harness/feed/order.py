"""Decides the samples of each batch from the seed, the epoch and the position."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ..data.storage import by_class
from ..runtime.seeding import order_rng


@dataclass(frozen=True, slots=True)
class EpochRemainder:
    """The samples ``start`` to ``stop`` that are left of the order of ``epoch``, of all ranks."""

    epoch: int
    start: int
    stop: int


def balanced(labels: np.ndarray, strength: float, seed: int, epoch: int) -> np.ndarray:
    """Returns as many draws as there are samples, more of rare classes and fewer of common ones.

    A class's share goes by its number of samples to the power of 1 - ``strength``: 0.5 is the
    square-root sampling of Mahajan et al. 2018 (arXiv 1805.00932), 1 gives every class the same
    share. The samples of a class take turns, over the epochs too: at an epoch's end none has been
    drawn more than once oftener than another.

    Args:
        labels: of the samples, int64 ``[N]``.
        strength: 0 to 1.
        seed: the run's.
        epoch: of the draws, which are a function of seed and epoch.

    Returns:
        int64 ``[N]``, in random order, as of ``Order.indices``.
    """
    length = len(labels)
    members = [own for own in by_class(labels) if len(own)]
    shares = np.cumsum([len(own) ** (1 - strength) for own in members])
    # rounded so that they make up the epoch, and every class has a sample of it
    ends = np.floor(shares / shares[-1] * length + 0.5).astype(np.int64)
    drawn = []
    for part, (own, quota) in enumerate(zip(members, np.diff(ends, prepend=0), strict=True), 1):
        turns, rest = divmod(int(quota), len(own))
        drawn.append(np.add.outer(length * np.arange(turns), own).ravel())
        # what whole turns leave of the quota begins where the epoch before has stopped, in turns
        # that have an order of their own each
        turn, first = divmod(epoch * rest, len(own))
        two = [
            order_rng(seed, turn + more, part).permutation(own) + (turns + more) * length
            for more in (0, 1)
        ]
        drawn.append(np.concatenate(two)[first : first + rest])
    return order_rng(seed, epoch).permutation(np.concatenate(drawn))


@dataclass(frozen=True, slots=True)
class Order:
    """The batches of one rank.

    A global batch is a run of ``batch_size * world_size`` places in the epoch's order, and each
    rank takes its own stretch. So the global batches are the same for any number of ranks at an
    equal global batch size, and without ``drop_last`` every sample is seen once by one rank:
    nothing is padded.

    A rest begins with a whole global batch, wherever it starts, and all ranks have the same number
    of its batches: the last, short global batch is divided evenly. If the last batch has fewer
    samples than there are ranks, the last two batches become two of about half the size.

    Attributes:
        length: samples in the data set.
        batch_size: samples per batch and rank.
        shuffle: a new order each epoch, else 0, 1, 2, ...
        drop_last: leave out the last batches if they do not make a whole update.
        accumulate_steps: global batches of an update.
        repeats: times that a shuffled epoch has each of its samples, one after the other.
        balance: labels and strength by which a shuffled epoch is ``balanced``; None: it has each
            sample once.
        rest: what is left of one epoch; None: every epoch is whole.

    Raises:
        ValueError: the rest does not lie in the data set, or the ranks cannot share the rest.
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
        """Returns the batches of a whole epoch."""
        return replace(self, rest=None).count(0)

    def count(self, epoch: int) -> int:
        """Returns the batches of ``epoch``."""
        places, sizes = _plan(self, epoch)
        # of the last, short batch of a whole epoch only the first ranks may have a part
        own = [size * self.rank // self.world_size for size in sizes]
        return sum(begin + first < places[-1] for begin, first in zip(places, own, strict=False))

    def taken(self, epoch: int, batches: int | None = None) -> int:
        """Returns the place in the order of ``epoch`` after ``batches`` of every rank, or all."""
        places, _ = _plan(self, epoch)
        return places[-1 if batches is None else min(batches, len(places) - 1)]

    def indices(self, epoch: int) -> np.ndarray:
        """Returns the order of the whole data set in ``epoch``, int64 ``[length]``.

        A sample that is drawn again has ``length`` added to its place each time: its random numbers
        are others, the place is what remains after division by ``length``.
        """
        if not self.shuffle:
            return np.arange(self.length)
        if self.balance is not None:
            return balanced(*self.balance, self.seed, epoch)
        order = order_rng(self.seed, epoch).permutation(self.length)
        if self.repeats == 1:
            return order
        # Hoffer et al. 2020 (arXiv 1901.09335); an epoch stays as long, as in torchvision's script
        few = order[: -(-self.length // self.repeats), None]
        again: np.ndarray = few + self.length * np.arange(self.repeats)
        return again.reshape(-1)[: self.length]

    def batches(self, epoch: int, first: int = 0) -> Iterator[np.ndarray]:
        """Iterates over this rank's batches of ``epoch`` from ``first`` on.

        Each is int64 ``[<= batch_size]``.
        """
        order = self.indices(epoch)
        places, sizes = _plan(self, epoch)
        for begin, size in zip(places[first:], sizes[first:], strict=False):
            start = begin + size * self.rank // self.world_size
            share = order[start : begin + size * (self.rank + 1) // self.world_size]
            if len(share):
                yield share


@lru_cache(maxsize=8)
def _plan(order: Order, epoch: int) -> tuple[list[int], list[int]]:
    """Returns where the epoch's global batches begin and the last ends, and what ranks share."""
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
    """How far the probes of a run are.

    Attributes:
        asked: batches that all probes together have asked for.
        begin: where the last probe that moves on began.
        seen: the batches that ``again`` repeats: those that the last such probe has given.
    """

    asked: int = 0
    begin: int = 0
    seen: range = range(0)

    def saw(self, batches: int) -> None:
        """Notes that the last probe that moves on has given ``batches``: they can be read."""
        self.seen = range(self.begin, self.begin + batches)


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Endless batches of ``order``, from epochs that training never sees; moves ``cursor``.

    Probes that share a cursor continue its epochs where the last one has stopped: they ask for
    every sample once before they ask for any sample again, if ``order`` does.

    Attributes:
        again: repeat what the cursor has seen, and do not move it.
    """

    order: Order
    cursor: Cursor
    again: bool = False

    def __post_init__(self) -> None:
        if not self.again:
            self.cursor.begin = self.cursor.asked

    def count(self, epoch: int) -> int:
        """Returns more batches than anyone asks for."""
        return sys.maxsize

    def batches(self, epoch: int, first: int = 0) -> Iterator[np.ndarray]:
        """Iterates over the batches from now on; ``epoch`` and ``first`` change nothing."""
        repeated = itertools.cycle(self.cursor.seen if self.again else ())
        # of the latest epoch
        batches = lru_cache(1)(lambda turn: [*self.order.batches(turn)])
        whole = len(self.order)
        while True:
            position = next(repeated, None)
            if position is None:
                position = self.cursor.asked
                self.cursor.asked += 1
            # far from any epoch of training
            yield batches(2**31 + position // whole)[position % whole]


AnyOrder = Order | ProbeOrder
