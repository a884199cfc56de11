"""What the device did between the host's calls, from timing events that are read late and never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Slot:
    """Two events around one block of computing, with what the host knew about it."""

    start: TimingEvent
    end: TimingEvent
    wait_s: float = 0.0  # blocked on the feed between the block before and this one
    first: bool = False  # part of an epoch's first step
    fresh: bool = False  # the block before is not known, so neither is the gap
    ends_step: bool = False


class Timeline:
    """A ring of ``slots`` event pairs around blocks of computing on ``stream()``; ``StepClock`` says what the figures mean."""

    def __init__(self, slots: int, event: Callable[[], TimingEvent], stream: Callable[[], Any]) -> None:
        self._stream = stream
        self._free = [_Slot(event(), event()) for _ in range(slots)]
        self._pending: deque[_Slot] = deque()
        self._copies: deque[tuple[TimingEvent, TimingEvent]] = deque(maxlen=slots)
        self._previous: _Slot | None = None  # the last slot that was read: the next gap begins at its end
        self._fresh = True  # the running block will not be measured; between blocks: the next one's gap will not be known
        self._unended = 0  # measured blocks of the running step
        self._known, self._compute_ms, self._gap_ms = True, 0.0, 0.0  # of the step that is being read

    @contextmanager
    def block(self, ledger: Ledger, *, wait_s: float, first: bool) -> Iterator[None]:
        """Measure the block inside; one that raises is left out, one for which the device is too far behind is dropped."""
        if not self._free:
            self.read(ledger)
        if not self._free:
            ledger.dropped += 1
            self._fresh = True
            yield
            return
        slot = self._free.pop()
        slot.wait_s, slot.first, slot.fresh, slot.ends_step = wait_s, first, self._fresh, False
        self._fresh = False
        slot.start.record(self._stream())
        try:
            yield
        except BaseException:
            self._fresh = True
            raise
        finally:
            if self._fresh:
                self._free.append(slot)
            else:
                slot.end.record(self._stream())
                self._pending.append(slot)
                self._unended += 1

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
        """Wait until the device has done all blocks; the running one, and the gap before the next, go unmeasured."""
        self._fresh = True
        if self._pending:
            self._pending[-1].end.synchronize()  # the host waits for the device

    def read(self, ledger: Ledger, keep: int = 0) -> None:
        """Count the blocks that the device has done, but not the newest ``keep``, nor those of the running step."""
        while len(self._pending) > max(keep, self._unended) and self._pending[0].end.query():
            slot, read = self._pending.popleft(), self._previous
            self._count(slot, None if slot.fresh else read, ledger)
            self._previous = slot
            if read is not None:
                self._free.append(read)

    def _count(self, slot: _Slot, previous: _Slot | None, ledger: Ledger) -> None:
        compute, exposed = slot.start.elapsed_time(slot.end), self._count_copies(slot, previous, ledger)
        gap = max(0.0, previous.end.elapsed_time(slot.start)) if previous else 0.0
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

    def _count_copies(self, slot: _Slot, previous: _Slot | None, ledger: Ledger) -> float:
        """Count the copies that ended before ``slot`` began; the milliseconds that they ran after ``previous`` ended.

        A block waits for its own batch, so that the copy which made it wait is always among those.
        """
        exposed = 0.0
        while self._copies and (ended := self._copies[0][1]).query() and ended.elapsed_time(slot.start) >= 0:
            start, end = self._copies.popleft()
            if not slot.first:
                ledger.copy.add(start.elapsed_time(end))
            if previous:
                began = max(0.0, previous.end.elapsed_time(start))
                exposed += max(0.0, previous.end.elapsed_time(end) - began)
        return exposed
