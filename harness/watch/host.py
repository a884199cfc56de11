"""The machine: what it is, how busy it is, and the thread that looks at it now and then."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Protocol, Self

import psutil

from harness.runtime import limits
from harness.watch.device import nvml_sees_gpu
from harness.watch.tags import Tag


class Source(Protocol):
    """Something that can be looked at."""

    def sample(self) -> Mapping[str, float]:
        """Figures by tag; what cannot be had now is absent."""


class HostSource:
    """Processor, memory and disk of the whole machine, other people's programs among them.

    ``host/cpu_fraction`` is of all the machine's cores, also where this process may use fewer; ``host/ram_used_bytes`` is
    memory that is neither free nor cache; ``host/disk_read_bytes_per_s`` is what local disks read, so neither the page
    cache nor a network file system. The first and the last are means since the sample before.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._cpu = self._disk = (0.0, 0.0)
        self._reads = {
            Tag.CPU_FRACTION: self._cpu_fraction,
            Tag.RAM_USED_BYTES: lambda: float(psutil.virtual_memory().used),
            Tag.DISK_READ_BYTES_PER_S: self._disk_rate,
        }

    def sample(self) -> dict[str, float]:
        """What can be had now; a figure that fails is given up for the rest of the run, without a word."""
        found: dict[str, float] = {}
        for tag, read in list(self._reads.items()):
            try:
                value = read()
            except (
                OSError,
                RuntimeError,
                psutil.Error,
            ):  # no permission, or no such thing here (psutil raises all three)
                del self._reads[tag]
                continue
            if value is not None:
                found[tag] = value
        return found

    def _cpu_fraction(self) -> float | None:
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # both are in user already
        idle = times.idle + getattr(times, "iowait", 0.0)
        (total_before, idle_before), self._cpu = self._cpu, (total, idle)
        passed = total - total_before
        return min(1.0, max(0.0, 1 - (idle - idle_before) / passed)) if total_before and passed > 0 else None

    def _disk_rate(self) -> float | None:
        counters = psutil.disk_io_counters()
        if counters is None:
            return None
        at, read = self._now(), float(counters.read_bytes)
        (at_before, read_before), self._disk = self._disk, (at, read)
        return max(0.0, read - read_before) / (at - at_before) if at_before and at > at_before else None


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
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self._interval_s)


def environment(device_name: str | None = None) -> dict[str, object]:
    """What the run ran on, for ``report.json``: versions and hardware; no names of hosts, users or folders.

    Args:
        device_name: ``torch.cuda.get_device_name(device)``; None on other devices.
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
        "ram_bytes": psutil.virtual_memory().total,
    }
    return {name: value for name, value in found.items() if value is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
