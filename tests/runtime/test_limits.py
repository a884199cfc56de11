"""Limits: the smallest of what the machine has and what any control group above this process
grants.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.runtime import limits

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 cores and 64 GiB of memory, without Slurm."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))


def tree(root: Path, membership: str, files: dict[str, object]) -> Path:
    for name, text in {
        "proc/self/cgroup": membership,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cores", "gib"),
    [
        pytest.param("0::/", {}, 16, 64, id="v2 without limits"),
        pytest.param("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5, 64, id="v2 quota"),
        pytest.param(
            "0::/a/b",
            {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"},
            4,
            64,
            id="v2 ancestor",
        ),
        pytest.param(
            "0::/../../pod/x",
            {"cpu.max": "50000 100000"},
            0.5,
            64,
            id="v2 namespace that names the host's groups",
        ),
        pytest.param(
            "4:cpu:/docker/x\n9:memory:/docker/x",
            {
                "cpu/cpu.cfs_quota_us": 150000,
                "cpu/cpu.cfs_period_us": 100000,
                "memory/memory.limit_in_bytes": 4 * GIB,
                "memory/memory.usage_in_bytes": GIB,
            },
            1.5,
            3,
            id="v1 namespace that names the host's groups",
        ),
        pytest.param(
            "0::/a/b",
            {
                "a/b/memory.max": "max",
                "a/b/memory.current": 0,
                "a/memory.max": 8 * GIB,
                "a/memory.current": 3 * GIB,
            },
            16,
            5,
            id="v2 memory of an ancestor",
        ),
        pytest.param(
            "0::/a",
            {
                "a/memory.max": 4 * GIB,
                "a/memory.current": 3 * GIB,
                "a/memory.stat": (
                    f"anon {GIB}\ninactive_anon 7\nactive_file 9\ninactive_file {2 * GIB}"
                ),
            },
            16,
            3,
            id="v2 inactive page cache is not use",
        ),
        pytest.param(
            "9:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": 4 * GIB,
                "memory/a/memory.usage_in_bytes": 3 * GIB,
                "memory/a/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
            },
            16,
            2,
            id="v1 inactive page cache of the whole tree is not use",
        ),
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
    ],
)
def test_the_smallest_limit_counts(
    tmp_path: Path, membership: str, files: dict[str, object], cores: float, gib: float
) -> None:
    """Cores and memory are the least that affinity, the machine, and each group from here to the
    root leave.
    """
    found = limits.measure(root=tree(tmp_path, membership, files))
    assert found.cores == pytest.approx(cores)
    assert found.memory_bytes == gib * GIB


def test_local_ranks_share_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores, memory and shared memory are divided over the ranks of this node; open files are each
    process's own.
    """
    monkeypatch.setattr(
        shutil, "disk_usage", {tmp_path / "dev/shm": SimpleNamespace(free=6 * GIB)}.__getitem__
    )
    (tmp_path / "dev/shm").mkdir(parents=True)
    alone = limits.measure(1, tmp_path)
    shared = limits.measure(4, tmp_path)
    assert (shared.cores, shared.memory_bytes) == (4.0, 16 * GIB)
    assert (alone.shm_bytes, shared.shm_bytes) == (6 * GIB, 1.5 * GIB)
    assert shared.open_files == alone.open_files > 0
    assert shared.files_open == alone.files_open > 0


def test_what_is_promised_to_all_ranks_is_not_theirs(tmp_path: Path) -> None:
    """Memory that something shared will fill is taken off before what is left is divided."""
    assert limits.measure(4, tmp_path, reserved_bytes=16 * GIB).memory_bytes == 12 * GIB
    assert limits.measure(4, tmp_path, reserved_bytes=80 * GIB).memory_bytes == 0


SRUN = {"SLURM_CPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize(
    ("variables", "local_ranks", "affinity", "cores", "gib"),
    [
        pytest.param(SRUN, 1, 16, 8, 64, id="batch script, one rank"),
        pytest.param(
            SRUN | {"SLURM_CPUS_PER_TASK": "2"}, 4, 8, 2, 16, id="batch script, torchrun or spawn"
        ),
        pytest.param(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            4,
            2,
            2,
            16,
            id="srun, ranks bound to their own cores",
        ),
        pytest.param(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4, 16, 2, 16, id="srun, ranks not bound"
        ),
        pytest.param(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4"},
            1,
            2,
            2,
            16,
            id="srun, four runs side by side",
        ),
        pytest.param(
            {
                "SLURM_CPUS_ON_NODE": "8",
                "SLURM_STEP_TASKS_PER_NODE": "1",
                "SLURM_CPUS_PER_TASK": "6",
            },
            4,
            16,
            1.5,
            16,
            id="srun of one torchrun",
        ),
        pytest.param({"SLURM_CPUS_ON_NODE": "64"}, 1, 16, 16, 64, id="more than the affinity"),
        pytest.param(
            {"SLURM_CPUS_ON_NODE": "8,4"},
            1,
            16,
            16,
            64,
            id="malformed",
        ),
    ],
)
def test_slurm_bounds_a_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    local_ranks: int,
    affinity: int,
    cores: float,
    gib: int,
) -> None:
    """Under Slurm a rank has its share of its task's or its node's part, whichever process started
    it, at most its affinity.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = limits.measure(local_ranks, tmp_path)
    assert (found.cores, found.memory_bytes) == (cores, gib * GIB)


@pytest.mark.parametrize(
    ("own", "launcher", "local_ranks", "cores"),
    [
        pytest.param(64, 64, 4, 16, id="not bound"),
        pytest.param(16, 16, 4, 4, id="all together by taskset"),
        pytest.param(8, 64, 8, 8, id="each to its own cores"),
        pytest.param(32, 64, 8, 8, id="each to its NUMA node, four to a node"),
        pytest.param(2, 64, 2, 2, id="each to few"),
    ],
)
def test_a_bound_rank_keeps_its_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: int,
    launcher: int,
    local_ranks: int,
    cores: float,
) -> None:
    """Ranks divide the cores that they share, and no others."""
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(launcher if pid == os.getppid() else own))
    )
    assert limits.measure(local_ranks, tmp_path).cores == cores


@pytest.mark.parametrize(
    ("nodes", "launcher", "bound"),
    [
        pytest.param([0, 0, 1, 1], 16, {*range(4, 8), *range(12, 16)}, id="two GPUs a node"),
        pytest.param([0, 0, 0, 1], 16, {*range(4, 8), *range(12, 16)}, id="one on this node"),
        pytest.param([1, 1, 1, 1], 16, None, id="all on one node"),
        pytest.param([-1, -1, -1, -1], 16, None, id="node unknown"),
        pytest.param([0, 0, 1, 1], 32, None, id="bound already"),
    ],
)
def test_a_rank_is_bound_to_the_node_of_its_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[int],
    launcher: int,
    bound: set[int] | None,
) -> None:
    """The last of four ranks takes cores near its GPU if it loses none by that."""
    gpus = [f"0000:{i:02x}:00.0" for i in range(4)]
    files = {
        f"sys/bus/pci/devices/{gpu}/numa_node": node for gpu, node in zip(gpus, nodes, strict=True)
    }
    files |= {
        "sys/devices/system/node/node0/cpulist": "0-3,8-11",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(launcher if pid == os.getppid() else 16))
    )
    done: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", done.__setitem__)
    limits.bind(gpus, 3, tmp_path)
    assert done.get(os.getpid()) == bound


def test_the_name_of_a_group_is_any_bytes(tmp_path: Path) -> None:
    """A group whose name is not UTF-8 is found like any other."""
    folder = os.fsencode(tmp_path) + b"/sys/fs/cgroup/caf\xe9"
    os.makedirs(folder)
    Path(os.fsdecode(folder), "cpu.max").write_text("150000 100000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    assert limits.measure(root=tmp_path).cores == 1.5


@pytest.mark.parametrize(
    "error",
    [psutil.AccessDenied(), PermissionError("no"), FileNotFoundError("/proc/meminfo")],
    ids=lambda e: type(e).__name__,
)
def test_what_may_not_be_read_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Where psutil may read nothing, the C library says what memory is free."""

    def refuse() -> None:
        raise error

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    found = limits.measure(root=tmp_path)
    assert (found.cores, found.memory_bytes > 0) == (16, True)


def test_the_real_machine_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine there is at least some core, some memory and one open file."""
    monkeypatch.undo()
    found = limits.measure()
    assert found.cores > 0 and found.memory_bytes > 0 and 0 < found.files_open < found.open_files
