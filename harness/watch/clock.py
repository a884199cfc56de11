"""Where a step's time goes, without making the device wait.

Light: feeds and workers import this file, and torch is touched only where a clock is made for a CUDA device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from harness.watch.figures import Ledger, Window
from harness.watch.timeline import Timeline, TimingEvent

if TYPE_CHECKING:
    import torch

Batch = TypeVar("Batch")


class _Block:
    """A reusable context manager: a generator-based one would cost more than all else that the clock does in a step."""

    __slots__ = ("_enter", "_leave")

    def __init__(self, enter: Callable[[], None], leave: Callable[[bool], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._leave(kind is None)


class StepClock:
    """Counts where the time of training steps goes; told by the loop, in one thread.

    The loop puts ``waiting()`` around ``next()`` on its feed and ``computing()`` around forward to optimizer step, and
    calls ``step`` at the end of each; or it lets ``watch`` do all three. No step synchronises: on CUDA ``computing()``
    records two events from a ring of ``slots`` pairs, which are read some steps later, once ``query()`` says that they
    have come. Where no pair is free the block goes unmeasured and is counted in ``Window.dropped``. Memory is fixed.

    ``stall_fraction``, over the ``computing()`` blocks i on the device's time line::

        gap_i   = start of compute i - end of compute i-1          (after a pause not known, and left out)
        stall_i = min(gap_i, exposed_copy_i + data_wait_i)
        stall_fraction = sum(stall_i) / sum(gap_i + compute_i)

    where exposed_copy_i is the part of the gap in which a batch's copy ran, and data_wait_i the host time blocked on the
    feed between the two blocks. It errs to the high side: a wait counts as if all of it lay inside the gap, and so do the
    microseconds that a ready ``next()`` takes. Without device events the stall is ``data_wait_fraction``, and
    ``stall_basis`` says ``host``. A step's device figures may fall into the window after its own.

    Args:
        device: where the network runs.
        slots: pairs of events, so the number of ``computing()`` blocks that the host may be ahead of the device.
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
        self._waiting = _Block(self._begin_wait, self._end_wait)
        self._computing = _Block(self._begin_compute, self._end_compute)
        self._ledger, self._closed = Ledger(), Ledger()
        self._mark: float | None = None  # when the running step began; None outside
        self._first = True  # the running step is an epoch's first
        self._wait_s = self._block_wait_s = self._compute_s = 0.0  # in this step, since its last block, in this step
        self._wait_depth = self._compute_depth = self._pause_depth = 0
        self._wait_since = self._compute_since = self._pause_since = self._paused_s = 0.0

    def waiting(self) -> _Block:
        """A context manager around ``next()`` on the feed: its host time is data wait."""
        return self._waiting

    def computing(self) -> _Block:
        """A context manager around forward, backward and optimizer step; several in one step add up.

        Enter it with the network's stream as the current one. A block that raises is not measured on the device.
        """
        return self._computing

    def copied(self, start: TimingEvent, end: TimingEvent) -> None:
        """Take the two recorded events around one batch's copy; the caller must not record them again."""
        if self._timeline and not self._pause_depth:
            self._timeline.copied(start, end)

    def start_epoch(self) -> None:
        """Keep the next step apart as an epoch's first."""
        if not self._pause_depth:
            self._first = True
            self._start()

    def step(self, images: int) -> None:
        """End a step in which this rank used ``images`` images."""
        if self._pause_depth:
            return
        now, ledger = self._active(), self._ledger
        took, self._mark = now - self._start(), now
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

        In a pause inside a pause the outer name counts. The device first finishes the steps so far (the host waits for
        it here), and that time is booked to them and not to the pause.
        """
        if self._pause_depth == 0:
            self._settle()
            self._pause_since = self._now()
        self._pause_depth += 1
        try:
            yield
        finally:
            self._pause_depth -= 1
            if self._pause_depth == 0:
                took = self._now() - self._pause_since
                self._paused_s += took
                self._ledger.pauses_s[name] = self._ledger.pauses_s.get(name, 0.0) + took

    def watch(self, batches: Iterable[Batch], images: Callable[[Batch], int] | None = None) -> Iterator[Batch]:
        """Yield one epoch of ``batches``, with the body of the caller's loop as the step.

        One changed line gives a plain loop its figures: ``for images, labels in clock.watch(loader):``. Time before and
        after the loop does not count, nor does a step that ``break`` or an exception leaves.

        Args:
            batches: a loader, or any other iterable.
            images: the number of images in a batch; None: the length of its first tensor.
        """
        if self._pause_depth:
            yield from batches
            return
        self.start_epoch()
        try:
            with self._waiting:
                iterator = iter(batches)
            while True:
                with self._waiting:
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        return
                count = (images or _images_in)(batch)
                with self._computing:
                    yield batch
                self.step(count)
        finally:
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
        whole = Ledger()
        whole.merge(self._closed)
        whole.merge(self._ledger)
        return whole.window()

    def _active(self) -> float:
        """A clock in seconds that stands still in pauses."""
        return (self._pause_since if self._pause_depth else self._now()) - self._paused_s

    def _start(self) -> float:
        """When the running step began: now, if none runs."""
        if self._mark is None:
            self._mark = self._active()
        return self._mark

    def _begin_wait(self) -> None:
        self._start()
        if self._wait_depth == 0:
            self._wait_since = self._active()
        self._wait_depth += 1

    def _end_wait(self, _succeeded: bool) -> None:
        self._wait_depth -= 1
        if self._wait_depth == 0:
            waited = self._active() - self._wait_since
            self._wait_s += waited
            self._block_wait_s += waited

    def _begin_compute(self) -> None:
        self._start()
        self._compute_depth += 1
        if self._compute_depth > 1 or self._pause_depth:
            return
        if self._times_compute:
            self._compute_since = self._active()
        if self._timeline:
            self._timeline.begin(self._ledger, wait_s=self._block_wait_s, first=self._first)
        self._block_wait_s = 0.0

    def _end_compute(self, succeeded: bool) -> None:
        self._compute_depth -= 1
        if self._compute_depth or self._pause_depth:
            return
        if self._times_compute:
            self._compute_s += self._active() - self._compute_since
        if self._timeline and succeeded:
            self._timeline.end()
        elif self._timeline:
            self._timeline.interrupt()

    def _settle(self) -> None:
        """Let the device finish the steps so far, and book that time to them."""
        if self._timeline:
            before = self._active()
            self._timeline.interrupt()
            self._timeline.finish()
            if self._mark is not None:
                waited = self._active() - before
                self._ledger.elapsed_s += waited
                self._mark += waited


def _images_in(batch: Any) -> int:
    while isinstance(batch, (tuple, list, dict)):
        first = next(iter(batch.values() if isinstance(batch, dict) else batch), None)
        if not hasattr(first, "__len__"):
            break
        batch = first
    return len(batch)
