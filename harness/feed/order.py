"""Which samples make which batch: a pure function of seed, epoch and position."""

from __future__ import annotations

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
            first = (position * self.world_size + self.rank) * self.batch_size
            yield order[first : first + self.batch_size]


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """``count`` batches of ``order`` in one pass, over as many epochs as it takes, none of which training will see."""

    order: Order
    count: int

    def __len__(self) -> int:
        return self.count

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """Batches of the epochs from ``_PROBE_EPOCH + epoch`` on; ``start`` counts from the first."""
        position = start
        while position < self.count:
            turn, inside = divmod(position, len(self.order))
            for batch in self.order.batches(_PROBE_EPOCH + epoch + turn, inside):
                if position == self.count:
                    return
                yield batch
                position += 1
