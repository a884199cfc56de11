"""The report: how a run ended is not up to it."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evidences import evidence
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.cli import compose
from harness.config import Config
from harness.report import reporter
from harness.report.reporter import Reporter
from harness.report.run_report import report
from harness.report.statement import stated
from harness.report.verdict import judge
from harness.runtime import distributed


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


@pytest.mark.parametrize(
    "folder",
    ["a b", "it's", "a, b=1", "$HOME", "~", "~/x", "-x", "tab\there", "two\nlines", "a\\'b", "c\\",
     "no\xa0break", 'a"b!c`d', "runs/[1] (copy)", "\udcff"],
)  # fmt: skip
def test_the_line_that_resumes_can_be_pasted(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell and Hydra read the folder back from what is printed, whatever its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distributed, "command", lambda ranks: ["python", "train.py"])
    Path(folder).mkdir(parents=True)
    engine: Any = SimpleNamespace(
        state=SimpleNamespace(samples=0, step=3, epoch=1),
        config=Config(),
        folder=tmp_path / folder,
        world=None,
    )
    kept = ("data.root='a\tb'", "--config-dir=/my files")
    Reporter(kept, None, 2.0, None)._stand(engine, [SimpleNamespace(path=tmp_path)])
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("resume with ").strip()
    script = f"python() {{ printf '%s\\0' \"$@\"; }}; {line}"
    typed = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    words = os.fsdecode(typed).split("\0")[:-1]
    assert words[:-1] == ["train.py", *kept]
    (override,) = compose.prepared(words[-1:]).overrides
    assert os.path.samefile(OverridesParser.create().parse_override(override).value(), folder)
