"""The report: how a run ended is not up to it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evidences import evidence

from harness.config import Config
from harness.report import reporter
from harness.report.reporter import Reporter
from harness.report.run_report import report
from harness.report.statement import stated
from harness.report.verdict import judge


class Board:
    """Keeps the report that it is given."""

    def __init__(self) -> None:
        self.reported: dict[str, Any] = {}

    def report(self, report: dict[str, Any]) -> None:
        self.reported = json.loads(json.dumps(report))


@pytest.mark.parametrize("fails", [True, False])
def test_figures_that_cannot_be_had_hide_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Where the device answers nothing more, the run ends as it did, with a warning."""

    class Clock:
        def total(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    writer = Board()
    engine: Any = SimpleNamespace(
        monitor=SimpleNamespace(writer=writer, clock=Clock(), sampler=None),
        status="failed" if fails else "completed",
        evaluation=None,
        state=SimpleNamespace(epoch=1, step=30),
        world=None,
        folder=tmp_path,
        config=Config(),
    )
    reporter = Reporter((), None, 2.0, SimpleNamespace(labels=None))
    ends = pytest.raises(ValueError, match="the first error") if fails else nullcontext()
    with ends, reporter.reporting(engine):
        if fails:
            raise ValueError("the first error")
    error = {"error": "ValueError: the first error"} if fails else {}
    assert writer.reported == {"status": engine.status, "epochs": 1, "steps": 30, **error}
    assert "RuntimeError: CUDA error" in caplog.text


@pytest.mark.parametrize(("worker_s", "more"), [(0.0, {}), (4.0, {"busy_fraction": 0.5})])
def test_stages_are_reported_without_a_counted_window(
    worker_s: float, more: dict[str, float]
) -> None:
    """Only the workers' busy share needs the seconds of one."""
    given = evidence(stages={"read": (2.0, 1.0), "crop": (0.0, 0.0)})
    found = report(given, stated(judge(given)), 1, None, worker_s)
    assert [stage["name"] for stage in found["stages"]] == ["read"]
    assert found["workers"] == {"samples": 1000, **more}


@pytest.mark.parametrize(
    ("folder", "root"),
    [(".", "."), ("outputs/a", "outputs"), ("multirun/d/t/0", "multirun"), ("else/a", "else/a")],
)
def test_tensorboard_is_told_the_folder_of_all_runs(
    folder: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in the current folder is told as it is."""
    monkeypatch.chdir(tmp_path)
    assert reporter._root(Path(folder)) == root
