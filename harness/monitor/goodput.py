"""Divides a run's wall time into training and everything else."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..clock.figures import Window


@dataclass(slots=True)
class GoodputTimer:
    """Wall time since ``began_s`` on ``time.perf_counter``, by activity."""

    began_s: float
    _spent_s: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Record the time since the last mark, or since the start, under ``name``."""
        unmarked_s = time.perf_counter() - self.began_s - sum(self._spent_s.values())
        self._spent_s[name] = self._spent_s.get(name, 0.0) + unmarked_s

    def goodput(self, figures: Window) -> dict[str, Any] | None:
        """Returns the fraction of wall time in which the device ran training steps.

        ``busy_s`` is the device's (on a CPU, the host's) time within ``computing()``, excluding
        the first step of each epoch; ``wall_s`` is the time since the command started, and
        ``fraction`` is their ratio. ``rest`` contains the other activities, largest first. Returns
        None if device time is unknown.
        """
        spent = {name: share * figures.elapsed_s for name, share in figures.shares.items()}
        wall_s = time.perf_counter() - self.began_s
        if "compute" not in spent:
            return None
        busy_s = min(spent.pop("compute"), wall_s)
        first_s = figures.first_step_s or 0.0
        spent = {**self._spent_s, **spent, "first_steps": first_s, **figures.pauses_s}
        # creating feeds, printing, closing
        spent["other"] = wall_s - busy_s - sum(spent.values())
        largest = sorted(spent.items(), key=lambda part: -part[1])
        rest = [{"name": name, "s": s} for name, s in largest if s > 0]
        return {"fraction": busy_s / wall_s, "busy_s": busy_s, "wall_s": wall_s, "rest": rest}
