"""Computes the device's busy and waiting times from timing events, without synchronization.

Events give the time between two points on the device; the host's clock gives the host's activity.
Aligning the two needs no synchronization: for each block, an event is recorded on an otherwise idle
stream, so it completes immediately. If another thread or a shared queue delays the event, the
estimated start of the block is too early. The previous block's end plus the time since then, minus
the clock drift, is also either too early or exact, so the later of the two is used.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures import Ledger, Sums, add

if TYPE_CHECKING:
    from ..runtime.accelerator import Accelerator

# interval on the host's clock in seconds
Span = tuple[float, float]
# ``torch.cuda.Event(enable_timing=True)``, or an object with the same methods
TimingEvent = Any

# minimum host seconds per device second; quartz clocks drift by up to 50 ppm
_SLOWEST = 1 - 1e-4


class Copy(NamedTuple):
    """Events for one batch: the start and end of its copy, and when it is ready.

    ``end`` is ``start`` if nothing was copied because the batch was made on the device. If the copy
    is ``amid`` a block, on the block's stream, kernels wait for it.
    """

    start: TimingEvent
    end: TimingEvent
    ready: TimingEvent
    amid: bool = False


@dataclass(slots=True)
class _Slot:
    """Events for one computing block, with the host's measurements."""

    start: TimingEvent
    end: TimingEvent
    mark: TimingEvent
    # the stream on which it started
    stream: Any = None
    # the host's clock just before ``mark`` was recorded
    mark_s: float = 0.0
    # intervals blocked on the feed since the previous block
    waits: Sequence[Span] = ()
    # the copies of its batches
    copies: tuple[Copy, ...] = ()
    # ``start``, or when its first copy is ready
    begin: TimingEvent = None
    # whether it is part of an epoch's first step
    first: bool = False
    # whether the previous block, and therefore the gap, is unknown
    fresh: bool = False
    # compute time in recent steps, if the block was held back
    usual_s: float = 0.0
    # host time at the end of the step, for the step's last block
    stepped_s: float | None = None

    def passed(self) -> bool:
        """Returns whether the device has finished the block, its copies and the mark."""
        return (
            self.end.query()
            and self.mark.query()
            and all(copy.ready.query() for copy in self.copies)
        )


class Timeline:
    """Events around computing blocks; ``StepClock`` defines the metrics.

    Args:
        own: creates the events and selects their streams.
        now: the host's clock in seconds.

    Attributes:
        waits: intervals since the last block during which the host was blocked on the feed; set by
            the clock.
        copies: events for the next block's batches; set by the clock.
        fresh: whether the current block is not measured; between blocks, whether the next gap is
            unknown.
        ends_s: when each of the last steps ended on the device, in host time.
    """

    def __init__(self, own: Accelerator, now: Callable[[], float]) -> None:
        self._own = own
        self._now = now
        self._event: Callable[[], TimingEvent] = partial(own.event, timed=True)
        # as many slots as blocks that the host was ahead of the device
        self._free: list[_Slot] = []
        self._pending: deque[_Slot] = deque()
        # the current block, if it is measured
        self._running: _Slot | None = None
        # whether the end of the current block is already recorded
        self._marked = False
        # bounded for loops that never compute
        self.waits: deque[Span] = deque(maxlen=64)
        self.copies: deque[Copy] = deque(maxlen=64)
        # reusable events from finished copies
        self.spare: deque[TimingEvent] = deque(maxlen=64)
        # the last block read, at whose end the next gap starts
        self._previous: _Slot | None = None
        # host time of that end
        self._passed_s = -math.inf
        self.fresh = True
        # number of measured blocks in the current step
        self._unended = 0
        self._steps = 0
        # the steps' compute time, if the next block is to be held back
        self._hold_s = 0.0
        self._held = 0  # number of held blocks
        self._copies = 0  # number of copies for the last block
        # one megabyte; tuning times fewer steps at once
        self.ends_s: deque[float] = deque(maxlen=1 << 15)
        # the device's delay in epochs' first steps
        self._late_s = 0.0
        # whether all gaps in the step being read are known
        self._known = True
        self._step_s: Sums = defaultdict(float)  # seconds in that step, by part
        self._usual_s = 0.0  # usual compute time for that step, if it was held back
        # seconds in the last steps, because a window may be too short
        self._recent_s: deque[Sums] = deque(maxlen=16)

    def begin(self, *, first: bool) -> None:
        """Begins a block."""
        slot = self._free.pop() if self._free else _Slot(*(self._event() for _ in range(3)))
        self._running = slot
        slot.waits = tuple(self.waits)
        slot.copies = tuple(self.copies)
        self.waits.clear()
        self.copies.clear()
        slot.first = first
        slot.fresh = self.fresh
        slot.stepped_s = None
        self.fresh = False
        slot.usual_s = 0.0
        slot.stream = self._own.stream()
        slot.mark_s = self._now()
        slot.mark.record(self._own.idle_stream())
        slot.start.record(slot.stream)
        slot.begin = slot.start
        self._hold_back(slot)

    def copied(self, copy: Copy) -> None:
        """Records a copy for the next block or the current one, which starts after its first."""
        slot = self._running
        if slot is None:
            self.copies.append(copy)
        elif self._own.stream() != slot.stream:
            # the copy delays nothing here
            slot.copies += (copy,)
        elif self._marked:
            # belongs to this block if the block's end moves
            self.copies.append(copy)
        else:
            if not slot.copies:
                slot.begin = copy.ready
            slot.copies += (copy._replace(amid=True),)
            self._hold_back(slot)

    def _hold_back(self, slot: _Slot) -> None:
        """Delays the device here if requested, unless a copy for the block follows.

        A copy from pageable memory would wait for the device.
        """
        copied = len(slot.copies) >= self._copies
        if not (self._hold_s and copied) or slot.first:
            return
        begin = self._event()
        end = self._event()
        begin.record(slot.stream)
        self._own.delay(min(1.0, 1.5 * self._hold_s))
        end.record(slot.stream)
        slot.copies += (Copy(begin, begin, end, True),)
        slot.usual_s = self._hold_s
        self._held += 1
        self._hold_s = 0.0

    def mark_end(self) -> None:
        """Ends the current block here, unless this is called again."""
        slot = self._running
        assert slot is not None
        self._copies = len(slot.copies)
        slot.copies += tuple(copy._replace(amid=True) for copy in self.copies)
        self.copies.clear()
        slot.end.record(slot.stream)
        self._marked = True

    def end(self, *, whole: bool) -> None:
        """Ends the block, and discards it unless it is ``whole``."""
        if not self._marked:
            self.mark_end()
        slot = self._running
        self._running = None
        self._marked = False
        self.fresh |= not whole
        assert slot is not None
        if self.fresh:
            self._free.append(slot)
            return
        self._pending.append(slot)
        self._unended += 1

    def step(self, ledger: Ledger) -> None:
        """Ends a step and groups its blocks."""
        if self._unended:
            # already fresh if the step's last block is missing
            if not self.fresh:
                self._pending[-1].stepped_s = self._now()
            self._unended = 0
        # events are nearly always complete by then; at the tenth step, the third step is read,
        # which is the first known one
        self.read(ledger, keep=7)
        self._steps += 1
        # the host stays ahead for some steps, which do not count toward the next trial
        if self._steps % 40 != 10 or self._held >= 3:
            return
        # If the device may be waiting for launches, it is held back in one of the next blocks, so
        # that the host runs ahead and kernels run without gaps. The time saved is the launch wait,
        # or part of it if the queue was full or the host waited for the device.
        launch = ledger.quantiles("launch_ms")
        usual_s, starved_s = (
            median([step_s[name] for step_s in self._recent_s] or [math.inf])
            for name in ("compute", "starved")
        )
        # not if this would let a slow loader catch up in the meantime
        if launch and launch.median >= 900 * usual_s and starved_s < usual_s / 10:
            self._hold_s = usual_s

    def finish(self, ledger: Ledger) -> float:
        """Waits until the device has finished the network's stream.

        Returns the total seconds by which the device lagged behind the host in epochs' first steps
        since the last call.
        """
        end = self._event()
        end.record(self._own.stream())
        # the host waits for the device
        end.synchronize()
        self.read(ledger)
        late_s = self._late_s
        self._late_s = 0.0
        return late_s

    def read(self, ledger: Ledger, keep: int = 0) -> None:
        """Counts finished blocks, except for the newest ``keep``.

        Blocks in the current step are not counted yet.
        """
        while len(self._pending) > max(keep, self._unended) and self._pending[0].passed():
            slot = self._pending.popleft()
            self._count(slot, ledger)
            # start and end may be the same
            self.spare.extend({id(e): e for copy in slot.copies for e in copy[:3]}.values())
            if self._previous:
                self._free.append(self._previous)
            self._previous = slot

    def _count(self, slot: _Slot, ledger: Ledger) -> None:
        gap_s = 0.0
        previous = self._previous
        if previous:
            gap_s = max(0.0, previous.end.elapsed_time(slot.begin)) / 1e3
        block_s = slot.begin.elapsed_time(slot.end) / 1e3
        # when the block started on the device, in host time
        start_s = max(
            slot.mark_s + slot.mark.elapsed_time(slot.begin) / 1e3,
            self._passed_s + gap_s * _SLOWEST,
        )
        self._passed_s = start_s + block_s * _SLOWEST
        gap = (start_s - gap_s, start_s)
        spent_s = _explain(slot, previous, gap, block_s, ledger)
        known = previous is not None and not slot.fresh
        if known and not slot.first and not slot.usual_s:
            add(ledger.sums["device"], spent_s)
        self._known &= known
        self._usual_s += slot.usual_s
        add(self._step_s, spent_s)
        if slot.stepped_s is not None:
            self.ends_s.append(self._passed_s)
            if slot.first:
                self._late_s += max(0.0, self._passed_s - slot.stepped_s)
            elif self._known and self._usual_s:
                add(
                    ledger.sums["run"],
                    {"kernels_s": self._step_s["compute"], "usual_s": self._usual_s},
                )
            elif self._known:
                step_s = self._step_s
                self._recent_s.append(step_s)
                whole_s = sum(step_s.values())
                step_s["gap"] = whole_s - step_s["compute"]
                step_s["step"] = whole_s
                for name, seconds in step_s.items():
                    ledger.count(f"{name}_ms", seconds)
            self._known = True
            self._usual_s = 0.0
            self._step_s = defaultdict(float)


def _explain(
    slot: _Slot, previous: _Slot | None, gap: Span, block_s: float, ledger: Ledger
) -> dict[str, float]:
    """Returns the seconds in a block and in the preceding ``gap``, by part."""
    free_s = gap[0]
    if slot.waits:
        # a copy before the request is early and delays nothing
        free_s = max(free_s, slot.waits[0][0])
    spent_s = {"compute": block_s, "exposed_copy": 0.0, "prepare": 0.0}
    exposed = []
    for copy in slot.copies:
        copied_s = copy.start.elapsed_time(copy.end) / 1e3
        if copied_s and not slot.first:
            ledger.count("copy_ms", copied_s)
        if previous is None:
            continue
        began_s = gap[0] + previous.end.elapsed_time(copy.start) / 1e3
        ready_s = gap[0] + previous.end.elapsed_time(copy.ready) / 1e3
        for name, until_s in (("exposed_copy", began_s + copied_s), ("prepare", ready_s)):
            span = max(free_s, began_s), min(gap[1] + copy.amid * block_s, until_s)
            # work on a stream is sequential
            if span[0] < span[1]:
                exposed.append(span)
                spent_s[name] += span[1] - span[0]
                free_s = span[1]
                spent_s["compute"] -= max(0.0, span[1] - max(span[0], gap[1]))
            began_s = until_s
    starved_s = _overlap(slot.waits, [gap]) - _overlap(slot.waits, exposed)
    host_s = max(0.0, gap[1] + block_s - gap[0] - sum(spent_s.values()) - starved_s)
    return {"starved": starved_s, **spent_s, "host": host_s}


def _overlap(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Returns the overlap between ``some`` and ``others`` in seconds.

    The spans within each sequence do not overlap.
    """
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)
