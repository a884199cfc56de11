"""The machine: what it is, how busy it is, what holds this run up, and the thread that looks now
and then.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Self

import psutil

from harness.runtime import limits
from harness.watch.device import Figures, Source, nvml_sees_gpu
from harness.watch.figures import Tag
from harness.watch.tree import Tree

_LAST_LOOK_S = 5.0  # that the end of a run waits for


class HostSource(Source):
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
        """``cores`` may be used, by these processes alone; None: what others take of the cores is
        not looked at.
        """
        super().__init__()
        self._now = now
        self._root = root
        self._tree = Tree(proc=root / "proc")
        self._groups = limits.control_groups(root)
        self._last: dict[Hashable, tuple[float, float]] = {}
        self._busy: float | None = None  # cores of the machine, in the same sample
        self._used: float | None = None  # of these, by this run
        self._reads = {
            (Tag.CPU_FRACTION, Tag.MACHINE_CPU_CORES): self._machine,
            (Tag.RAM_USED_BYTES,): lambda: (float(psutil.virtual_memory().used),),
            (Tag.DISK_READ_BYTES_PER_S,): self._disk_rate,
            (Tag.CPU_CORES, Tag.MAJOR_FAULTS_PER_S): self._processor,
            (Tag.READ_BYTES_PER_S, Tag.STORAGE_BYTES_PER_S): lambda: self._rates(
                "read", self._tree.read_bytes()
            ),
            (Tag.THROTTLED_FRACTION,): self._throttled,
            (Tag.MEMORY_STALL_FRACTION,): self._memory_stall,
        }
        if cores is not None:
            self._reads[(Tag.OTHERS_CPU_CORES,)] = lambda: self._others(cores)
            self._reads[(Tag.QUEUED_THREADS,)] = lambda: self._rates(
                "queued", (self._tree.queued_s(),)
            )

    def _machine(self) -> Figures:
        self._busy = None
        total, busy = machine_times()
        self._busy = self._growth("busy", self._now(), busy)
        return *_share(self._growth("cores", total, busy)), self._busy

    def _processor(self) -> Figures:
        self._used = None
        found = self._rates("processor", self._tree.processor())
        self._used = found[0] if found else None
        return found

    def _others(self, cores: float) -> Figures:
        """What other programs take of ``cores``: what they use beyond the machine's other cores, so
        at least that.
        """
        if self._busy is None or self._used is None:
            return ()
        return (max(0.0, self._busy - self._used - max(0.0, (psutil.cpu_count() or 1) - cores)),)

    def _disk_rate(self) -> Figures:
        counters = psutil.disk_io_counters()
        return self._rates("disks", (counters.read_bytes,) if counters else None)

    def _throttled(self) -> Figures:
        shares = (self._growth(group, *counts) for group, counts in throttled(self._groups).items())
        return _share(max((share for share in shares if share is not None), default=None))

    def _memory_stall(self) -> Figures:
        path, stalled_s = memory_stalled(self._groups, self._root)
        return _share(self._growth(path, self._now(), stalled_s))

    def _rates(self, name: str, totals: Sequence[float] | None) -> list[float | None]:
        """The growth of each total per second."""
        now = self._now()
        return [self._growth((name, place), now, total) for place, total in enumerate(totals or ())]

    def _growth(self, name: Hashable, at: float, value: float) -> float | None:
        """The growth of ``value`` per unit of ``at`` since the sample before; None on the first,
        and where it has shrunk.
        """
        at_before, before = self._last.get(name, (at, value))
        self._last[name] = at, value
        return (value - before) / (at - at_before) if at > at_before and value >= before else None


class Sampler:
    """Looks at all sources every ``interval_s`` seconds, in a thread of its own inside a ``with``
    block.
    """

    def __init__(self, sources: Sequence[Source], interval_s: float) -> None:
        self._sources = sources
        self._interval_s = interval_s
        self._recent: dict[str, tuple[float, int]] = {}
        self._whole: dict[str, tuple[float, int]] = {}  # since the restart
        self._before: dict[str, tuple[float, int]] = {}
        self._aside = False
        # since the last look began it was not all training: the next one's rates reach back to that
        self._mixed = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_LAST_LOOK_S)  # a driver's call may never come back

    def look(self) -> None:
        """Take one sample of every source."""
        with self._lock:
            mixed = self._mixed
            self._mixed = self._aside
        for source in self._sources:
            found = source.sample()
            with self._lock:
                of_training = not (mixed or self._mixed)
                for sums in (self._recent, self._whole if of_training else self._before):
                    for tag, value in found.items():
                        total, count = sums.get(tag, (0.0, 0))
                        sums[tag] = total + value, count + 1

    def read(self) -> dict[str, float]:
        """The mean of each figure since the last call; absent where no sample came."""
        with self._lock:
            recent = self._recent
            self._recent = {}
        return {tag: total / count for tag, (total, count) in recent.items()}

    def restart(self) -> None:
        """Begin the means of the run anew: what came before, imports and tuning, is not what
        training is like.
        """
        with self._lock:
            self._before = self._whole
            self._whole = {}
            self._mixed = True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A block, such as an evaluation, that the means of the run leave out."""
        with self._lock:
            self._aside = True
            self._mixed = True
        try:
            yield
        finally:
            with self._lock:
                self._aside = False
                self._mixed = True

    def means(self) -> dict[str, float]:
        """The mean of each figure since the last ``restart``, or before it where no sample came
        since.

        Absent where it was lost on the way: what came before speaks for no run.
        """
        lost = set[str]().union(*(source.lost for source in self._sources))
        with self._lock:
            sums = self._whole or self._before
            return {tag: total / count for tag, (total, count) in sums.items() if tag not in lost}

    def _run(self) -> None:
        self.look()
        while not self._stop.wait(self._interval_s):
            self.look()


def throttled(groups: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """By control group: scheduling periods in which something of it wanted to run, and in how many
    its quota stopped it.
    """
    found = {}
    for group in groups:
        stat = limits.words(group / "cpu.stat")
        counters = dict(zip(stat[::2], stat[1::2], strict=False))
        if (
            "nr_periods" in counters
        ):  # version 2 leaves it out where the group has no processor controller
            found[group] = int(counters["nr_periods"]), int(counters["nr_throttled"])
    return found


def memory_stalled(groups: Sequence[Path], root: Path = Path("/")) -> tuple[Path, float]:
    """The file that says it, and for how many seconds so far at least one task was waiting for
    memory (PSI).

    It is the innermost of ``groups`` that has such a file, or else the whole machine's.

    Raises:
        FileNotFoundError: none can be read, as where the kernel was started without PSI.
    """
    for path in (*(group / "memory.pressure" for group in groups), root / "proc/pressure/memory"):
        said = limits.words(
            path
        )  # some avg10=0.00 avg60=0.00 avg300=0.00 total=<microseconds> full ...
        if said:
            return path, int(said[4].removeprefix("total=")) / 1e6
    raise FileNotFoundError(
        f"{path} cannot be read; the kernel may have been built or started without PSI"
    )


def machine_times() -> tuple[float, float]:
    """Seconds of all the machine's cores since it started, and those in which one was neither idle
    nor waiting for a disk.
    """
    times = psutil.cpu_times()
    total = (
        sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    )  # both are in user already
    return total, total - times.idle - getattr(times, "iowait", 0.0)


def _share(value: float | None) -> Figures:
    """At most the whole: two counters are not read at the very same moment."""
    return (value if value is None else min(1.0, value),)


def environment(device_name: str | None = None) -> dict[str, object]:
    """What the run ran on, for ``report.json``: versions and hardware; no names of hosts, users or
    folders.
    """
    import torch

    seen = nvml_sees_gpu()
    found = {
        "wellfed": _version("wellfed"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "cuda": torch.version.cuda,
        "driver": seen[0] if seen else None,
        "platform": platform.platform(),
        "device": device_name,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": limits.measure().cores,
        "ram_bytes": _ram_bytes(),
    }
    return {name: value for name, value in found.items() if value is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ram_bytes() -> int | None:
    try:
        return int(psutil.virtual_memory().total)
    except (psutil.Error, OSError, RuntimeError):
        return None


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine() or None
