"""Somebody's scripts, run alone and under ``wellfed watch``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from commands import ROOT, ran

LOOPS = ROOT / "tests" / "support" / "loops"
WATCH = ("-m", "wellfed", "watch")
Run = subprocess.CompletedProcess[str]


class Both(NamedTuple):
    """A script run alone, run watched, and the report; None: there is none."""

    alone: Run
    watched: Run
    report: dict[str, Any] | None

    def equal(self) -> dict[str, Any]:
        """Returns the report, once what the script did is found the same."""
        assert self.watched.stdout == self.alone.stdout
        assert self.watched.returncode == self.alone.returncode, self.watched.stderr
        assert self.report is not None, self.watched.stderr
        return self.report


Start = Callable[..., Both]


def both(tmp_path: Path, start: Callable[..., Run], *arguments: str | Path) -> Both:
    """Runs a script in one empty folder and, watched, in another."""
    typed = [str(argument) for argument in arguments]
    places = []
    for name in ("alone", "watched"):
        places.append(tmp_path / name)
        places[-1].mkdir()
    alone = start(*typed, cwd=places[0])
    watched = start(*WATCH, "--no-tensorboard", "--out", "report", *typed, cwd=places[1])
    report = places[1] / "report" / "report.json"
    return Both(alone, watched, json.loads(report.read_text()) if report.exists() else None)


def anew(*arguments: str, cwd: Path) -> Run:
    """Runs ``python`` with ``arguments``, which imports all itself."""
    return ran(sys.executable, *arguments, cwd=cwd, PYTHONPATH=str(ROOT))


def loaders(report: dict[str, Any]) -> list[tuple[str, bool, int, int]]:
    """Where each loader was made, without the line; if it trains, its passes and batches."""
    return [
        (each["where"].partition(":")[0], each["trains"], each["passes"], each["batches"])
        for each in report["loaders"]
    ]
