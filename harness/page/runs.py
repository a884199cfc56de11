"""Run folders, and what the page shows of one: its files, read as they are, with what is missing
said in words.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from heapq import nlargest
from pathlib import Path
from typing import Any

from harness.page.course import Windows, course, latest, read_windows
from harness.page.shape import REPORT, TUNING, fitted
from harness.runtime.files import read_inside, read_json

BUCKETS = 400  # points of a chart that has the page's width
REPORT_JSON = "report.json"
METRICS_JSONL = "metrics.jsonl"
TUNING_JSON = "tuning.json"
FILES = (REPORT_JSON, METRICS_JSONL, TUNING_JSON)
_CONFIG = ".hydra/config.yaml"

# looked at below one folder
_MOST_RUNS = 1000
_MOST_FOLDERS = 50_000
_CONFIG_CHARACTERS = 32_000
_OF_A_RUN = ("checkpoints", "trace")  # folders in which there are no runs


def find_runs(root: Path, notes: list[str]) -> dict[str, Path]:
    """The run folders at and below ``root`` by name, which is the path from there, in natural
    order.

    They are the 1,000 that were written to last, and ``notes`` is told where there are more.
    """
    found = [(changed_s(folder), name, folder) for name, folder in each_run(root, notes)]
    if len(found) > _MOST_RUNS:
        notes.append(
            f"{root}: {len(found):,} runs; shown are the {_MOST_RUNS:,} that were written to last"
        )
    kept = sorted(nlargest(_MOST_RUNS, found), key=lambda run: _natural(run[1]))
    return {name: folder for _, name, folder in kept}


def each_run(root: Path, notes: list[str], most: int = _MOST_FOLDERS) -> Iterator[tuple[str, Path]]:
    """Every run folder as it is found, the last by name first; links to folders are not followed.

    After ``most`` folders it ends, and ``notes`` is told.
    """
    for count, (path, folders, files) in enumerate(os.walk(root)):
        if count == most:
            notes.append(
                f"{root}: more than {most:,} folders; the rest, from {path} on, is not looked "
                "into: name one below it"
            )
            return
        is_run = REPORT_JSON in files or METRICS_JSONL in files
        if is_run:
            yield (
                (os.path.relpath(path, root) if path != str(root) else root.resolve().name),
                Path(path),
            )
        passed = _OF_A_RUN if is_run else ()
        looked_into = [name for name in folders if not name.startswith(".") and name not in passed]
        folders[:] = sorted(looked_into, key=_natural, reverse=True)


def stamp(path: Path) -> tuple[int, int]:
    """Returns what changes when a file does: nanoseconds of the wall clock and bytes; zeros if it
    cannot be looked at.
    """
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def changed_s(folder: Path) -> float:
    """Returns when the run in ``folder`` last wrote what it did, in seconds of the wall clock; 0 if
    it has not.
    """
    return max(stamp(folder / name)[0] for name in (REPORT_JSON, METRICS_JSONL)) / 1e9


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
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"([0-9]+)", name)
    ]


def run_json(folder: Path, name: str, *, buckets: int = BUCKETS) -> str:
    """One run as JSON, in letters of ASCII."""
    return json.dumps(
        read_run(folder, name, buckets=buckets), allow_nan=False, separators=(",", ":")
    )


def read_run(folder: Path, name: str, *, buckets: int = BUCKETS) -> dict[str, Any]:
    """One run as the page takes it: its files' contents and ``notes`` on what is missing.

    Where there is no report yet, ``report`` has the figures of the ``latest`` window.
    """
    notes: list[str] = []
    windows = _windows(folder / METRICS_JSONL, notes) or Windows()
    report = fitted(_json(folder / REPORT_JSON, notes), REPORT)
    if report is None and not os.path.exists(folder / REPORT_JSON):
        notes.append(
            f"{REPORT_JSON} is missing: the run has not ended or was killed; what is shown is what "
            "it wrote so far"
        )
    if report and windows.steps and windows.steps[-1] > report.get("steps", math.inf):
        notes.append(
            f"{REPORT_JSON} is of step {report['steps']}; the run has gone on since, to step "
            f"{windows.steps[-1]}"
        )
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


@contextmanager
def _noting(name: str, notes: list[str], missing: str = "") -> Iterator[None]:
    """A block that reads the file ``name``; where that fails it ends early, and ``notes`` are told
    why.

    A file that is not there is worth a note only where ``missing`` says what that costs.
    """
    try:
        yield
    except FileNotFoundError:
        if missing:
            notes.append(f"{name} is missing: {missing}")
    except OSError as error:
        notes.append(f"{name} cannot be read: {error.strerror or error}")
    except ValueError as error:
        notes.append(f"{name} is damaged: {error}")


def _json(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    """Returns the object in a file; None, with a note unless it is just not there, if there is
    none.
    """
    with _noting(path.name, notes):
        value = read_json(path)
        if isinstance(value, dict):
            return value
        raise ValueError(f"it holds no object but {type(value).__name__}")
    return None


def _windows(path: Path, notes: list[str]) -> Windows | None:
    with _noting(path.name, notes, missing="there is no course over time"):
        windows = read_windows(path)
        if windows.damaged:
            notes.append(f"{path.name} has {windows.damaged} damaged lines, which are left out")
        if not windows.steps:
            notes.append(f"{path.name} has no window of steps yet")
        return windows
    return None


def _config(folder: Path, notes: list[str]) -> str | None:
    with _noting(_CONFIG, notes):
        return read_inside(folder, _CONFIG).decode(errors="replace")[:_CONFIG_CHARACTERS]
    return None
