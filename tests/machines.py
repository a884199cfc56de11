"""Made-up machines that answer what a search asks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import samples

from harness.feed.interface import FeedSettings
from harness.tuning.figures import Rate, SampleCost, Trial
from harness.tuning.search import Ask


def own(num_workers: int) -> FeedSettings:
    """The user's settings: batches of 32."""
    return samples.settings(num_workers, batch_size=32, persistent_workers=True)


@dataclass
class Machine:
    """``cores`` processors, on which a sample takes ``wall_s``, ``cpu_s`` of them busy, and a step ``1 / demand`` an image.

    ``ceiling`` is the most that the storage gives, ``handing`` the most that the trainer takes; ``noise`` the relative
    standard deviation of a measurement; a setting in ``broken`` is refused; ``form_speed`` makes a form so much faster.
    """

    wall_s: float
    cpu_s: float
    demand: float
    cores: float = 2.0
    step_cpu_s: float = 0.0
    ceiling: float = math.inf
    handing: float = math.inf
    noise: float = 0.0
    variation: float = 0.1
    broken: Callable[[FeedSettings], bool] = lambda _: False
    form_speed: dict[str, float] = dataclasses.field(default_factory=lambda: {"processes": 1.0})
    seed: int = 0
    asked: list[Ask] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def supply(self, s: FeedSettings) -> float:
        return min(self.loaded(s), self.handing)

    def loaded(self, s: FeedSettings) -> float:
        speed = self.form_speed[s.backend]
        return min(max(1, s.num_workers) * speed / self.wall_s, self.cores * speed / self.cpu_s, self.ceiling)

    def delivered(self, s: FeedSettings) -> float:
        if s.num_workers == 0:
            return 1 / (1 / self.demand + self.wall_s)
        together = self.cores / (self.cpu_s / self.form_speed[s.backend] + self.step_cpu_s)
        return min(self.demand, self.supply(s), together)

    def times(self, mean_s: float) -> tuple[tuple[float, int], ...]:
        """One sample in a hundred takes so long that the variation is as said."""
        slow_s = mean_s * (1 + self.variation * math.sqrt(99))
        return (mean_s * (1 - self.variation / math.sqrt(99)), 990), (slow_s, 10)

    def answer(self, ask: Ask) -> Trial:
        self.asked.append(ask)
        steps = ask.kind == "steps"
        if self.broken(ask.settings):
            return Trial(ask.settings, "steps" if steps else "supply", seconds=1.0, refused="a worker died")
        exact = self.delivered(ask.settings) if steps else self.supply(ask.settings)
        rate = exact * self.random.gauss(1.0, self.noise)
        slowed = max(1.0, ask.settings.num_workers / self.wall_s / self.loaded(ask.settings)) if ask.settings.num_workers else 1
        wall_s = self.wall_s / self.form_speed[ask.settings.backend] * slowed
        cost = SampleCost(wall_s, self.cpu_s, self.variation, times=self.times(wall_s))
        wait = max(0.0, 1 - exact / self.demand)
        interval = Rate(rate, rate * 0.97, rate * 1.03)
        if steps:
            return Trial(ask.settings, "steps", interval, 1000, 1.5, wait_fraction=wait)
        return Trial(ask.settings, "supply", interval, 1000, 1.5, cost=cost)
