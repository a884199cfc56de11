"""Measures the cost of something: a loop with and without it, alternating.

As a control, the loop without it also runs against itself, which shows the noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.bench.tables import Sample

# runs a number of steps, or its single task
Work = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cost is measured.

    Attributes:
        runs: alternating runs of each side.
        steps: steps per run.
        before: called before each run, untimed.
        now: the clock in seconds; the thread's CPU time if runs are long enough to be
            interrupted.
        kind: returns the kind of the watched side's latest run, if its runs differ.
    """

    runs: int
    steps: int = 1
    before: Callable[[], object] = lambda: None
    now: Callable[[], float] = time.perf_counter
    kind: Callable[[], Hashable] = lambda: None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Returns the median with its interval of order statistics."""
        ordered = np.sort(np.asarray(values, float))
        # values outside the interval on each side
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
        """Returns the mean over kinds of runs: the median of each, weighted by its frequency."""
        count = sum(map(len, values.values()))
        parts = [cls.of(those) * (len(those) / count) for those in values.values()]
        return sum(parts, cls(0.0, 0.0, 0.0))

    def __add__(self, other: Estimate) -> Estimate:
        """Returns the sum, with the widest interval that the two allow."""
        return Estimate(self.value + other.value, self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def judged(self, most: float) -> str:
        """Returns whether the value is at most ``most``, in words."""
        if self.high <= most:
            return "holds"
        return "does not hold" if self.low > most else "not resolved"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of something, in microseconds.

    Attributes:
        us: the loop with it minus the loop without.
        control_us: the loop without it minus itself.
        bare_us: the loop without it.
        mean_us: mean of ``us`` over kinds of runs; its median if there is one kind.
    """

    us: Sample
    control_us: Sample
    bare_us: Sample
    mean_us: Estimate

    @classmethod
    def of(cls, watched: Work, bare: Work, plan: Plan) -> Cost:
        """Returns the cost of ``watched`` over ``bare``."""
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
