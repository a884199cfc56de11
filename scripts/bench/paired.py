"""Measures what something costs: a loop with it and without it in turns.

And without it against itself, which shows the noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.bench.tables import Sample

# does so many steps, or the one thing that it is for
Work = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cost is measured.

    Attributes:
        runs: of each side, in turns.
        steps: in a run.
        before: done before each run, untimed.
        now: the clock in seconds; the thread's processor time where runs are long enough to be
            interrupted.
        kind: of the run that the watched side did in this turn, where not all of its runs do the
            same.
    """

    runs: int
    steps: int = 1
    before: Callable[[], object] = lambda: None
    now: Callable[[], float] = time.perf_counter
    kind: Callable[[], Hashable] = lambda: None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Returns the median with its interval of order statistics."""
        ordered = np.sort(np.asarray(values, float))
        # values on each side outside of the interval
        beyond = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
        return cls(float(np.median(ordered)), float(ordered[beyond]), float(ordered[-1 - beyond]))

    @classmethod
    def ratio(cls, over: Sequence[float], under: Sequence[float]) -> Estimate:
        """Returns the median of ``over[i] / under[i]``."""
        return cls.of([one / other for one, other in zip(over, under, strict=True)])

    def __format__(self, digits: str) -> str:
        return f"{self.value:{digits}} [{self.low:{digits}}, {self.high:{digits}}]"

    @classmethod
    def mean(cls, values: Mapping[Hashable, Sequence[float]]) -> Estimate:
        """What runs of several kinds take on average: the median of each, by how often it came."""
        count = sum(map(len, values.values()))
        parts = [cls.of(those) * (len(those) / count) for those in values.values()]
        return sum(parts, cls(0.0, 0.0, 0.0))

    def __add__(self, other: Estimate) -> Estimate:
        """The sum; its interval is the widest that the two allow."""
        return Estimate(self.value + other.value, self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def judged(self, most: float) -> str:
        """Returns whether the figure is ``most`` at most, as words."""
        if self.high <= most:
            return "holds"
        return "does not hold" if self.low > most else "not resolved"


@dataclass(frozen=True, slots=True)
class Cost:
    """What something costs, in microseconds each time.

    Attributes:
        us: of the loop with it, less the loop without.
        control_us: of the loop without, less the same again.
        bare_us: of the loop without.
        mean_us: the same on average, over kinds of runs: the median of ``us`` where there is one.
    """

    us: Sample
    control_us: Sample
    bare_us: Sample
    mean_us: Estimate

    @classmethod
    def of(cls, watched: Work, bare: Work, plan: Plan) -> Cost:
        """Of what ``watched`` does beyond ``bare``."""
        sides = {"watched": watched, "bare": bare, "control": bare}
        us: dict[str, list[float]] = {name: [] for name in sides}
        kinds: dict[Hashable, list[float]] = {}
        for work in sides.values():
            work(plan.steps)
        for turn in range(plan.runs):
            for name in sides if turn % 2 == 0 else reversed(sides):
                plan.before()
                begin = plan.now()
                sides[name](plan.steps)
                us[name].append(1e6 * (plan.now() - begin) / plan.steps)
            kinds.setdefault(plan.kind(), []).append(us["watched"][-1] - us["bare"][-1])
        watched_us, control_us = (
            np.subtract(us[side], us["bare"]).tolist() for side in ("watched", "control")
        )
        return cls(
            Sample.of(watched_us),
            Sample.of(control_us),
            Sample.of(us["bare"]),
            Estimate.mean(kinds),
        )
