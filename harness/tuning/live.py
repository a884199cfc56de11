"""Follows the run: how many threads load, by what the run's own meters say.

A number of threads is changed in place, which changes no batch. Two rules, on the model of the
search (7 and 8 in docs/tuning.md):

1. Where steps wait for data, the threads are at work, and the run has processors left, as many
   threads are tried as the model asks for.
2. Where a sample takes less than half of what it took when the number was set, fewer are tried: as
   many as the model asks for, or where that is no fewer, the fewest, for threads may wait for each
   other.

What a try does not gain is taken back, and more are not tried for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.feed.threads import ThreadFeed
from harness.tuning.measures import BUSY, FED, Model, SampleCost, undisturbed
from harness.tuning.search import MET
from harness.watch.console import say
from harness.watch.figures import Window
from harness.watch.stages import StageTotals


@dataclass(frozen=True, slots=True)
class Period:
    """Some windows together.

    Attributes:
        images_per_s: that were trained on.
        stall: share of the time in which the device had nothing to run for want of data.
        wall_s: of a sample in a thread.
        cpu_s: processor seconds of a sample.
        step_cpu_s: processor seconds per image of everything else in this process; 0 where they
            are not known yet.
    """

    images_per_s: float
    stall: float
    wall_s: float
    cpu_s: float
    step_cpu_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """A number of threads that was changed after ``step`` updates, and what training got before."""

    step: int
    threads: int
    before: int
    images_per_s: float
    reason: str


class Live:
    """Gives feeds as many threads as pays.

    Args:
        feeds: the training feed, and others that are to have as many threads.
        cores: processors that this process may use.
        most: threads that may be tried.
        step: updates that are done already.
        cpu_now: processor seconds of this process.

    Attributes:
        changes: what was changed, in order.
    """

    def __init__(
        self,
        feeds: Sequence[ThreadFeed],
        cores: float,
        most: int,
        *,
        step: int = 0,
        cpu_now: Callable[[], float] = time.process_time,
    ) -> None:
        settings = feeds[0].settings
        self.feeds = feeds
        self.changes = list[Change]()
        self._cores = cores
        # no more than samples in the making at once
        self._most = min(most, settings.batch_size * (1 + (settings.prefetch_factor or 0)))
        self._fewest = min(settings.num_workers, max(1, int(cores)))
        # by the period before: one alone may be luck
        self._asked = settings.num_workers
        # a sample's time when the number was set
        self._sample_s = 0.0
        # what there was before a try that is not judged
        self._tried: tuple[int, Period] | None = None
        # periods without a try of more, and how many follow the next vain one
        self._rest = 0
        self._next_rest = 30
        self._step = step
        self._step_cpu_s = 0.0
        self._cpu_now = cpu_now
        self._begin()

    @property
    def threads(self) -> int:
        """The number for now."""
        return self.feeds[0].settings.num_workers

    @property
    def settled(self) -> int:
        """The number that is known to be good: of a try that is not judged, the one before."""
        return self._tried[0] if self._tried else self.threads

    def _begin(self) -> None:
        # seconds, stalled seconds, images, steps, windows that hold more than steps
        self._sums = np.zeros(5)
        self._worked = self._work()
        self._began_cpu_s = self._cpu_now()

    def _work(self) -> StageTotals:
        meter = self.feeds[0].meter
        assert meter is not None
        return meter.read()

    def look(self, window: Window) -> None:
        """Takes in a window of steps, and judges once there are enough."""
        self._step += window.steps + window.first_steps
        stalled_s = window.elapsed_s * (window.stall_fraction or 0.0)
        odd = bool(window.first_steps or window.pauses_s)
        self._sums += window.elapsed_s, stalled_s, window.images, window.steps, odd
        seconds, stalled_s, images, steps, mixed = self._sums.tolist()
        # a shorter period tells nothing
        if seconds < 1.0 or steps < 8:
            return
        worked = self._work().since(self._worked)
        if worked.samples and images:
            cpu_s = sum(cost.cpu_s for cost in worked.stages.values())
            if not mixed:
                # the processor time is the steps' and the threads' alone
                spent_s = self._cpu_now() - self._began_cpu_s
                self._step_cpu_s = max(0.0, spent_s - cpu_s) / images
            wall_s = worked.busy_s / worked.samples
            cpu_s /= worked.samples
            rate = images / seconds
            self.judge(Period(rate, stalled_s / seconds, wall_s, cpu_s, self._step_cpu_s))
        self._begin()

    def judge(self, period: Period) -> None:
        """Changes the number of threads where ``period`` says so."""
        threads = self.threads
        self._rest = max(0, self._rest - 1)
        self._sample_s = self._sample_s or period.wall_s
        if self._tried:
            former, before = self._tried
            self._tried = None
            # more threads must deliver 5 % more, and fewer at most 3 % less
            if period.images_per_s < (1.05 if former < threads else 0.97) * before.images_per_s:
                self._rest = self._next_rest
                self._next_rest *= 4
                reason = (
                    f"Back again: {threads} gave {period.images_per_s:.0f} images/s, "
                    f"{former} gave {before.images_per_s:.0f}"
                )
                self._change(former, period, before.wall_s, reason)
                return
        wanted, reason = self._wanted(period)
        asked = self._asked
        self._asked = wanted
        if min(wanted, asked) > threads or max(wanted, asked) < threads:
            self._tried = threads, period
            self._change(wanted, period, period.wall_s, reason)

    def _wanted(self, period: Period) -> tuple[int, str]:
        """Returns a number of threads that is worth a try, and why."""
        threads = self.threads
        now = f"A sample takes {period.wall_s * 1e3:.2g} ms"
        cost = SampleCost(period.wall_s, period.cpu_s, 0.0)
        model = Model(
            demand=period.images_per_s / max(1 - period.stall, 0.01),
            cost=undisturbed(cost, threads, self._cores),
            cores=self._cores,
            step_cpu_s=period.step_cpu_s,
            alone_s=0.0,
        )
        wanted = min(model.workers_for(MET * model.reachable), self._most)
        # rule 8: samples take less than half
        if 2 * period.wall_s < self._sample_s:
            fewer = max(wanted, self._fewest) if wanted < threads else self._fewest
            return min(threads, fewer), f"{now} instead of {self._sample_s * 1e3:.2g}"
        # rule 7: threads that rest are not what steps wait for
        at_work = period.images_per_s * period.wall_s >= 0.8 * threads
        full = period.images_per_s >= BUSY * model.roofline
        if period.stall > 1 - FED and at_work and not full and not self._rest:
            reason = f"Training waited for data {period.stall:.0%} of the time. {now}"
            return max(threads, wanted), reason
        return threads, ""

    def _change(self, threads: int, period: Period, sample_s: float, reason: str) -> None:
        before = self.threads
        for feed in self.feeds:
            feed.resize(threads)
        if self.threads != threads:
            # the system has no more
            self._most = self.threads
        self._asked = threads
        self._sample_s = sample_s
        self.changes.append(Change(self._step, self.threads, before, period.images_per_s, reason))
        say(f"Step {self._step}: {self.threads} threads load instead of {before}. {reason}.")
