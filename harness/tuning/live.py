"""Follows the run: how many threads load, by what the run's own meters say.

A number of threads is changed in place, which changes no batch. Two rules, on the model of the
look (7 and 8 in docs/tuning.md):

1. Where steps wait for data, the threads are at work, and the run and the machine have processors
   left, as many threads are tried as the model asks for.
2. Where a sample takes less than half of what it took when the number was set, fewer are tried: as
   many as the model asks for, or where that is no fewer, the fewest, for threads may wait for each
   other.

What a try does not gain is taken back, and nothing is tried for a while, unless samples come to
cost half or twice as much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.feed.threads import ThreadFeed
from harness.tuning.look import FED, MET
from harness.tuning.measures import SampleCost
from harness.tuning.model import BUSY, Model, undisturbed
from harness.watch.clock import StepClock
from harness.watch.console import say
from harness.watch.figures import Window
from harness.watch.host import machine_times

# times as long, or as short: another kind of sample
_OTHER = 2.0


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
        busy: share of the machine's processor time that was used, by whatever program.
    """

    images_per_s: float
    stall: float
    wall_s: float
    cpu_s: float
    step_cpu_s: float
    busy: float


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
        # a sample's time when the number was set, and periods since the start
        self._sample_s = math.inf
        self._seen = 0
        # what there was before a try that is not judged
        self._tried: tuple[int, Period] | None = None
        # a sample's time at the last try in vain, and periods to go
        self._vain_s = 0.0
        self._rest = 0
        # of the next such try; after each, four times as many
        self._next_rest = 30

    @property
    def settled(self) -> int:
        """The number that is known to be good: of a try that is not judged, the one before."""
        return self._tried[0] if self._tried else self.threads

    def after(self, period: Period) -> int:
        """Returns the number of threads from now on."""
        self._seen += 1
        self._rest = max(0, self._rest - 1)
        if self._seen <= 2:
            self._sample_s = min(self._sample_s, period.wall_s)
        if self._tried:
            threads, before = self._tried
            self._tried = None
            # more threads must deliver 5 % more, and fewer at most 3 % less
            least = 1.05 if threads < self.threads else 0.97
            if period.images_per_s < least * before.images_per_s:
                self._vain_s = before.wall_s
                self._rest = self._next_rest
                self._next_rest *= 4
                self.reason = (
                    f"Back again: {self.threads} gave {period.images_per_s:.0f} images/s, "
                    f"{threads} gave {before.images_per_s:.0f}"
                )
                return self._set(threads, before)
        wanted, reason = self._wanted(period)
        again = min(wanted, self._asked) > self.threads or max(wanted, self._asked) < self.threads
        self._asked = wanted
        if not again:
            return self.threads
        self._tried = self.threads, period
        self.reason = reason
        return self._set(wanted, period)

    def _set(self, threads: int, period: Period) -> int:
        self.threads = self._asked = threads
        self._sample_s = period.wall_s
        return threads

    def _wanted(self, period: Period) -> tuple[int, str]:
        """Returns a number of threads that is worth a try, and why."""
        if self._rest and 1 / _OTHER < period.wall_s / self._vain_s < _OTHER:
            return self.threads, ""
        now = f"A sample takes {period.wall_s * 1e3:.2g} ms"
        model = Model(
            demand=period.images_per_s / max(1 - period.stall, 0.01),
            cost=undisturbed(
                SampleCost(period.wall_s, period.cpu_s, 0.0), self.threads, self._cores
            ),
            cores=self._cores,
            step_cpu_s=period.step_cpu_s,
            alone_s=0.0,
        )
        wanted = min(model.workers_for(MET * model.reachable), self.most)
        # rule 8: samples take less than half
        if period.wall_s * _OTHER < self._sample_s:
            fewer = wanted if wanted < self.threads else self._fewest
            fewer = min(self.threads, max(fewer, self._fewest))
            return fewer, f"{now} instead of {self._sample_s * 1e3:.2g}"
        # rule 7: threads that rest are not what steps wait for
        at_work = period.images_per_s * period.wall_s >= 0.8 * self.threads
        full = period.images_per_s >= BUSY * model.roofline or period.busy >= 0.85
        if wanted > self.threads and period.stall > 1 - FED and at_work and not full:
            return wanted, f"Training waited for data {period.stall:.0%} of the time. {now}"
        return self.threads, ""


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
        machine_now: those of the machine, of all its cores and used.

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
        machine_now: Callable[[], tuple[float, float]] = machine_times,
    ) -> None:
        settings = feeds[0].settings
        assert feeds[0].meter is not None
        self.feeds = feeds
        self.changes = list[Change]()
        self._meter = feeds[0].meter
        self._cpu_now = cpu_now
        self._machine_now = machine_now
        # samples in the making at once
        room = settings.batch_size * (1 + (settings.prefetch_factor or 0))
        self.policy = Policy(settings.num_workers, cores, min(most, room))
        self._step = step
        self._step_cpu_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._windows = list[Window]()
        self._worked = self._meter.read()
        self._began_cpu_s = self._cpu_now()
        self._machine_s = self._machine_now()

    def look(self, clock: StepClock, window: Window) -> None:
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
        worked = self._meter.read().since(self._worked)
        if worked.samples and images:
            cpu_s = sum(cost.cpu_s for cost in worked.stages.values())
            busy = 0.0
            if not any(each.first_steps or each.pauses_s for each in windows):
                # the processor time is the steps' and the threads' alone
                spent_s = self._cpu_now() - self._began_cpu_s
                self._step_cpu_s = max(0.0, spent_s - cpu_s) / images
                total_s, busy_s = self._machine_now()
                total_s -= self._machine_s[0]
                busy = (busy_s - self._machine_s[1]) / max(total_s, 1e-9)
            period = Period(
                images_per_s=images / seconds,
                stall=stalled_s / seconds,
                wall_s=worked.busy_s / worked.samples,
                cpu_s=cpu_s / worked.samples,
                step_cpu_s=self._step_cpu_s,
                busy=busy,
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
