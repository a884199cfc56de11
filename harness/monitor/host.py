"""Reads host metrics, hardware details, and the load from other programs."""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Self

import psutil

from ..clock.figures import Tag
from ..runtime import limits
from ..runtime.errors import rounded
from ..runtime.folder import log
from ..runtime.gpus import nvml_sees_gpu
from .device import Figures, Sensor
from .tree import Tree


class HostSensor(Sensor):
    """Resource use of the machine, and of this process and its descendants.

    Machine metrics cover all cores, memory (not free or cached) and local disks, for all users;
    the page cache and network file systems are not disks. Rates are means since the previous
    sample.
    """

    def __init__(self, root: Path = Path("/"), cores: float | None = None) -> None:
        """``cores`` are available to these processes; if None, other programs are not measured."""
        super().__init__()
        self._cores = cores
        tree = Tree(proc=root / "proc")
        groups = limits.control_groups(root)
        self._last: dict[Hashable, tuple[float, float]] = {}
        rates = self._rates
        self._reads = {
            (Tag.CPU_FRACTION, Tag.MACHINE_CPU_CORES): self._machine,
            (Tag.RAM_USED_BYTES,): lambda: (float(psutil.virtual_memory().used),),
            (Tag.DISK_READ_BYTES_PER_S,): self._disks,
            (Tag.CPU_CORES, Tag.MAJOR_FAULTS_PER_S): lambda: rates("used", tree.processor()),
            (Tag.READ_BYTES_PER_S, Tag.STORAGE_BYTES_PER_S): lambda: rates(
                "read", tree.read_bytes()
            ),
            (Tag.THROTTLED_FRACTION,): lambda: self._most_throttled(groups),
            (Tag.MEMORY_STALL_FRACTION,): lambda: self._short_of_memory(groups, root),
        }
        if cores is not None:
            self._reads[(Tag.QUEUED_THREADS,)] = lambda: rates("queued", (tree.queued_s(),))

    def sample(self) -> dict[str, float]:
        """Returns the available metrics by tag."""
        found = super().sample()
        if self._cores is not None and {Tag.MACHINE_CPU_CORES, Tag.CPU_CORES} <= found.keys():
            # others use at least the excess over the cores unavailable to this run
            others = found[Tag.MACHINE_CPU_CORES] - found[Tag.CPU_CORES]
            spare = max(0.0, (psutil.cpu_count() or 1) - self._cores)
            found[Tag.OTHERS_CPU_CORES] = max(0.0, others - spare)
        return found

    def _machine(self) -> Figures:
        times = psutil.cpu_times()
        total = sum(times)
        # waiting for I/O is not counted as busy
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        return self._growth("share", total, busy), self._growth("busy", time.monotonic(), busy)

    def _disks(self) -> Figures:
        counters = psutil.disk_io_counters()
        return self._rates("disks", counters and (counters.read_bytes,))

    def _short_of_memory(self, groups: Sequence[Path], root: Path) -> Figures:
        # the root group, without a type, is the whole machine, where others wait too
        own = [group / "memory.pressure" for group in groups if (group / "cgroup.type").exists()]
        # v1 groups have no pressure file; at the run's own limit, the machine's is the run's
        hits = [int(n) for group in groups for n in limits.words(group / "memory.failcnt")]
        is_short = self._growth("limits", time.monotonic(), sum(hits))
        stalled = self._rates("memory", memory_stalled([*own, root / "proc/pressure/memory"]))
        return stalled if own or is_short else ()

    def _most_throttled(self, groups: Sequence[Path]) -> Figures:
        shares = [self._growth(group, *counts) for group in groups if (counts := throttled(group))]
        return (max((share for share in shares if share is not None), default=None),)

    def _rates(self, name: str, totals: Sequence[float] | None) -> list[float | None]:
        """Returns the growth of each total per second."""
        now = time.monotonic()
        return [self._growth((name, place), now, total) for place, total in enumerate(totals or ())]

    def _growth(self, name: Hashable, at: float, value: float) -> float | None:
        """Returns the growth of ``value`` per unit of ``at`` since the previous sample.

        None on the first call, and if the value has decreased.
        """
        at_before, before = self._last.get(name, (at, value))
        self._last[name] = at, value
        if at <= at_before or value < before:
            return None
        return (value - before) / (at - at_before)


class Sampler:
    """Samples all sensors every ``interval_s`` seconds, in a thread, inside a ``with`` block."""

    def __init__(self, sensors: Sequence[Sensor], interval_s: float) -> None:
        self._sources = sensors
        # sum and count of each metric since the last read, and during training
        self._recent: dict[str, tuple[float, int]] = {}
        self._whole: dict[str, tuple[float, int]] = {}
        self._is_over = False  # ``_whole`` covers the time before training
        self._aside = False
        self._lock = threading.Lock()
        self._stop = threading.Event()

        def run() -> None:
            self.look()
            while not self._stop.wait(interval_s):
                self.look()

        self._thread = threading.Thread(target=run, name="watch-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # a driver call may never return
        self._thread.join(5.0)

    def look(self) -> None:
        """Take one sample from every sensor."""
        if self._is_over and not self._aside:
            self._is_over = False
            self._whole = {}
        for sensor in self._sources:
            found = sensor.sample()
            with self._lock:
                for sums in (self._recent,) if self._aside else (self._recent, self._whole):
                    for tag, value in found.items():
                        total, count = sums.get(tag, (0.0, 0))
                        sums[tag] = total + value, count + 1

    def read(self) -> dict[str, float]:
        """Returns the mean of each metric since the last call, if it has a sample."""
        with self._lock:
            recent = self._recent
            self._recent = {}
        return _means(recent)

    def restart(self) -> None:
        """Reset the run's means, because imports and tuning differ from training."""
        self._is_over = True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the block, such as an evaluation, from the run's means."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def means(self) -> dict[str, float]:
        """Returns the mean of each metric since the last ``restart``.

        Uses earlier samples if there have been none since then.
        """
        with self._lock:
            return _means(self._whole)


def _means(sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    return {tag: total / count for tag, (total, count) in sums.items()}


def throttled(group: Path) -> tuple[int, int] | None:
    """Returns how many scheduling periods a control group had, and how many were throttled.

    Only periods in which the group could run are counted.
    """
    stat = limits.words(group / "cpu.stat")
    # v2 omits periods if the group has no CPU controller
    if "nr_periods" not in stat:
        return None
    at = stat.index("nr_periods")
    return int(stat[at + 1]), int(stat[at + 3])


def memory_stalled(paths: Sequence[Path]) -> tuple[float, ...]:
    """Returns the total seconds in which some task waited for memory (PSI).

    Reads the first readable file of ``paths``; empty if there is none.
    """
    # some avg10=0.00 avg60=0.00 avg300=0.00 total=<microseconds> full ...
    said = next(filter(None, map(limits.words, paths)), None)
    return (int(said[4].removeprefix("total=")) / 1e6,) if said else ()


def environment(device_name: str | None = None) -> dict[str, object]:
    """Returns versions and hardware, without host, user or folder names."""
    import torch

    named = None
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        named = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "device": device_name,
        "cpu": named[1] if named else platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": limits.measure().cores,
    }
    for package in ("wellfed", "torchvision"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    with suppress(psutil.Error, OSError, RuntimeError):
        found["ram_bytes"] = int(psutil.virtual_memory().total)
    if seen := nvml_sees_gpu():
        found["driver"] = seen[0]
    return {name: value for name, value in found.items() if value is not None}


# twice the harm threshold, because kernel threads working for the run are counted as others
SPOILT = 0.2


def taken(sampled: Mapping[str, float]) -> float | None:
    """Returns the run's cores used by other programs; None if harmless or unknown.

    Contention requires both that others used the cores and that as many threads of the run waited.
    A run that fills its own cores has waiting threads but no other programs; a run that needs no
    more cores has other programs but no waiting threads.
    """
    if not {Tag.OTHERS_CPU_CORES, Tag.QUEUED_THREADS, Tag.CPU_CORES} <= sampled.keys():
        return None
    others = sampled[Tag.OTHERS_CPU_CORES]
    kept = min(others, sampled[Tag.QUEUED_THREADS])
    # waiting less than a tenth of the time does not delay a step
    if kept < max(0.1, SPOILT * (sampled[Tag.CPU_CORES] + kept)):
        return None
    return others


class Neighbors:
    """Measures the load from other programs during a measurement."""

    def __init__(self, cores: float | None) -> None:
        """``cores`` are available; None if unknown, for example if ranks share the machine."""
        self._cores = cores
        self._sensor = HostSensor(cores=cores)
        self._sensor.sample()
        self._looked_s = time.monotonic()

    def look(self) -> float | None:
        """Returns the cores that others used since the last call; None if that is harmless.

        Returns None within half a second of the last call.
        """
        # CPU time is counted in ticks of 10 ms
        if time.monotonic() - self._looked_s < 0.5:
            return None
        self._looked_s = time.monotonic()
        sampled = self._sensor.sample()
        others = sampled.get(Tag.OTHERS_CPU_CORES, 0.0)
        # alternating measurements have no permanently waiting threads, so full CPUs suffice
        is_full = sampled.get(Tag.CPU_FRACTION, 0.0) >= 0.85
        if self._cores and is_full and others >= SPOILT * self._cores:
            return others
        return taken(sampled)

    def warned(self, advice: str = "") -> float | None:
        """Like ``look``, but warns the user about other programs, with ``advice``."""
        others = self.look()
        if others is not None:
            log.warning(
                f"other programs used {rounded(others)} of {self._cores:g} cores during "
                f"measurements, so these numbers are unreliable{advice}"
            )
        return others
