"""Creates control groups with a quota for a test, if permitted."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# versions 1 and 2
_BASES = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_PERIOD_US = 100_000
_number = itertools.count()


@contextmanager
def quota(cores: float) -> Iterator[Path]:
    """Yields a control group with this CPU quota; skips the test if it cannot be created."""
    name = f"wellfed-test-{os.getpid()}-{next(_number)}"
    group = next(base for base in _BASES if base.exists() or base is _BASES[-1]) / name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a control group: {error}")
    try:
        _limit(group, int(cores * _PERIOD_US))
        yield group
    finally:
        _remove(group)


@contextmanager
def group_of(controller: str) -> Iterator[Path]:
    """Yields a new version 1 group of ``controller``; skips the test if it cannot be created."""
    group = Path("/sys/fs/cgroup") / controller / f"wellfed-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a version 1 control group: {error}")
    try:
        yield group
    finally:
        _remove(group)


def within(group: Path, *command: str) -> list[str]:
    """Returns ``command`` as run in ``group``, with all its children."""
    return ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command]


def members(group: Path) -> list[int]:
    """Returns the processes in ``group``."""
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def settled(group: Path, limit_s: float) -> list[int]:
    """Waits until ``group`` is empty or for ``limit_s``; returns its remaining processes."""
    deadline = time.monotonic() + limit_s
    while (left := members(group)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _limit(group: Path, quota_us: int) -> None:
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    elif (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    else:
        pytest.skip("control groups have no CPU controller here")


def _remove(group: Path) -> None:
    """Removes ``group`` and kills its remaining processes."""
    deadline = time.monotonic() + 10
    while True:
        for pid in members(group):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
