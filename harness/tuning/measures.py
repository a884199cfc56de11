"""What tuning measures, the model of throughput on it, and what it needs of the data set.

The model serves the diagnosis too. Its laws are in ``harness.watch.throughput``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from harness.feed.interface import PROCESSES, THREADS, Backend, FeedSettings
from harness.feed.order import Cursor
from harness.watch.throughput import roofline, workers_for

# Student's t of a 95 % interval, from one degree of freedom on; beyond the last it changes little
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
# of the mean: two rates that are off by 30 % look alike from no waiting to waiting half of the
# time, as (1 - 0.3) / (1 + 0.3) is 0.54
_UNEVEN = 0.3
# share of the processors above which workers and step are in each other's way
BUSY = 0.8
# delivered over demand with which there is nothing to gain
FED = 0.95

Kind = Literal["supply", "steps", "passes"]


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """Images per second: the mean and its 95 % interval; ordered by the mean."""

    images_per_s: float
    low: float
    high: float = math.inf

    @classmethod
    def of(cls, images: ArrayLike, seconds: ArrayLike) -> Rate:
        """Returns the mean rate of blocks of ``images`` that took ``seconds``.

        The mean is total over total. The interval is Student's over the blocks' residuals (a ratio
        estimator's); with a single block it is open above.
        """
        count = np.asarray(images, float)
        spent = np.asarray(seconds, float)
        n = len(count)
        mean = float(count.sum() / spent.sum())
        if n < 2:
            return cls(mean, 0.0)
        error = np.sqrt(n / (n - 1) * ((count - mean * spent) ** 2).sum()) / spent.sum()
        half = _T95[min(n, len(_T95) + 1) - 2] * float(error)
        return cls(mean, max(0.0, mean - half), mean + half)

    @classmethod
    def exactly(cls, images_per_s: float) -> Rate:
        """Returns a rate that was computed and has no interval."""
        return cls(images_per_s, images_per_s, images_per_s)

    @classmethod
    def typical(cls, images: ArrayLike, seconds: ArrayLike) -> Rate:
        """Returns the median block's rate, which a few slow blocks do not change.

        The interval is that of order statistics.
        """
        rates = np.divide(images, seconds)
        beyond = min(0.5, 0.98 / math.sqrt(len(rates)))
        low, middle, high = np.quantile(rates, [0.5 - beyond, 0.5, 0.5 + beyond]).tolist()
        return cls(middle, low, high)

    @property
    def half_width(self) -> float:
        """Half of the interval as a fraction of the mean."""
        return (self.high - self.low) / 2 / self.images_per_s if self.images_per_s else math.inf

    @property
    def is_uneven(self) -> bool:
        """Whether the interval is too wide for the rate to be compared."""
        return self.low < self.high and self.half_width > _UNEVEN

    def __str__(self) -> str:
        text = f"{self.images_per_s:.0f}"
        if self.images_per_s < 100:
            text = f"{self.images_per_s:.3g}"
        if self.low == self.high:
            return f"about {text}"
        if math.isinf(self.high):
            return text
        return f"{text} ±{self.half_width:.0%}"


@dataclass(frozen=True, slots=True)
class SampleCost:
    """What one sample costs.

    Attributes:
        wall_s: seconds inside a worker, or inside this process where there are none.
        cpu_s: of these, seconds on a processor.
        variation: standard deviation of ``wall_s`` over its mean.
        receive_s: processor seconds of the process that takes the batches, without those that
            making samples in it took.
    """

    wall_s: float
    cpu_s: float
    variation: float
    receive_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one setting.

    Attributes:
        kind: "supply": the loader with nothing consuming; "steps": what it delivered to real
            training steps.
        rate: images/s of one rank, the slowest; None where it was refused.
        seconds: what the trial cost, the workers' start and end included.
        wait_fraction: share of the time in which the steps waited for data ("steps" alone).
        cost: of one sample in a worker.
        refused: why the setting cannot be used, or None.
    """

    settings: FeedSettings
    kind: Kind
    rate: Rate | None = None
    seconds: float = 0.0
    wait_fraction: float | None = None
    cost: SampleCost | None = None
    refused: str | None = None

    @property
    def images_per_s(self) -> float:
        """The mean rate; 0 where the setting was refused."""
        return self.rate.images_per_s if self.rate else 0.0

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table: what was measured, images/s, waiting, seconds, the setting."""
        waiting = "" if self.wait_fraction is None else f"{self.wait_fraction:.0%}"
        why = f": {self.refused}" if self.refused else ""
        return (
            "loader alone" if self.kind == "supply" else "real steps",
            str(self.rate or "refused"),
            waiting,
            f"{self.seconds:.1f}",
            f"{self.settings}{why}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What one backend can give to the steps.

    Attributes:
        demand: images/s that the step takes with a batch at hand.
        cost: of one sample in a worker that has a processor to itself.
        cores: processors that one rank may use.
        step_cpu_s: processor seconds of the step per image.
        alone_s: seconds per image that a process without workers spends on the step, and cannot
            load in.
    """

    demand: float
    cost: SampleCost
    cores: float
    step_cpu_s: float
    alone_s: float

    @property
    def roofline(self) -> float:
        """Images/s at which loading, receiving and step together fill all processors."""
        return roofline(self.cores, self.cost.cpu_s, self.cost.receive_s, self.step_cpu_s)

    @property
    def reachable(self) -> float:
        """The most images/s that any number of workers can give to the steps."""
        return min(self.demand, self.roofline)

    @property
    def is_crowded(self) -> bool:
        """Whether loading beside the step needs nearly all processors."""
        return self.reachable > BUSY * self.roofline

    def delivered(self, workers: int) -> float:
        """Returns the images/s that steps get from that many workers."""
        if workers == 0:
            return min(self.reachable, 1 / (self.alone_s + self.cost.wall_s))
        return min(self.reachable, workers / self.cost.wall_s)

    def workers_for(self, images_per_s: float) -> int:
        """Returns the fewest workers for a rate, at least 1."""
        return workers_for(images_per_s, self.cost.wall_s)


def undisturbed(cost: SampleCost, workers: int, cores: float) -> SampleCost:
    """Returns ``cost`` without what busy workers took from each other.

    They do that where there are more of them than processors.
    """
    if workers <= cores or workers * cost.cpu_s / cost.wall_s <= BUSY * cores:
        return cost
    return replace(cost, wall_s=max(cost.cpu_s, cost.wall_s * cores / workers))


def in_flight(settings: FeedSettings) -> int:
    """Returns how many batches are made, or in the making, before one is taken.

    Each process makes its own; threads make one together.
    """
    each = settings.prefetch_factor or 0
    if settings.backend != THREADS:
        return settings.num_workers * each
    return each + (settings.num_workers > 0)


class Probes(Protocol):
    """Makes the feeds that tuning measures; by default of processes alone.

    Attributes:
        cursor: how far they are; is told what a probe has given, and can be read.
    """

    cursor: Cursor

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that can serve the data set."""
        return (PROCESSES,)

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        """Returns the bytes of one batch's tensors; None if only loading one would tell."""

    def held_bytes(self, settings: FeedSettings) -> int:
        """Returns the bytes that feeds of ``settings`` hold besides their batches."""
        return 0

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        """Returns the validation feed's settings beside a training feed of ``train``."""
        return train

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Backend:
        """Returns an endless feed over samples that no probe has asked for.

        With ``again`` it goes round the samples that ``cursor`` has seen.
        """
