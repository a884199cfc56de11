"""Times the parts of each step without making the device wait.

Feeds and workers import this file, so torch is imported only when a clock is created.
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
# parts of a wait: until the batch was made, received, pinned, and delivered
_WAIT_PARTS = ("make", "transport", "pin", "move")


# callbacks are removed by identity, not by value
@dataclass(slots=True, eq=False)
class _Collections:
    """Sums the seconds spent on garbage collection in ``thread``; one of ``gc.callbacks``."""

    now: Callable[[], float]
    seconds: float = 0.0
    thread: int | None = None
    _began: float = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Records the start or end of a collection."""
        if get_ident() == self.thread:
            if phase == "start":
                self._began = self.now()
            else:
                self.seconds += self.now() - self._began


class StepClock:
    """Measures the parts of training steps; called by the loop in one thread.

    The loop puts ``waiting()`` around ``next()`` on its feed and ``computing()`` around everything
    from forward pass to optimizer step, and calls ``step`` at the end of each step; or ``watch``
    does all three. No step synchronizes. On CUDA, ``computing()`` records three events, which are
    read some steps later, after completion, and reused. On the device's timeline, for the
    ``computing()`` blocks i::

        gap_i          = end of compute i-1 to start of compute i, except gaps with a pause
        exposed_copy_i = the part of gap_i in which a requested batch was copied
        prepare_i      = the part of gap_i in which the device augmented and normalized that batch
        starved_i      = the remaining part in which the host waited for a batch
        host_i         = the rest of gap_i: launches, garbage collection, logging, the loop
        stall_fraction = sum(starved_i + exposed_copy_i) / sum(gap_i + compute_i)

    Neither waiting while the device has queued work nor work between two steps is a stall. Without
    device events, the stall is ``data_wait_fraction``; on a CPU, prepare is the rest of ``next()``
    after the feed has returned its batch, and host is the remainder. The stall is None if the
    device's busy time is unknown. A step's device times may be counted in the next window.

    Args:
        device: the network's device.
        now: a monotonic clock in seconds, also an attribute; None means the device's.
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
        # a CPU has finished its work when a call returns, but MPS has not
        self._times_compute = own.is_host and not own.has_streams
        self._tells = own.tells
        # sums for the open window, and for closed windows by part of the run
        self._ledger = Ledger()
        self._closed = [Ledger()]
        # for the current step: host seconds spent waiting, preparing, held back, computing
        self._wait_s = self._prepare_s = self._full_s = self._compute_s = 0.0
        self._wait_parts_s: Sums = defaultdict(float)
        self._host_parts_s: Sums = defaultdict(float)
        # starts of the current step, wait, computing block and noted work; shifted by pauses
        self._since: dict[str, float] = {}
        self._paused = False
        # whether the current step is an epoch's first
        self._first = True
        # provisional end of the current computing block
        self._computed_s: float | None = None
        # stamps of the batch that ends the current wait, and its arrival
        self._arrival: tuple[Stamps | None, float | None] = (None, None)
        self._gc = _Collections(self.now)
        # collection seconds before the current step
        self._gc_mark_s = 0.0
        gc.callbacks.append(self._gc)
        weakref.finalize(self, gc.callbacks.remove, self._gc)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the host time of a block around ``next()`` on the feed as data wait.

        Nested blocks do not count, because a feed and its loop may both call this.
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
                # each part gets the time that the batch spent in it during the wait
                at = began
                for part, until in zip(_WAIT_PARTS, (*stamps, there), strict=True):
                    until = max(at, min(until, there))
                    self._wait_parts_s[part] += until - at
                    at = until
            if self._timeline:
                self._timeline.waits.append((began, there))

    def arrived(self, stamps: Stamps | None, there_s: float | None = None) -> None:
        """Records the stamps of the batch that ends the current wait.

        Ignored outside of ``waiting()``.

        Args:
            stamps: when the batch was made, received and pinned, if known.
            there_s: when the batch arrived, on the clock ``now``; the rest of the block does not
                count as data wait.
        """
        if "wait" in self._since:
            self._arrival = (stamps, there_s)

    def held(self, began_s: float) -> None:
        """Excludes the time since ``began_s`` from the wait, because the device had queued work."""
        if "wait" in self._since and not self._paused:
            full_s = self.now() - began_s
            self._full_s += full_s
            self._since["wait"] += full_s

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measures the block around the forward pass, backward pass and optimizer step.

        Multiple blocks in one step add up. Enter the block on the network's stream. If it raises,
        it is not measured on the device.
        """
        if self._paused or "compute" in self._since:
            yield
            return
        if "step" not in self._since:
            self.start_epoch()
        # collections are excluded if the host computes; otherwise, the device works in the meantime
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
        """Ends the current computing block here, unless this is called again before its end.

        This is for hooks on optimizer steps, which cannot know whether another step follows.
        """
        if "compute" in self._since and not self._paused:
            self._computed_s = self.now() - self._gc.seconds * self._times_compute
            if self._timeline:
                self._timeline.mark_end()

    def copied(
        self, start: TimingEvent, end: TimingEvent, ready: TimingEvent | None = None
    ) -> None:
        """Records the events around one batch's copy, before the block that computes on the batch.

        ``ready`` is recorded after other device work on the batch, such as normalization. For a
        batch that was not copied, ``end`` is ``start``. The caller must not reuse the events;
        ``event`` does so. Copies within a block do not count as computing: the block starts after
        the first copy, and later copies are subtracted.
        """
        if self._timeline and not self._paused:
            self._timeline.copied(Copy(start, end, ready or end))

    def event(self, own: Accelerator) -> TimingEvent:
        """Returns a timed event from ``own`` for ``copied``, reused if possible."""
        spare = self._timeline.spare if self._timeline else None
        return spare.popleft() if spare else own.event(timed=True)

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Labels the work done between steps, such as logging, in ``Window.host_parts_s``.

        Garbage collections inside the block are counted separately.
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
        """Starts a step, if none is open, and counts it separately as an epoch's first step."""
        if self._paused:
            return
        self._first = True
        if "step" not in self._since:
            self._since["step"] = self.now()
            self._gc_mark_s = self._gc.seconds
            self._gc.thread = get_ident()

    def step(self, images: int) -> None:
        """Ends a step with ``images`` images on this rank."""
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
        """Excludes the block from all steps, as a pause called ``name``.

        Calls inside the block do not count. The host first waits for the device to finish earlier
        steps; this time counts toward those steps.
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
        """Excludes the time since ``began_s`` from all steps, as a pause called ``name``.

        This is for pauses detected afterward, within the current step.
        """
        took_s = self.now() - began_s
        if self._timeline:
            self._timeline.fresh = True
        self._ledger.sums["pause"][name] += took_s
        for running in self._since:
            self._since[running] += took_s

    def settle(self) -> None:
        """Waits for the device to finish earlier steps, and counts the time toward them.

        Call this at the end of an epoch, because the next step is counted separately and the device
        may still have queued work from this epoch. Device time for an epoch's first step counts
        toward that step even after the host has moved on.
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
        """Yields one epoch of ``batches``; the caller's loop body is the step.

        ``images`` counts a batch's images; the default is the length of the first tensor. Time
        before and after the loop does not count, and neither does a step that ends with ``break``
        or an exception.
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
                count = (images or images_in)(batch)
                with self.computing():
                    yield batch
                self.step(count)
        finally:
            if not self._paused:
                self._since.pop("step", None)

    def end_epoch(self) -> None:
        """Waits for the device and stops timing until the next step starts."""
        self.settle()
        if not self._paused:
            self._since.pop("step", None)

    def device_steps(self, count: int) -> tuple[float, ...]:
        """Returns the seconds for each of the last ``count`` steps, end to end on the device.

        The result is empty if they are unknown.
        """
        ends_s = [*self._timeline.ends_s][-count - 1 :] if self._timeline else []
        steps_s = tuple(later - earlier for earlier, later in pairwise(ends_s))
        return steps_s if len(steps_s) == count else ()

    def close_window(self) -> Window | None:
        """Returns the window since the last call, or None if no step has ended.

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
        """Starts another part of the run; all earlier windows must be closed."""
        self._closed.append(Ledger())

    def total(self, first: int = 0) -> Window:
        """Returns the window for the whole run so far, including the open window.

        It starts at part ``first``; -1 is the last part. Never waits for the device.
        """
        if self._timeline:
            self._timeline.read(self._ledger)
        whole = Ledger()
        for ledger in (*self._closed[first:], self._ledger):
            whole.merge(ledger)
        return whole.window(self._tells)


def images_in(batch: Any) -> int:
    """Returns the number of images in a batch: the length of its first tensor or list of images.

    The number is 1 for an object without a length.
    """
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if not isinstance(batch, (tuple, list)):
        return len(batch) if hasattr(batch, "__len__") and getattr(batch, "ndim", True) else 1
    # numbers and strings are one per image
    kinds = (tuple, list, Mapping)
    parts = (part for part in batch if isinstance(part, kinds) or hasattr(part, "ndim"))
    first = next(parts, None)
    if first is None:
        return len(batch)
    # images for a detector differ in size
    if isinstance(first, (tuple, list)) and getattr(next(iter(first), None), "ndim", 0) == 3:
        return len(first)
    return images_in(first)
