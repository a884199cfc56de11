"""The tests marked ``gpu``, which no machine without a GPU runs: that they can be collected, and
that their calls are right.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BARE = """
import sys
# none of these can be imported
sys.modules |= dict.fromkeys(("selenium", "scipy", "sklearn", "sklearn.datasets", "scipy.stats"))
"""
STAND_IN = """
import warnings
import pytest, torch
from emulator import EmulatedDevice, emulated
torch.cuda.is_available = lambda: True

@pytest.fixture(autouse=True)
def _on_an_emulated_gpu(monkeypatch):
    told = "Synchronization debug mode is a prototype feature"
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn(told))
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    with emulated(EmulatedDevice(), monkeypatch):
        yield
"""
EMULATED = (
    "test_augment_gpu.py",
    "told_to_the_clock",
    "one_side_stream",
    "leaves_no_thread",
    "no_step_waits",
)


def run(plugin: str, place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Pytest on the tests that are marked ``gpu``, with a ``plugin`` and without those that a bare
    machine has not.
    """
    (place / "more_of_pytest.py").write_text(plugin)
    paths = os.pathsep.join((str(place), str(TESTS / "support"), str(TESTS.parent)))
    marked = [
        str(path)
        for path in TESTS.rglob("test_*.py")
        if any(word in path.read_text() for word in ("mark.gpu", "importorskip("))
    ]
    plugins = [
        f"-p{name}" for name in ("no:timeout", "no:xdist", "no:cacheprovider", "more_of_pytest")
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *plugins, *arguments, *marked],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pytest_alone_collects_them(tmp_path: Path) -> None:
    """Each file has some, and what needs more than pytest is skipped with its reason."""
    done = run(BARE, tmp_path, "--collect-only")
    assert done.returncode == 0, done.stdout + done.stderr
    for path in TESTS.rglob("test_*.py"):
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__):
            assert f"{path.relative_to(TESTS.parent)}::" in done.stdout
    assert all(
        f"needs {name} (uv sync)" in done.stdout for name in ("selenium", "scipy", "sklearn")
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_the_emulated_gpu_their_calls_are_right(tmp_path: Path) -> None:
    """Those that it can satisfy pass on it; torch's warning of a mode that they switch on is no
    error.
    """
    done = run(STAND_IN, tmp_path, "-k", " or ".join(EMULATED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Synchronization debug mode is a prototype" in done.stdout and "12 passed" in done.stdout
