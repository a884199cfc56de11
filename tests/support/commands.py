"""Commands that tests run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def trained(
    cwd: Path, *overrides: str, timeout_s: float = 110.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs train.py in ``cwd``, as a user does."""
    command = (sys.executable, ROOT / "train.py", *overrides)
    return ran(*command, cwd=cwd, timeout_s=timeout_s, **environment)
