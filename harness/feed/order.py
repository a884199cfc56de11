"""Which samples make which batch: a pure function of seed, epoch and position."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness.runtime.seeding import order_rng

_PROBE_EPOCH = 2**31  # far from any epoch of training


@dataclass(frozen=True, slots=True)
class Order:
    """The batches of one rank.

    A global batch is a run of ``batch_size * world_size`` places in the epoch's order; each rank takes its own stretch of
    it. So the global batches are the same for any number of ranks at an equal global batch size, and without ``drop_last``
    every sample is seen once by one rank: nothing is padded.

    Attributes:
        length: samples in the data set.
        batch_size: samples per batch and rank.
        shuffle: a new order each epoch, else 0, 1, 2, ...
        drop_last: leave out a last global batch that is not full.
    """

    length: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        full, rest = divmod(self.length, self.batch_size * self.world_size)
        return full + (not self.drop_last and rest > self.rank * self.batch_size)

    def indices(self, epoch: int) -> np.ndarray:
        """The order of the whole data set in ``epoch``: int64 ``[length]``."""
        if not self.shuffle:
            return np.arange(self.length)
        return order_rng(self.seed, epoch).permutation(self.length)

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """This rank's batches of ``epoch`` from position ``start`` on, each int64 ``[<= batch_size]``."""
        order = self.indices(epoch)
        for position in range(start, len(self)):
            yield self.share(order, position)

    def share(self, order: np.ndarray, position: int) -> np.ndarray:
        """This rank's batch at ``position`` of an epoch whose ``indices()`` are ``order``."""
        first = (position * self.world_size + self.rank) * self.batch_size
        return order[first : first + self.batch_size]


@dataclass(slots=True)
class Cursor:
    """How far the probes of a run are.

    Attributes:
        asked: batches that all probes together have asked for.
        begin: where the last probe that moves on began.
        seen: the batches that ``again`` goes round: those that such a probe has given.
    """

    asked: int = 0
    begin: int = 0
    seen: range = range(0)


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Batches of ``order`` without an end, from epochs that training will never see; asking for one moves ``cursor``.

    Probes that share a cursor never ask for the same sample before the whole set has been asked for.

    Attributes:
        again: go round what the cursor has seen, and leave it alone.
    """

    order: Order
    cursor: Cursor
    again: bool = False

    def __len__(self) -> int:
        return sys.maxsize

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """The batches from now on; ``epoch`` and ``start`` change nothing."""
        turn, indices = -1, np.empty(0, np.int64)
        for position in self._positions():
            if position // len(self.order) != turn:
                turn = position // len(self.order)
                indices = self.order.indices(_PROBE_EPOCH + turn)
            yield self.order.share(indices, position % len(self.order))

    def _positions(self) -> Iterator[int]:
        if self.again:
            yield from itertools.cycle(self.cursor.seen)
        while True:
            self.cursor.asked += 1
            yield self.cursor.asked - 1
