"""Made-up machines that answer what a search asks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import samples

from harness.feed.interface import FeedSettings
from harness.tuning.measures import Rate, SampleCost, Trial
from harness.tuning.model import Model, undisturbed
from harness.tuning.search import Ask, AutoSearch, Choice, follow


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
    asked: list[Ask] = dataclasses.field(default_factory=list)

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

    def answer(self, ask: Ask) -> Trial:
        self.asked.append(ask)
        steps = ask.kind == "steps"
        if self.broken(ask.settings):
            return Trial(
                ask.settings, "steps" if steps else "supply", seconds=1.0, refused="a worker died"
            )
        exact = self.delivered(ask.settings) if steps else self.supply(ask.settings)
        rate = exact * self.random.gauss(1.0, self.noise)
        slowed = (
            max(1.0, ask.settings.num_workers / self.wall_s / self.loaded(ask.settings))
            if ask.settings.num_workers
            else 1
        )
        speed = self.form_speed[ask.settings.backend]
        wall_s = self.wall_s / speed * slowed
        cost = SampleCost(wall_s, self.cpu_s / speed, self.variation, self.receive_s)
        wait = max(0.0, 1 - exact / self.steps(ask.settings))
        interval = Rate(rate, rate * 0.97, rate * 1.03)
        if steps:
            return Trial(ask.settings, "steps", interval, 1.5, wait_fraction=wait)
        return Trial(ask.settings, "supply", interval, 1.5, cost=cost)


def look(
    machine: Machine,
    own: FeedSettings,
    most: int = 16,
    fits: Callable[[FeedSettings], str | None] = lambda _: None,
    budget_s: float = 30.0,
) -> AutoSearch:
    """What is known of ``machine`` before a search, with probes of ``own``, or of one worker."""

    def modelled(cost: SampleCost, workers: int) -> Model:
        return Model(
            demand=machine.demand,
            cost=undisturbed(cost, workers, machine.cores),
            cores=machine.cores,
            step_cpu_s=machine.step_cpu_s,
            alone_s=1 / machine.demand,
        )

    trials: list[Trial] = []
    for settings in (
        dataclasses.replace(own, num_workers=own.num_workers or 1),
        dataclasses.replace(own, num_workers=1, prefetch_factor=1),
    ):
        refused = fits(settings)
        ask = Ask(settings, "supply")
        trials.append(
            Trial(settings, "supply", refused=refused) if refused else machine.answer(ask)
        )
        if trials[-1].rate:
            break
    return AutoSearch(
        own=own,
        trials=trials,
        backends=tuple(machine.form_speed),
        demand=Rate.exactly(machine.demand),
        modelled=modelled,
        most=most,
        pin_memory=False,
        fits=fits,
        left_s=budget_s,
    )


def search(
    machine: Machine,
    own: FeedSettings,
    most: int = 16,
    fits: Callable[[FeedSettings], str | None] = lambda _: None,
    budget_s: float = 30.0,
) -> Choice:
    """What tuner=auto chooses on ``machine``, before which the user had ``own``."""

    def attempt(ask: Ask) -> Trial:
        refused = fits(ask.settings)
        return Trial(ask.settings, "supply", refused=refused) if refused else machine.answer(ask)

    return follow(look(machine, own, most, fits, budget_s).run(), attempt)
