"""Sweeps by Hydra's launchers and sweepers: each job trains, or the command fails and says which
one and why.

The plugins are a group of their own: ``uv run --group launchers pytest -m 'slow or not slow'
tests/test_launchers.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import ran

ROOT = Path(__file__).parents[1]
SMALL = ("experiment=smoke", "trainer.max_steps=1", "loader.num_workers=0", "run.name=x")
OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1")
WAYS = {
    "basic": ("hydra", ()),
    "submitit": ("hydra_plugins.hydra_submitit_launcher", ("hydra/launcher=submitit_local",)),
    "joblib": (
        "hydra_plugins.hydra_joblib_launcher",
        ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    ),
    "optuna": ("hydra_plugins.hydra_optuna_sweeper", OPTUNA),
}

MINE = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def installed(module: str) -> bool:
    """Whether a plugin is there; its parent may be missing too."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The overrides that choose a launcher or a sweeper."""
    module, overrides = WAYS[request.param]
    if not installed(module):
        pytest.skip(f"needs {module}: uv sync --group launchers")
    return overrides


def sweep(cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A whole command."""
    command = (sys.executable, ROOT / "train.py", "-m", *SMALL, *overrides)
    return ran(*command, cwd=cwd, timeout_s=280)


def statuses(cwd: Path) -> list[str]:
    """How each job's report says that it ended."""
    return [
        json.loads(path.read_text())["status"]
        for path in sorted(cwd.glob("multirun/x/*/report.json"))
    ]


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_every_job_trains(way: tuple[str, ...], tmp_path: Path, chdir: str) -> None:
    """Two jobs, two reports, exit code 0; modules are found in the folder of the command."""
    (tmp_path / "mine.py").write_text(MINE)
    values = "optim.lr=choice(0.1,0.2)" if OPTUNA[0] in way else "optim.lr=0.1,0.2"
    done = sweep(tmp_path, values, *way, "model.name=mine:build", f"hydra.job.chdir={chdir}")
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path) == ["completed"] * 2
    *_, first, second, page = done.stdout.splitlines()
    assert {first.split()[0], second.split()[0]} == {"0", "1"}
    assert page.endswith(" multirun/x/report.html") and (tmp_path / page.split()[-1]).is_file()


def test_a_job_that_fails_is_named(way: tuple[str, ...], tmp_path: Path) -> None:
    """The exit code is the job's, the line has its folder and its reason, and the others trained
    all the same.
    """
    values = (
        "loader.batch_size=choice(100000,200000)"
        if OPTUNA[0] in way
        else "loader.batch_size=100000,64"
    )
    done = sweep(tmp_path, values, *way)
    assert done.returncode == 2, done.stderr
    assert "\nerror: multirun/x/0: loader.batch_size=" in f"\n{done.stderr}"
    assert statuses(tmp_path) == ["failed", *([] if OPTUNA[0] in way else ["completed"])]
    assert re.search(r"(?m)^0 .* loader.batch_size=\d+0000: ", done.stdout)


def test_optuna_looks_for_the_highest_top1(tmp_path: Path) -> None:
    """What a job returns is its best top-1, and the best trial is the one that had the most."""
    if not installed(WAYS["optuna"][0]):
        pytest.skip("needs hydra_plugins.hydra_optuna_sweeper: uv sync --group launchers")
    grid = ("hydra/sweeper/sampler=grid", "optim.lr=choice(0.0,0.1)")
    done = sweep(tmp_path, *grid, *OPTUNA, "trainer.max_steps=22")
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "multirun/x/optimization_results.yaml").read_text()
    top1 = [
        json.loads(path.read_text())["top1"] for path in tmp_path.glob("multirun/x/*/report.json")
    ]
    assert len(top1) == 2
    assert f"best_value: {max(top1)}" in found and max(top1) > min(top1)
