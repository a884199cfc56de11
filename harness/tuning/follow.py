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

_log = logging.getLogger(LOGGER)


@dataclass(slots=True)
class Follow:
    """Tells once, after a hundred steps, whether the prediction held.

    Attributes:
        report: holds the prediction.
        on_miss: forgets the answer; called when it did not hold.
    """

    report: TuningReport
    on_miss: Callable[[], object] | None = None
    done: bool = False

    def look(self, clock: StepClock, window: Window) -> None:
        """Looks at the steps so far; to be called whenever a window of steps ends."""
        predicted = self.report.after.wait_fraction
        if self.done or predicted is None:
            return
        total = clock.total()
        if total.steps + total.first_steps < STEPS:
            return
        self.done = True
        stall = total.stall_fraction
        if stall is None:
            stall = total.data_wait_fraction
        # five points over the prediction
        if stall is None or stall <= predicted + 0.05:
            return
        _log.warning(
            "Over the first %d steps, training waited for data %.0f%% of the time. Tuning said "
            "%.0f%%. %s.",
            total.steps,
            100 * stall,
            100 * predicted,
            _cause(self.report, total),
        )
        if self.on_miss:
            self.on_miss()
            say("The remembered answer is forgotten. The next run tunes again.")


def _cause(report: TuningReport, total: Window) -> str:
    """Returns what changed since: a step that became faster, or else a slower loader."""
    if report.demand is not None and total.compute_ms is not None:
        was_ms = report.settings.batch_size / report.demand.images_per_s * 1e3
        is_ms = total.compute_ms.median
        if total.prepare_ms:
            # both are what a step takes
            is_ms += total.prepare_ms.median
        if is_ms < 0.9 * was_ms:
            return f"A step takes {is_ms:.1f} ms and not {was_ms:.1f}. Try: tuner.fresh=true"
    expected = report.after.images_per_s
    if expected is None or total.images_per_s is None:
        return "The loader is slower. Try: tuner.fresh=true"
    return (
        f"The feed delivers {total.images_per_s:.0f} images/s a rank and not "
        f"{expected.images_per_s:.0f}. Other programs, slower storage or costlier samples may be "
        "why: see host/cpu_fraction and host/disk_read_bytes_per_s"
    )
