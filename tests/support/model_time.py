"""Machines whose time passes when told, so that every figure is known exactly."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from harness.clock.clock import StepClock
from harness.clock.figures import Window
from scripts.bench.differential import Emulated

# streams
COMPUTE = "compute"
IDLE = "idle"
Figure = TypeVar("Figure")


def known(figure: Figure | None) -> Figure:
    """Returns a figure that must be there."""
    assert figure is not None
    return figure


class Hand:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def one_step(
    clock: StepClock,
    hand: Hand,
    wait_s: float,
    compute_s: float,
    rest_s: float = 0.0,
    images: int = 4,
) -> None:
    with clock.waiting():
        hand.pass_(wait_s)
    with clock.computing():
        hand.pass_(compute_s)
    hand.pass_(rest_s)
    clock.step(images)


class Gpu:
    """A host's clock, a compute stream and a copy stream, each of which works in order."""

    def __init__(self) -> None:
        self.host = 0.0
        self.compute_until = 0.0
        self.copy_until = 0.0
        self.waits = 0
        self.made = 0
        self.hung = False
        # what the idle stream takes to pass a mark
        self.mark_late_s = 0.0
        # of the device's clock beside the host's
        self.rate = 1.0

    def now(self) -> float:
        return self.host

    def event(self) -> Event:
        self.made += 1
        return Event(self)

    def clock(self, kind: type[StepClock] = StepClock) -> StepClock:
        return kind(Emulated(self.event, lambda: COMPUTE, IDLE), now=self.now)

    def launch(self, seconds: float) -> None:
        self.compute_until = max(self.compute_until, self.host) + seconds

    def copy(self, seconds: float, at: float | None = None) -> tuple[Event, Event]:
        start = Event(self)
        end = Event(self)
        start.pass_at(max(self.copy_until, self.host if at is None else at))
        end.pass_at(start.at + seconds)
        self.copy_until = end.at
        return start, end

    def await_copy(self, end: Event) -> None:
        self.compute_until = max(self.compute_until, end.at)


class Event:
    """What torch.cuda.Event does, on a ``Gpu``."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = math.inf
        # the same by the device's clock
        self.stamp = 0.0

    def record(self, stream: Any = None) -> None:
        assert stream in (COMPUTE, IDLE)
        gpu = self.gpu
        self.pass_at(
            gpu.host + gpu.mark_late_s if stream == IDLE else max(gpu.compute_until, gpu.host)
        )

    def pass_at(self, host_s: float) -> None:
        self.at = host_s
        self.stamp = host_s * self.gpu.rate

    def query(self) -> bool:
        return not self.gpu.hung and self.at <= self.gpu.host

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end_event: Event) -> float:
        assert self.query()
        assert end_event.query(), "the time of an event that has not come is an error in CUDA"
        return (end_event.stamp - self.stamp) * 1e3


def step(
    clock: StepClock,
    gpu: Gpu,
    *,
    wait_s: float = 0.0,
    compute_s: float = 0.0,
    copy_s: float = 0.0,
    launch_s: float = 0.001,
) -> None:
    with clock.waiting():
        gpu.host += wait_s
    if copy_s:
        copied = gpu.copy(copy_s)
        clock.copied(*copied)
        gpu.await_copy(copied[1])
    with clock.computing():
        gpu.host += launch_s
        gpu.launch(compute_s)
    clock.step(4)


def settled(clock: StepClock, gpu: Gpu) -> Window:
    gpu.host = max(gpu.host, gpu.compute_until)
    return clock.total()
