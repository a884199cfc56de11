"""An epoch of training: when it is about to end, and what it showed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from harness.watch.figures import Window

_LEAD_S = 1.5  # workers that start now have batches ready by then


class Lead:
    """Tells, once, when an epoch of ``steps`` steps is about to end: ``_LEAD_S`` seconds before, or
    before its last step.

    The steps that are left are taken to last as long as those so far did on average, the first one
    left out.
    """

    def __init__(self, steps: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._steps, self._now = steps, now
        self._begin = 0.0
        self._told = False

    def due(self, left: int) -> bool:
        """Whether it is time; to be asked before each step, with the number of steps ``left``, that
        one included.
        """
        timed = self._steps - left - 1
        if timed <= 0:
            self._begin = self._now()
        soon = left == 1 or (timed > 0 and left * (self._now() - self._begin) <= _LEAD_S * timed)
        told, self._told = self._told, self._told or soon
        return soon and not told


@dataclass(slots=True)
class Shown:
    """What some steps showed to people who watch: sums that ``add`` fills, and one line of them.

    Attributes:
        steps: of which the loss is known.
        loss: the sum of the losses of these steps.
        images: of all ranks.
        elapsed_s: seconds in which they were trained on.
        stalled_s: seconds of these without data.
        lr: the last learning rate.
    """

    steps: int = 0
    loss: float = 0.0
    images: int = 0
    elapsed_s: float = 0.0
    stalled_s: float = 0.0
    lr: float = 0.0

    def add(
        self, steps: int, loss: float | None, lr: float, window: Window | None, ranks: int
    ) -> None:
        """Add a window of ``steps`` steps of each of ``ranks`` ranks; the figures of ``window`` are
        of one.
        """
        self.lr = lr
        if loss is not None:
            self.steps += steps
            self.loss += steps * loss
        if window is not None:
            self.images += window.images * ranks
            self.elapsed_s += window.elapsed_s
            self.stalled_s += window.elapsed_s * (window.stall_fraction or 0.0)

    def __str__(self) -> str:
        found = []
        if self.steps:
            found.append(f"loss {self.loss / self.steps:.3f}")
        if self.elapsed_s:
            found.append(f"{self.images / self.elapsed_s:.0f} images/s")
            found.append(f"stall {self.stalled_s / self.elapsed_s:.0%}")
        return ", ".join([*found, f"lr {self.lr:.3g}"])
