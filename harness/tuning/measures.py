"""Defines tuning's measurements, the throughput model and the tuning report.

The diagnosis also uses the model. The model's laws are in ``harness.clock.stages``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..clock.stages import roofline, workers_for
from ..feed.base import ARRAYS, PROCESSES, THREADS, Backend, FeedSettings
from ..feed.order import Cursor
from ..monitor.console import aligned
from ..monitor.writer import RunWriter, plain, publish
from ..runtime.limits import Limits

# Student's t for a 95% interval with 1, 2, ... degrees of freedom; nearly constant after the last
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
# fraction of the mean: with 30% errors, no waiting and waiting half of the time look alike,
# because (1 - 0.3) / (1 + 0.3) is 0.54
_UNEVEN = 0.3
_OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers")
# fraction of the cores above which workers and the step slow each other down
BUSY = 0.8
# ratio of delivered rate to demand above which there is nothing to gain
FED = 0.95

Kind = Literal["supply", "steps", "passes"]


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """Images per second: the mean and its 95% interval; rates are ordered by the mean."""

    images_per_s: float
    low: float
    high: float = math.inf

    @classmethod
    def of(cls, images: ArrayLike, seconds: ArrayLike) -> Rate:
        """Returns the mean rate for blocks with ``images`` images that took ``seconds`` seconds.

        The mean is total images over total seconds. The interval is a Student's t interval over
        the blocks' residuals (a ratio estimator); for a single block, it has no upper end.
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
        """Returns a computed rate, without an interval."""
        return cls(images_per_s, images_per_s, images_per_s)

    @classmethod
    def typical(cls, images: ArrayLike, seconds: ArrayLike) -> Rate:
        """Returns the median block's rate, which is robust to a few slow blocks.

        The interval is from order statistics.
        """
        rates = np.divide(images, seconds)
        beyond = min(0.5, 0.98 / math.sqrt(len(rates)))
        low, middle, high = np.quantile(rates, [0.5 - beyond, 0.5, 0.5 + beyond]).tolist()
        return cls(middle, low, high)

    @property
    def half_width(self) -> float:
        """Half the interval, as a fraction of the mean."""
        return (self.high - self.low) / 2 / self.images_per_s if self.images_per_s else math.inf

    @property
    def is_uneven(self) -> bool:
        """Whether the interval is too wide for comparisons."""
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
    """The cost of one sample.

    Attributes:
        wall_s: seconds in a worker, or in this process without workers.
        cpu_s: CPU seconds within ``wall_s``.
        variation: standard deviation of ``wall_s`` divided by its mean.
        receive_s: CPU seconds in the process that takes the batches, excluding those for making
            samples in it.
    """

    wall_s: float
    cpu_s: float
    variation: float
    receive_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The result for one setting.

    Attributes:
        kind: "supply" for the loader without a consumer, "steps" for the loader with real training
            steps.
        rate: images/s on the slowest rank; None if the setting was rejected.
        seconds: duration of the trial, including starting and ending workers.
        wait_fraction: fraction of time that steps waited for data ("steps" only).
        cost: cost of one sample in a worker.
        refused: why the setting cannot be used, or None if it can.
        memory_bytes: the workers' private memory and the batches in flight; None if not computed.
    """

    settings: FeedSettings
    kind: Kind
    rate: Rate | None = None
    seconds: float = 0.0
    wait_fraction: float | None = None
    cost: SampleCost | None = None
    refused: str | None = None
    memory_bytes: int | None = None

    @property
    def images_per_s(self) -> float:
        """The mean rate; 0 if the setting was rejected."""
        return self.rate.images_per_s if self.rate else 0.0

    @property
    def row(self) -> tuple[str, ...]:
        """The cells in a table row: measurement, images/s, waiting, seconds, setting."""
        waiting = "-" if self.wait_fraction is None else f"{self.wait_fraction:.0%}"
        why = f": {self.refused}" if self.refused else ""
        return (
            "loader only" if self.kind == "supply" else "real steps",
            str(self.rate or ("refused" if why else "-")),
            waiting,
            f"{self.seconds:.1f}",
            f"{self.settings}{why}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The throughput model for one backend.

    Attributes:
        demand: images/s for the step on a preloaded batch.
        cost: cost of one sample in a worker with a core to itself.
        cores: cores that one rank may use.
        step_cpu_s: the step's CPU seconds per image.
        alone_s: seconds per image during which a process without workers is busy with the step and
            cannot load.
    """

    demand: float
    cost: SampleCost
    cores: float
    step_cpu_s: float
    alone_s: float

    @property
    def roofline(self) -> float:
        """Images/s at which loading, receiving and the step together use all cores."""
        return roofline(self.cores, self.cost.cpu_s, self.cost.receive_s, self.step_cpu_s)

    @property
    def reachable(self) -> float:
        """The maximum images/s that any number of workers can deliver to the steps."""
        return min(self.demand, self.roofline)

    @property
    def is_crowded(self) -> bool:
        """Whether loading and the step together need nearly all cores."""
        return self.reachable > BUSY * self.roofline

    def delivered(self, workers: int) -> float:
        """Returns the images/s that ``workers`` deliver to the steps."""
        if workers == 0:
            return min(self.reachable, 1 / (self.alone_s + self.cost.wall_s))
        return min(self.reachable, workers / self.cost.wall_s)

    def workers_for(self, images_per_s: float) -> int:
        """Returns the number of workers needed to reach a rate, at least 1."""
        return workers_for(images_per_s, self.cost.wall_s)


def undisturbed(cost: SampleCost, workers: int, cores: float) -> SampleCost:
    """Returns ``cost`` without the time that busy workers took from each other.

    Workers do this if there are more workers than cores.
    """
    if workers <= cores or workers * cost.cpu_s / cost.wall_s <= BUSY * cores:
        return cost
    return replace(cost, wall_s=max(cost.cpu_s, cost.wall_s * cores / workers))


def in_flight(settings: FeedSettings) -> int:
    """Returns the number of batches finished or in progress before one is taken.

    Each process makes its own batch; threads make one batch together.
    """
    return settings.batches_ahead + (settings.backend == THREADS and settings.num_workers > 0)


class Probes(Protocol):
    """Makes the feeds that tuning measures; by default, only feeds with processes.

    Attributes:
        cursor: the position in the samples, updated after each probe.
    """

    cursor: Cursor

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that can serve the dataset."""
        return (PROCESSES,)

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        """Returns the bytes in one batch's tensors; None if unknown before a batch is loaded."""

    def held_bytes(self, settings: FeedSettings) -> int:
        """Returns the bytes that feeds with ``settings`` hold in addition to their batches."""
        return 0

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        """Returns the validation feed's settings alongside a training feed with ``train``."""
        return train

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Backend:
        """Returns an endless feed over samples that no probe has requested.

        With ``again``, it cycles through the samples that ``cursor`` has seen.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """The measurements and the choice from a search.

    Attributes:
        search: auto or grid.
        before: the result for the user's own settings.
        after: the result for the choice.
        val: the choice for the validation feed.
        demand: the step's images/s, as estimated by the search; None if not measured.
        reason: why this choice, in sentences without the last period.
        complete: False if the budget ended the search.
        trials: all settings measured or rejected, in order.
        limits: the resources that a rank may use.
        notes: further notes for the user, one sentence each.
        worker_bytes: one worker's private memory.
        seconds: duration of tuning in this run.
        reused: whether the result is from an earlier run.
        others_cores: cores that other programs used during measurements; None if they did not
            disturb them.
    """

    search: str
    before: Trial
    after: Trial
    val: FeedSettings
    demand: Rate | None = None
    reason: str = ""
    complete: bool = True
    trials: tuple[Trial, ...]
    limits: Limits
    notes: tuple[str, ...] = ()
    worker_bytes: int = 0
    seconds: float = 0.0
    reused: bool = False
    others_cores: float | None = None

    @property
    def settings(self) -> FeedSettings:
        """The choice for the training feed."""
        return self.after.settings

    @property
    def ceiling(self) -> float | None:
        """The speedup over ``before`` if loading were free; None if unknown."""
        before = self.before.images_per_s
        return max(1.0, self.demand.images_per_s / before) if self.demand and before else None

    @property
    def sentence(self) -> str:
        """The model's throughput, the settings' throughput, and the reason for the choice."""
        before = self.before
        after = self.after
        if not (self.ceiling and after.rate):
            return f"Chosen: {after.settings}. {self.reason}."
        model = f"The model takes {self.demand} images/s"
        rates = f"{model}. Training reaches {before.rate} with {before.settings}"
        if after.settings != before.settings:
            return f"{rates}; the choice, {after.settings}, reaches {after.rate}. {self.reason}."
        if FED * self.ceiling <= 1:
            found = "possible" if self.others_cores is None else "found alongside other programs"
            bound = f"upper bound {self.ceiling:.1f}x"
            return f"No speedup {found} ({bound}). {rates}. {self.reason}."
        return f"{rates}, which is kept. {self.reason}."

    @property
    def override(self) -> str:
        """The command-line arguments that produce this choice without tuning."""
        train = self.settings
        names = ["backend", "pin_memory", *_OF_WORKERS]
        if train.backend == ARRAYS:
            names.remove("num_workers")
        if train.backend == THREADS:
            names.remove("persistent_workers")
        words = {name: getattr(train, name) for name in names}
        # the validation feed's settings follow from these, unless they had to be lower
        derived = {
            "batch_size": train.batch_size,
            "num_workers": train.num_workers,
            "prefetch_factor": None if train.backend == THREADS else 2,
        }
        for name, value in derived.items():
            other = getattr(self.val, name)
            words[f"val.{name}"] = None if other == value else other
        return " ".join(
            f"loader.{name}={str(value).lower()}"
            for name, value in words.items()
            if value is not None
        )

    @property
    def loader_arguments(self) -> dict[str, Any]:
        """The choice as keyword arguments for ``torch.utils.data.DataLoader``."""
        own = self.settings
        names = ("batch_size", "pin_memory", *_OF_WORKERS)
        found = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
        # the first method is Python's default
        if own.num_workers and own.start_method != get_all_start_methods()[0]:
            found["multiprocessing_context"] = own.start_method
        return found

    @property
    def dataloader(self) -> str:
        """The equivalent line of code; empty if PyTorch has no such backend."""
        if self.settings.backend != PROCESSES:
            return ""
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.loader_arguments.items())
        return f"DataLoader(dataset, shuffle=True, {arguments})"

    def publish(self, writer: RunWriter | None) -> None:
        """Prints the result; ``writer`` writes ``tuning.json`` and TensorBoard's Text tab."""
        names = ("settings", "ceiling", "sentence", "override", "dataloader")
        more = {name: getattr(self, name) for name in names}
        publish("tuning", self.lines(), {**self.to_plain(), **more}, writer)

    def lines(self) -> list[str]:
        """Returns the result: before and after, reason, how to repeat it, and rejected settings."""
        number = len(self.trials) + (self.demand is not None)
        count = f"{number} measurement" + "s" * (number != 1)
        title = f"tuner={self.search}: {count} in {self.seconds:.1f} s"
        if self.reused:
            title = f"tuner={self.search}: remembered from an earlier run, {self.seconds:.1f} s"
        elif not self.complete:
            title += ", out of time"
        rows = [
            (name, *side.row[1:3], shown(side.memory_bytes), str(side.settings))
            for name, side in (("before", self.before), ("after", self.after))
        ]
        what = "images/s" if self.demand else "images/s (loader only)"
        code = [f"the same in code: {self.dataloader}"] if self.dataloader else []
        return [
            title,
            *aligned(("", what, "waiting", "memory", "setting"), rows),
            self.sentence,
            f"the same without tuning: {self.override}",
            *code,
            *(
                f"refused {trial.settings}: {trial.refused}"
                for trial in self.trials
                if trial.refused
            ),
            *(f"note: {note}" for note in self.notes),
        ]

    def summary(self) -> dict[str, Any]:
        """Returns the tuning entry for ``report.json``."""
        return {
            "seconds": round(self.seconds, 2),
            "chosen": str(self.settings),
            "reused": self.reused,
            "complete": self.complete,
            "before_images_per_s": self.before.images_per_s or None,
            "after_images_per_s": self.after.images_per_s or None,
            "sentence": self.sentence,
        }

    def to_plain(self) -> dict[str, Any]:
        """Returns everything as plain JSON values; ``files.from_json`` is the inverse.

        An infinite interval end becomes None.
        """
        return dict(plain(dataclasses.asdict(self)))


def shown(count: float | None) -> str:
    """Returns ``count`` bytes as MB, or as GB from 1000 MB up; "-" if None."""
    if count is None:
        return "-"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
