"""Limits: the smallest of what the machine has and what any control group above this process grants."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.runtime import limits

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 cores and 64 GiB of memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))


def tree(root: Path, membership: str, files: dict[str, object]) -> Path:
    for name, text in {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cores", "gib"),
    [
        pytest.param("0::/", {}, 16, 64, id="v2 without limits"),
        pytest.param("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5, 64, id="v2 quota"),
        pytest.param("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4, 64, id="v2 ancestor"),
        pytest.param("0::/a/b", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, 2, 64, id="v2 smallest"),
        pytest.param("0::/a/b", {"cpu.max": "50000 100000"}, 0.5, 64, id="v2 root of a container"),
        pytest.param("0::/a", {"a/cpu.max": "9900000 100000"}, 16, 64, id="v2 quota above the affinity"),
        pytest.param(
            "0::/a/b",
            {"a/b/memory.max": "max", "a/b/memory.current": 0, "a/memory.max": 8 * GIB, "a/memory.current": 3 * GIB},
            16,
            5,
            id="v2 memory of an ancestor",
        ),
        pytest.param("0::/a", {"a/memory.max": 2 * GIB, "a/memory.current": 3 * GIB}, 16, 0, id="v2 memory overdrawn"),
        pytest.param(
            "4:cpu,cpuacct:/job\n9:memory:/job",
            {
                "cpu/job/cpu.cfs_quota_us": -1,
                "cpu/job/cpu.cfs_period_us": 100000,
                "cpu/cpu.cfs_quota_us": 250000,
                "cpu/cpu.cfs_period_us": 100000,
                "memory/job/memory.limit_in_bytes": 6 * GIB,
                "memory/job/memory.usage_in_bytes": 2 * GIB,
                "memory/memory.limit_in_bytes": UNLIMITED_V1,
                "memory/memory.usage_in_bytes": 0,
            },
            2.5,
            4,
            id="v1",
        ),
        pytest.param(
            "1:name=systemd:/x\n4:cpu:/a\n0::/b",
            {"cpu/a/cpu.cfs_quota_us": 300000, "cpu/a/cpu.cfs_period_us": 100000, "b/memory.max": GIB, "b/memory.current": 0},
            3,
            1,
            id="both versions at once",
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, membership: str, files: dict[str, object], cores: float, gib: float) -> None:
    """Cores and memory are the least that affinity, the machine, and each group from here to the root leave."""
    found = limits.measure(root=tree(tmp_path, membership, files))
    assert found.cores == pytest.approx(cores)
    assert found.memory_bytes == gib * GIB


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    """Where /proc tells nothing of groups, affinity and free memory are the limits."""
    found = limits.measure(root=tmp_path)
    assert (found.cores, found.memory_bytes) == (16.0, 64 * GIB)


def test_local_ranks_share_alike(tmp_path: Path) -> None:
    """Cores, memory and shared memory are divided over the ranks of this node; open files are each process's own."""
    alone, shared = limits.measure(1, tmp_path), limits.measure(4, tmp_path)
    assert (shared.cores, shared.memory_bytes) == (4.0, 16 * GIB)
    assert shared.open_files == alone.open_files > 0
    if alone.shm_bytes is not None:
        assert shared.shm_bytes == pytest.approx(alone.shm_bytes / 4, rel=0.05, abs=1)


def test_the_real_machine_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine there is at least some core and some memory."""
    monkeypatch.undo()
    found = limits.measure()
    assert found.cores > 0 and found.memory_bytes > 0
