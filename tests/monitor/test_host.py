"""The machine's figures, the thread that takes them, and what the machine is."""

import json
import logging
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

from harness.clock.figures import Tag
from harness.monitor import host
from harness.monitor.device import Figures, Sensor
from harness.monitor.host import HostSensor, Sampler, environment

Times = namedtuple("Times", "user system idle iowait")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine whose counters a test sets, without /proc and control groups."""
    state = SimpleNamespace(
        times=Times(10.0, 5.0, 80.0, 5.0), read_bytes=1000, now=10.0, root=tmp_path
    )
    monkeypatch.setattr(psutil, "cpu_times", lambda: state.times)
    monkeypatch.setattr(
        psutil, "disk_io_counters", lambda: SimpleNamespace(read_bytes=state.read_bytes)
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(used=7_000_000))
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


def source_of(machine: SimpleNamespace) -> HostSensor:
    return HostSensor(machine.root)


def test_rates_are_since_the_sample_before(machine: SimpleNamespace) -> None:
    """The first sample has no rates; waiting for a disk is not being busy."""
    sensor = source_of(machine)
    assert sensor.sample() == {Tag.RAM_USED_BYTES: 7_000_000.0}
    machine.times = Times(13.0, 6.0, 82.0, 9.0)
    machine.read_bytes = 5000
    machine.now = 12.0
    sample = sensor.sample()
    assert sample[Tag.CPU_FRACTION] == pytest.approx(0.4)
    assert sample[Tag.MACHINE_CPU_CORES] == pytest.approx(2.0)
    assert sample[Tag.DISK_READ_BYTES_PER_S] == pytest.approx(2000.0)


def write_kernel(
    root: Path,
    cores_s: float,
    faults: int,
    read: tuple[int, int],
    stalled_us: int,
    periods: list[str],
) -> None:
    """Writes what a kernel says of this process, in a group "job" within another group."""
    ticks = round(cores_s * os.sysconf("SC_CLK_TCK"))
    pid = os.getpid()
    files = {
        "proc/self/cgroup": "0::/pod/job",
        f"proc/{pid}/stat": f"{pid} (python) R 1 0 0 0 0 0 0 0 {faults} 0 {ticks} 0 0 0",
        f"proc/{pid}/io": f"rchar: {read[0]}\nread_bytes: {read[1]}",
        "sys/fs/cgroup/pod/job/memory.pressure": (
            f"some avg10=0 avg60=0 avg300=0 total={stalled_us}"
        ),
        "sys/fs/cgroup/pod/job/cgroup.type": "domain",
        "sys/fs/cgroup/pod/job/cpu.stat": periods[0],
        "sys/fs/cgroup/pod/cpu.stat": periods[1],
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_what_the_kernel_says_of_this_process_becomes_rates(machine: SimpleNamespace) -> None:
    """Rates are per second; throttling is per period, of the group that has most."""
    write_kernel(
        machine.root,
        3.0,
        10,
        (1000, 500),
        2_000_000,
        ["nr_periods 10 nr_throttled 5", "nr_periods 90 nr_throttled 9"],
    )
    sensor = source_of(machine)
    assert sensor.sample() == {Tag.RAM_USED_BYTES: 7_000_000.0}
    machine.now += 2.0
    write_kernel(
        machine.root,
        8.0,
        14,
        (9000, 2500),
        2_500_000,
        ["nr_periods 30 nr_throttled 10", "nr_periods 110 nr_throttled 23"],
    )
    sample = sensor.sample()
    expected = {
        Tag.CPU_CORES: 2.5, Tag.MAJOR_FAULTS_PER_S: 2.0, Tag.READ_BYTES_PER_S: 4000.0,
        Tag.STORAGE_BYTES_PER_S: 1000.0,
        Tag.MEMORY_STALL_FRACTION: 0.25, Tag.THROTTLED_FRACTION: 0.7,
    }  # fmt: skip
    assert {tag: sample.get(tag) for tag in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("count", "cores", "others"),
    [
        pytest.param(2, 2.0, 1.5, id="all cores"),
        pytest.param(3, 2.0, 0.5, id="a core that may not be used, on which they may be"),
        pytest.param(8, 2.0, 0.0, id="more cores than they take"),
        pytest.param(2, 0.5, 0.0, id="a quota"),
        pytest.param(2, None, None, id="ranks share the machine"),
    ],
)
def test_others_take_what_is_busy_and_not_ours(
    machine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    cores: float | None,
    others: float | None,
) -> None:
    """What is busy and not ours counts as far as other cores cannot hold it."""
    monkeypatch.setattr(psutil, "cpu_count", lambda: count)
    sensor = HostSensor(machine.root, cores)
    found = {}
    for own_s in (0.0, 1.0):
        write_kernel(machine.root, own_s, 0, (0, 0), 0, ["", ""])
        machine.times = Times(4.0 * own_s, 0.0, 50.0, 5.0 * own_s)
        machine.now += 2.0
        found = sensor.sample()
    assert found.get(Tag.OTHERS_CPU_CORES) == (others if others is None else pytest.approx(others))
    assert found[Tag.MACHINE_CPU_CORES] == pytest.approx(2.0)


def test_what_others_take_is_not_known_without_what_is_ours(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where processes can no longer be looked at, their work does not become others'."""
    monkeypatch.setattr(psutil, "cpu_count", lambda: 1)
    sensor = HostSensor(machine.root, 1.0)
    known = []
    for seconds in (1.0, 2.0, 3.0):
        write_kernel(machine.root, seconds / 2, 0, (0, 0), 0, ["", ""])
        if seconds == 3:
            (machine.root / f"proc/{os.getpid()}/stat").unlink()
        machine.times = Times(seconds, 0.0, 50.0, 0.0)
        machine.now = machine.now + 1.0
        known.append(Tag.OTHERS_CPU_CORES in sensor.sample())
    assert known == [False, True, False]


@pytest.mark.parametrize(
    ("group", "hits", "stalled"),
    [
        pytest.param("0::/", 0, None, id="no group"),
        pytest.param("4:memory:/job", 0, None, id="below its limit"),
        pytest.param("4:memory:/job", 1, 0.4, id="at its limit"),
    ],
)
def test_a_neighbors_wait_for_memory_is_not_the_runs(
    machine: SimpleNamespace, group: str, hits: int, stalled: float | None
) -> None:
    """Without a pressure of its own, the machine's is the run's at the run's own limit alone."""
    sensor = None
    for second in range(2):
        pressure = f"some avg10=0 avg60=0 avg300=0 total={1_000_000 + second * 400_000}"
        files = {
            "proc/self/cgroup": group,
            "proc/pressure/memory": pressure,
            # that of the whole machine, which has no type
            "sys/fs/cgroup/memory.pressure": pressure,
            "sys/fs/cgroup/memory/job/memory.failcnt": f"{7 + second * hits}",
        }
        for name, text in files.items():
            (machine.root / name).parent.mkdir(parents=True, exist_ok=True)
            (machine.root / name).write_text(f"{text}\n")
        sensor = sensor or source_of(machine)
        machine.now += 1.0
        sample = sensor.sample()
    assert sample.get(Tag.MEMORY_STALL_FRACTION) == pytest.approx(stalled)


def test_a_total_that_shrinks_gives_no_rate(machine: SimpleNamespace) -> None:
    """An orphan takes its part along: no rate this once, and none is negative."""
    sensor = source_of(machine)
    rates = []
    for cores_s in (3.0, 2.0, 2.5):
        write_kernel(machine.root, cores_s, 0, (0, 0), 0, ["", ""])
        rates.append(sensor.sample().get(Tag.CPU_CORES))
        machine.now += 1.0
    assert rates == [None, None, pytest.approx(0.5)]


def test_without_a_quota_nothing_is_throttled(machine: SimpleNamespace) -> None:
    """A group without a quota counts no periods: the figure is absent, not 0."""
    sensor = source_of(machine)
    for _ in range(2):
        write_kernel(
            machine.root, 3.0, 0, (0, 0), 0, ["nr_periods 0 nr_throttled 0", "usage_usec 5"]
        )
        assert Tag.THROTTLED_FRACTION not in sensor.sample()
        machine.now += 1.0


@pytest.mark.parametrize(
    "error",
    [PermissionError("no"), psutil.AccessDenied(), RuntimeError("no disk")],
    ids=lambda e: type(e).__name__,
)
def test_what_may_not_be_read_is_absent(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A figure without permission is absent, and the others stay."""

    def refuse() -> None:
        raise error

    monkeypatch.setattr(psutil, "disk_io_counters", refuse)
    sensor = source_of(machine)
    for _ in range(2):
        machine.times = Times(*(value + 1 for value in machine.times))
        sample = sensor.sample()
    assert set(sample) == {Tag.RAM_USED_BYTES, Tag.CPU_FRACTION}


def test_a_file_that_is_missing_is_named_once(
    machine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """What a kernel does not give is one line in the log for each file, at the first sample."""
    write_kernel(machine.root, 3.0, 0, (0, 0), 0, ["", ""])
    (machine.root / f"proc/{os.getpid()}/io").unlink()
    caplog.set_level(logging.INFO, "wellfed")
    sensor = source_of(machine)
    for _ in range(3):
        sensor.sample()
        machine.now += 1.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("host/own_read_bytes_per_s, host/own_storage_bytes_per_s ")


def test_this_machine_can_be_sampled() -> None:
    """On the real machine the figures are in their ranges."""
    sensor = HostSensor()
    sensor.sample()
    sum(range(300_000))
    sample = sensor.sample()
    assert 0.0 <= sample.get(Tag.CPU_FRACTION, 0.0) <= 1.0
    assert sample[Tag.MACHINE_CPU_CORES] >= 0.0
    assert 0 < sample[Tag.RAM_USED_BYTES] < psutil.virtual_memory().total
    assert sample[Tag.CPU_CORES] >= 0.0
    assert {Tag.READ_BYTES_PER_S, Tag.MAJOR_FAULTS_PER_S} <= set(sample)


class Counting(Sensor):
    """Gives 1, 2, 3, ..."""

    def __init__(self, done: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._taken = 0.0
        self._done = done
        self._reads = {(Tag.CPU_CORES,): self._count}

    def _count(self) -> Figures:
        self._taken += 1
        self._done()
        return (self._taken,)


def test_a_read_is_the_mean_since_the_last_one() -> None:
    """Each window has its own samples; the run's mean has all; without samples none is there."""
    sampler = Sampler([Counting()], 1.0)
    sampler.look()
    sampler.look()
    assert sampler.read() == {Tag.CPU_CORES: 1.5}
    sampler.look()
    assert sampler.read() == {Tag.CPU_CORES: 3.0}
    assert sampler.read() == {}
    assert sampler.means() == {Tag.CPU_CORES: 2.0}


def test_the_means_of_the_run_begin_anew() -> None:
    """What was seen before the restart counts until there is something newer; the windows go on."""
    sampler = Sampler([Counting()], 1.0)
    sampler.look()
    sampler.restart()
    assert sampler.means() == {Tag.CPU_CORES: 1.0}
    sampler.look()
    sampler.look()
    assert (sampler.means(), sampler.read()) == ({Tag.CPU_CORES: 2.5}, {Tag.CPU_CORES: 2.0})


def test_the_means_of_the_run_leave_out_what_is_aside() -> None:
    """Samples in an evaluation are in the windows alone."""
    sampler = Sampler([Counting()], 1.0)
    sampler.look()
    with sampler.aside():
        sampler.look()
    sampler.look()
    assert (sampler.means(), sampler.read()) == ({Tag.CPU_CORES: 2.0}, {Tag.CPU_CORES: 2.0})


def test_the_thread_samples_and_ends_at_once() -> None:
    """The thread looks by itself, and the end of the block does not wait for the interval."""
    looked = threading.Event()
    with Sampler([Counting(looked.set)], 1000.0) as sampler:
        assert looked.wait(10)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert sampler.means() == {Tag.CPU_CORES: 1.0}
    assert "watch-sampler" not in {thread.name for thread in threading.enumerate()}


def test_the_environment_names_versions_and_no_places() -> None:
    """report.json says what the run ran on, and neither where nor for whom."""
    found = environment()
    assert {
        "python",
        "torch",
        "torchvision",
        "cpu",
        "cores",
        "usable_cores",
        "ram_bytes",
        "platform",
    } <= set(found)
    text = json.dumps(found)
    assert socket.gethostname() not in text
    assert os.path.expanduser("~") not in text
    assert None not in found.values()
