"""What tuning measures, and what it needs of the step that it measures for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from harness.feed.gauge import Gauge
from harness.feed.interface import Feed, FeedSettings, HostBatch
from harness.watch.figures import StepRun

_T95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.2,
    2.18,
    2.16,
    2.14,
    2.13,
)  # Student's t, from 1 degree
# two rates off by so much look alike from no waiting to waiting half of the time: (1 - 0.3) / (1 +
# 0.3) = 0.54
_UNEVEN = 0.3
MOSTLY = 0.9  # of the time: steps that wait longer are too short besides to tell their own speed


@dataclass(frozen=True, slots=True)
class Rate:
    """Images per second: the mean and its 95 % interval."""

    images_per_s: float
    low: float
    high: float = math.inf

    @classmethod
    def of(cls, images: Sequence[float], seconds: Sequence[float]) -> Rate:
        """The rate of blocks that each gave so many images in so many seconds; its interval is open
        above with one block.

        The mean is total over total; the interval is Student's over the blocks' residuals (a ratio
        estimator's).
        """
        count = np.asarray(images, float)
        spent = np.asarray(seconds, float)
        mean = float(count.sum() / spent.sum())
        if len(count) < 2:
            return cls(mean, 0.0, math.inf)
        residual = count - mean * spent
        error = math.sqrt(float((residual**2).sum()) * len(count) / (len(count) - 1)) / float(
            spent.sum()
        )
        half = (_T95[len(count) - 2] if len(count) - 2 < len(_T95) else 1.96) * error
        return cls(mean, max(0.0, mean - half), mean + half)

    @classmethod
    def exactly(cls, images_per_s: float) -> Rate:
        """A rate that was computed and has no interval."""
        return cls(images_per_s, images_per_s, images_per_s)

    @classmethod
    def typical(cls, images: Sequence[float], seconds: Sequence[float]) -> Rate:
        """The median block's rate, and the interval that order statistics give it: a few slow
        blocks change nothing.
        """
        rates = np.sort(np.asarray(images, float) / np.asarray(seconds, float))
        n = len(rates)
        beyond = max(
            0, math.floor((n - 1.96 * math.sqrt(n)) / 2)
        )  # blocks on each side that lie outside of it
        return cls(float(np.median(rates)), float(rates[beyond]), float(rates[n - 1 - beyond]))

    @property
    def half_width(self) -> float:
        """Half of the interval as a fraction of the mean."""
        return (self.high - self.low) / 2 / self.images_per_s if self.images_per_s else math.inf

    @property
    def is_uneven(self) -> bool:
        """Whether it is known so badly that it is not to be compared."""
        return self.half_width > _UNEVEN

    def __str__(self) -> str:
        if self.low == self.high:
            return (
                f"about {self.images_per_s:.3g}"
                if self.images_per_s < 100
                else f"about {self.images_per_s:.0f}"
            )
        mean = f"{self.images_per_s:.3g}" if self.images_per_s < 100 else f"{self.images_per_s:.0f}"
        return mean + (f" ±{self.half_width:.0%}" if math.isfinite(self.half_width) else "")


@dataclass(frozen=True, slots=True)
class SampleCost:
    """What one sample costs.

    Attributes:
        wall_s: seconds inside a worker, or inside this process where there are none.
        cpu_s: of these, seconds on a processor.
        variation: standard deviation of ``wall_s`` over its mean.
        receive_s: processor seconds of the process that takes the batches, less what making samples
            in it took.
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
        images: how many images the rate rests on.
        seconds: what the trial cost, the workers' start and end included.
        wait_fraction: share of the time in which the steps waited for data ("steps" alone).
        cost: of one sample in a worker.
        memory_bytes: the workers' private memory and the batches in flight.
        refused: why the setting cannot be used, or None.
    """

    settings: FeedSettings
    kind: Literal["supply", "steps"]
    rate: Rate | None = None
    images: int = 0
    seconds: float = 0.0
    wait_fraction: float | None = None
    cost: SampleCost | None = None
    memory_bytes: int | None = None
    refused: str | None = None

    @property
    def working(self) -> float:
        """Images/s of the steps but for their waits for data; 0 where there was no rate."""
        return (
            self.rate.images_per_s / (1 - min(MOSTLY, self.wait_fraction or 0.0))
            if self.rate
            else 0.0
        )


class Trainee(Protocol):
    """The training step as tuning sees it. Every rank makes the same calls in the same order."""

    @property
    def device(self) -> torch.device:
        """Where the network runs."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether batches are loaded beside the step even without workers."""
        ...

    def kept(self) -> AbstractContextManager[None]:
        """A block at whose end all that steps change is as before: weights, buffers, optimizer,
        counters, random states.
        """
        ...

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        """Steps on one batch whose bytes stay on the device, warmed up, for about ``limit_s``
        seconds, and at least two.
        """
        ...

    def deliver(self, feed: Feed, skip: int, limit_s: float) -> StepRun:
        """Steps on ``feed`` for about ``limit_s`` seconds and at least two, after ``skip`` batches
        or a third of that time.
        """
        ...


class Ranks(Protocol):
    """What tuning needs of the other ranks: one decision for all, on the slowest."""

    def smallest(self, value: float) -> float:
        """The smallest ``value`` of all ranks, on every rank."""
        ...

    def agreed(self, value: Any) -> Any:
        """The first rank's ``value``, on every rank."""
        ...

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's ``value``, on every rank."""
        ...


class Probes(Protocol):
    """Makes the feeds that tuning measures."""

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of the feed's forms that can serve the data set."""
        ...

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        """Bytes of one batch's tensors; None where only loading one would tell."""
        ...

    def held_bytes(self, settings: FeedSettings) -> int:
        """Bytes of memory that feeds of ``settings`` hold besides their batches."""
        ...

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        """The validation feed's settings beside a training feed of ``train``."""
        ...

    def probe(
        self, settings: FeedSettings, gauge: Gauge | None = None, *, again: bool = False
    ) -> Feed:
        """An endless feed over samples that no probe has asked for, or ``again`` round those of the
        last ``saw``.
        """
        ...

    def saw(self, batches: int) -> None:
        """Note that the last probe that was made has given so many batches: their samples can be
        read.
        """
        ...

    def probed(self) -> float:
        """How many times the training set has been asked for by probes."""
        ...
