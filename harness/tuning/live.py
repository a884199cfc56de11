"""Follows the run: how many threads load, by what the run's own meters say whenever windows of
steps end.

A number of threads is changed in place, which changes no batch. Two rules, on the model of the
look:

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
from harness.tuning.figures import SampleCost
from harness.tuning.look import FED, MET
from harness.tuning.model import BUSY, Model, undisturbed
from harness.watch.clock import StepClock
from harness.watch.console import say
from harness.watch.figures import Window
from harness.watch.host import machine_times

# that windows must have together to be judged
_PERIOD_S = 1.0
_PERIOD_STEPS = 8
# what more threads must deliver of what there was, and what fewer may
_GAIN = 1.05
_LOSS = 0.97
_AT_WORK = 0.8  # share of their time: threads that work for less are not what steps wait for
_FULL = 0.85  # of the machine's processor time
_OTHER = 2.0  # times as long, or as short: another kind of sample
# periods without a try after the first that gained nothing, and how many times as many after the
# next
_REST = 30
_LONGER = 4


@dataclass(frozen=True, slots=True)
class Period:
    """Some windows together.

    Attributes:
        images_per_s: that were trained on.
        stall: share of the time in which the device had nothing to run for want of data.
        wall_s: of a sample in a thread.
        cpu_s: processor seconds of these.
        step_cpu_s: processor seconds per image of everything else in this process; 0 where they are
            not known yet.
        busy: share of the machine's processor time that was used, by whatever program.
    """

    images_per_s: float
    stall: float
    wall_s: float
    cpu_s: float
    step_cpu_s: float
    busy: float

    def model(self, threads: int, cores: float) -> Model:
        """What any number of threads would give here, as so many were at work."""
        cost = undisturbed(SampleCost(self.wall_s, self.cpu_s, 0.0), threads, cores)
        demand = self.images_per_s / max(1 - self.stall, 0.01)
        return Model(demand=demand, cost=cost, cores=cores, step_cpu_s=self.step_cpu_s, alone_s=0.0)


class Policy:
    """How many threads from now on, told period by period.

    Attributes:
        threads: the number for now.
        most: threads that may be tried.
        reason: why it was changed last.
    """

    def __init__(self, threads: int, cores: float, most: int) -> None:
        self.threads = threads
        self.most = most
        self.reason = ""
        self._fewest = min(threads, max(1, int(cores)))
        self._cores = cores
        self._asked = threads  # by the period before: one alone may be luck
        # a sample's time when the number was set, and periods since the start
        self._sample_s = math.inf
        self._seen = 0
        self._tried: tuple[int, Period] | None = (
            None  # what there was before a try that is not judged
        )
        # a sample's time at the last try in vain, and periods to go
        self._vain_s = 0.0
        self._rest = 0
        self._next_rest = _REST

    @property
    def settled(self) -> int:
        """The number that is known to be good: of a try that is not judged, the one before."""
        return self.threads if self._tried is None else self._tried[0]

    def after(self, period: Period) -> int:
        """The number of threads from now on."""
        self._seen += 1
        self._rest = max(0, self._rest - 1)
        if self._seen <= 2:
            self._sample_s = min(self._sample_s, period.wall_s)
        if self._tried is not None:
            threads, before = self._tried
            self._tried = None
            if (
                period.images_per_s
                < (_GAIN if threads < self.threads else _LOSS) * before.images_per_s
            ):
                rates = (
                    f"{self.threads} gave {period.images_per_s:.0f} images/s, {threads} gave "
                    f"{before.images_per_s:.0f}"
                )
                self._vain_s = before.wall_s
                self._rest = self._next_rest
                self._next_rest = _LONGER * self._next_rest
                return self._set(threads, before, f"Back again: {rates}")
        wanted, reason = self._wanted(period)
        again = min(wanted, self._asked) > self.threads or max(wanted, self._asked) < self.threads
        self._asked = wanted
        if not again:
            return self.threads
        self._tried = self.threads, period
        return self._set(wanted, period, reason)

    def _set(self, threads: int, period: Period, reason: str) -> int:
        self.threads = self._asked = threads
        self._sample_s = period.wall_s
        self.reason = reason
        return threads

    def _wanted(self, period: Period) -> tuple[int, str]:
        """A number of threads that is worth a try, and why."""
        now = f"A sample takes {period.wall_s * 1e3:.2g} ms"
        model = period.model(self.threads, self._cores)
        wanted = min(model.workers_for(MET * model.reachable), self.most)
        if self._rest and 1 / _OTHER < period.wall_s / self._vain_s < _OTHER:
            return self.threads, ""
        if period.wall_s * _OTHER < self._sample_s:
            fewer = wanted if wanted < self.threads else self._fewest
            return min(
                self.threads, max(fewer, self._fewest)
            ), f"{now} instead of {self._sample_s * 1e3:.2g}"
        at_work = period.images_per_s * period.wall_s >= _AT_WORK * self.threads
        full = period.images_per_s >= BUSY * model.roofline or period.busy >= _FULL
        if period.stall <= 1 - FED or not at_work or full:
            return self.threads, ""
        return max(
            self.threads, wanted
        ), f"Training waited for data {period.stall:.0%} of the time. {now}"


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
        before: images/s with the user's own setting, where that is another than the feeds'.
        cpu_now: processor seconds of this process.
        machine_now: those of the machine, of all its cores and used.

    Attributes:
        changes: what was changed, in order.
        gained_s: seconds that training took less than it would have at ``before`` images/s, or at
            those before the first change, as long as samples cost what they did then.
    """

    def __init__(
        self,
        feeds: Sequence[ThreadFeed],
        cores: float,
        most: int,
        *,
        step: int = 0,
        before: float | None = None,
        cpu_now: Callable[[], float] = time.process_time,
        machine_now: Callable[[], tuple[float, float]] = machine_times,
    ) -> None:
        first = feeds[0]
        assert first.meter is not None
        self.feeds = feeds
        self.changes = list[Change]()
        self.gained_s = 0.0
        self._meter = first.meter
        self._before = before
        self._before_sample_s = 0.0
        self._cpu_now = cpu_now
        self._machine_now = machine_now
        room = first.settings.batch_size * (
            1 + (first.settings.prefetch_factor or 0)
        )  # samples in the making at once
        self._policy = Policy(first.settings.num_workers, cores, min(most, room))
        self._step = step
        self._step_cpu_s = 0.0
        self._pure = (
            True  # nothing but steps since the last period, so that the processor time is theirs
        )
        self._begin()

    @property
    def settled(self) -> int:
        """The number of threads that is known to be good."""
        return self._policy.settled

    def look(self, clock: StepClock, window: Window) -> None:
        """To be called whenever a window of steps ends."""
        self._step += window.steps + window.first_steps
        self._steps += window.steps
        self._images += window.images
        self._seconds += window.elapsed_s
        self._stalled_s += window.elapsed_s * (window.stall_fraction or 0.0)
        self._pure = self._pure and not (window.first_steps or window.pauses_s)
        if self._seconds >= _PERIOD_S and self._steps >= _PERIOD_STEPS:
            if (period := self._period()) is not None:
                self._count(period)
                self._judge(period)
            self._begin()

    def _begin(self) -> None:
        self._steps = self._images = 0
        self._seconds = self._stalled_s = 0.0
        self._pure = True
        self._worked, self._began_cpu_s, self._machine_s = (
            self._meter.read(),
            self._cpu_now(),
            self._machine_now(),
        )

    def _period(self) -> Period | None:
        worked = self._meter.read().since(self._worked)
        if not worked.samples or not self._images:
            return None
        loading_s = sum(cost.cpu_s for cost in worked.stages.values())
        busy = 0.0
        if self._pure:
            self._step_cpu_s = (
                max(0.0, self._cpu_now() - self._began_cpu_s - loading_s) / self._images
            )
            total_s, busy_s = (
                now - then for now, then in zip(self._machine_now(), self._machine_s, strict=True)
            )
            busy = busy_s / total_s if total_s > 0 else 0.0
        return Period(
            images_per_s=self._images / self._seconds,
            stall=self._stalled_s / self._seconds,
            wall_s=worked.busy_s / worked.samples,
            cpu_s=loading_s / worked.samples,
            step_cpu_s=self._step_cpu_s,
            busy=busy,
        )

    def _count(self, period: Period) -> None:
        self._before_sample_s = self._before_sample_s or period.wall_s
        if self._before is not None and period.wall_s * _OTHER > self._before_sample_s:
            self.gained_s += self._images / self._before - self._seconds

    def _judge(self, period: Period) -> None:
        before = self._policy.threads
        if (threads := self._policy.after(period)) == before:
            return
        for feed in self.feeds:
            feed.resize(threads)
        started = self.feeds[0].settings.num_workers
        if started != threads:  # the system has no more
            self._policy.threads = self._policy.most = started
        if self._before is None:
            self._before = period.images_per_s
            self._before_sample_s = period.wall_s
        self.changes.append(
            Change(self._step, started, before, period.images_per_s, self._policy.reason)
        )
        say(
            f"Step {self._step}: {started} threads load instead of {before}. {self._policy.reason}."
        )
