"""Runs that a launcher started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, ran
from run_state import digest

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


APART = """
import os, runpy, sys
place = os.environ["PLACE"] + "/" + os.environ["RANK"]
os.makedirs(place, exist_ok=True)
os.chdir(place)
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_share_no_folder_go_on_together(tmp_path: Path) -> None:
    """The rank that has the newest checkpoint reads it for all, whichever it is."""
    (tmp_path / "apart.py").write_text(APART.format(train=str(ROOT / "train.py")))

    def start(place: Path, *settings: str) -> subprocess.CompletedProcess[str]:
        return ran(
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            tmp_path / "apart.py", "data=digits", "device=cpu", "loader.num_workers=0",
            "trainer.num_threads=1", "trainer.epochs=1", *settings, timeout_s=280,
            PLACE=str(place),
        )  # fmt: skip

    parts, whole = tmp_path / "parts", tmp_path / "whole"
    named = ("run.name=x", "resume=auto")
    for place, settings in ((parts, (*named, "trainer.max_steps=5")), (whole, named)):
        done = start(place, *settings)
        assert done.returncode == 0, done.stderr[-2000:]
    assert not list((parts / "1").glob("outputs/x/checkpoints/*"))
    # a damaged checkpoint is one line on each rank
    shutil.copytree(parts, tmp_path / "bad")
    for file in (tmp_path / "bad").glob("0/outputs/x/checkpoints/step-*.pt"):
        file.write_bytes(b"")
    done = start(tmp_path / "bad", *named)
    assert done.returncode and len(re.findall(r"(?m)^error: .*damaged", done.stderr)) == 2
    # the folders change hands
    (parts / "0").rename(parts / "2")
    (parts / "1").rename(parts / "0")
    (parts / "2").rename(parts / "1")
    done = start(parts, *named)
    assert done.returncode == 0, done.stderr[-2000:]
    assert " after step 5, " in done.stdout
    assert digest(parts / "0/outputs/x") == digest(whole / "0/outputs/x")
