"""Where a step's time goes, without making the device wait.

Light: feeds and workers import this file, and torch is touched only where a clock is made for a CUDA device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from harness.watch.figures import Ledger, Window
from harness.watch.timeline import Timeline, TimingEvent

if TYPE_CHECKING:
    import torch

Batch = TypeVar("Batch")
_END: Any = object()


class StepClock:
    """Counts where the time of training steps goes; told by the loop, in one thread.

    The loop puts ``waiting()`` around ``next()`` on its feed and ``computing()`` around forward to optimizer step, and
    calls ``step`` at the end of each; or it lets ``watch`` do all three. No step synchronises: on CUDA ``computing()``
    records two events from a ring of ``slots`` pairs, which are read some steps later, once they have come; where no pair
    is free the block goes unmeasured. Over the ``computing()`` blocks i on the device's time line::

        gap_i   = start of compute i - end of compute i-1          (after a pause not known, and left out)
        stall_i = min(gap_i, exposed_copy_i + data_wait_i)
        stall_fraction = sum(stall_i) / sum(gap_i + compute_i)

    where exposed_copy_i is the part of the gap in which a batch's copy ran, and data_wait_i the host time blocked on the
    feed between the two blocks. It errs to the high side: a wait counts as if all of it lay inside the gap. Without device
    events the stall is ``data_wait_fraction``. A step's device figures may fall into the window after its own.

    Args:
        device: where the network runs.
        slots: the number of ``computing()`` blocks that the host may be ahead of the device.
        now: a monotonic clock in seconds.
        event: makes timing events; None: CUDA's on a CUDA device, else none.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        slots: int = 64,
        now: Callable[[], float] = time.perf_counter,
        event: Callable[[], TimingEvent] | None = None,
    ) -> None:
        kind = str(device).partition(":")[0]
        stream: Callable[[], Any] = lambda: None
        if event is None and kind == "cuda":
            import torch

            event, stream = partial(torch.cuda.Event, enable_timing=True), partial(torch.cuda.current_stream, device)
        self._now = now
        self._timeline = Timeline(slots, event, stream) if event else None
        self._times_compute = kind == "cpu" and not event  # when a call returns, a CPU has done its work; MPS has not
        self._ledger, self._closed = Ledger(), Ledger()
        self._mark: float | None = None  # when the running step began; None outside
        self._first = True  # the running step is an epoch's first
        self._wait_s = self._block_wait_s = self._compute_s = 0.0  # in this step, since its last block, in this step
        self._in_wait = self._in_compute = False
        self._pause_since: float | None = None
        self._paused_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the host time inside the block, around ``next()`` on the feed, as data wait."""
        if self._in_wait or self._pause_since is not None:  # a feed and its loop may both tell
            yield
            return
        self._in_wait, began = True, self._begin()
        try:
            yield
        finally:
            self._in_wait, waited = False, self._active() - began
            self._wait_s += waited
            self._block_wait_s += waited

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the block, around forward, backward and optimizer step; several in one step add up.

        Enter it with the network's stream as the current one. A block that raises is not measured on the device.
        """
        if self._in_compute or self._pause_since is not None:
            yield
            return
        self._in_compute, began = True, self._begin()
        wait_s, self._block_wait_s = self._block_wait_s, 0.0
        try:
            with self._timeline.block(self._ledger, wait_s=wait_s, first=self._first) if self._timeline else nullcontext():
                yield
        finally:
            self._in_compute = False
            if self._times_compute:
                self._compute_s += self._active() - began

    def copied(self, start: TimingEvent, end: TimingEvent) -> None:
        """Take the two recorded events around one batch's copy; the caller must not record them again."""
        if self._timeline and self._pause_since is None:
            self._timeline.copied(start, end)

    def start_epoch(self) -> None:
        """Keep the next step apart as an epoch's first."""
        if self._pause_since is None:
            self._first = True
            self._begin()

    def step(self, images: int) -> None:
        """End a step in which this rank used ``images`` images."""
        if self._pause_since is not None:
            return
        now, ledger = self._active(), self._ledger
        took, self._mark = now - (now if self._mark is None else self._mark), now
        if self._first:
            ledger.first_steps += 1
            ledger.first_s += took
        else:
            ledger.steps += 1
            ledger.images += images
            ledger.elapsed_s += took
            ledger.wait_s += self._wait_s
            ledger.host_step.add(took * 1e3)
            ledger.wait.add(self._wait_s * 1e3)
            if self._compute_s:
                ledger.host_compute_s += self._compute_s
                ledger.compute.add(self._compute_s * 1e3)
        self._first = False
        self._wait_s = self._compute_s = 0.0
        if self._timeline:
            self._timeline.step(ledger)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Keep the time inside the block out of all steps, under ``name``; what the clock is told inside does not count.

        The device first finishes the steps so far (the host waits for it here), and that time is booked to them.
        """
        if self._pause_since is not None:
            yield
            return
        before = self._active()
        if self._timeline:
            self._timeline.finish()
        self._pause_since = self._now()
        if self._mark is not None:
            self._ledger.elapsed_s += self._active() - before
            self._mark += self._active() - before
        try:
            yield
        finally:
            took, self._pause_since = self._now() - self._pause_since, None
            self._paused_s += took
            self._ledger.pauses_s[name] = self._ledger.pauses_s.get(name, 0.0) + took

    def watch(self, batches: Iterable[Batch], images: Callable[[Batch], int] | None = None) -> Iterator[Batch]:
        """Yield one epoch of ``batches``, with the body of the caller's loop as the step.

        ``images`` counts a batch's images; by default it is the length of the first tensor. Time before and after the loop
        does not count, nor does a step that ``break`` or an exception leaves.
        """
        self.start_epoch()
        try:
            with self.waiting():
                iterator = iter(batches)
            while True:
                with self.waiting():
                    batch = next(iterator, _END)
                if batch is _END:
                    return
                count = (images or _images_in)(batch)
                with self.computing():
                    yield batch
                self.step(count)
        finally:
            if self._pause_since is None:
                self._mark = None

    def close_window(self) -> Window | None:
        """The figures since the last call; None where no step has ended since. Never waits for the device."""
        if self._timeline:
            self._timeline.read(self._ledger)
        if not (self._ledger.steps or self._ledger.first_steps):
            return None
        ended, self._ledger = self._ledger, Ledger()
        self._closed.merge(ended)
        return ended.window()

    def total(self) -> Window:
        """The figures of the whole run so far, with those of the open window. Never waits for the device."""
        if self._timeline:
            self._timeline.read(self._ledger)
        whole = deepcopy(self._closed)
        whole.merge(self._ledger)
        return whole.window()

    def _active(self) -> float:
        """A clock in seconds that stands still in pauses."""
        return (self._now() if self._pause_since is None else self._pause_since) - self._paused_s

    def _begin(self) -> float:
        """The active clock; the running step began now, if none ran."""
        now = self._active()
        self._mark = now if self._mark is None else self._mark
        return now


def _images_in(batch: Any) -> int:
    items = batch.values() if isinstance(batch, dict) else batch
    first = next(iter(items), None) if isinstance(batch, (tuple, list, dict)) else None
    return _images_in(first) if hasattr(first, "__len__") else len(batch)
