"""The end of a sweep: a table of its jobs, and their page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.report.sweep import conclude, report_failure


def job(folder: Path, *overrides: str, **report: Any) -> None:
    """A job's folder with its report."""
    folder.mkdir(parents=True)
    folds = {"folds": 5} if "data.fold=" in str(overrides) else {}
    run = {"name": folder.name, "overrides": overrides, **folds}
    (folder / "report.json").write_text(json.dumps({"status": "completed", "run": run, **report}))


def table(root: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of the table that a sweep in ``root`` prints."""
    conclude(SimpleNamespace(dir=str(root)))
    _, heads, *rows, page = capsys.readouterr().out.splitlines()
    assert page.split()[-1].endswith("report.html")
    starts = [
        heads.index(head) for head in ("job", "differs", "top-1", "images/s", "data", "status")
    ]
    ends = [*starts[1:], None]
    return [[row[a:b].strip() for a, b in zip(starts, ends, strict=True)] for row in rows]


def test_a_sweep_ends_with_a_table_of_its_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what differs is shown; a job that failed or was killed stands beside the others."""
    figures = {"status": "completed", "top1": 0.5, "images_per_s": 90.4, "data_wait_fraction": 0.25}
    job(tmp_path / "10", "seed=1", "optim=adamw", "optim.lr=0.1", "resume=auto", **figures)
    job(tmp_path / "9", "seed=1", "optim=sgd", "optim.lr=0.2", status="interrupted", steps=3)
    (tmp_path / "11").mkdir()
    report_failure(tmp_path / "11", "device: no", ("seed=1", "optim=sgd", "optim.lr=0.1"))
    # killed before its report
    (tmp_path / "12").mkdir()
    (tmp_path / "12/metrics.jsonl").touch()
    assert table(tmp_path, capsys) == [
        ["9", "optim=sgd optim.lr=0.2", "-", "-", "-", "interrupted"],
        ["10", "optim=adamw optim.lr=0.1", "0.5000", "90", "25.0%", "completed"],
        ["11", "optim=sgd optim.lr=0.1", "-", "-", "-", "device: no"],
        ["12", "", "-", "-", "-", "-"],
    ]
    assert "optim=adamw" in (tmp_path / "report.html").read_text()


def test_folds_and_seeds_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mean, deviation and range of each cross-validation and of several seeds."""
    for place, (fold, lr, top1) in enumerate(
        [(0, 0.1, 0.5), (1, 0.1, 0.7), (0, 0.2, 0.25), (1, 0.2, 0.25)]
    ):
        # one was stopped and resumed
        resumed = ["resume=auto"] * (place == 1)
        job(tmp_path / str(place), f"data.fold={fold}", f"optim.lr={lr}", *resumed, top1=top1)
    job(tmp_path / "9", "data.fold=0", "optim.lr=0.3", top1=0.5)
    (tmp_path / "10").mkdir()
    report_failure(tmp_path / "10", "data: no", ("data.fold=2", "optim.lr=0.1"))
    stopped = {"top1": 0.1, "status": "interrupted"}
    job(tmp_path / "11", "data.fold=3", "optim.lr=0.1", **stopped)
    for seed, top1 in (1, 0.5), (2, 0.6):
        job(tmp_path / f"2{seed}", f"seed={seed}", "optim.lr=0.4", top1=top1)
        job(tmp_path / f"3{seed}", f"seed={seed}", "data.fold=1", top1=top1)
    conclude(SimpleNamespace(dir=str(tmp_path)))
    lines = [line for line in capsys.readouterr().out.splitlines() if "±" in line]
    figures = [re.findall(r"\d\.?\d*", line) for line in lines]
    assert figures == [
        ["2", "5", "1", "0.6000", "0.1414", "0.5000", "0.7000", "0.1"],
        ["2", "5", "1", "0.2500", "0.0000", "0.2500", "0.2500", "0.2"],
        ["2", "1", "0.5500", "0.0707", "0.5000", "0.6000", "0.4"],
        ["2", "1", "0.5500", "0.0707", "0.5000", "0.6000"],
    ]
    page = (tmp_path / "report.html").read_text()
    assert "0.6000" in page and "0.1414" in page


def test_a_failed_start_hides_no_earlier_run(tmp_path: Path) -> None:
    """A report with steps stays; that of an earlier failed start gives way."""
    job(tmp_path / "0", steps=3)
    for error in ("first", "second"):
        report_failure(tmp_path / "0", error, ())
        report_failure(tmp_path, error, ())
    assert "error" not in json.loads((tmp_path / "0/report.json").read_text())
    assert json.loads((tmp_path / "report.json").read_text())["error"] == "second"
