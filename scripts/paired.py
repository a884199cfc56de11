"""What something costs: the same loop with it and without it in turns, and without it against itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scripts.measured import Sample

Work = Callable[[int], object]  # does so many steps, or the one thing that it is for


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cost is measured.

    Attributes:
        runs: of each side, in turns.
        steps: in a run.
        before: done before each run, untimed.
        now: the clock in seconds; the thread's processor time where runs are long enough to be interrupted.
    """

    runs: int
    steps: int = 1
    before: Callable[[], object] = lambda: None
    now: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class Cost:
    """What something costs, in microseconds each time.

    Attributes:
        us: of the loop with it, less the loop without.
        control_us: of the loop without, less the same again.
        bare_us: of the loop without.
    """

    us: Sample
    control_us: Sample
    bare_us: Sample

    @classmethod
    def of(cls, watched: Work, bare: Work, plan: Plan) -> Cost:
        """Of what ``watched`` does beyond ``bare``."""
        sides = {"watched": watched, "bare": bare, "control": bare}
        us: dict[str, list[float]] = {name: [] for name in sides}
        for work in sides.values():
            work(plan.steps)
        for turn in range(plan.runs):
            for name in sides if turn % 2 == 0 else reversed(sides):
                plan.before()
                begin = plan.now()
                sides[name](plan.steps)
                us[name].append(1e6 * (plan.now() - begin) / plan.steps)
        watched_us, control_us = (np.subtract(us[side], us["bare"]).tolist() for side in ("watched", "control"))
        return cls(Sample.of(watched_us), Sample.of(control_us), Sample.of(us["bare"]))
