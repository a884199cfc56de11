"""Times the parts of each step without making the device wait.

Light: feeds and workers import this file, and torch is imported only where a clock is made.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from .figures import HOST_STEP, Ledger, Sums, Window, add
from .stages import Stamps
from .timeline import Copy, Timeline, TimingEvent

if TYPE_CHECKING:
    import torch

    from ..runtime.accelerator import Accelerator

Batch = TypeVar("Batch")
# of a wait, by where its batch was: until it was made, received, pinned, and here
_WAIT_PARTS = ("make", "transport", "pin", "move")


# callbacks are removed by what they are, not by their figures
@dataclass(slots=True, eq=False)
class _Collections:
    """Adds up the seconds of garbage collections in ``thread``; one of ``gc.callbacks``."""

    now: Callable[[], float]
    seconds: float = 0.0
    thread: int | None = None
    _began: float = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Take the start or the stop of a collection."""
        if get_ident() == self.thread:
            if phase == "start":
                self._began = self.now()
            else:
                self.seconds += self.now() - self._began


class StepClock:
    """Counts where the time of training steps goes; told by the loop, in one thread.

    The loop puts ``waiting()`` around ``next()`` on its feed and ``computing()`` around forward to
    optimizer step, and calls ``step`` at the end of each; or it lets ``watch`` do all three. No
    step synchronises: on CUDA ``computing()`` records three events, which are read some steps
    later, once they have come, and used again. On the device's time line, over the
    ``computing()`` blocks i::

        gap_i          = end of compute i-1 to start of compute i, but for a gap with a pause
        exposed_copy_i = the part of gap_i in which a batch was copied that the host had asked for
        prepare_i      = the part of gap_i in which the device augmented and normalised that batch
        starved_i      = the part of the rest in which the host waited for a batch
        host_i         = what is left of gap_i: launches, garbage collection, logging, the loop
        stall_fraction = sum(starved_i + exposed_copy_i) / sum(gap_i + compute_i)

    A wait while the device has queued work is no stall, and work between two steps is no stall.
    Without device events the stall is ``data_wait_fraction``; on a CPU prepare is the rest of
    ``next()`` once the feed has given its batch, and host is what is left. Where nothing tells when
    the device is at work it is None. A step's device figures may fall into the window after its
    own.

    Args:
        device: where the network runs.
        now: a monotonic clock in seconds, kept as an attribute; None: the device's own.
    """

    def __init__(
        self,
        device: torch.device | str | Accelerator = "cpu",
        *,
        now: Callable[[], float] | None = None,
    ) -> None:
        from ..runtime import accelerator  # which imports torch

        own = accelerator.get(device)
        self.now = now or own.now
        self._timeline = Timeline(own, self.now) if own.has_streams else None
        # when a call returns, a CPU has done its work; MPS has not
        self._times_compute = own.is_host and not own.has_streams
        self._tells = own.tells
        # of the open window, and by part of the run of those that are closed
        self._ledger = Ledger()
        self._closed = [Ledger()]
        # of the running step: seconds waited and prepared by the host's clock, held, computed
        self._wait_s = self._prepare_s = self._full_s = self._compute_s = 0.0
        self._wait_parts_s: Sums = defaultdict(float)
        self._host_parts_s: Sums = defaultdict(float)
        # when the running step, wait, block of computing and noted work began; a pause moves them
        self._since: dict[str, float] = {}
        self._paused = False
        # the running step is an epoch's first
        self._first = True
        # when the running block of computing ended, as far as is known
        self._computed_s: float | None = None
        # of the batch that ends the running wait: when it was where, and when it was there
        self._arrival: tuple[Stamps | None, float | None] = (None, None)
        self._gc = _Collections(self.now)
        # of its seconds, those before the running step
        self._gc_mark_s = 0.0
        gc.callbacks.append(self._gc)
        weakref.finalize(self, gc.callbacks.remove, self._gc)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the host time inside the block, around ``next()`` on the feed, as data wait.

        One inside another does not count: a feed and its loop may both tell.
        """
        if self._paused or "wait" in self._since:
            yield
            return
        if "step" not in self._since:
            self.start_epoch()
        self._arrival = (None, None)
        self._since["wait"] = self.now()
        try:
            yield
        finally:
            began = self._since.pop("wait")
            ended = self.now()
            stamps, there = self._arrival
            there = ended if there is None else min(max(there, began), ended)
            self._wait_s += there - began
            self._prepare_s += ended - there
            if stamps is not None:
                # to each part goes what its batch spent there meanwhile
                at = began
                for part, until in zip(_WAIT_PARTS, (*stamps, there), strict=True):
                    until = max(at, min(until, there))
                    self._wait_parts_s[part] += until - at
                    at = until
            if self._timeline:
                self._timeline.waits.append((began, there))

    def arrived(self, stamps: Stamps | None, there_s: float | None = None) -> None:
        """Take what is known of the batch that is about to end the running wait.

        Outside of ``waiting()`` it does not count.

        Args:
            stamps: when it was made, received and pinned, where its feed tells.
            there_s: when it was there, by the clock ``now``: what is left of the block is no
                waiting for data.
        """
        if "wait" in self._since:
            self._arrival = (stamps, there_s)

    def held(self, began_s: float) -> None:
        """Take the time since ``began_s`` out of the running wait: the device had work in store."""
        if "wait" in self._since and not self._paused:
            full_s = self.now() - began_s
            self._full_s += full_s
            self._since["wait"] += full_s

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the block, around forward, backward and optimizer step.

        Several in one step add up. Enter it with the network's stream as the current one. A block
        that raises is not measured on the device.
        """
        if self._paused or "compute" in self._since:
            yield
            return
        if "step" not in self._since:
            self.start_epoch()
        # where the host computes, collections are none of it; elsewhere the device works meanwhile
        self._since["compute"] = self.now() - self._gc.seconds * self._times_compute
        self._computed_s = None
        if self._timeline:
            self._timeline.begin(first=self._first)
        whole = False
        try:
            yield
            whole = True
        finally:
            if self._timeline:
                self._timeline.end(whole=whole)
            ended_s = self._computed_s
            if ended_s is None:
                ended_s = self.now() - self._gc.seconds * self._times_compute
            self._compute_s += max(0.0, ended_s - self._since.pop("compute"))

    def computed(self) -> None:
        """Let the running block of computing end here, unless this is called again before its end.

        For whoever learns of an optimizer's step, and not whether another one follows.
        """
        if "compute" in self._since and not self._paused:
            self._computed_s = self.now() - self._gc.seconds * self._times_compute
            if self._timeline:
                self._timeline.mark_end()

    def copied(
        self, start: TimingEvent, end: TimingEvent, ready: TimingEvent | None = None
    ) -> None:
        """Take the recorded events around one batch's copy, before the block that computes on it.

        ``ready`` is recorded after what else the device did to the batch, as normalising. A
        batch that was not copied has ``start`` for its ``end``. The caller must not record the
        events again: ``event`` gives them out anew. A copy within a block is none of its
        computing: the block begins behind the first one, and later ones are taken out.
        """
        if self._timeline and not self._paused:
            self._timeline.copied(Copy(start, end, ready or end))

    def event(self, own: Accelerator) -> TimingEvent:
        """Returns a timed event of ``own`` for ``copied``, one that was read if there is any."""
        spare = self._timeline.spare if self._timeline else None
        return spare.popleft() if spare else own.event(timed=True)

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Give work between steps, as logging, a name in ``Window.host_parts_s``.

        Garbage collections inside do not count: they have a figure of their own.
        """
        if self._paused or "work" in self._since or "step" not in self._since:
            yield
            return
        self._since["work"] = self.now() - self._gc.seconds
        try:
            yield
        finally:
            took_s = self.now() - self._gc.seconds - self._since.pop("work")
            self._host_parts_s[name] += took_s

    def start_epoch(self) -> None:
        """Begin a step, if none runs, and keep it apart as an epoch's first."""
        if self._paused:
            return
        self._first = True
        if "step" not in self._since:
            self._since["step"] = self.now()
            self._gc_mark_s = self._gc.seconds
            self._gc.thread = get_ident()

    def step(self, images: int) -> None:
        """End a step in which this rank used ``images`` images."""
        if self._paused:
            return
        now = self.now()
        took_s = now - self._since.get("step", now)
        self._since["step"] = now
        ledger = self._ledger
        run = ledger.sums["run"]
        if self._first:
            self._first = False
            run["first_steps"] += 1
            run["first_s"] += took_s
        else:
            run["steps"] += 1
            run["images"] += images
            run["elapsed_s"] += took_s
            run["wait_s"] += self._wait_s
            run["full_s"] += self._full_s
            run["gc_s"] += self._gc.seconds - self._gc_mark_s
            add(ledger.sums["wait"], self._wait_parts_s)
            add(ledger.sums["host"], self._host_parts_s)
            ledger.count(HOST_STEP, took_s)
            ledger.count("data_wait_ms", self._wait_s)
            if self._compute_s and self._timeline:
                ledger.count("launch_ms", self._compute_s)
            elif self._compute_s and self._times_compute:
                run["compute_s"] += self._compute_s
                ledger.count("compute_ms", self._compute_s)
                if self._prepare_s:
                    run["prepare_s"] += self._prepare_s
                    ledger.count("prepare_ms", self._prepare_s)
                host_s = took_s - self._wait_s - self._prepare_s - self._compute_s
                ledger.count("host_ms", max(0.0, host_s))
        self._wait_s = self._prepare_s = self._full_s = self._compute_s = 0.0
        self._wait_parts_s.clear()
        self._host_parts_s.clear()
        self._gc_mark_s = self._gc.seconds
        if self._timeline:
            self._timeline.step(self._ledger)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Keep the time inside the block out of all steps, under ``name``.

        What the clock is told inside does not count. The device first finishes the steps so far
        (the host waits for it here), and that time is booked to them.
        """
        if self._paused:
            yield
            return
        self.settle()
        self._paused = True
        began = self.now()
        collected_s = self._gc.seconds
        try:
            yield
        finally:
            self._paused = False
            self._gc.seconds = collected_s
            self.left_out(name, began)

    def left_out(self, name: str, began_s: float) -> None:
        """Keep the time since ``began_s`` out of all steps, under ``name``.

        For whoever learns afterwards that it was a pause; it must lie within the running step.
        """
        took_s = self.now() - began_s
        if self._timeline:
            self._timeline.fresh = True
        self._ledger.sums["pause"][name] += took_s
        for running in self._since:
            self._since[running] += took_s

    def settle(self) -> None:
        """Let the device finish the steps so far, and book that time to them.

        The host waits for the device here. Told where an epoch ends: the next step is kept apart,
        and the device may have much of this epoch before it. What the device spent on an epoch's
        first step after the host had gone on is booked to that step.
        """
        if self._timeline is None or self._paused:
            return
        began = self.now()
        late_s = self._timeline.finish(self._ledger)
        took_s = self.now() - began
        if "step" in self._since:
            run = self._ledger.sums["run"]
            run["elapsed_s"] += took_s - late_s
            run["first_s"] += late_s
            self._since["step"] += took_s

    def watch(
        self, batches: Iterable[Batch], images: Callable[[Batch], int] | None = None
    ) -> Iterator[Batch]:
        """Yield one epoch of ``batches``, with the body of the caller's loop as the step.

        ``images`` counts a batch's images; by default it is the length of the first tensor. Time
        before and after the loop does not count, nor does a step that ``break`` or an exception
        leaves.
        """
        self.start_epoch()
        try:
            with self.waiting():
                iterator = iter(batches)
            while True:
                try:
                    with self.waiting():
                        batch = next(iterator)
                except StopIteration:
                    self.end_epoch()
                    return
                count = (images or _images_in)(batch)
                with self.computing():
                    yield batch
                self.step(count)
        finally:
            if not self._paused:
                self._since.pop("step", None)

    def end_epoch(self) -> None:
        """Let the device finish, and count no time until a step begins again."""
        self.settle()
        if not self._paused:
            self._since.pop("step", None)

    def device_steps(self, count: int) -> tuple[float, ...]:
        """Returns the seconds of the last ``count`` settled steps, from end to end on the device.

        Empty where they are not known.
        """
        ends_s = [*self._timeline.ends_s][-count - 1 :] if self._timeline else []
        steps_s = tuple(later - earlier for earlier, later in pairwise(ends_s))
        return steps_s if len(steps_s) == count else ()

    def close_window(self) -> Window | None:
        """Returns the figures since the last call; None where no step has ended since.

        Never waits for the device.
        """
        if self._timeline:
            self._timeline.read(self._ledger)
        if not {"steps", "first_steps"} & self._ledger.sums["run"].keys():
            return None
        ended = self._ledger
        self._ledger = Ledger()
        self._closed[-1].merge(ended)
        return ended.window(self._tells)

    def start_part(self) -> None:
        """Begins another part of the run; all windows of the one before are closed."""
        self._closed.append(Ledger())

    def total(self, first: int = 0) -> Window:
        """Returns the figures of the whole run so far, with those of the open window.

        Or from its part ``first`` on; -1 is the last one. Never waits for the device.
        """
        if self._timeline:
            self._timeline.read(self._ledger)
        whole = Ledger()
        for ledger in (*self._closed[first:], self._ledger):
            whole.merge(ledger)
        return whole.window(self._tells)


def _images_in(batch: Any) -> int:
    items = [*batch.values()] if isinstance(batch, dict) else batch
    nested = isinstance(items, (tuple, list)) and items and hasattr(items[0], "__len__")
    if not nested:
        return len(items)
    first = items[0]
    # a detector's pictures have sizes of their own
    if isinstance(first, (tuple, list)) and getattr(next(iter(first), None), "ndim", 0) == 3:
        return len(first)
    return _images_in(first)
