"""Where the wall time of a run went, from the command to its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.watch.figures import Window


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds that went to something else than training steps on the device."""

    name: str
    s: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """How much of the wall time the device was busy with training steps.

    Attributes:
        fraction: ``busy_s`` of ``wall_s``, 0..1.
        busy_s: the device's (on a CPU: the host's) seconds within ``computing()``, but for the
            first step of each epoch.
        wall_s: from the start of the command to this figure.
        rest: what took the rest, the largest part first; with ``busy_s`` they sum to ``wall_s``.
    """

    fraction: float
    busy_s: float
    wall_s: float
    rest: tuple[Part, ...]


@dataclass(slots=True)
class Course:
    """Wall time since ``began_s``, a time of the clock ``now``, by what it went to."""

    began_s: float
    now: Callable[[], float] = time.perf_counter
    _spent_s: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Book the time since the last mark, or since the beginning, under ``name``."""
        unmarked_s = self.now() - self.began_s - sum(self._spent_s.values())
        self._spent_s[name] = self._spent_s.get(name, 0.0) + unmarked_s

    def goodput(self, figures: Window) -> Goodput | None:
        """Returns what ``figures`` of the whole run and the marks come to.

        None where the device's own time is not known.
        """
        shares_s = {name: share * figures.elapsed_s for name, share in figures.shares.items()}
        wall_s = self.now() - self.began_s
        if "compute" not in shares_s:
            return None
        busy_s = min(shares_s.pop("compute"), wall_s)
        spent = {
            **self._spent_s,
            **shares_s,
            "first_steps": figures.first_step_s or 0.0,
            **figures.pauses_s,
        }
        # making feeds, printing, closing
        spent["other"] = wall_s - busy_s - sum(spent.values())
        parts = [Part(name, s) for name, s in spent.items() if s > 0]
        parts.sort(key=lambda part: -part.s)
        return Goodput(busy_s / wall_s, busy_s, wall_s, tuple(parts))
