"""The step clock with device events, on an emulated device whose streams run in model time."""

import contextlib
import math
from typing import Any

import pytest

from harness.watch.clock import StepClock
from harness.watch.figures import Window


class Gpu:
    """A host's clock, a compute stream and a copy stream; work is queued and done in order on each."""

    def __init__(self) -> None:
        self.host = 0.0
        self.compute_until = 0.0
        self.copy_until = 0.0
        self.waits = 0
        self.made = 0
        self.hung = False

    def now(self) -> float:
        return self.host

    def event(self) -> "Event":
        self.made += 1
        return Event(self)

    def launch(self, seconds: float) -> None:
        self.compute_until = max(self.compute_until, self.host) + seconds

    def copy(self, seconds: float) -> tuple["Event", "Event"]:
        start, end = Event(self), Event(self)
        start.at = max(self.copy_until, self.host)
        end.at = self.copy_until = start.at + seconds
        return start, end

    def await_copy(self, end: "Event") -> None:
        self.compute_until = max(self.compute_until, end.at)


class Event:
    """What torch.cuda.Event does, on a ``Gpu``."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = math.inf

    def record(self, stream: Any = None) -> None:
        self.at = max(self.gpu.compute_until, self.gpu.host)

    def query(self) -> bool:
        return not self.gpu.hung and self.at <= self.gpu.host

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.query()
        assert end_event.query(), "the time of an event that has not come is an error in CUDA"
        return (end_event.at - self.at) * 1e3


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def clock(gpu: Gpu) -> StepClock:
    return StepClock("cuda", now=gpu.now, event=gpu.event)


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


def test_a_device_that_waits_for_data_is_stalled(clock: StepClock, gpu: Gpu) -> None:
    """The feed takes 8 ms and the step 2 ms on an idle device: it stood still for four fifths of the time."""
    for _ in range(50):
        step(clock, gpu, wait_s=0.008, launch_s=0.002)
    total = settled(clock, gpu)
    assert total.stall_basis == "device"
    assert total.stall_fraction == pytest.approx(0.8, abs=0.01)
    assert total.compute_fraction == pytest.approx(0.2, abs=0.01)
    assert total.step_ms is not None
    assert total.step_ms.median == pytest.approx(10, rel=0.011)


def test_a_wait_that_the_device_does_not_notice_is_no_stall(clock: StepClock, gpu: Gpu) -> None:
    """While queued work keeps the device busy, the host's wait harms nobody: the data wait is high, the stall nil."""
    for _ in range(50):
        step(clock, gpu, wait_s=0.008, compute_s=0.010)
    total = settled(clock, gpu)
    assert total.data_wait_fraction == pytest.approx(8 / 9, rel=0.02)
    assert total.stall_fraction == 0.0
    assert total.compute_fraction == pytest.approx(1.0)
    assert total.compute_ms is not None
    assert total.compute_ms.median == pytest.approx(10, rel=0.011)


def test_a_copy_in_the_gap_is_a_stall(clock: StepClock, gpu: Gpu) -> None:
    """Without waits of the host, the part of the copies that the device had to wait for is the stall."""
    for _ in range(50):
        step(clock, gpu, copy_s=0.006, compute_s=0.002, launch_s=0.0)
        gpu.host = max(gpu.host, gpu.compute_until)
    total = settled(clock, gpu)
    assert total.stall_fraction == pytest.approx(0.75, abs=0.01)
    assert total.copy_ms is not None
    assert total.copy_ms.median == pytest.approx(6, rel=0.011)


def test_a_copy_behind_the_compute_is_no_stall(clock: StepClock, gpu: Gpu) -> None:
    """A copy one batch ahead, hidden behind the step before, is timed and harms nobody."""
    ahead = gpu.copy(0.006)
    for _ in range(50):
        clock.copied(*ahead)
        gpu.await_copy(ahead[1])
        ahead = gpu.copy(0.006)
        step(clock, gpu, compute_s=0.010)
        gpu.host = max(gpu.host, gpu.compute_until - 0.005)
    total = settled(clock, gpu)
    assert total.copy_ms is not None
    assert total.copy_ms.max == pytest.approx(6)
    assert total.stall_fraction == 0.0


def test_of_a_copy_only_the_exposed_part_is_a_stall(clock: StepClock, gpu: Gpu) -> None:
    """A copy that began behind the step before stalls the device only from that step's end on."""
    copied = gpu.copy(0.008)
    for _ in range(50):
        clock.copied(*copied)
        gpu.await_copy(copied[1])
        gpu.host = max(gpu.host, copied[1].at)
        copied = gpu.copy(0.008)
        step(clock, gpu, compute_s=0.006, launch_s=0.0)
    total = settled(clock, gpu)
    assert total.stall_fraction == pytest.approx(0.25, abs=0.01)


def test_python_between_steps_is_no_stall(clock: StepClock, gpu: Gpu) -> None:
    """A gap in which neither a wait nor a copy lies is the host's own, and is not blamed on the data."""
    step(clock, gpu, wait_s=30.0, compute_s=0.002)
    for _ in range(50):
        step(clock, gpu, compute_s=0.002, launch_s=0.0)
        gpu.host += 0.008
    total = settled(clock, gpu)
    assert total.stall_fraction == 0.0
    assert total.compute_fraction == pytest.approx(0.25, abs=0.01)


def test_no_step_waits_for_the_device(clock: StepClock, gpu: Gpu) -> None:
    """However far the host runs ahead, nothing that the loop calls synchronises; nor does the end of a window."""
    for _ in range(500):
        step(clock, gpu, compute_s=1.0)
    clock.close_window()
    clock.total()
    assert gpu.waits == 0


def test_blocks_beyond_the_ring_are_dropped_and_counted(clock: StepClock, gpu: Gpu) -> None:
    """With 64 pairs pending on a hung device the rest goes unmeasured, and host figures go on."""
    gpu.hung = True
    for _ in range(100):
        step(clock, gpu, compute_s=0.001)
    total = clock.total()
    assert (total.dropped, total.steps, total.stall_basis) == (36, 99, "host")
    assert total.step_ms is not None


def test_after_a_drop_the_figures_are_right_again(clock: StepClock, gpu: Gpu) -> None:
    """A gap beside a dropped block is not known and left out, so that no step of 10 ms is shown as longer."""
    gpu.hung = True
    for _ in range(100):
        step(clock, gpu, wait_s=0.008, launch_s=0.002)
    gpu.hung = False
    for _ in range(100):
        step(clock, gpu, wait_s=0.008, launch_s=0.002)
    total = settled(clock, gpu)
    assert total.dropped == 36
    assert total.step_ms is not None
    assert total.step_ms.max == pytest.approx(10)
    assert total.stall_fraction == pytest.approx(0.8, abs=0.01)


def test_memory_stays_as_it_was(clock: StepClock, gpu: Gpu) -> None:
    """Ten thousand steps make no event beyond the ring's, and leave no copies behind."""
    for _ in range(10_000):
        step(clock, gpu, wait_s=0.001, compute_s=0.001, copy_s=0.0005)
    assert clock._timeline is not None
    assert gpu.made == 128
    assert len(clock._timeline._copies) + len(clock._timeline._pending) < 40


def test_copies_nobody_computes_on_are_bounded(clock: StepClock, gpu: Gpu) -> None:
    """A loop that never tells of its computing does not gather events."""
    for _ in range(1000):
        clock.copied(*gpu.copy(0.001))
        clock.step(1)
    assert clock._timeline is not None
    assert len(clock._timeline._copies) == 64


def test_a_pause_lets_the_device_finish_and_books_it_to_the_steps(clock: StepClock, gpu: Gpu) -> None:
    """Steps that are still queued when an evaluation begins are not paid for by the evaluation."""
    clock.start_epoch()
    for _ in range(11):
        step(clock, gpu, compute_s=0.1)
    with clock.pause("evaluate"):
        gpu.host += 3.0
    total = clock.total()
    assert gpu.waits == 1
    assert total.pauses_s == {"evaluate": pytest.approx(3.0)}
    assert total.elapsed_s == pytest.approx(1.1, abs=0.002)


def test_the_gap_over_a_pause_is_left_out(clock: StepClock, gpu: Gpu) -> None:
    """An evaluation between two steps is neither a slow step nor a stall."""
    for _ in range(5):
        for _ in range(5):
            step(clock, gpu, wait_s=0.001, compute_s=0.009)
        with clock.pause("evaluate"):
            gpu.host += 3.0
    total = settled(clock, gpu)
    assert total.step_ms is not None
    assert total.step_ms.max < 12


def test_the_first_step_of_an_epoch_is_left_out(clock: StepClock, gpu: Gpu) -> None:
    """Start-up is no stall of the steady state, on the device either."""
    for _ in range(3):
        clock.start_epoch()
        step(clock, gpu, wait_s=20.0, copy_s=5.0, compute_s=9.0)
        for _ in range(10):
            step(clock, gpu, compute_s=0.01, copy_s=0.001)
        gpu.host = gpu.compute_until
    total = settled(clock, gpu)
    assert total.step_ms is not None
    assert total.copy_ms is not None
    assert (total.step_ms.max, total.copy_ms.max) == (pytest.approx(10, rel=0.02), pytest.approx(1))
    assert total.stall_fraction == pytest.approx(0.0, abs=0.01)


def test_blocks_of_one_step_add_up(clock: StepClock, gpu: Gpu) -> None:
    """With gradient accumulation a step's device time is that of all its blocks and gaps."""
    for _ in range(20):
        for _ in range(2):
            with clock.waiting():
                gpu.host += 0.004
            with clock.computing():
                gpu.launch(0.001)
            gpu.host += 0.001
        clock.step(8)
    total = settled(clock, gpu)
    assert total.step_ms is not None
    assert total.compute_ms is not None
    assert (total.step_ms.max, total.compute_ms.max) == (pytest.approx(10), pytest.approx(2))
    assert total.stall_fraction == pytest.approx(0.8, abs=0.01)


def test_a_step_that_lost_a_block_is_left_out(gpu: Gpu) -> None:
    """When only the second of a step's two blocks was dropped, the first one's time is not shown as the step's."""
    clock = StepClock("cuda", slots=4, now=gpu.now, event=gpu.event)
    for number in range(12):
        gpu.hung = number > 0 and number % 2 == 0  # the first of its blocks takes the last free slot
        for _ in range(2):
            with clock.computing():
                gpu.host += 0.005
        clock.step(8)
    total = settled(clock, gpu)
    assert total.dropped > 0
    assert total.compute_ms is not None
    assert total.compute_ms.median == pytest.approx(10, rel=0.011)
    assert total.compute_ms.max == pytest.approx(10)


def test_a_window_closed_within_a_step_does_not_split_it(clock: StepClock, gpu: Gpu) -> None:
    """The blocks of a step that has not ended are left for the window that it ends in."""
    for _ in range(10):
        with clock.computing():
            gpu.host += 0.005
        clock.close_window()
        clock.step(8)
    total = settled(clock, gpu)
    assert total.compute_ms is not None
    assert total.compute_ms.max == pytest.approx(5)


def test_a_block_that_raises_is_left_out(clock: StepClock, gpu: Gpu) -> None:
    """An error in a step spoils neither the ring nor its neighbours' figures."""
    for count in range(30):
        if count % 3 == 2:
            with contextlib.suppress(KeyError), clock.computing():
                gpu.launch(5.0)
                gpu.host = gpu.compute_until
                raise KeyError
        else:
            step(clock, gpu, wait_s=0.001, compute_s=0.001)
    total = settled(clock, gpu)
    assert total.compute_ms is not None
    assert total.compute_ms.max < 5
    assert clock._timeline is not None
    assert len(clock._timeline._free) + len(clock._timeline._pending) + 1 == 64


def test_a_pause_inside_a_block_leaves_it_out(clock: StepClock, gpu: Gpu) -> None:
    """A checkpoint in the middle of a step is no compute time."""
    step(clock, gpu, compute_s=0.001)
    step(clock, gpu, compute_s=0.001)
    with clock.computing(), clock.pause("checkpoint"):
        gpu.host += 9.0
    clock.step(4)
    for _ in range(3):
        step(clock, gpu, compute_s=0.001)
    total = settled(clock, gpu)
    assert total.compute_ms is not None
    assert total.compute_ms.max < 10


def test_device_figures_may_come_a_window_late(clock: StepClock, gpu: Gpu) -> None:
    """Closing a window takes what the device has done and leaves the rest to the next one."""
    for _ in range(5):
        step(clock, gpu, compute_s=1.0)
    early = clock.close_window()
    assert early is not None
    assert early.compute_ms is None
    gpu.host = gpu.compute_until
    step(clock, gpu, compute_s=1.0)
    late = clock.close_window()
    assert late is not None
    assert late.compute_ms is not None


def test_watch_measures_the_device_too(clock: StepClock, gpu: Gpu) -> None:
    """The body of a watched loop is a block of computing on the device."""

    def slow() -> Any:
        for _ in range(20):
            gpu.host += 0.008
            yield [0, 0]

    for _ in clock.watch(slow()):
        gpu.host += 0.002
    total = settled(clock, gpu)
    assert total.stall_fraction == pytest.approx(0.8, abs=0.01)
