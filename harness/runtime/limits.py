"""What this process may use: cores, memory, shared memory, open files."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import psutil

# how much, and where that is said
_Figure = tuple[float, str]
# what psutil raises where /proc is missing, or hides something
_DENIED = (psutil.Error, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank may use.

    Attributes:
        cores: processors' worth of time, by affinity, cgroup quota and Slurm, divided over the
            ranks that share it.
        memory_bytes: memory that can still be taken before something is killed, divided over the
            ranks of this node.
        shm_bytes: free shared memory, divided over the ranks of this node; None where there is no
            /dev/shm.
        open_files: file descriptors that one process may hold.
        files_open: file descriptors that this process holds already; 0 where it may not be asked.
        sources: by name of the figures above, where each was read, in words.
    """

    cores: float
    memory_bytes: int
    shm_bytes: int | None
    open_files: int
    files_open: int = 0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)


def measure(local_ranks: int = 1, root: Path = Path("/"), reserved_bytes: int = 0) -> Limits:
    """The limits of one of ``local_ranks`` equal ranks, read under ``root`` (the file system's, or
    a test's).

    ``reserved_bytes`` of the memory that is free are promised to something that all ranks share.
    """
    groups = control_groups(root)
    shm = root / "dev/shm"
    # srun binds each of its tasks to cores of its own: where the ranks are its tasks, affinity is
    # one rank's already. Under a launcher that is one task, or in a batch script, which is no step
    # of srun, all ranks share what this process sees.
    tasks = _slurm("STEP_TASKS_PER_NODE") or 1
    together = math.ceil(local_ranks / tasks)
    ranks = together * tasks
    cores, cores_from = min(_cores(groups, together, ranks), key=itemgetter(0))
    left = [_machine_memory(), *map(_memory_left, groups), *_slurm_memory(ranks)]
    free_bytes, free_from = min(left, key=itemgetter(0))
    memory, memory_from = _over(ranks, (free_bytes - reserved_bytes, free_from))
    free = _over(ranks, (shutil.disk_usage(shm).free, f"free in {shm}")) if shm.is_dir() else None
    return Limits(
        cores=cores,
        memory_bytes=max(0, int(memory)),
        shm_bytes=None if free is None else int(free[0]),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        files_open=_files_open(),
        sources={
            "cores": cores_from,
            "memory_bytes": memory_from,
            "shm_bytes": f"no {shm}" if free is None else free[1],
            "open_files": "soft limit (ulimit -n)",
        },
    )


def _over(ranks: int, figure: _Figure) -> _Figure:
    total, source = figure
    return total / ranks, source if ranks == 1 else f"{source}, over {ranks} ranks"


def _cores(groups: list[Path], together: int, ranks: int) -> Iterator[_Figure]:
    """What one rank has of each bound on cores: its task's, shared by ``together`` ranks, and the
    node's, by ``ranks``.
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    yield _over(together, (affinity, "affinity"))
    # a batch script is none of the job's tasks
    if _slurm("STEP_TASKS_PER_NODE") and (task := _slurm("CPUS_PER_TASK")):
        yield _over(together, (task, "SLURM_CPUS_PER_TASK"))
    if node := _slurm("CPUS_ON_NODE"):
        yield _over(ranks, (node, "SLURM_CPUS_ON_NODE"))
    for folder in groups:
        yield _over(ranks, _quota(folder))


def _slurm_memory(ranks: int) -> Iterator[_Figure]:
    """What the job may take on this node less what ``ranks`` like this one have; Slurm may count
    without a control group.
    """
    granted: list[_Figure] = []
    if node := _slurm("MEM_PER_NODE"):
        granted.append((node * 2**20, "SLURM_MEM_PER_NODE"))
    if (each := _slurm("MEM_PER_CPU")) and (cores := _slurm("CPUS_ON_NODE")):
        granted.append((each * cores * 2**20, "SLURM_MEM_PER_CPU"))
    for total, source in granted:
        yield total - ranks * psutil.Process().memory_info().rss, source


def _slurm(name: str) -> int | None:
    """The number in ``SLURM_<name>``, such as 8, or 4 in ``4(x2)``; None where it is absent, zero
    or not one number.
    """
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ.get(f"SLURM_{name}", ""))
    return int(match[1]) or None if match else None


def control_groups(root: Path = Path("/")) -> list[Path]:
    """The folders of this process's control groups and all their ancestors, of version 1 and 2,
    each group before its parent.

    In a container the groups' names may be the host's and lie nowhere below the mount; its own
    group is then the mount itself.
    """
    try:
        # a name is any bytes
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        wanted = [c for c in controllers.split(",") if c in ("cpu", "memory")]
        bases = (
            [root / "sys/fs/cgroup" / name for name in wanted]
            if controllers
            else [root / "sys/fs/cgroup"]
        )
        for base in bases:
            folder = base / inside.lstrip("/")
            found += [f for f in (folder, *folder.parents) if f == base or base in f.parents]
    return found


def _quota(folder: Path) -> _Figure:
    two = words(folder / "cpu.max")
    if len(two) == 2 and two[0] != "max":
        return int(two[0]) / int(two[1]), f"quota in {folder / 'cpu.max'}"
    quota = words(folder / "cpu.cfs_quota_us")
    period = words(folder / "cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0]), f"quota in {folder / 'cpu.cfs_quota_us'}"
    return math.inf, "no quota"


def _machine_memory() -> _Figure:
    try:
        return psutil.virtual_memory().available, "free and cache (MemAvailable)"
    except _DENIED:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "free (sysconf)"


def _files_open() -> int:
    try:
        return psutil.Process().num_fds()
    except _DENIED:
        return 0


def _memory_left(folder: Path) -> _Figure:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = words(folder / limit_name)
        used = words(folder / used_name)
        if limit and used and limit[0] != "max":
            stat = words(folder / "memory.stat")
            # given back before any kill
            cache = int(dict(zip(stat[::2], stat[1::2], strict=False)).get(cache_name, 0))
            return int(limit[0]) - max(
                0, int(used[0]) - cache
            ), f"limit less use in {folder / limit_name}"
    return math.inf, "no limit"


def words(path: Path) -> list[str]:
    """The words of a small file of the kernel's; none where it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []
