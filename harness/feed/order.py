"""Which samples make which batch: a pure function of seed, epoch and position."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from harness.runtime.seeding import order_rng

# far from any epoch of training
_PROBE_EPOCH = 2**31


@dataclass(frozen=True, slots=True)
class Rest:
    """Samples ``start`` to ``stop`` of the order of ``epoch``: what is left of it, over all ranks."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Order:
    """The batches of one rank.

    A global batch is a run of ``batch_size * world_size`` places in the epoch's order; each rank
    takes its own stretch of it. So the global batches are the same for any number of ranks at an
    equal global batch size, and without ``drop_last`` every sample is seen once by one rank:
    nothing is padded.

    A rest begins with a whole global batch, wherever it starts, and all ranks have the same number
    of batches of it: the last, short global batch is divided evenly. Where that has fewer samples
    than there are ranks, it and the one before it become two of about half the size each.

    Attributes:
        length: samples in the data set.
        batch_size: samples per batch and rank.
        shuffle: a new order each epoch, else 0, 1, 2, ...
        drop_last: leave out the last batches where they do not make a whole update.
        parts: global batches of an update.
        rest: all that there is of one epoch; None: every epoch is whole.

    Raises:
        ValueError: the rest does not lie in the data set, or the ranks cannot share it.
    """

    length: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    rest: Rest | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        rest = self.rest
        if rest is None:
            return
        shared = rest.stop - rest.start >= self.count(rest.epoch) * self.world_size
        if rest.start < 0 or rest.stop > self.length or not shared:
            raise ValueError(
                f"epoch {rest.epoch}: {self.world_size} ranks cannot share samples {rest.start} to "
                f"{rest.stop} of "
                f"{self.length} evenly in batches of at most {self.batch_size}; use fewer ranks or "
                "raise loader.batch_size"
            )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return replace(self, rest=None).count(0)

    def count(self, epoch: int) -> int:
        """Batches of ``epoch``."""
        left = self._left(epoch)
        # of the last, short batch of a whole epoch the first ranks alone may have a part
        before = 0 if left is self.rest else self.rank * self.batch_size
        return math.ceil((left.stop - left.start - before) / self._step)

    def stop(self, epoch: int) -> int:
        """Where ``epoch`` ends: samples of its order."""
        return self._left(epoch).stop

    def taken(self, epoch: int, batches: int) -> int:
        """Samples of the order of ``epoch`` that are behind all ranks once each has had ``batches``
        of it.
        """
        left = self._left(epoch)
        taken = min(left.start + batches * self._step, left.stop)
        short = left.stop - taken
        if left is self.rest and 0 < short < self.world_size:
            taken -= (self._step - short) // 2
        return taken

    def indices(self, epoch: int) -> np.ndarray:
        """The order of the whole data set in ``epoch``: int64 ``[length]``."""
        if not self.shuffle:
            return np.arange(self.length)
        return order_rng(self.seed, epoch).permutation(self.length)

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        """This rank's batches of ``epoch``, each int64 ``[<= batch_size]``."""
        order = self.indices(epoch)
        for position in range(self.count(epoch)):
            yield self.share(order, epoch, position)

    def share(self, order: np.ndarray, epoch: int, position: int) -> np.ndarray:
        """This rank's batch at ``position`` of ``epoch``, whose ``indices()`` are ``order``."""
        batch = order[self.taken(epoch, position) : self.taken(epoch, position + 1)]
        size = len(batch) if self._left(epoch) is self.rest else self._step
        return batch[
            size * self.rank // self.world_size : size * (self.rank + 1) // self.world_size
        ]

    @property
    def _step(self) -> int:
        """Samples of a global batch."""
        return self.batch_size * self.world_size

    def _left(self, epoch: int) -> Rest:
        """What there is of ``epoch``: the very ``rest``, or all."""
        if self.rest is not None and self.rest.epoch == epoch:
            return self.rest
        return Rest(
            epoch,
            0,
            self.length - (self.length % (self._step * self.parts) if self.drop_last else 0),
        )


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
    """Batches of ``order`` without an end, from epochs that training will never see; asking for one
    moves ``cursor``.

    Probes that share a cursor never ask for the same sample before the whole set has been asked
    for.

    Attributes:
        again: go round what the cursor has seen, and leave it alone.
    """

    order: Order
    cursor: Cursor
    again: bool = False

    def count(self, epoch: int) -> int:
        """More batches than anyone asks for, in any epoch."""
        return sys.maxsize

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        """The batches from now on; ``epoch`` changes nothing."""
        of = -1
        indices = np.empty(0, np.int64)
        whole = len(self.order)
        for position in self._positions():
            turn = _PROBE_EPOCH + position // whole
            if turn != of:
                of = turn
                indices = self.order.indices(turn)
            yield self.order.share(indices, turn, position % whole)

    def _positions(self) -> Iterator[int]:
        if self.again:
            yield from itertools.cycle(self.cursor.seen)
        while True:
            self.cursor.asked += 1
            yield self.cursor.asked - 1


AnyOrder = Order | ProbeOrder
