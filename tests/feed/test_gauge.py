"""The gauge: what workers count in shared memory, and that the memory goes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path

import pytest

from harness.feed.gauge import Gauge, Work


def segments() -> list[str]:
    """The shared memory that this process holds by a descriptor, and what has a name of torch's and
    this process's.
    """
    held = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    named = [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    return sorted(named + [target for target in held if target.startswith("/dev/shm/torch_")])


def test_the_totals_are_those_of_all_slots() -> None:
    """read() adds up samples, seconds and squares over the slots, and counts the slots that did
    anything.
    """
    gauge = Gauge(3)
    assert gauge.read() == Work(0, 0, 0.0, 0.0, 0.0)
    for slot, wall_s, cpu_s in ((0, 2.0, 1.0), (2, 3.0, 0.5), (2, 1.0, 0.25)):
        gauge.add(slot, wall_s, cpu_s)
    assert gauge.read() == Work(samples=3, moved=2, wall_s=6.0, wall_sq_s2=14.0, cpu_s=1.75)


def test_there_is_a_slot_without_workers() -> None:
    """Gauge(0) has the slot of the process itself."""
    gauge = Gauge(0)
    gauge.add(0, 1.0, 1.0)
    assert gauge.read().samples == 1


@pytest.mark.parametrize(
    "method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_a_worker_writes_into_the_same_memory(method: str) -> None:
    """What a process of any start method adds is read here, and nothing is left of the memory
    afterwards.
    """
    before = segments()
    gauge = Gauge(2)
    worker = multiprocessing.get_context(method).Process(target=gauge.add, args=(1, 2.0, 1.0))
    worker.start()
    worker.join(30)
    assert gauge.read() == Work(1, 1, 2.0, 4.0, 1.0)
    assert len(segments()) == len(before) + 1
    worker.close()
    del gauge, worker
    assert segments() == before


def test_it_does_not_travel_as_a_copy() -> None:
    """Pickled as for a worker and unpickled, it is the same memory."""
    gauge = Gauge(1)
    other = pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(gauge))
    other.add(0, 1.0, 1.0)
    assert gauge.read().samples == 1
