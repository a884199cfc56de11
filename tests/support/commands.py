"""Commands and runs that tests bring to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.cli import job
from harness.config import Config
from harness.runtime.errors import Interrupted

ROOT = Path(__file__).parents[2]


def ran(
    *command: str | Path, cwd: Path = ROOT, timeout_s: float = 110.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command, whatever its exit code; its output is text."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def python(
    code: str, *arguments: str, timeout_s: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``code``, which finds what this process finds; its output is text."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return ran(sys.executable, "-c", code, *arguments, timeout_s=timeout_s, **environment)


def trained(
    cwd: Path, *overrides: str, timeout_s: float = 110.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs train.py in ``cwd``, as a user does."""
    command = (sys.executable, ROOT / "train.py", *overrides)
    return ran(*command, cwd=cwd, timeout_s=timeout_s, **environment)


def run_here(config: Config, folder: Path, *typed: str, stopped: bool = False) -> dict[str, Any]:
    """Runs in this process, which a signal may end if ``stopped``; its report, if any."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        job.main_worker(0, job.Job(config, folder, typed))
    except Interrupted:
        if not stopped:
            raise
    report = folder / "report.json"
    return dict(json.loads(report.read_text())) if report.exists() else {}
