"""Computes the device's busy and waiting time from timing events, without synchronization.

Events give the time between two points of the device; what the host did meanwhile is known by the
host's clock. To bring the two together takes no synchronisation: beside each block an event is
recorded on a stream that nothing else runs on, so that the device passes the event at once. Where
another thread or a shared queue holds the event up, it shows the block's begin too early. So does
the block before plus the time since, less what two clocks drift apart. As both can only be too
early, the later one is used.
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

# from when to when, in seconds of the host's clock
Span = tuple[float, float]
# ``torch.cuda.Event(enable_timing=True)``, or what has its record, query, synchronize and
# elapsed_time
TimingEvent = Any

# host seconds to a second of the device, at least: quartz clocks keep time to 50 in a million
_SLOWEST = 1 - 1e-4


class Copy(NamedTuple):
    """Events of one batch: its copy from start to end, and when it is ready.

    ``end`` is ``start`` where nothing was copied: the batch was made on the device. ``amid`` a
    block, on its stream, kernels wait for it.
    """

    start: TimingEvent
    end: TimingEvent
    ready: TimingEvent
    amid: bool = False


@dataclass(slots=True)
class _Slot:
    """Events around and beside one block of computing, with what the host knew of it."""

    start: TimingEvent
    end: TimingEvent
    mark: TimingEvent
    # that it was begun on
    stream: Any = None
    # the host's clock just before ``mark`` was recorded
    mark_s: float = 0.0
    # blocked on the feed since the block before
    waits: Sequence[Span] = ()
    # of the batches that it computes on
    copies: tuple[Copy, ...] = ()
    # ``start``, or behind its first copy
    begin: TimingEvent = None
    # part of an epoch's first step
    first: bool = False
    # the block before is not known, so neither is the gap
    fresh: bool = False
    # it was held back; recent steps computed so long
    usual_s: float = 0.0
    # the host's clock as the step ended of which it is the last block
    stepped_s: float | None = None

    def passed(self) -> bool:
        """Returns whether the device has done the block, the copies for it and the mark."""
        return (
            self.end.query()
            and self.mark.query()
            and all(copy.ready.query() for copy in self.copies)
        )


class Timeline:
    """Events around blocks of computing; ``StepClock`` says what the figures mean.

    Args:
        own: makes the events, and says on which streams to record them.
        now: the host's clock in seconds.

    Attributes:
        waits: since the last block, when the host was blocked on the feed; told by the clock.
        copies: the events of the batches that the next block computes on; told by the clock.
        fresh: the running block is not measured; between blocks: the gap before the next is not
            known.
        ends_s: when the device ended each of the last steps, by the host's clock.
    """

    def __init__(self, own: Accelerator, now: Callable[[], float]) -> None:
        self._own = own
        self._now = now
        self._event: Callable[[], TimingEvent] = partial(own.event, timed=True)
        # as many as the host was ahead of the device
        self._free: list[_Slot] = []
        self._pending: deque[_Slot] = deque()
        # of the block that has begun, if it is measured
        self._running: _Slot | None = None
        # the end of the running block is recorded already
        self._marked = False
        # those of loops that never compute are no more
        self.waits: deque[Span] = deque(maxlen=64)
        self.copies: deque[Copy] = deque(maxlen=64)
        # of copies that were read; a loop may record others
        self.spare: deque[TimingEvent] = deque(maxlen=64)
        # the last one read: the next gap begins at its end
        self._previous: _Slot | None = None
        # when the device passed that end, by the host's clock
        self._passed_s = -math.inf
        self.fresh = True
        # measured blocks of the running step
        self._unended = 0
        self._steps = 0
        # if the next block is to be held back: how long steps compute
        self._hold_s = 0.0
        self._held = 0  # blocks that were
        self._copies = 0  # for the last block
        # a megabyte; tuning times fewer steps together
        self.ends_s: deque[float] = deque(maxlen=1 << 15)
        # after the host, the device ended epochs' first steps
        self._late_s = 0.0
        # all gaps of the step that is being read, so far
        self._known = True
        self._step_s: Sums = defaultdict(float)  # of that step
        self._usual_s = 0.0  # of that step, if it was held back
        # the last steps, as a window may be too short to read one within it
        self._recent_s: deque[Sums] = deque(maxlen=16)

    def begin(self, *, first: bool) -> None:
        """Begin a block."""
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
        """Take a copy: of the next block, or of the running one, which begins behind the first."""
        slot = self._running
        if slot is None:
            self.copies.append(copy)
        elif self._own.stream() != slot.stream:
            # it delays nothing here
            slot.copies += (copy,)
        elif self._marked:
            # of this block, if its end moves
            self.copies.append(copy)
        else:
            if not slot.copies:
                slot.begin = copy.ready
            slot.copies += (copy._replace(amid=True),)
            self._hold_back(slot)

    def _hold_back(self, slot: _Slot) -> None:
        """Let the device wait here, if it is to and no copy for the block follows.

        One from pageable memory would wait for the device.
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
        """Let the running block end here, unless this is called again."""
        slot = self._running
        assert slot is not None
        self._copies = len(slot.copies)
        slot.copies += tuple(copy._replace(amid=True) for copy in self.copies)
        self.copies.clear()
        slot.end.record(slot.stream)
        self._marked = True

    def end(self, *, whole: bool) -> None:
        """End the block; one that is not ``whole`` is left out."""
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
        """End a step: its blocks' times belong together."""
        if self._unended:
            # fresh again already where the step's last block is missing
            if not self.fresh:
                self._pending[-1].stepped_s = self._now()
            self._unended = 0
        # events have nearly always come by then; by the tenth step a run's third is read, the first
        # one that is known
        self.read(ledger, keep=7)
        self._steps += 1
        # the host stays ahead for some steps: they are no measure for the next time
        if self._steps % 40 != 10 or self._held >= 3:
            return
        # Where the device may be waiting for launches it is held back in one of the next blocks:
        # the host is then ahead, and kernels run without a pause. That takes less time than usual
        # by what the device had waited: all of it, or part where the queue was full or the host
        # waited for the device.
        launch = ledger.quantiles("launch_ms")
        usual_s, starved_s = (
            median([step_s[name] for step_s in self._recent_s] or [math.inf])
            for name in ("compute", "starved")
        )
        # not where a slow loader would catch up meanwhile
        if launch and launch.median >= 900 * usual_s and starved_s < usual_s / 10:
            self._hold_s = usual_s

    def finish(self, ledger: Ledger) -> float:
        """Wait until the device has done all that the network's stream was given.

        Returns the seconds by which the device ended epochs' first steps after the host, since the
        last call.
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
        """Count the blocks that the device has done, but for the newest ``keep``.

        Blocks of the running step are left too.
        """
        while len(self._pending) > max(keep, self._unended) and self._pending[0].passed():
            slot = self._pending.popleft()
            self._count(slot, ledger)
            # one may be the start and the end
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
        # when the device began the block, by the host's clock
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
    """Returns the seconds of a block, and of the ``gap`` before it, by what filled them."""
    free_s = gap[0]
    if slot.waits:
        # a copy before the host asked is ahead of its time, and delays nothing
        free_s = max(free_s, slot.waits[0][0])
    spent_s = {"compute": block_s, "exposed_copy": 0.0, "prepare": 0.0}
    exposed: list[Span] = []
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
            # what runs on one stream comes one after the other
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
    """Returns the seconds that lie in one of ``some`` and in one of ``others``.

    Within each of the two, spans do not overlap.
    """
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)
