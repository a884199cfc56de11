"""The step clock against the differential method, in model time and on threads that sleep."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from model_time import Gpu

from harness.watch.clock import StepClock
from scripts import differential
from scripts.differential import EmulatedEvent, EmulatedStream, Rig, Row, compare, emulated_rig


def compared(rig: Rig, steps: int, tolerance: float) -> tuple[str, list[Row], list[str]]:
    """The line, the table and what is wrong."""
    said = compare(rig, steps, tolerance)
    table = list[Row]()
    wrong = list[str]()
    while True:
        try:
            row = next(said)
        except StopIteration as end:
            return end.value, table, wrong
        wrong.append(row["wrong"]) if "wrong" in row else table.append(row)


class Deaf(StepClock):
    """A clock that hears of no wait."""

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def model_rig(clock: type[StepClock] = StepClock) -> Rig:
    """Steps of 10 ms on a GPU in model time, and batches with a copy of 1 ms, one ahead."""
    gpu = Gpu()

    def batches(load_s: float, count: int, told: StepClock) -> Iterator[None]:
        ready_s = gpu.host + load_s
        for _ in range(count):
            gpu.host = max(gpu.host, ready_s)
            if load_s:
                copied = gpu.copy(0.001, at=ready_s)
                told.copied(*copied)
                gpu.await_copy(copied[1])
            ready_s = gpu.host + load_s
            yield None

    def move(seconds: float) -> None:
        gpu.host += seconds

    return Rig(
        clock=lambda: clock(events=gpu.events(), now=gpu.now),
        batches=batches,
        launch=lambda batch: gpu.launch(0.010),
        wait=lambda: move(max(0.0, gpu.compute_until - gpu.host)),
        sleep=move,
        now=gpu.now,
    )


def test_the_clock_agrees_with_the_differential_method() -> None:
    """On exact time the two differ by less than a tenth of a point, for every load from no stall to
    90 %.
    """
    summary, rows, problems = compared(model_rig(), 40, tolerance=0.001)
    assert problems == []
    assert summary == "step 10.00 ms; clock and differential method differ by up to 0.000"
    stalls = [float(row["stall"]) for row in rows]
    assert len(stalls) >= 8 and min(stalls) == 0 and max(stalls) >= 0.9


def test_a_hidden_wait_and_the_loops_own_work_are_no_stall() -> None:
    """A wait in half of the time that queued work hides, and a loop that works beyond the step,
    hardly stall the device.
    """
    _, rows, _ = compared(model_rig(), 40, tolerance=0.001)
    found = {(row["loader / step"], row["loop / step"]): row for row in rows}
    hidden = found[0.5, 0.0]
    working = found[0.0, 1.5]
    assert float(hidden["data wait"]) > 0.45 and float(hidden["stall"]) < 0.03
    assert float(working["stall"]) == 0 and float(working["host"]) > 0.3


def test_a_clock_that_is_deaf_is_found_out() -> None:
    """Where the clock hears of no wait, the loads are named on which the two differ."""
    _, _, problems = compared(model_rig(Deaf), 20, tolerance=0.01)
    assert "loader / step 2, loop / step 0: they differ by more than 0.01" in problems


def test_an_emulated_stream_runs_beside_the_host() -> None:
    """Ordering returns at once, waiting takes the time that was ordered, and events tell it."""
    stream = EmulatedStream("emulated")
    start = EmulatedEvent()
    end = EmulatedEvent()
    begin = time.perf_counter()
    start.record(stream)
    for _ in range(3):
        stream.sleep(0.02)
    end.record(stream)
    ordered = time.perf_counter() - begin
    passed = end.query()
    end.synchronize()
    assert ordered < 0.02 and not passed
    assert time.perf_counter() - begin >= 0.06
    assert 60 - 1e-6 <= start.elapsed_time(end) <= 60 + 1e3 * ordered


def test_an_emulated_stream_waits_for_another() -> None:
    """Work behind a wait for another stream's event begins when that one has passed."""
    one = EmulatedStream("emulated")
    other = EmulatedStream("emulated")
    copied = EmulatedEvent()
    done = EmulatedEvent()
    one.sleep(0.02)
    copied.record(one)
    other.wait_for(copied)
    other.sleep(0.01)
    done.record(other)
    done.synchronize()
    assert copied.elapsed_time(done) == pytest.approx(10, abs=1e-6)


def test_an_emulated_device_is_three_threads() -> None:
    """Compute, copies and marks go on beside each other; an epoch leaves no more threads behind."""
    rig = emulated_rig(step_s=0.001)
    before = threading.active_count()
    differential.timed_epoch(rig, 0.001, 0.0, 5)
    assert threading.active_count() == before
    assert sum(thread.name.startswith("emulated-") for thread in threading.enumerate()) >= 3


@pytest.mark.slow
def test_on_threads_the_two_agree_as_well() -> None:
    """With a device that runs beside the host in threads, and real sleeps, they differ by three
    points at most.
    """
    assert compared(emulated_rig(), 20, tolerance=0.03)[2] == []
