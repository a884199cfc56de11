"""Compares the step clock's stall with the differential method.

The method repeats the same steps on preloaded batches. The fraction of time spent on loading is
then ``1 - t_cached / t_real`` (Mohan et al., VLDB 2021). This needs a second run but no events, so
it is independent of the clock. Loads are sleeps, to avoid contention.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from harness.clock.clock import StepClock
from harness.clock.figures import Window
from harness.runtime.accelerator import Accelerator

LOADS = (
    (0.5, 0.0), (0.9, 0.0), (1.1, 0.0), (1.25, 0.0), (1.5, 0.0), (2.0, 0.0), (3.3, 0.0),
    (10.0, 0.0), (0.0, 1.5), (0.5, 0.5), (0.5, 1.5), (1.5, 0.3),
)  # fmt: skip
"""Loads, relative to a step's time: of the loader per batch, and of the loop per step."""
# the median counts
_ROUNDS = 5
# steps between two readings of the loss, for which the host waits for the device
_WINDOW = 20

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rig:
    """Asynchronous steps that a ``StepClock`` can time.

    Attributes:
        clock: makes a clock for the device.
        batches: yields a number of batches, each taking the given seconds, and reports their
            copies to the clock.
        launch: starts a step.
        wait: waits for the steps so far.
        sleep: sleeps, in seconds.
        now: a clock in seconds.
    """

    clock: Callable[[], StepClock]
    batches: Callable[[float, int, StepClock], Iterator[Any]]
    launch: Callable[[Any], object]
    wait: Callable[[], object]
    sleep: Callable[[float], object] = time.sleep
    now: Callable[[], float] = time.perf_counter


def timed_epoch(rig: Rig, load_s: float, work_s: float, steps: int) -> tuple[float, Window]:
    """Returns the host's seconds per step and the clock's figures, without the first step."""
    clock = rig.clock()
    batches = rig.batches(load_s, steps + 1, clock)
    clock.start_epoch()
    begin = 0.0
    for done in range(steps + 1):
        if work_s:
            rig.sleep(work_s)
        with clock.waiting():
            batch = next(batches)
        with clock.computing():
            rig.launch(batch)
        clock.step(1)
        if done % _WINDOW == 0:
            rig.wait()
        if done == 0:
            begin = rig.now()
    rig.wait()
    seconds = (rig.now() - begin) / steps
    window = clock.close_window()
    assert window is not None
    return seconds, window


def compare(rig: Rig, steps: int, tolerance: float) -> Generator[Row, None, str]:
    """Yields both methods' results for every load, and ``{"wrong": ...}`` if they differ.

    Args:
        rig: the steps.
        steps: steps per epoch.
        tolerance: allowed difference, as a fraction of time.
    """
    # warm-up: kernel selection, compilation
    timed_epoch(rig, 0.0, 0.0, 5)
    step_s = timed_epoch(rig, 0.0, 0.0, steps)[0]
    worst = 0.0
    for load, work in LOADS:
        epochs = [_both(rig, load * step_s, work * step_s, steps) for _ in range(_ROUNDS)]
        found = {name: median(epoch[name] for epoch in epochs) for name in epochs[0]}
        yield {
            "loader / step": load,
            "loop / step": work,
            **{name: f"{value:.3f}" for name, value in found.items()},
        }
        apart = median(abs(epoch["stall"] - epoch["differential"]) for epoch in epochs)
        worst = max(worst, apart)
        if apart > tolerance:
            yield {
                "wrong": (
                    f"loader / step {load:g}, loop / step {work:g}: they differ by more than "
                    f"{tolerance:g}"
                )
            }
    return f"step {1e3 * step_s:.2f} ms; clock and differential method differ by up to {worst:.3f}"


def _both(rig: Rig, load_s: float, work_s: float, steps: int) -> dict[str, float]:
    """Returns the stall of an epoch with loading by the clock and by an epoch without."""
    cached_s, _ = timed_epoch(rig, 0.0, work_s, steps)
    real_s, window = timed_epoch(rig, load_s, work_s, steps)
    assert (
        window.stall_basis == "device"
        and window.stall_fraction is not None
        and window.data_wait_fraction is not None
    )
    return {
        "step ms": 1e3 * real_s, "data wait": window.data_wait_fraction, **window.shares,
        "stall": window.stall_fraction, "differential": max(0.0, 1 - cached_s / real_s),
    }  # fmt: skip


class Emulated(Accelerator):
    """An accelerator with the given events and streams; its tensors are on the CPU."""

    has_events = True
    has_streams = True

    def __init__(
        self,
        event: Callable[[], Any],
        stream: Callable[[], Any],
        idle: Any,
        delay: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self._given = event, stream, idle, delay

    def event(self, *, timed: bool = False) -> Any:
        """Returns a new event."""
        return self._given[0]()

    def stream(self) -> Any:
        """Returns the network's stream."""
        return self._given[1]()

    def idle_stream(self) -> Any:
        """Returns an idle stream."""
        return self._given[2]

    def delay(self, seconds: float) -> None:
        """Keeps the network's stream busy."""
        self._given[3](seconds)


class EmulatedStream:
    """A stream emulated by a thread that executes sleeps and events in order.

    An operation begins when it is enqueued or when the previous one ends, whichever is later. A
    sleep ends on time even if the thread wakes late, so delays of a busy machine do not accumulate
    over the steps.
    """

    def __init__(self, name: str) -> None:
        self._orders: queue.SimpleQueue[tuple[float, Callable[[], object]]] = queue.SimpleQueue()
        # its progress, in seconds of the host's clock
        self._at = 0.0
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def sleep(self, seconds: float) -> None:
        """Enqueues a sleep."""

        def until() -> None:
            self._at += seconds
            time.sleep(max(0.0, self._at - time.perf_counter()))

        self._order(until)

    def wait_for(self, event: EmulatedEvent) -> None:
        """Enqueues a wait for an event already recorded on another stream."""
        passed = event.passed

        def until() -> None:
            passed.wait()
            self._at = max(self._at, event.at)

        self._order(until)

    def mark(self, event: EmulatedEvent) -> None:
        """Enqueues the completion of an event."""
        passed = event.passed

        def until() -> None:
            event.at = self._at
            passed.set()

        self._order(until)

    def _order(self, what: Callable[[], object]) -> None:
        self._orders.put((time.perf_counter(), what))

    def _work(self) -> None:
        while True:
            given, what = self._orders.get()
            self._at = max(self._at, given)
            what()


class EmulatedEvent:
    """The subset of ``torch.cuda.Event`` in use, for an ``EmulatedStream``."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        """Marks a stream's present position, replacing an earlier one."""
        self.passed = threading.Event()
        stream.mark(self)

    def query(self) -> bool:
        """Returns whether the stream has passed the position."""
        return self.passed.is_set()

    def synchronize(self) -> None:
        """Waits until it has."""
        self.passed.wait()

    def elapsed_time(self, end_event: Any) -> float:
        """Returns milliseconds to another event."""
        return 1e3 * float(end_event.at - self.at)


def emulated_rig(step_s: float = 0.01, copy_s: float = 0.001) -> Rig:
    """Returns a device whose steps and copies are sleeps of threads.

    Its loader is one batch ahead, like the prefetcher.

    A batch without load time is already on the device and is not copied.
    """
    compute, copy, idle = (
        EmulatedStream(f"emulated-{name}") for name in ("compute", "copy", "idle")
    )

    # the loader's thread: a batch, and its copy on the copy stream
    def made(load_s: float) -> tuple[EmulatedEvent, EmulatedEvent] | None:
        if not load_s:
            return None
        time.sleep(load_s)
        start = EmulatedEvent()
        end = EmulatedEvent()
        start.record(copy)
        copy.sleep(copy_s)
        end.record(copy)
        return start, end

    # one batch ahead; the step's stream waits for its copy
    def batches(load_s: float, count: int, clock: StepClock) -> Iterator[None]:
        with ThreadPoolExecutor(1) as loader:
            coming = loader.submit(made, load_s)
            for left in reversed(range(count)):
                copied = coming.result()
                if left:
                    coming = loader.submit(made, load_s)
                if copied:
                    clock.copied(*copied)
                    compute.wait_for(copied[1])
                yield None

    def wait() -> None:
        event = EmulatedEvent()
        event.record(compute)
        event.synchronize()

    return Rig(
        clock=lambda: StepClock(Emulated(EmulatedEvent, lambda: compute, idle)),
        batches=batches,
        launch=lambda batch: compute.sleep(step_s),
        wait=wait,
    )
