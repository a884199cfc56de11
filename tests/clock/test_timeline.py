"""The step clock's ring and windows, on a GPU in model time."""

import contextlib

import pytest
from model_time import Gpu, known, settled, step

from harness.clock.clock import StepClock


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def clock(gpu: Gpu) -> StepClock:
    return gpu.clock()


@pytest.mark.parametrize("kind", ["starved_ms", "host_ms", "compute_ms"])
def test_a_spike_on_the_device_survives(clock: StepClock, gpu: Gpu, kind: str) -> None:
    """One slow step among a thousand is its window's maximum, whichever part of it was slow."""
    for number in range(1000):
        slow_s = {kind: 0.5} if number == 500 else {}
        gpu.host += slow_s.get("host_ms", 0.0)
        step(
            clock,
            gpu,
            wait_s=slow_s.get("starved_ms", 0.001),
            compute_s=slow_s.get("compute_ms", 0.002),
        )
    gpu.host = gpu.compute_until
    window = known(clock.close_window())
    spread = getattr(window, kind)
    assert spread.max == pytest.approx(500, rel=0.02)
    assert spread.p95 < 3


def test_no_step_waits_for_the_device(clock: StepClock, gpu: Gpu) -> None:
    """Neither a step nor the end of a window synchronizes."""
    for _ in range(500):
        step(clock, gpu, compute_s=1.0)
    clock.close_window()
    clock.total()
    assert gpu.waits == 0


def test_a_device_far_behind_has_figures_once_it_comes(clock: StepClock, gpu: Gpu) -> None:
    """Meanwhile the host's go on; afterwards every step has its own."""
    gpu.hung = True
    for _ in range(100):
        step(clock, gpu, wait_s=0.008, launch_s=0.002)
    total = clock.total()
    assert (total.steps, total.stall_basis) == (99, "host")
    assert total.step_ms
    gpu.hung = False
    for _ in range(100):
        step(clock, gpu, wait_s=0.008, launch_s=0.002)
    total = settled(clock, gpu)
    assert known(total.step_ms).max == pytest.approx(10)
    assert total.stall_fraction == pytest.approx(0.8, abs=0.01)


def test_copies_nobody_computes_on_are_bounded(clock: StepClock, gpu: Gpu) -> None:
    """A loop that never tells of its computing does not gather events."""
    for _ in range(1000):
        clock.copied(*gpu.copy(0.001))
        clock.step(1)
    assert clock._timeline is not None
    assert len(clock._timeline.copies) == 64


@pytest.mark.parametrize("steps", [10, 20, 100])
def test_what_an_epochs_end_leaves_to_the_device_is_its_steps(
    clock: StepClock, gpu: Gpu, steps: int
) -> None:
    """A host that settles at each epoch's end has the device's images/s."""
    for _ in range(4):
        clock.start_epoch()
        for _ in range(steps):
            step(clock, gpu, compute_s=0.1)
        clock.settle()
    total = clock.total()
    assert total.images_per_s == pytest.approx(40, rel=0.01)
    assert total.elapsed_s + (total.first_step_s or 0.0) == pytest.approx(0.4 * steps, rel=0.01)


def test_a_pause_lets_the_device_finish_and_books_it_to_the_steps(
    clock: StepClock, gpu: Gpu
) -> None:
    """Steps that are still queued when an evaluation begins are not paid for by the evaluation."""
    clock.start_epoch()
    for _ in range(11):
        step(clock, gpu, compute_s=0.1)
    with clock.pause("evaluate"):
        gpu.host += 3.0
    total = clock.total()
    assert gpu.waits == 1
    assert total.pauses_s == {"evaluate": pytest.approx(3.0)}
    assert (total.elapsed_s, total.first_step_s) == (
        pytest.approx(1.0, abs=0.002),
        pytest.approx(0.1, abs=0.002),
    )


def test_the_gap_over_a_pause_is_left_out(clock: StepClock, gpu: Gpu) -> None:
    """An evaluation between two steps is neither a slow step nor a stall."""
    for _ in range(5):
        for _ in range(5):
            step(clock, gpu, wait_s=0.001, compute_s=0.009)
        with clock.pause("evaluate"):
            gpu.host += 3.0
    total = settled(clock, gpu)
    assert known(total.step_ms).max < 12


def test_the_first_step_of_an_epoch_is_left_out(clock: StepClock, gpu: Gpu) -> None:
    """Start-up is no stall of the steady state, on the device either."""
    for _ in range(3):
        clock.start_epoch()
        step(clock, gpu, wait_s=20.0, copy_s=5.0, compute_s=9.0)
        for _ in range(10):
            step(clock, gpu, compute_s=0.01, copy_s=0.001)
        gpu.host = gpu.compute_until
    total = settled(clock, gpu)
    assert (known(total.step_ms).max, known(total.copy_ms).max) == (
        pytest.approx(10, rel=0.02),
        pytest.approx(1),
    )
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
    assert (known(total.step_ms).max, known(total.compute_ms).max) == (
        pytest.approx(10),
        pytest.approx(2),
    )
    assert total.stall_fraction == pytest.approx(0.8, abs=0.01)


def test_a_block_that_raises_is_left_out(clock: StepClock, gpu: Gpu) -> None:
    """An error in a step spoils neither its events nor its neighbors' figures."""
    for count in range(30):
        if count % 3 == 2:
            with contextlib.suppress(KeyError), clock.computing():
                gpu.launch(5.0)
                gpu.host = gpu.compute_until
                raise KeyError
        else:
            step(clock, gpu, wait_s=0.001, compute_s=0.001)
    total = settled(clock, gpu)
    assert known(total.compute_ms).max < 5
    assert clock._timeline is not None
    assert len(clock._timeline._free) + len(clock._timeline._pending) + 1 < 20


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
    assert known(total.compute_ms).max < 10


def test_device_figures_may_come_a_window_late(clock: StepClock, gpu: Gpu) -> None:
    """Closing a window takes what the device has done and leaves the rest to the next one."""
    for _ in range(5):
        step(clock, gpu, compute_s=1.0)
    assert known(clock.close_window()).compute_ms is None
    gpu.host = gpu.compute_until
    step(clock, gpu, compute_s=1.0)
    assert known(clock.close_window()).compute_ms
