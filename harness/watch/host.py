"""The machine: what it is, how busy it is, and the thread that looks at it now and then."""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Self

import psutil

from harness.runtime import limits
from harness.watch.device import Source, nvml_sees_gpu
from harness.watch.tags import Tag


class HostSource(Source):
    """All cores, memory (neither free nor cache) and local disks of the machine, other people's programs among them.

    The cores' and the disks' figures are means since the sample before; the page cache and network file systems are no disks.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: dict[Tag, tuple[float, float]] = {}
        self._reads = {
            Tag.CPU_FRACTION: self._cpu_fraction,
            Tag.RAM_USED_BYTES: lambda: float(psutil.virtual_memory().used),
            Tag.DISK_READ_BYTES_PER_S: self._disk_rate,
        }

    def _cpu_fraction(self) -> float | None:
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # both are in user already
        idle = self._slope(Tag.CPU_FRACTION, total, times.idle + getattr(times, "iowait", 0.0))
        return None if idle is None else max(0.0, 1 - idle)

    def _disk_rate(self) -> float | None:
        counters = psutil.disk_io_counters()
        return self._slope(Tag.DISK_READ_BYTES_PER_S, self._now(), float(counters.read_bytes)) if counters else None

    def _slope(self, tag: Tag, at: float, value: float) -> float | None:
        """The growth of ``value`` per unit of ``at`` since the sample before; None on the first."""
        at_before, before = self._last.get(tag, (at, value))
        self._last[tag] = at, value
        return max(0.0, value - before) / (at - at_before) if at > at_before else None


class Sampler:
    """Looks at all sources every ``interval_s`` seconds, in a thread of its own inside a ``with`` block."""

    def __init__(self, sources: Sequence[Source], interval_s: float) -> None:
        self._sources, self._interval_s = sources, interval_s
        self._recent: dict[str, tuple[float, int]] = {}
        self._whole: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Take one sample of every source."""
        for source in self._sources:
            found = source.sample()
            with self._lock:
                for sums in (self._recent, self._whole):
                    for tag, value in found.items():
                        total, count = sums.get(tag, (0.0, 0))
                        sums[tag] = total + value, count + 1

    def read(self) -> dict[str, float]:
        """The mean of each figure since the last call; absent where no sample came."""
        with self._lock:
            recent, self._recent = self._recent, {}
        return {tag: total / count for tag, (total, count) in recent.items()}

    def means(self) -> dict[str, float]:
        """The mean of each figure since the start."""
        with self._lock:
            return {tag: total / count for tag, (total, count) in self._whole.items()}

    def _run(self) -> None:
        self.look()
        while not self._stop.wait(self._interval_s):
            self.look()


def environment(device_name: str | None = None) -> dict[str, object]:
    """What the run ran on, for ``report.json``: versions and hardware; no names of hosts, users or folders."""
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
        "ram_bytes": psutil.virtual_memory().total,
    }
    return {name: value for name, value in found.items() if value is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine() or None
