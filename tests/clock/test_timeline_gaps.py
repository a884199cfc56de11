"""What the device waited for, gap by gap, on a GPU in model time."""

import random

import pytest
from model_time import COMPUTE, Gpu, known, settled, step

from harness.clock.clock import StepClock


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def clock(gpu: Gpu) -> StepClock:
    return gpu.clock()


def test_normalizing_behind_the_copy_is_the_devices_own_work(clock: StepClock, gpu: Gpu) -> None:
    """What the device does to a batch has a name of its own, and is no stall."""
    for _ in range(50):
        start, end = gpu.copy(0.004)
        ready = gpu.copy(0.002)[1]
        clock.copied(start, end, ready)
        gpu.await_copy(ready)
        step(clock, gpu, compute_s=0.004, launch_s=0.0)
        gpu.host = max(gpu.host, gpu.compute_until)
    total = settled(clock, gpu)
    assert total.shares == pytest.approx(
        {"compute": 0.4, "starved": 0, "exposed_copy": 0.4, "prepare": 0.2, "host": 0}, abs=0.01
    )
    assert total.stall_fraction == pytest.approx(0.4, abs=0.01)
    assert known(total.copy_ms).median == pytest.approx(4, rel=0.011)


@pytest.mark.parametrize(
    ("host_ms", "load_ms", "copy_ms", "expected_ms"),
    [
        pytest.param(2, 5, 0, (0, 0, 0), id="all behind the compute"),
        pytest.param(0, 15, 0, (5, 0, 0), id="a wait that begins before the gap"),
        pytest.param(4, 8, 0, (2, 0, 0), id="work behind the compute, then a wait"),
        pytest.param(12, 8, 0, (8, 0, 2), id="work into the gap, then a wait"),
        pytest.param(18, 0, 0, (0, 0, 8), id="work alone"),
        pytest.param(0, 12, 3, (2, 3, 0), id="a wait, then a copy in the gap"),
        pytest.param(0, 8, 5, (0, 3, 0), id="a copy that begins before the gap"),
        pytest.param(13, 7, 5, (7, 5, 3), id="work, a wait and a copy"),
    ],
)
def test_every_part_of_a_gap_is_explained(
    clock: StepClock,
    gpu: Gpu,
    host_ms: float,
    load_ms: float,
    copy_ms: float,
    expected_ms: tuple[float, float, float],
) -> None:
    """The loop works, waits and copies in turn: what the device missed is known exactly."""
    for _ in range(200):
        gpu.host += 1e-3 * host_ms
        step(
            clock, gpu, wait_s=1e-3 * load_ms, copy_s=1e-3 * copy_ms, compute_s=0.010, launch_s=0.0
        )
        # no further ahead than the running step
        gpu.host = max(gpu.host, gpu.compute_until - 0.010)
    total = settled(clock, gpu)
    found = (total.starved_ms, total.exposed_copy_ms, total.host_ms)
    assert [known(spread).max for spread in found] == pytest.approx(expected_ms, abs=0.005)
    gap_ms = sum(expected_ms)
    assert known(total.gap_ms).max == pytest.approx(gap_ms, abs=0.005)
    starved, exposed_copy, host, compute = (ms / (10 + gap_ms) for ms in (*expected_ms, 10))
    assert total.shares == pytest.approx(
        {"compute": compute, "starved": starved, "exposed_copy": exposed_copy, "host": host},
        abs=0.001,
    )
    assert total.stall_fraction == pytest.approx(starved + exposed_copy, abs=0.001)


@pytest.mark.parametrize(
    ("asked_ms", "exposed_ms"), [(12, 5), (16, 2), (20, 0)], ids=["before", "within", "after"]
)
def test_a_copy_delays_from_when_the_host_asks_for_it(
    clock: StepClock, gpu: Gpu, asked_ms: float, exposed_ms: float
) -> None:
    """A copy that a thread issues at 13 ms costs what is left when the loop wants it."""
    for _ in range(100):
        copied = gpu.copy(0.005, at=gpu.host + 0.013)
        began = gpu.host
        gpu.host = began + 1e-3 * asked_ms
        with clock.waiting():
            # handed out when it is on its way
            gpu.host = max(gpu.host, began + 0.013)
            clock.copied(*copied)
        gpu.await_copy(copied[1])
        with clock.computing():
            gpu.launch(0.010)
        clock.step(4)
        gpu.host = gpu.compute_until - 0.010
    total = settled(clock, gpu)
    assert known(total.exposed_copy_ms).median == pytest.approx(exposed_ms, rel=0.01, abs=0.005)
    assert total.shares["starved"] * total.elapsed_s / total.steps == pytest.approx(
        1e-3 * max(0, 13 - asked_ms), abs=1e-4
    )


@pytest.mark.parametrize("where", ["first", "amid", "behind the end", "between two ends"])
def test_a_late_copy_is_no_computing(clock: StepClock, gpu: Gpu, where: str) -> None:
    """What the network's stream copies for 2 of 20 ms is a copy, wherever the step makes it."""
    before_ms = {"first": 0, "behind the end": 18}.get(where, 6)
    for _ in range(50):
        # the batch itself
        clock.copied(*gpu.copy(0.0))
        with clock.computing():
            gpu.launch(1e-3 * before_ms)
            if "end" in where:
                clock.computed()
            start, end = gpu.event(), gpu.event()
            start.record(COMPUTE)
            gpu.launch(0.002)
            end.record(COMPUTE)
            clock.copied(start, end)
            if where != "behind the end":
                gpu.launch(1e-3 * (18 - before_ms))
                clock.computed()
        clock.step(4)
        gpu.host = gpu.compute_until
    total = settled(clock, gpu)
    assert total.shares == pytest.approx(
        {"compute": 0.9, "starved": 0, "exposed_copy": 0.1, "host": 0}, abs=0.001
    )
    assert known(total.copy_ms).max == pytest.approx(2)


def test_two_batches_in_one_block_are_both_waited_for(clock: StepClock, gpu: Gpu) -> None:
    """A loop that takes two batches for one block is starved in both waits."""
    for _ in range(50):
        for _ in range(2):
            with clock.waiting():
                gpu.host += 0.004
            gpu.host += 0.001
        with clock.computing():
            gpu.launch(0.010)
        clock.step(8)
        gpu.host = gpu.compute_until
    total = settled(clock, gpu)
    assert total.shares == pytest.approx(
        {"compute": 0.5, "starved": 0.4, "exposed_copy": 0, "host": 0.1}, abs=0.001
    )


def starve(clock: StepClock, gpu: Gpu, steps: int) -> None:
    """Makes steps of 10 ms: the loop works for 5 ms, then waits for 15 ms."""
    for _ in range(steps):
        gpu.host += 0.005
        step(clock, gpu, wait_s=0.015, compute_s=0.010, launch_s=0.0)


def test_a_mark_that_comes_late_spoils_nothing(clock: StepClock, gpu: Gpu) -> None:
    """Where most marks are held up, the others tell."""
    chance = random.Random(0)
    for _ in range(300):
        gpu.mark_late_s = chance.choice([0.0, 0.004, 0.2])
        starve(clock, gpu, 1)
    total = settled(clock, gpu)
    assert total.stall_fraction == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize("drift", [-50e-6, 50e-6], ids=["slow", "fast"])
def test_clocks_that_drift_apart_spoil_nothing(clock: StepClock, gpu: Gpu, drift: float) -> None:
    """A mark that comes in time once a second makes up for the drift."""
    gpu.rate = 1 + drift
    for number in range(3000):
        gpu.mark_late_s = 0.0 if number % 50 == 0 else 0.1
        starve(clock, gpu, 1)
    assert settled(clock, gpu).stall_fraction == pytest.approx(0.5, abs=0.01)
