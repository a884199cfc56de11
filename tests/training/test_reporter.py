"""The report: how a run ended is not up to it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config import Config
from harness.training import reporter
from harness.training.reporter import Page, Reporter


class Board:
    """Keeps the report that it is given."""

    def __init__(self) -> None:
        self.reported: dict[str, Any] = {}

    def report(self, report: dict[str, Any]) -> None:
        self.reported = json.loads(json.dumps(report))


def test_figures_that_cannot_be_had_hide_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the device answers nothing more, the run's own error is raised and reported."""

    class Clock:
        def total(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    board = Board()
    engine: Any = SimpleNamespace(
        watch=SimpleNamespace(board=board, clock=Clock(), sampler=None),
        status="failed",
        evaluation=None,
        state=SimpleNamespace(epoch=1, step=30),
        world=None,
        place=SimpleNamespace(folder=tmp_path),
    )
    reporter = Reporter(Config(), (), None, 2.0, Page("", lambda folder: None))
    with pytest.raises(ValueError, match="the first error"), reporter.reporting(engine):
        raise ValueError("the first error")
    assert board.reported == {
        "status": "failed",
        "epochs": 1,
        "steps": 30,
        "error": "ValueError: the first error",
    }
    assert "no figures: RuntimeError: CUDA error" in caplog.text


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
