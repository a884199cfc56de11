"""Tuned runs with half a processor: one that the kernel holds to it,
and one that only reads of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import samples

from harness.cli import job
from harness.config import Config
from harness.runtime import limits
from scripts.bench.watch import control_groups

ROOT = Path(__file__).parents[2]
BUDGET_S = 15
OVERRIDES = (  # to decode these images takes several times as long as a step on them
    "data=shapes", "data.generate.train_images=256", "data.generate.val_images=32",
    "data.generate.width=400",
    "data.generate.height=300", "data.image_size=32", "loader.batch_size=16",
    "loader.autotune=true", f"tuner.budget_s={BUDGET_S}", "trainer.max_steps=5", "device=cpu",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def tuned(folder: Path) -> None:
    """What the run in ``folder`` says of its tuning, which came to its end in time."""
    tuning: dict[str, Any] = json.loads((folder / "tuning.json").read_text())
    assert tuning["limits"]["cores"] == 0.5
    assert tuning["complete"] and tuning["seconds"] < 1.2 * BUDGET_S
    assert json.loads((folder / "report.json").read_text())["status"] == "completed"


def members_ever(group: Path, run: subprocess.Popen[str], limit_s: float) -> set[int]:
    """The processes that were in ``group`` until ``run`` ended, or so many seconds had passed."""
    found: set[int] = set()
    deadline = time.monotonic() + limit_s
    while run.poll() is None and time.monotonic() < deadline:
        found.update(control_groups.members(group))
        time.sleep(0.02)
    return found


def test_a_run_is_tuned_under_a_real_quota(tmp_path: Path) -> None:
    """It chooses in time, the report has what the quota did, and neither process nor segment is
    left.
    """
    # workers, of which none may be left
    more = ("loader.num_workers=1", "watch.sample_s=0.2", "run.name=half")
    command = [sys.executable, str(ROOT / "train.py"), *OVERRIDES, *more]
    env = {**os.environ, "WELLFED_CACHE": str(tmp_path / "cache")}
    with (
        control_groups.quota(0.5) as group,
        open(tmp_path / "said", "w+", encoding="utf-8") as said,
    ):
        run = subprocess.Popen(
            control_groups.within(group, *command),
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=said,
            stderr=said,
        )
        pids = members_ever(group, run, 350)
        left = control_groups.settled(group, 10)
    assert run.poll() == 0, (tmp_path / "said").read_text()
    assert left == []
    assert len(pids) > 2
    assert [
        name
        for name in os.listdir("/dev/shm")
        if name.startswith(tuple(f"torch_{pid}_" for pid in pids))
    ] == []
    tuned(tmp_path / "outputs/half")
    sampled = json.loads((tmp_path / "outputs/half/report.json").read_text())["sampled"]
    assert 0 < sampled["host/own_cpu_cores"] < 0.6
    assert "host/throttled_fraction" in sampled


@pytest.mark.usefixtures("kept_globals")
def test_a_run_is_tuned_to_a_quota_that_it_reads(
    composed: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where no control group may be made, one that is only written down is respected
    all the same.
    """
    group = tmp_path / "root/sys/fs/cgroup/job"
    for path, text in (
        (group / "cpu.max", "50000 100000"),
        (tmp_path / "root/proc/self/cgroup", "0::/job"),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(limits, "measure", partial(limits.measure, root=tmp_path / "root"))
    folder = tmp_path / "run"
    folder.mkdir()
    job.main_worker(0, job.Job(composed(*OVERRIDES), folder, ()))
    tuned(folder)
    assert samples.left_behind() == []
