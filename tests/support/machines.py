"""Made-up machines that answer what a search asks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import samples
import torch

from harness.config import TunerConfig
from harness.feed.base import FeedSettings
from harness.runtime.distributed import World
from harness.runtime.limits import Limits
from harness.tuning.auto import AutoSearch
from harness.tuning.lab import LoaderBenchmark, Needs
from harness.tuning.measures import Kind, Rate, SampleCost, Trial, TuningReport


class Asked(NamedTuple):
    """What a search had measured."""

    settings: FeedSettings
    kind: Kind


def own(num_workers: int, backend: str = "processes") -> FeedSettings:
    """The user's settings: batches of 32."""
    return samples.settings(num_workers, batch_size=32, persistent_workers=True, backend=backend)


@dataclass
class Machine:
    """``cores`` processors with costs of a sample and of a step.

    A sample takes ``wall_s``, ``cpu_s`` of them busy, and a step ``1 / demand`` an image.

    ``receive_s`` is what the trainer's processor takes to receive an image. ``ceiling`` is the most
    that the storage gives, ``handing`` the most that the trainer takes; ``noise`` the relative
    standard deviation of a measurement; a setting in ``broken`` is refused. ``form_speed`` makes a
    backend so much faster, ``form_ceiling`` is the most that it gives with any number of workers,
    ``form_slows`` what it leaves of the step's speed.
    """

    wall_s: float
    cpu_s: float
    demand: float
    cores: float = 2.0
    step_cpu_s: float = 0.0
    receive_s: float = 0.0
    ceiling: float = math.inf
    handing: float = math.inf
    noise: float = 0.0
    variation: float = 0.1
    broken: Callable[[FeedSettings], bool] = lambda _: False
    form_speed: dict[str, float] = dataclasses.field(default_factory=lambda: {"processes": 1.0})
    form_ceiling: dict[str, float] = dataclasses.field(default_factory=dict)
    form_slows: dict[str, float] = dataclasses.field(default_factory=dict)
    seed: int = 0
    asked: list[Asked] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def supply(self, s: FeedSettings) -> float:
        return min(self.loaded(s), self.handing)

    def loaded(self, s: FeedSettings) -> float:
        speed = self.form_speed[s.backend]
        most = min(self.ceiling, self.form_ceiling.get(s.backend, math.inf))
        return min(
            max(1, s.num_workers) * speed / self.wall_s, self.cores * speed / self.cpu_s, most
        )

    def steps(self, s: FeedSettings) -> float:
        """Images/s of the step beside a feed of ``s`` that it never waits for."""
        return self.demand * (self.form_slows.get(s.backend, 1.0) if s.num_workers else 1.0)

    def delivered(self, s: FeedSettings) -> float:
        speed = self.form_speed[s.backend]
        if s.num_workers == 0:
            return 1 / (1 / self.demand + 1 / self.loaded(s))
        return min(
            self.steps(s),
            self.supply(s),
            self.cores / (self.cpu_s / speed + self.receive_s + self.step_cpu_s),
        )

    def answer(self, settings: FeedSettings, kind: Kind, limit_s: float = 0.0) -> Trial:
        self.asked.append(Asked(settings, kind))
        steps = kind == "steps"
        trial = Trial(settings, "steps" if steps else "supply", seconds=1.5)
        if self.broken(settings):
            return dataclasses.replace(trial, seconds=1.0, refused="a worker died")
        exact = self.delivered(settings) if steps else self.supply(settings)
        rate = exact * self.random.gauss(1.0, self.noise)
        interval = Rate(rate, rate * 0.97, rate * 1.03)
        if steps:
            wait = max(0.0, 1 - exact / self.steps(settings))
            return dataclasses.replace(trial, rate=interval, wait_fraction=wait)
        slowed = 1.0
        if settings.num_workers:
            slowed = max(1.0, settings.num_workers / self.wall_s / self.loaded(settings))
        speed = self.form_speed[settings.backend]
        wall_s = self.wall_s / speed * slowed
        cost = SampleCost(wall_s, self.cpu_s / speed, self.variation, self.receive_s)
        return dataclasses.replace(trial, rate=interval, cost=cost)


class MadeUp(LoaderBenchmark):
    """A lab in which ``machine`` answers; ``fits`` says why a setting does not fit."""

    machine: Machine
    fits: Callable[[FeedSettings], str | None]

    def measured(self, settings: FeedSettings, kind: Kind, limit_s: float) -> Trial:
        if refused := self.fits(settings):
            return Trial(settings, "supply", refused=refused)
        return self.machine.answer(settings, kind)

    def demand(self, limit_s: float, rate: object = None) -> tuple[Rate, float]:
        return Rate.exactly(self.machine.demand), self.machine.step_cpu_s

    def unfit(self, settings: FeedSettings) -> str | None:
        return self.fits(settings)

    def needs(self, settings: FeedSettings) -> Needs:
        return Needs()

    def pays_to_pin(self, own: FeedSettings) -> bool:
        return False

    @property
    def now(self) -> Callable[[], float]:
        return lambda: 0.0


def made_up(
    machine: Machine, fits: Callable[[FeedSettings], str | None] = lambda _: None
) -> MadeUp:
    probes: Any = SimpleNamespace(
        backends=tuple(machine.form_speed), val_settings=lambda train: train
    )
    step: Any = SimpleNamespace(overlaps=False)
    limits = Limits(machine.cores, 10**10, 10**10, 10_000)
    lab = MadeUp(probes, step, limits, World(0, 1, 0, 1, torch.device("cpu")))
    lab.machine = machine
    lab.fits = fits
    return lab


def room(
    batch_bytes: int | None,
    worker_bytes: int = 0,
    held_bytes: int = 0,
    limits: Limits | None = None,
) -> LoaderBenchmark:
    """A lab that knows what a batch, a worker and the images in memory take."""
    probes: Any = SimpleNamespace(
        batch_bytes=lambda _: batch_bytes, held_bytes=lambda _: held_bytes
    )
    none: Any = None
    return LoaderBenchmark(
        probes, none, limits or Limits(8.0, 10**11, 10**11, 10**5), none, worker_bytes
    )


def search(
    machine: Machine,
    own: FeedSettings,
    most: int = 16,
    fits: Callable[[FeedSettings], str | None] = lambda _: None,
    budget_s: float = 30.0,
) -> TuningReport:
    """What tuner=auto chooses on ``machine``, before which the user had ``own``."""
    config = TunerConfig(budget_s=budget_s, max_workers=most)
    return AutoSearch(made_up(machine, fits), own, config).run()
