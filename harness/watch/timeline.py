"""What the device did between the host's calls, from timing events that are read late and never
waited for.

Events give the time between two points of the device; what the host did meanwhile is known by the
host's clock. To bring the two together takes no synchronisation: beside each block an event is
recorded on a stream that nothing else runs on, so that the device passes it at once. Should it have
been held up all the same, by another thread or a queue that is shared, it shows the device's points
too early and never too late; so does the point before plus the time since, less what two clocks
drift apart. The latest of all that is shown is the truth, or next to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from harness.watch.ledger import Ledger, add_all

Span = tuple[float, float]  # from when to when, in seconds of the host's clock

# blocks between an event's recording and the first look at it: by then it has nearly always come
_LAG = 8
_SLOWEST = (
    1 - 1e-4
)  # host seconds to a second of the device, at least: quartz clocks keep time to 50 in a million
# launching as a share of the block's device time, from which the device may be waiting for launches
_FOLLOWS = 0.9
_LOOK_STEPS = 10  # how often that is looked at
# steps that a device is held back for, and by how much at most
_HELD_BACK = 3
_LONGEST_S = 1.0
# beyond the drift: so far from each other the two clocks got as a machine slept, or was set right
_JUMP_S = 1e-3


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


class Events(NamedTuple):
    """Where events come from and go to."""

    make: Callable[[], TimingEvent]
    stream: Callable[[], Any]  # the one that the network runs on
    idle: Any  # a stream that nothing else runs on
    delay: Callable[[float], object] | None = (
        None  # keeps the network's stream busy for so many seconds, and not the host
    )


class Copy(NamedTuple):
    """Events of one batch: its copy from start to end, and what the device did to it until it was
    ready.

    ``end`` is ``start`` where nothing was copied: the batch was made on the device.
    """

    start: TimingEvent
    end: TimingEvent
    ready: TimingEvent


@dataclass(slots=True)
class _Slot:
    """Two events around one block of computing and one beside it, with what the host knew about it."""

    start: TimingEvent
    end: TimingEvent
    mark: TimingEvent
    mark_s: float = 0.0  # the host's clock just before ``mark`` was recorded
    waits: Sequence[Span] = ()  # blocked on the feed since the block before
    copies: Sequence[Copy] = ()  # of the batches that it computes on
    first: bool = False  # part of an epoch's first step
    fresh: bool = False  # the block before is not known, or held back, so neither is the gap
    whole: bool = False  # all of it was launched before the device came to it
    ends_step: bool = False
    stepped_s: float = 0.0  # the host's clock as that step ended

    def passed(self) -> bool:
        """Whether the device has done the block, the copies for it and the mark."""
        return (
            self.end.query()
            and self.mark.query()
            and all(copy.ready.query() for copy in self.copies)
        )


class Timeline:
    """A ring of events around blocks of computing; ``StepClock`` says what the figures mean.

    Args:
        slots: the number of blocks that the host may be ahead of the device.
        events: makes the events, and says on which streams to record them.
        now: the host's clock in seconds.
        keep_steps: keep when each step ended.

    Attributes:
        ends_s: when the device ended each step, by the host's clock; empty unless they are kept.
    """

    def __init__(
        self, slots: int, events: Events, now: Callable[[], float], keep_steps: bool = False
    ) -> None:
        self._events = events
        self._now = now
        self._free = [_Slot(events.make(), events.make(), events.make()) for _ in range(slots)]
        self._pending: deque[_Slot] = deque()
        self._running: _Slot | None = None  # of the block that has begun, if it is measured
        self._waits: deque[Span] = deque(maxlen=slots)  # since the last block
        self._copies: deque[Copy] = deque(maxlen=slots)  # likewise
        self._previous: _Slot | None = (
            None  # the last slot that was read: the next gap begins at its end
        )
        self._passed_s = -math.inf  # when the device passed that end, by the host's clock
        # the running block will not be measured; between blocks: the next one's gap will not be
        # known
        self._fresh = True
        self._unended = 0  # measured blocks of the running step
        self._steps = 0
        # by which the next block is held back; how many were
        self._hold_s = 0.0
        self._held = 0
        self.ends_s = list[float]()
        self._keep_steps = keep_steps
        self._late_s = 0.0  # after the host, the device ended epochs' first steps
        self._known = True  # all gaps of the step that is being read, so far
        self._step_s: dict[str, float] = {}  # of that step

    def waited(self, began_s: float, ended_s: float) -> None:
        """Keep a stretch in which the host was blocked on the feed, for the next block's batch."""
        self._waits.append((began_s, ended_s))

    def copied(self, copy: Copy) -> None:
        """Keep the events of a batch that the next block computes on."""
        self._copies.append(copy)

    def begin(self, ledger: Ledger, *, first: bool) -> None:
        """Begin a block; one for which the device is too far behind is dropped."""
        waits = tuple(self._waits)
        copies = tuple(self._copies)
        self._waits.clear()
        self._copies.clear()
        if not self._free:
            self.read(ledger)
        if not self._free:
            ledger.dropped += 1
            self._fresh = True
            return
        slot = self._running = self._free.pop()
        slot.waits = waits
        slot.copies = copies
        slot.first = first
        slot.fresh = self._fresh
        slot.ends_step = False
        self._fresh = False
        slot.whole = bool(self._hold_s) and not first
        if slot.whole and self._events.delay:
            slot.fresh = True
            self._held += 1
            self._events.delay(self._hold_s)
            self._hold_s = 0.0
        slot.mark_s = self._now()
        slot.mark.record(self._events.idle)
        slot.start.record(self._events.stream())

    def end(self, *, whole: bool) -> None:
        """End the block; one that is not ``whole`` is left out."""
        slot = self._running
        self._running = None
        self._fresh |= not whole
        if slot is None:
            return
        if self._fresh:
            self._free.append(slot)
            return
        slot.end.record(self._events.stream())
        slot.whole = slot.whole and not slot.start.query()
        self._pending.append(slot)
        self._unended += 1

    def step(self, ledger: Ledger) -> None:
        """End a step: its blocks' times belong together."""
        if self._unended:
            last = self._pending[-1]
            last.ends_step = not self._fresh  # fresh again already: its last block is missing
            last.stepped_s = self._now()
            self._unended = 0
        self.read(ledger, _LAG)
        self._steps += 1
        if self._steps % _LOOK_STEPS == 0 and self._held < _HELD_BACK and self._events.delay:
            self._look_into(ledger)

    def forget(self) -> None:
        """Leave the running block, and the gap before the next, unmeasured."""
        self._fresh = True

    def _look_into(self, ledger: Ledger) -> None:
        """Hold the device back before one of the next blocks, where launching may be what that
        block's time goes to.

        The host is then ahead of the device, which runs the block's kernels without a pause: so
        long they take by themselves.
        """
        launch = ledger.sketches["launch_ms"].spread()
        compute = ledger.sketches["compute_ms"].spread()
        if launch and compute and launch.median >= _FOLLOWS * compute.median:
            self._hold_s = min(_LONGEST_S, 1.5e-3 * launch.median)

    def finish(self, ledger: Ledger) -> float:
        """Wait until the device has done all that the network's stream was given, blocks that were
        dropped too.

        Returns the seconds by which it ended epochs' first steps after the host since the last
        call.
        """
        end = self._events.make()
        end.record(self._events.stream())
        end.synchronize()  # the host waits for the device
        self.read(ledger)
        late_s = self._late_s
        self._late_s = 0.0
        return late_s

    def read(self, ledger: Ledger, keep: int = 0) -> None:
        """Count the blocks that the device has done, but not the newest ``keep``, nor those of the
        running step.
        """
        while len(self._pending) > max(keep, self._unended) and self._pending[0].passed():
            slot = self._pending.popleft()
            read = self._previous
            self._count(slot, read, ledger)
            self._previous = slot
            if read is not None:
                self._free.append(read)

    def _count(self, slot: _Slot, previous: _Slot | None, ledger: Ledger) -> None:
        gap_s = max(0.0, previous.end.elapsed_time(slot.start)) / 1e3 if previous else 0.0
        compute_s = slot.start.elapsed_time(slot.end) / 1e3
        start_s = self._place(slot, gap_s, compute_s)
        spent_s = {
            "compute": compute_s,
            **_explain(slot, previous, (start_s - gap_s, start_s), ledger),
        }
        known = previous is not None and not slot.fresh
        if known and not slot.first:
            add_all(ledger.device_s, spent_s)
            ledger.blocks += 1
        if slot.whole:
            ledger.kernels_s += compute_s
            ledger.kernel_blocks += 1
        self._known &= known
        add_all(self._step_s, spent_s)
        if slot.first and slot.ends_step:
            self._late_s += max(0.0, self._passed_s - slot.stepped_s)
        if slot.ends_step:
            if self._keep_steps:
                self.ends_s.append(self._passed_s)
            if self._known and not slot.first:
                _count_step(self._step_s, ledger)
            self._known = True
            self._step_s = {}

    def _place(self, slot: _Slot, gap_s: float, compute_s: float) -> float:
        """When the device began the block of ``slot``, by the host's clock."""
        shown_s = slot.mark_s + slot.mark.elapsed_time(slot.start) / 1e3
        start_s = max(shown_s, self._passed_s + gap_s * _SLOWEST)
        if start_s + compute_s > self._now() + _JUMP_S:  # it cannot be still to come
            start_s = shown_s
        self._passed_s = start_s + compute_s * _SLOWEST
        return start_s


def _explain(slot: _Slot, previous: _Slot | None, gap: Span, ledger: Ledger) -> dict[str, float]:
    """Seconds of the ``gap`` between two blocks by what the device had to wait for, or did in
    between.
    """
    asked_s = (
        slot.waits[0][0] if slot.waits else -math.inf
    )  # a copy before that is ahead of its time, and delays nothing
    free_s = max(gap[0], asked_s)
    spent_s = {"exposed_copy": 0.0, "prepare": 0.0}
    exposed: list[Span] = []
    for copy in slot.copies:
        copied_s = 0.0 if copy.end is copy.start else copy.start.elapsed_time(copy.end) / 1e3
        if copied_s and not slot.first:
            ledger.sketches["copy_ms"].add(1e3 * copied_s)
        if previous is None or (ready_s := previous.end.elapsed_time(copy.ready) / 1e3) <= 0:
            continue
        began_s = gap[0] + previous.end.elapsed_time(copy.start) / 1e3
        for name, until_s in (("exposed_copy", began_s + copied_s), ("prepare", gap[0] + ready_s)):
            span = max(free_s, began_s), min(gap[1], until_s)
            if span[0] < span[1]:  # what runs on one stream comes one after the other
                exposed.append(span)
                spent_s[name] += span[1] - span[0]
                free_s = span[1]
            began_s = until_s
    starved_s = _overlap(slot.waits, [gap]) - _overlap(slot.waits, exposed)
    host_s = max(0.0, gap[1] - gap[0] - sum(spent_s.values()) - starved_s)
    return {"starved": starved_s, **spent_s, "host": host_s}


def _overlap(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds that lie in one of ``some`` and in one of ``others``; neither of the two overlap
    among themselves.
    """
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def _count_step(step_s: Mapping[str, float], ledger: Ledger) -> None:
    whole_s = sum(step_s.values())
    times_s = {**step_s, "gap": whole_s - step_s["compute"], "step": whole_s}
    for name, seconds in times_s.items():
        ledger.sketches[f"{name}_ms"].add(1e3 * seconds)
