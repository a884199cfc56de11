"""An epoch of training: when it is about to end, and what it showed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from harness.watch.figures import Window

# workers that start now have batches ready by then
_WARM_UP_S = 1.5


class EvalWarmup:
    """Tells when to start the validation workers: shortly before an epoch's end.

    That is ``_WARM_UP_S`` seconds before the end of ``steps`` steps, or before the last step. Each
    step left is taken to last as long as the steps so far on average, without the first one.
    """

    def __init__(self, steps: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._steps = steps
        self._now = now
        self._began_s = 0.0

    def due(self, left: int) -> bool:
        """Whether it is time; ask before each step, with the steps ``left``, that step included."""
        # the first step may compile
        timed = self._steps - left - 1
        if timed <= 0:
            self._began_s = self._now()
        return left == 1 or 0 < left * (self._now() - self._began_s) <= _WARM_UP_S * timed


@dataclass(slots=True)
class Shown:
    """What some steps showed: sums that ``add`` fills, and one line of text.

    Attributes:
        steps: steps whose loss is known.
        loss: the sum of the losses of these steps.
        images: of all ranks.
        elapsed_s: seconds in which they were trained on.
        stalled_s: seconds of that time without data.
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
        """Adds ``steps`` steps of each of ``ranks`` ranks; ``window`` has one rank's figures."""
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
