"""Follows the run: how many threads load, by what the run's own meters say.

A number of threads is changed in place, which changes no batch. Two rules, on the model of the
look (7 and 8 in docs/tuning.md):

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

from harness.feed.threads import ThreadFeed
from harness.tuning.measures import SampleCost
from harness.tuning.model import BUSY, Model, undisturbed
from harness.tuning.search import FED, MET
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


class Policy:
    """How many threads from now on, told period by period.

    Attributes:
        threads: the number for now.
        most: threads that may be tried.
        reason: why the number was changed last.
    """

    def __init__(self, threads: int, cores: float, most: int) -> None:
        self.threads = threads
        self.most = most
        self.reason = ""
        self._fewest = min(threads, max(1, int(cores)))
        self._cores = cores
        # by the period before: one alone may be luck
        self._asked = threads
        # a sample's time when the number was set
        self._sample_s = 0.0
        # what there was before a try that is not judged
        self._tried: tuple[int, Period] | None = None
        # periods without a try of more, and how many follow the next vain one
        self._rest = 0
        self._next_rest = 30

    @property
    def settled(self) -> int:
        """The number that is known to be good: of a try that is not judged, the one before."""
        return self._tried[0] if self._tried else self.threads

    def after(self, period: Period) -> int:
        """Returns the number of threads from now on."""
        self._rest = max(0, self._rest - 1)
        self._sample_s = self._sample_s or period.wall_s
        if self._tried:
            threads, before = self._tried
            self._tried = None
            # more threads must deliver 5 % more, and fewer at most 3 % less
            least = 1.05 if threads < self.threads else 0.97
            if period.images_per_s < least * before.images_per_s:
                self._rest = self._next_rest
                self._next_rest *= 4
                reason = (
                    f"Back again: {self.threads} gave {period.images_per_s:.0f} images/s, "
                    f"{threads} gave {before.images_per_s:.0f}"
                )
                return self._set(threads, before, reason)
        wanted, reason = self._wanted(period)
        asked = self._asked
        self._asked = wanted
        if min(wanted, asked) > self.threads or max(wanted, asked) < self.threads:
            self._tried = self.threads, period
            return self._set(wanted, period, reason)
        return self.threads

    def _set(self, threads: int, period: Period, reason: str) -> int:
        self.threads = self._asked = threads
        self._sample_s = period.wall_s
        self.reason = reason
        return threads

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
        wanted = min(model.workers_for(MET * model.reachable), self.most)
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


@dataclass(frozen=True, slots=True)
class Change:
    """A number of threads that was changed after ``step`` updates, and what training got before."""

    step: int
    threads: int
    before: int
    images_per_s: float
    reason: str


class Live:
    """Gives feeds the threads that ``Policy`` asks for.

    Args:
        feeds: the training feed, and others that are to have as many threads.
        cores: processors that this process may use.
        most: threads that may be tried.
        step: updates that are done already.
        cpu_now: processor seconds of this process.

    Attributes:
        policy: asks for a number.
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
        # samples in the making at once
        room = settings.batch_size * (1 + (settings.prefetch_factor or 0))
        self.feeds = feeds
        self.policy = Policy(settings.num_workers, cores, min(most, room))
        self.changes = list[Change]()
        self._cpu_now = cpu_now
        self._step = step
        self._step_cpu_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._windows = list[Window]()
        self._worked = self._work()
        self._began_cpu_s = self._cpu_now()

    def _work(self) -> StageTotals:
        meter = self.feeds[0].meter
        assert meter is not None
        return meter.read()

    def look(self, window: Window) -> None:
        """Takes in a window of steps, and judges once there are enough."""
        self._step += window.steps + window.first_steps
        self._windows.append(window)
        windows = self._windows
        seconds = sum(each.elapsed_s for each in windows)
        # a shorter period tells nothing
        if seconds < 1.0 or sum(each.steps for each in windows) < 8:
            return
        images = sum(each.images for each in windows)
        stalled_s = sum(each.elapsed_s * (each.stall_fraction or 0.0) for each in windows)
        worked = self._work().since(self._worked)
        if worked.samples and images:
            cpu_s = sum(cost.cpu_s for cost in worked.stages.values())
            if not any(each.first_steps or each.pauses_s for each in windows):
                # the processor time is the steps' and the threads' alone
                spent_s = self._cpu_now() - self._began_cpu_s
                self._step_cpu_s = max(0.0, spent_s - cpu_s) / images
            period = Period(
                images_per_s=images / seconds,
                stall=stalled_s / seconds,
                wall_s=worked.busy_s / worked.samples,
                cpu_s=cpu_s / worked.samples,
                step_cpu_s=self._step_cpu_s,
            )
            self._follow(period)
        self._begin()

    def _follow(self, period: Period) -> None:
        """Changes the threads of all feeds where the policy says so."""
        policy = self.policy
        before = policy.threads
        if (threads := policy.after(period)) == before:
            return
        for feed in self.feeds:
            feed.resize(threads)
        started = self.feeds[0].settings.num_workers
        if started != threads:
            # the system has no more
            policy.threads = policy.most = started
        change = Change(self._step, started, before, period.images_per_s, policy.reason)
        self.changes.append(change)
        say(f"Step {self._step}: {started} threads load instead of {before}. {policy.reason}.")
