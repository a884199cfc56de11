"""Checks, over the first training steps, that training waits for data no more than tuning said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from harness.runtime.folder import LOGGER
from harness.tuning.report import TuningReport
from harness.watch.clock import StepClock
from harness.watch.console import say
from harness.watch.figures import Window

STEPS = 100
_POINTS = 0.05  # of the time, over the prediction
_CHANGED = 0.1  # a figure that is so much off is named as the cause

_log = logging.getLogger(LOGGER)


@dataclass(slots=True)
class Follow:
    """Looks at the clock until it has seen a hundred steps, and then once tells whether the
    prediction held.

    Attributes:
        report: holds the prediction.
        on_miss: forgets the answer; called when it did not hold.
    """

    report: TuningReport
    on_miss: Callable[[], object] | None = None
    done: bool = False

    def look(self, clock: StepClock, window: Window) -> None:
        """To be called whenever a window of steps ends."""
        predicted = self.report.after.wait_fraction
        if self.done or predicted is None:
            return
        total = clock.total()
        if total.steps + total.first_steps < STEPS:
            return
        self.done = True
        stall = total.data_wait_fraction if total.stall_fraction is None else total.stall_fraction
        if stall is not None and stall > predicted + _POINTS:
            _log.warning("%s", missed(self.report, total, stall, predicted))
            if self.on_miss:
                self.on_miss()
                say("The remembered answer is forgotten. The next run tunes again.")


def missed(report: TuningReport, total: Window, stall: float, predicted: float) -> str:
    """What the user is told: how far the prediction was off, and what changed since."""
    waited = f"Over the first {total.steps} steps, training waited for data {stall:.0%} of the time"
    return f"{waited}. Tuning said {predicted:.0%}. {_cause(report, total)}."


def _cause(report: TuningReport, total: Window) -> str:
    batch = report.settings.batch_size
    if report.demand is not None and total.compute_ms is not None:
        was_ms = batch / report.demand.images_per_s * 1e3
        is_ms = total.compute_ms.median + (
            total.prepare_ms.median if total.prepare_ms else 0.0
        )  # both are what a step takes
        if is_ms < (1 - _CHANGED) * was_ms:
            return f"A step takes {is_ms:.1f} ms and not {was_ms:.1f}. Try: tuner.fresh=true"
    expected = report.after.images_per_s
    got = total.images_per_s
    if expected is None or got is None:
        return "The loader is slower. Try: tuner.fresh=true"
    return (
        f"The feed delivers {got:.0f} images/s a rank and not {expected.images_per_s:.0f}. Other "
        "programs, slower storage or "
        "costlier samples may be why: see host/cpu_fraction and host/disk_read_bytes_per_s"
    )
