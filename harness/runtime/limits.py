"""Measures the limits on this process: cores, memory, shared memory, open files."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources available to one rank.

    Attributes:
        cores: number of cores by affinity, cgroup quota and Slurm, divided among the ranks that
            share them.
        memory_bytes: memory that can be allocated before a process is killed, divided among the
            ranks on this node.
        shm_bytes: free shared memory, divided among the ranks on this node; None without /dev/shm.
        open_files: file descriptor limit per process.
        files_open: open file descriptors in this process; 0 if unknown.
        by_quota: whether a quota limits ``cores``.
    """

    cores: float
    memory_bytes: int
    shm_bytes: int | None
    open_files: int
    files_open: int = 0
    by_quota: bool = False


def measure(local_ranks: int = 1, root: Path = Path("/"), reserved_bytes: int = 0) -> Limits:
    """Returns the limits for one of ``local_ranks`` equal ranks on this node.

    Args:
        local_ranks: ranks that share the node.
        root: root of the file system, or a test's folder.
        reserved_bytes: free memory reserved across all ranks.
    """
    groups = control_groups(root)
    # under torchrun or in a batch script, outside srun, ranks share a task
    tasks = max(1, _slurm("STEP_TASKS_PER_NODE"))
    together = math.ceil(local_ranks / tasks)
    ranks = together * tasks

    cores, by_quota = min(_cores(groups, together, ranks))
    memory_bytes = max(0, min(_memory(groups)) - reserved_bytes)
    shm = root / "dev/shm"
    shm_bytes = shutil.disk_usage(shm).free // ranks if shm.is_dir() else None
    files_open = 0
    with suppress(OSError):
        files_open = len(os.listdir("/dev/fd"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Limits(cores, memory_bytes // ranks, shm_bytes, files, files_open, by_quota)


def _cores(groups: list[Path], together: int, ranks: int) -> Iterator[tuple[float, bool]]:
    """Yields one rank's part of each limit, and whether the limit is a quota.

    A limit applies to a task with ``together`` ranks, or to the node.
    """
    affinity = os.cpu_count() or 1
    shared = together
    if hasattr(os, "sched_getaffinity"):
        affinity = len(os.sched_getaffinity(0))
        # a bound rank shares its cores only with ranks bound to the same cores
        shared = math.ceil(together * affinity / max(affinity, len(_launched_on())))
    yield affinity / shared, False
    # a batch script is not a task of the job
    if _slurm("STEP_TASKS_PER_NODE") and (task := _slurm("CPUS_PER_TASK")):
        yield task / together, False
    if node := _slurm("CPUS_ON_NODE"):
        yield node / ranks, False
    for folder in groups:
        # cgroup v2 has the quota and the period in one file
        quota = words(folder / "cpu.max") or (
            words(folder / "cpu.cfs_quota_us") + words(folder / "cpu.cfs_period_us")
        )
        if len(quota) == 2 and quota[0] not in ("max", "-1"):
            yield int(quota[0]) / int(quota[1]) / ranks, True


def _launched_on() -> set[int]:
    """Returns the cores available to the parent process."""
    return os.sched_getaffinity(os.getppid())


def bind(gpus: Sequence[str], local_rank: int, root: Path = Path("/")) -> None:
    """Binds this rank to the cores of its GPU's NUMA node, so that memory is allocated near it.

    Does nothing if the rank is already bound, or would get less than an equal share of the cores.

    Args:
        gpus: PCI bus address of each local rank's GPU.
        local_rank: this rank's index among them.
        root: root of the file system, or a test's folder.
    """
    if not hasattr(os, "sched_getaffinity"):
        return
    own = os.sched_getaffinity(0)
    nodes = [words(root / f"sys/bus/pci/devices/{gpu}/numa_node") for gpu in gpus]
    node = "".join(nodes[local_rank])
    near: set[int] = set()
    for cores in words(root / f"sys/devices/system/node/node{node}/cpulist"):
        for part in cores.split(","):
            first, _, last = part.partition("-")
            near.update(range(int(first), int(last or first) + 1))
    near &= own
    enough = len(near) * len(gpus) >= len(own) * nodes.count(nodes[local_rank])
    if near and enough and own == _launched_on():
        # a fork server may already be running
        children = [each.pid for each in psutil.Process().children(recursive=True)]
        for task in (*map(int, os.listdir("/proc/self/task")), *children):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(task, near)


def _memory(groups: list[Path]) -> Iterator[int]:
    """Yields, for each limit, the bytes that all ranks together can still allocate."""
    try:
        yield psutil.virtual_memory().available
    except (psutil.Error, OSError, RuntimeError):
        # /proc is missing, or hides something
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in groups:
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = words(folder / limit_name)
            used = words(folder / used_name)
            if limit and used and limit[0] != "max":
                stat = words(folder / "memory.stat")
                # reclaimed before any process is killed
                cache = int(dict(zip(stat[::2], stat[1::2], strict=False)).get(cache_name, 0))
                yield int(limit[0]) - max(0, int(used[0]) - cache)


def _slurm(name: str) -> int:
    """Returns the number in ``SLURM_<name>``, such as 4 in ``4(x2)``; 0 if unset or a list."""
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ.get(f"SLURM_{name}", ""))
    return int(match[1]) if match else 0


def control_groups(root: Path = Path("/")) -> list[Path]:
    """Returns the folders of this process's control groups (v1 and v2) and their ancestors.

    Each group precedes its parent. In a container, the names may be the host's and may not exist
    below the mount; the container's group is then the mount itself.
    """
    try:
        # names are arbitrary bytes
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        # v2 lists no controllers
        for name in controllers.split(","):
            if name in ("", "cpu", "memory"):
                base = root / "sys/fs/cgroup" / name
                folder = base / inside.lstrip("/")
                found += [each for each in (folder, *folder.parents) if each.is_relative_to(base)]
    return found


def words(path: Path) -> list[str]:
    """Returns the words of a small kernel file; empty if it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []
