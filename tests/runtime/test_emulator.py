"""The emulator's virtual clock: time moves only where all threads are blocked, to whatever comes
first.
"""

from __future__ import annotations

import pytest
from emulator import EmulatedDevice, VirtualClock, WallClock


def test_threads_wake_in_the_order_of_their_times() -> None:
    """Each at its own, however long the others sleep; nobody waits for real."""
    clock = VirtualClock()
    seen = []

    def sleeper(name: str, naps: tuple[float, ...]) -> None:
        for nap in naps:
            clock.sleep(nap)
            seen.append((name, round(clock.now() - 1.0, 9)))

    threads = [
        clock.start(lambda name=name, naps=naps: sleeper(name, naps), name)  # type: ignore[misc]
        for name, naps in {"a": (3600.0, 30.0), "b": (10.0, 7200.0)}.items()
    ]
    for thread in threads:
        thread.join()
    assert seen == [("b", 10.0), ("a", 3600.0), ("a", 3630.0), ("b", 7210.0)]


def test_time_stands_still_while_a_thread_runs() -> None:
    """Calls that do not block take none."""
    clock = VirtualClock()
    began_s = clock.now()
    queue = clock.queue()
    for k in range(100):
        queue.put(k)
    assert [queue.get() for _ in range(100)] == list(range(100)) and clock.now() == began_s


@pytest.mark.parametrize("clock", [VirtualClock(), WallClock()], ids=["virtual", "wall"])
def test_a_moment_that_has_passed_is_not_slept_for(clock: VirtualClock | WallClock) -> None:
    """It may pass between reckoning how far it is and sleeping."""
    began_s = clock.now()
    clock.sleep(-1.0)
    assert 0 <= clock.now() - began_s < 1.0


def test_a_blocked_thread_is_woken_by_what_it_waits_for() -> None:
    """At the time at which it came, and later by what waking takes."""
    clock = VirtualClock(wake_s=0.5)
    queue = clock.queue()
    began_s = clock.now()

    def put() -> None:
        clock.sleep(2.0)
        queue.put("there")

    thread = clock.start(put, "putting")
    assert (queue.get(), clock.now() - began_s) == ("there", 2.5)
    thread.join()


def test_threads_that_wait_for_each_other_are_an_error() -> None:
    """A time that cannot move is told, not waited for."""
    clock = VirtualClock()
    with pytest.raises(AssertionError, match="every thread of the virtual clock waits for another"):
        clock.queue().get()


def test_a_launch_takes_the_host_and_the_device_their_own_time() -> None:
    """Three kernels of 2 s that take 0.5 s each to launch end 6.5 s after the first call, of which
    the host waits 5.
    """
    device = EmulatedDevice(VirtualClock())
    began_s = device.now()
    device.launch(6.0, 1.5, kernels=3)
    assert device.now() - began_s == 1.5
    device.synchronize()
    assert device.now() - began_s == 6.5 and device.slept_s == 5.0
    assert device.busy_between(began_s, device.now()) == 6.0
