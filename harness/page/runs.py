"""Run folders, and what the page shows of one: its files, read as they are, with what is missing said in words."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from heapq import nlargest
from pathlib import Path
from typing import Any

from harness.page.course import Windows, course, latest, read_windows
from harness.page.shape import REPORT, TUNING, fitted
from harness.runtime.files import read_inside, read_json

BUCKETS = 400  # points of a chart that has the page's width
REPORT_JSON, METRICS_JSONL, TUNING_JSON = "report.json", "metrics.jsonl", "tuning.json"
FILES = (REPORT_JSON, METRICS_JSONL, TUNING_JSON)
_CONFIG = ".hydra/config.yaml"

_MOST_RUNS, _MOST_FOLDERS = 1000, 50_000  # looked at below one folder
_CONFIG_CHARACTERS = 32_000
_OF_A_RUN = ("checkpoints", "trace")  # folders in which there are no runs


def find_runs(root: Path, notes: list[str]) -> dict[str, Path]:
    """The run folders at and below ``root`` by name, which is the path from there, in natural order.

    They are the 1,000 that were written to last, and ``notes`` is told where there are more.
    """
    found = [(changed_s(folder), name, folder) for name, folder in each_run(root, notes)]
    if len(found) > _MOST_RUNS:
        notes.append(f"{root}: {len(found):,} runs; shown are the {_MOST_RUNS:,} that were written to last")
    kept = sorted(nlargest(_MOST_RUNS, found), key=lambda run: _natural(run[1]))
    return {name: folder for _, name, folder in kept}


def each_run(root: Path, notes: list[str], most: int = _MOST_FOLDERS) -> Iterator[tuple[str, Path]]:
    """Every run folder as it is found, the last by name first; links to folders are not followed.

    After ``most`` folders it ends, and ``notes`` is told.
    """
    for count, (path, folders, files) in enumerate(os.walk(root)):
        if count == most:
            notes.append(f"{root}: more than {most:,} folders; the rest, from {path} on, is not looked into: name one below it")
            return
        is_run = REPORT_JSON in files or METRICS_JSONL in files
        if is_run:
            yield (os.path.relpath(path, root) if path != str(root) else root.resolve().name), Path(path)
        passed = _OF_A_RUN if is_run else ()
        looked_into = [name for name in folders if not name.startswith(".") and name not in passed]
        folders[:] = sorted(looked_into, key=_natural, reverse=True)


def changed_s(folder: Path) -> float:
    """When the run in ``folder`` last wrote what it did, in seconds of the wall clock; 0 where it has not."""
    return max(map(_changed_s, (folder / REPORT_JSON, folder / METRICS_JSONL)))


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def told(runs: Mapping[str, Path], make: Callable[[Path, str], str], notes: list[str]) -> list[str]:
    """``make(folder, name)`` of each run; one that cannot be told is a note and no other's end."""
    found = []
    for name, folder in runs.items():
        try:
            found.append(make(folder, name))
        except Exception as error:
            notes.append(f"run {name} cannot be shown: {type(error).__name__}: {error}")
    return found


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A key by which job 10 comes after job 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"([0-9]+)", name)]


def run_json(folder: Path, name: str, *, buckets: int = BUCKETS) -> str:
    """One run as JSON, in letters of ASCII."""
    return json.dumps(read_run(folder, name, buckets=buckets), allow_nan=False, separators=(",", ":"))


def read_run(folder: Path, name: str, *, buckets: int = BUCKETS) -> dict[str, Any]:
    """One run as the page takes it: its files' contents and ``notes`` on what is missing.

    Where there is no report yet, ``report`` has the figures of the ``latest`` window.
    """
    notes: list[str] = []
    windows = _windows(folder / METRICS_JSONL, notes)
    report = fitted(_json(folder / REPORT_JSON, notes), REPORT)
    if report is None and not os.path.exists(folder / REPORT_JSON):
        notes.append(f"{REPORT_JSON} is missing: the run has not ended or was killed; what is shown is what it wrote so far")
    if report and windows.steps and windows.steps[-1] > report.get("steps", math.inf):
        notes.append(f"{REPORT_JSON} is of step {report['steps']}; the run has gone on since, to step {windows.steps[-1]}")
    tuned = os.path.exists(folder / TUNING_JSON)  # Path.exists would raise where it may not look
    tuning = fitted(_json(folder / TUNING_JSON, notes), TUNING) if tuned else None
    if tuned and tuning is None and not any(TUNING_JSON in note for note in notes):
        notes.append(f"{TUNING_JSON} does not hold what the tuner writes")
    return {
        "name": name,
        "changed_s": changed_s(folder),
        "report": fitted(latest(windows), REPORT) if report is None else report,
        "latest": report is None,
        "tuning": tuning,
        "course": course(windows, buckets),
        "config": _config(folder, notes),
        "notes": notes,
    }


def _json(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    """The object in a file; None, with a note unless it is just not there, where there is none."""
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise ValueError(f"it holds no object but {type(value).__name__}")
        return value
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    except ValueError as error:
        notes.append(f"{path.name} is damaged: {error}")
    return None


def _windows(path: Path, notes: list[str]) -> Windows:
    try:
        windows = read_windows(path)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: there is no course over time")
        return Windows()
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
        return Windows()
    if windows.damaged:
        notes.append(f"{path.name} has {windows.damaged} damaged lines, which are left out")
    if not windows.steps:
        notes.append(f"{path.name} has no window of steps yet")
    return windows


def _config(folder: Path, notes: list[str]) -> str | None:
    try:
        return read_inside(folder, _CONFIG).decode(errors="replace")[:_CONFIG_CHARACTERS]
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{_CONFIG} is not shown: {error.strerror or error}")
    return None
