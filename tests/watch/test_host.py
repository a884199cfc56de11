"""The machine's figures, the thread that takes them, and what the machine is."""

import json
import os
import socket
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.watch import host
from harness.watch.host import HostSource, Sampler, environment
from harness.watch.tags import Tag

Times = namedtuple("Times", "user system idle iowait guest guest_nice")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine whose counters a test sets."""
    state = SimpleNamespace(times=Times(10.0, 5.0, 80.0, 5.0, 2.0, 0.0), read_bytes=1000, now=10.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: state.times)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: SimpleNamespace(read_bytes=state.read_bytes))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(used=7_000_000))
    return state


def test_rates_are_since_the_sample_before(machine: SimpleNamespace) -> None:
    """The first sample has no rates; the second has the mean between the two; waiting for a disk is not being busy."""
    source = HostSource(now=lambda: machine.now)
    assert source.sample() == {Tag.RAM_USED_BYTES: 7_000_000.0}
    machine.times, machine.read_bytes, machine.now = Times(13.0, 6.0, 82.0, 9.0, 4.0, 0.0), 5000, 12.0
    sample = source.sample()
    assert sample[Tag.CPU_FRACTION] == pytest.approx(0.4)
    assert sample[Tag.DISK_READ_BYTES_PER_S] == pytest.approx(2000.0)


def test_no_time_between_two_samples_gives_no_rates(machine: SimpleNamespace) -> None:
    """Two samples within one tick divide nothing by zero."""
    source = HostSource(now=lambda: machine.now)
    source.sample()
    assert source.sample() == {Tag.RAM_USED_BYTES: 7_000_000.0}


@pytest.mark.parametrize(
    "error",
    [PermissionError("no"), psutil.AccessDenied(), RuntimeError("no disk")],
    ids=lambda e: type(e).__name__,
)
def test_what_may_not_be_read_is_absent(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A figure without permission is absent, and the others stay."""

    def refuse() -> None:
        raise error

    monkeypatch.setattr(psutil, "disk_io_counters", refuse)
    source = HostSource(now=lambda: machine.now)
    for _ in range(2):
        machine.times = Times(*(value + 1 for value in machine.times))
        sample = source.sample()
    assert set(sample) == {Tag.RAM_USED_BYTES, Tag.CPU_FRACTION}


def test_a_machine_without_disks_has_no_disk_figure(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container psutil may find no disk at all."""
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    source = HostSource(now=lambda: machine.now)
    assert Tag.DISK_READ_BYTES_PER_S not in source.sample() | source.sample()


def test_this_machine_can_be_sampled() -> None:
    """On the real machine the figures are in their ranges."""
    source = HostSource()
    source.sample()
    sum(range(300_000))
    sample = source.sample()
    assert 0.0 <= sample.get(Tag.CPU_FRACTION, 0.0) <= 1.0
    assert 0 < sample[Tag.RAM_USED_BYTES] < psutil.virtual_memory().total


class Counting:
    """Gives 1, 2, 3, ..."""

    def __init__(self, done: Callable[[], None] = lambda: None) -> None:
        self.taken, self.done = 0.0, done

    def sample(self) -> dict[str, float]:
        self.taken += 1
        self.done()
        return {"count": self.taken}


def test_a_read_is_the_mean_since_the_last_one() -> None:
    """Each window has the samples of its own time; the run's mean has all; without samples a figure is absent."""
    sampler = Sampler([Counting()], 1.0)
    sampler.look()
    sampler.look()
    assert sampler.read() == {"count": 1.5}
    sampler.look()
    assert sampler.read() == {"count": 3.0}
    assert sampler.read() == {}
    assert sampler.means() == {"count": 2.0}


def test_the_thread_samples_and_ends_at_once() -> None:
    """The thread looks by itself, and the end of the block does not wait for the interval."""
    looked = threading.Event()
    with Sampler([Counting(looked.set)], 1000.0) as sampler:
        assert looked.wait(10)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert sampler.means() == {"count": 1.0}
    assert "watch-sampler" not in {thread.name for thread in threading.enumerate()}


def test_the_environment_names_versions_and_no_places() -> None:
    """report.json says what the run ran on, and neither where nor for whom."""
    found = environment()
    assert {"python", "torch", "torchvision", "cpu", "cores", "usable_cores", "ram_bytes", "platform"} <= set(found)
    text = json.dumps(found)
    assert socket.gethostname() not in text
    assert os.path.expanduser("~") not in text
    assert None not in found.values()


def test_a_machine_without_cpuinfo_still_has_a_name(tmp_path: Path) -> None:
    """Where /proc is missing the platform's own name serves, or none."""
    assert host._cpu_model(tmp_path / "none") != ""
    arm = tmp_path / "cpuinfo"
    arm.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert host._cpu_model(arm)
    arm.write_text("processor\t: 0\nmodel name\t: Fast: 9000 @ 3 GHz\n")
    assert host._cpu_model(arm) == "Fast: 9000 @ 3 GHz"
