"""What the device did between the host's calls, from timing events that are read late and never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from harness.watch.figures import Ledger

_LAG = 8  # blocks between an event's recording and the first look at it: by then it has nearly always come


class TimingEvent(Protocol):
    """The part of ``torch.cuda.Event(enable_timing=True)`` that is used here."""

    def record(self, stream: Any = None) -> None:
        """Mark the point that ``stream`` has reached."""

    def query(self) -> bool:
        """Whether the device has passed the point."""

    def synchronize(self) -> None:
        """Wait until the device has passed the point."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this point to that of ``end_event``; negative where that came first."""


class _Slot:
    """Two events around one block of computing, with what the host knew about it."""

    __slots__ = ("end", "ends_step", "first", "fresh", "start", "wait_s")

    def __init__(self, event: Callable[[], TimingEvent]) -> None:
        self.start, self.end = event(), event()
        self.wait_s = 0.0  # blocked on the feed between the block before and this one
        self.first = False  # part of an epoch's first step
        self.fresh = False  # the block before is not known, so neither is the gap
        self.ends_step = False


class Timeline:
    """A ring of event pairs around blocks of computing; ``StepClock`` says what the figures mean.

    Args:
        slots: pairs of events.
        event: makes one event.
        stream: the stream on which the network runs.
    """

    def __init__(self, slots: int, event: Callable[[], TimingEvent], stream: Callable[[], Any]) -> None:
        self._stream = stream
        self._free = [_Slot(event) for _ in range(slots)]
        self._pending: deque[_Slot] = deque()
        self._copies: deque[tuple[TimingEvent, TimingEvent]] = deque(maxlen=slots)
        self._open: _Slot | None = None
        self._previous: _Slot | None = None  # the last slot that was read: the next gap begins at its end
        self._fresh = True  # the next block's gap will not be known
        self._unended = 0  # measured blocks of the running step
        self._known, self._compute_ms, self._gap_ms = True, 0.0, 0.0  # of the step that is being read

    def begin(self, ledger: Ledger, *, wait_s: float, first: bool) -> None:
        """Record a block's start, or count the block as dropped where the device is too far behind."""
        if not self._free:
            self.read(ledger)
        if not self._free:
            ledger.dropped += 1
            self._fresh = True
            return
        slot = self._open = self._free.pop()
        slot.wait_s, slot.first, slot.fresh, slot.ends_step = wait_s, first, self._fresh, False
        self._fresh = False
        slot.start.record(self._stream())

    def end(self) -> None:
        """Record the end of the block that was begun."""
        if self._open is not None:
            self._open.end.record(self._stream())
            self._pending.append(self._open)
            self._open = None
            self._unended += 1

    def interrupt(self) -> None:
        """Leave the block that was begun unmeasured, and the gap before the next one."""
        if self._open is not None:
            self._free.append(self._open)
            self._open = None
        self._fresh = True

    def copied(self, start: TimingEvent, end: TimingEvent) -> None:
        """Keep the two events around one batch's copy."""
        self._copies.append((start, end))

    def step(self, ledger: Ledger) -> None:
        """End a step: its blocks' times belong together."""
        if self._unended:
            self._pending[-1].ends_step = not self._fresh  # fresh again already: its last block is missing
            self._unended = 0
        self.read(ledger, _LAG)

    def finish(self) -> None:
        """Wait until the device has done all blocks."""
        if self._pending:
            self._pending[-1].end.synchronize()  # the host waits for the device

    def read(self, ledger: Ledger, keep: int = 0) -> None:
        """Count the blocks that the device has done, but not the newest ``keep``, nor those of the running step."""
        keep = max(keep, self._unended)
        while len(self._pending) > keep and self._pending[0].end.query():
            self._read(self._pending.popleft(), ledger)

    def _read(self, slot: _Slot, ledger: Ledger) -> None:
        read, self._previous = self._previous, slot
        previous = None if slot.fresh else read
        compute = slot.start.elapsed_time(slot.end)
        gap = max(0.0, previous.end.elapsed_time(slot.start)) if previous else 0.0
        exposed = self._read_copies(slot, previous, ledger)
        if previous and not slot.first:
            ledger.device_s += (gap + compute) / 1e3
            ledger.device_compute_s += compute / 1e3
            ledger.device_stall_s += min(gap / 1e3, exposed / 1e3 + slot.wait_s)
        self._known &= previous is not None
        self._compute_ms += compute
        self._gap_ms += gap
        if slot.ends_step:
            if self._known and not slot.first:
                ledger.compute.add(self._compute_ms)
                ledger.device_step.add(self._compute_ms + self._gap_ms)
            self._known, self._compute_ms, self._gap_ms = True, 0.0, 0.0
        if read is not None:
            self._free.append(read)

    def _read_copies(self, slot: _Slot, previous: _Slot | None, ledger: Ledger) -> float:
        """Count the copies that ended before ``slot`` began; the milliseconds that they ran after ``previous`` ended.

        A block waits for its own batch, so that the copy which made it wait is always among those.
        """
        exposed = 0.0
        while self._copies:
            start, end = self._copies[0]
            if not end.query() or end.elapsed_time(slot.start) < 0:
                break
            self._copies.popleft()
            if not slot.first:
                ledger.copy.add(start.elapsed_time(end))
            if previous:
                began = max(0.0, previous.end.elapsed_time(start))
                exposed += max(0.0, previous.end.elapsed_time(end) - began)
        return exposed
