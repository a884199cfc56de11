"""What this process may use: cores, memory, shared memory, open files."""

from __future__ import annotations

import math
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank may use.

    Attributes:
        cores: processors' worth of time, by affinity and cgroup quota, divided over the local ranks.
        memory_bytes: memory that can still be taken before something is killed, divided over the local ranks.
        shm_bytes: free shared memory, divided over the local ranks; None where there is no /dev/shm.
        open_files: file descriptors that one process may hold.
    """

    cores: float
    memory_bytes: int
    shm_bytes: int | None
    open_files: int


def measure(local_ranks: int = 1, root: Path = Path("/")) -> Limits:
    """The limits of one of ``local_ranks`` equal ranks, read under ``root`` (the file system's, or a test's)."""
    groups = _cgroups(root)
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    memory = float(psutil.virtual_memory().available)
    for folder in groups:
        cores = min(cores, _quota_cores(folder))
        memory = min(memory, _memory_left(folder))
    shm = Path("/dev/shm")
    return Limits(
        cores=cores / local_ranks,
        memory_bytes=max(0, int(memory)) // local_ranks,
        shm_bytes=shutil.disk_usage(shm).free // local_ranks if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _cgroups(root: Path) -> list[Path]:
    """The folders of this process's control groups and all their ancestors, of version 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        wanted = [c for c in controllers.split(",") if c in ("cpu", "memory")]
        bases = [root / "sys/fs/cgroup" / name for name in wanted] if controllers else [root / "sys/fs/cgroup"]
        for base in bases:
            folder = base / inside.lstrip("/")
            found += [f for f in (folder, *folder.parents) if f == base or base in f.parents]
    return found


def _quota_cores(folder: Path) -> float:
    two = _words(folder / "cpu.max")
    if len(two) == 2 and two[0] != "max":
        return int(two[0]) / int(two[1])
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0])
    return math.inf


def _memory_left(folder: Path) -> float:
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _words(folder / limit_name), _words(folder / used_name)
        if limit and used and limit[0] != "max":
            return int(limit[0]) - int(used[0])
    return math.inf


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
