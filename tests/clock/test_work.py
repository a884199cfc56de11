"""Samples that are timed one by one: what workers count in shared memory, which goes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from harness.clock.stages import SAMPLE, StageMeter, Work


def segments() -> list[str]:
    """The shared memory that this process holds by a descriptor, and what has a name of torch's and
    this process's.
    """
    held = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    named = [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    return sorted(named + [target for target in held if target.startswith("/dev/shm/torch_")])


def made(meter: StageMeter, slot: int, samples: int = 1) -> None:
    """Count so many samples of a worker, which are no work at all."""
    meter.timed(slot, dict, samples)()


def test_the_totals_are_those_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """work() adds up samples, seconds and squares over the workers, and counts those that did
    anything; a call's samples took it alike.
    """
    wall_s = iter([0.0, 2.0, 0.0, 3.0, 0.0, 8.0])
    cpu_s = iter([0.0, 1.0, 0.0, 0.5, 0.0, 0.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(wall_s))
    monkeypatch.setattr("time.thread_time", lambda: next(cpu_s))
    meter = StageMeter((SAMPLE,), 3)
    assert meter.work() == Work(0, 0, 0.0, 0.0, 0.0)
    for slot, samples in ((0, 1), (2, 1), (2, 4)):
        made(meter, slot, samples)
    assert meter.work() == Work(6, 2, wall_s=13.0, wall_sq_s2=4.0 + 9.0 + 4 * 2.0**2, cpu_s=1.75)
    # batches are another count
    assert (meter.read().samples, meter.read().busy_s) == (0, 0.0)


def test_what_a_call_gives_and_raises_comes_through() -> None:
    """A call that raises does not count."""
    meter = StageMeter((SAMPLE,), 0)
    divide = meter.timed(0, lambda a, b: a / b)
    assert divide(6, 3) == 2.0
    with pytest.raises(ZeroDivisionError):
        divide(6, 0)
    assert meter.work().samples == 1


@pytest.mark.parametrize(
    "method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_a_worker_writes_into_the_same_memory(method: str) -> None:
    """What a process of any start method adds is read here, and nothing is left of the memory
    afterwards.
    """
    before = segments()
    meter = StageMeter((SAMPLE,), 2)
    worker = multiprocessing.get_context(method).Process(target=made, args=(meter, 1))
    worker.start()
    worker.join(30)
    work = meter.work()
    assert (work.samples, work.moved) == (1, 1) and work.wall_s > 0
    assert len(segments()) == len(before) + 1
    worker.close()
    del meter, worker
    assert segments() == before
