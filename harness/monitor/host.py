"""Reads the host's figures, its hardware, and the load of other programs."""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Self

import psutil

from ..clock.figures import Tag
from ..runtime import limits
from ..runtime.errors import rounded
from ..runtime.gpus import nvml_sees_gpu
from .device import Figures, Sensor
from .tree import Tree


class HostSensor(Sensor):
    """What the machine does, and what of it this process and its descendants do.

    The machine's figures are all cores, memory (neither free nor cache) and local disks, other
    people's programs among them; the page cache and network file systems are no disks. Rates are
    means since the sample before.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
        cores: float | None = None,
    ) -> None:
        """``cores`` may be used by these processes alone; None: others' cores are not known."""
        super().__init__()
        self._now = now
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
        """Returns what can be had now, by tag."""
        found = super().sample()
        if self._cores is not None and {Tag.MACHINE_CPU_CORES, Tag.CPU_CORES} <= found.keys():
            # what others use beyond the cores that this run may not use: at least that is theirs
            others = found[Tag.MACHINE_CPU_CORES] - found[Tag.CPU_CORES]
            spare = max(0.0, (psutil.cpu_count() or 1) - self._cores)
            found[Tag.OTHERS_CPU_CORES] = max(0.0, others - spare)
        return found

    def _machine(self) -> Figures:
        total, busy = machine_times()
        return self._growth("share", total, busy), self._growth("busy", self._now(), busy)

    def _disks(self) -> Figures:
        counters = psutil.disk_io_counters()
        return self._rates("disks", counters and (counters.read_bytes,))

    def _short_of_memory(self, groups: Sequence[Path], root: Path) -> Figures:
        # the root group, which has no type, is the whole machine: others wait there too
        own = [group / "memory.pressure" for group in groups if (group / "cgroup.type").exists()]
        # groups of version 1 have no pressure: the machine's is the run's at the run's own limit
        hits = [int(n) for group in groups for n in limits.words(group / "memory.failcnt")]
        is_short = self._growth("limits", self._now(), sum(hits))
        stalled = self._rates("memory", memory_stalled([*own, root / "proc/pressure/memory"]))
        return stalled if own or is_short else ()

    def _most_throttled(self, groups: Sequence[Path]) -> Figures:
        shares = [self._growth(group, *counts) for group in groups if (counts := throttled(group))]
        return (max((share for share in shares if share is not None), default=None),)

    def _rates(self, name: str, totals: Sequence[float] | None) -> list[float | None]:
        """Returns the growth of each total per second."""
        now = self._now()
        return [self._growth((name, place), now, total) for place, total in enumerate(totals or ())]

    def _growth(self, name: Hashable, at: float, value: float) -> float | None:
        """Returns the growth of ``value`` per unit of ``at`` since the sample before.

        None on the first, and where the value has shrunk.
        """
        at_before, before = self._last.get(name, (at, value))
        self._last[name] = at, value
        if at <= at_before or value < before:
            return None
        return (value - before) / (at - at_before)


class Sampler:
    """Looks at all sensors every ``interval_s`` seconds, in a thread, inside a ``with`` block."""

    def __init__(self, sensors: Sequence[Sensor], interval_s: float) -> None:
        self._sources = sensors
        # sum and number of each figure's samples since the last read, and of training
        self._recent: dict[str, tuple[float, int]] = {}
        self._whole: dict[str, tuple[float, int]] = {}
        self._is_over = False  # what ``_whole`` has is of the time before training
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
        # a driver's call may never come back
        self._thread.join(5.0)

    def look(self) -> None:
        """Take one sample of every sensor."""
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
        """Returns the mean of each figure since the last call; absent without a sample."""
        with self._lock:
            recent = self._recent
            self._recent = {}
        return _means(recent)

    def restart(self) -> None:
        """Begin the means of the run: imports and tuning are not what training is like."""
        self._is_over = True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the block, as an evaluation, out of the means of the run."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def means(self) -> dict[str, float]:
        """Returns the mean of each figure since the last ``restart``.

        Of the time before it, where no sample came since.
        """
        with self._lock:
            return _means(self._whole)


def _means(sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    return {tag: total / count for tag, (total, count) in sums.items()}


def throttled(group: Path) -> tuple[int, int] | None:
    """Returns a control group's scheduling periods, and in how many its quota stopped it.

    The periods are those in which something of the group wanted to run.
    """
    stat = limits.words(group / "cpu.stat")
    # version 2 leaves the periods out where the group has no processor controller
    if "nr_periods" not in stat:
        return None
    at = stat.index("nr_periods")
    return int(stat[at + 1]), int(stat[at + 3])


def memory_stalled(paths: Sequence[Path]) -> tuple[float, ...]:
    """Returns for how many seconds so far some task waited for memory (PSI).

    By the first of ``paths`` that can be read; empty if none can.
    """
    # some avg10=0.00 avg60=0.00 avg300=0.00 total=<microseconds> full ...
    said = next(filter(None, map(limits.words, paths)), None)
    return (int(said[4].removeprefix("total=")) / 1e6,) if said else ()


def machine_times() -> tuple[float, float]:
    """Returns the seconds of all the machine's cores since it started, and their busy ones.

    A core is busy that neither idles nor waits for a disk.
    """
    times = psutil.cpu_times()
    return sum(times), sum(times) - times.idle - getattr(times, "iowait", 0.0)


def environment(device_name: str | None = None) -> dict[str, object]:
    """Returns what the run ran on: versions and hardware; no names of hosts, users or folders."""
    import torch

    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "device": device_name,
        "cpu": cpu_model(),
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


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name, as Linux or else the platform has it."""
    named = None
    with suppress(OSError):
        text = cpuinfo.read_text(errors="replace")
        named = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return named[1] if named else platform.machine()


# of what the run could have used, twice what counts as harm: the kernel's own threads work for the
# run and count as others
SPOILT = 0.2


def taken(sampled: Mapping[str, float]) -> float | None:
    """Returns the cores that others took of the run's; None: no harm, or not known.

    Harm takes both: others had the cores, and as many threads of the run waited for one. A run that
    fills its cores by itself has waiting threads and no others; one that wants no more has others
    and no waiting threads.
    """
    if not {Tag.OTHERS_CPU_CORES, Tag.QUEUED_THREADS, Tag.CPU_CORES} <= sampled.keys():
        return None
    others = sampled[Tag.OTHERS_CPU_CORES]
    kept = min(others, sampled[Tag.QUEUED_THREADS])
    # a thread that waits for a core for less than a tenth of the time has not held a step up
    if kept < max(0.1, SPOILT * (sampled[Tag.CPU_CORES] + kept)):
        return None
    return others


class Neighbours:
    """Looks at what other programs take while something is measured."""

    def __init__(self, cores: float | None, now: Callable[[], float] = time.monotonic) -> None:
        """``cores`` may be used; None, as where ranks share the machine: others are not known."""
        self._cores = cores
        self._sensor = HostSensor(now, cores=cores)
        self._now = now
        self._sensor.sample()
        self._looked_s = now()

    def look(self) -> float | None:
        """Returns the cores that others took since the last look; None where nothing is spoilt.

        A look within half a second of the last one takes no figures, and is None.
        """
        # processor time is counted in ticks of 10 ms
        if self._now() - self._looked_s < 0.5:
            return None
        self._looked_s = self._now()
        sampled = self._sensor.sample()
        others = sampled.get(Tag.OTHERS_CPU_CORES, 0.0)
        # what is measured by turns shows no threads that wait all the time: full processors are
        # enough
        is_full = sampled.get(Tag.CPU_FRACTION, 0.0) >= 0.85
        if self._cores and is_full and others >= SPOILT * self._cores:
            return others
        return taken(sampled)

    def warning(self, others: float) -> str:
        """Returns what the user is warned of."""
        return (
            f"other programs took {rounded(others)} of the {self._cores:g} cores meanwhile, so "
            "that the figures are theirs too"
        )
