"""Runs that a launcher started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import ran

from harness.cli import compose
from harness.config import ConfigError


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def test_the_rank_that_a_launcher_adds_is_taken(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """It is dropped where the variable says the same; typed by a user it is refused."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert compose.prepared([flag, "seed=1"]).overrides == ["seed=1"]
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError):
        compose.prepared([flag, "seed=1"])


@pytest.mark.slow
def test_each_job_of_a_sweep_under_torchrun_has_ranks_of_its_own(tmp_path: Path) -> None:
    """Jobs that share torchrun's store do not take each other's addresses for their own."""
    launched = ran(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "train.py", "-m", "data=digits", "optim.lr=0.1,0.05,0.02", "trainer.max_steps=2",
        "trainer.epochs=1", "device=cpu", f"hydra.sweep.dir={tmp_path}", timeout_s=300,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-2000:]
    reports = [json.loads((tmp_path / f"{i}/report.json").read_text()) for i in range(3)]
    assert [report["status"] for report in reports] == ["completed"] * 3
