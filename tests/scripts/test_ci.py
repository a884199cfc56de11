"""The gate, with every command that it runs made up."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"


def gate(place: Path, **commands: str) -> subprocess.CompletedProcess[str]:
    """What the gate does where ``commands`` are all that there is, each a line of shell; ``uv``
    tells what it was asked for.
    """
    for name, line in {"uv": 'echo "uv $*"', "id": "echo 0", **commands}.items():
        (place / name).write_text(f"#!/bin/sh\n{line}\n")
        (place / name).chmod(0o755)
    (place / "dirname").symlink_to(str(shutil.which("dirname")))
    (place / "sh").symlink_to("/bin/sh")
    command = [str(shutil.which("bash")), str(RUN)]
    return subprocess.run(
        command, env={"PATH": str(place)}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("failing", ["update", "install"])
def test_a_machine_without_a_mirror_runs_the_rest(tmp_path: Path, failing: str) -> None:
    """Where Chromium cannot be installed that is said on standard
    error, and everything else runs.
    """
    done = gate(tmp_path, **{"apt-get": f'[ "$1" != {failing} ]'})
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith(
        "uv run --group dev pytest"
    )
    assert done.stderr.splitlines() == [
        ".ci/run: apt-get cannot install chromium and chromium-driver",
        ".ci/run: WITHOUT chromedriver: the tests of the page in a browser are skipped",
    ]


@pytest.mark.parametrize("step", ["ruff", "mypy", "lint-imports", "pytest"])
def test_what_fails_ends_it(tmp_path: Path, step: str) -> None:
    """Nothing that the gate runs is unable to fail."""
    done = gate(tmp_path, chromedriver="", uv=f'case "$*" in *{step}*) exit 3;; esac')
    assert (done.returncode, done.stderr) == (3, "")
