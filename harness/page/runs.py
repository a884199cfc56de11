"""Run folders, and what the page shows of one, with what is missing said in words."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.page.course import Windows, course, latest, read_windows
from harness.page.shape import FIRST_BATCH, MISTAKES, REPORT, TUNING, fitted
from harness.runtime.files import natural, read_inside, read_json

# points of a chart that has the page's width
BUCKETS = 400
REPORT_JSON = "report.json"
METRICS_JSONL = "metrics.jsonl"
FILES = (REPORT_JSON, METRICS_JSONL, "tuning.json", "mistakes.json", "first_batch.json")

# looked at below one folder
_MOST_RUNS = 1000
_MOST_FOLDERS = 50_000


def find_runs(root: Path, notes: list[str]) -> dict[str, Path]:
    """Returns the run folders at and below ``root``, by path from there, in natural order.

    Of more than 1,000 they are those written last, and ``notes`` say so.
    """
    found = list(each_run(root, notes))
    if len(found) > _MOST_RUNS:
        notes.append(
            f"{root}: {len(found):,} runs; shown are the {_MOST_RUNS:,} that were written to last"
        )
        found.sort(key=lambda run: max(stamps(run[1])))
    return dict(sorted(found[-_MOST_RUNS:], key=lambda run: natural(run[0])))


def each_run(root: Path, notes: list[str], most: int = _MOST_FOLDERS) -> Iterator[tuple[str, Path]]:
    """Yields every run folder as it is found, the last by name first, without links.

    It ends after ``most`` folders, and ``notes`` say so.
    """
    for count, (path, folders, files) in enumerate(os.walk(root)):
        if count == most:
            notes.append(
                f"{root}: more than {most:,} folders; the rest, from {path} on, is not looked "
                "into: name one below it"
            )
            return
        if REPORT_JSON in files or METRICS_JSONL in files:
            name = os.path.relpath(path, root)
            if name == ".":
                name = root.resolve().name
            yield name, Path(path)
            folders[:] = [name for name in folders if name not in ("checkpoints", "trace")]
        looked_into = [name for name in folders if not name.startswith(".")]
        folders[:] = sorted(looked_into, key=natural, reverse=True)


def stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Returns what changes when a run's files do: nanoseconds of the wall clock, and bytes."""
    found = [(0, 0)]
    for name in FILES:
        with suppress(OSError):
            status = (folder / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
    return tuple(found)


def told(
    folders: Mapping[str, Path], tell: Callable[[Path, str], str], notes: list[str]
) -> list[str]:
    """Returns what ``tell`` returns of each run in ``folders``; a run that fails is a note."""
    found = []
    for name, folder in folders.items():
        try:
            found.append(tell(folder, name))
        except Exception as error:
            notes.append(f"run {name} cannot be shown: {type(error).__name__}: {error}")
    return found


def run_json(folder: Path, name: str, buckets: int = BUCKETS) -> str:
    """Returns one run as JSON, in letters of ASCII."""
    run = read_run(folder, name, buckets=buckets)
    return json.dumps(run, allow_nan=False, separators=(",", ":"))


def read_run(folder: Path, name: str, buckets: int = BUCKETS) -> dict[str, Any]:
    """Returns one run as the page takes it, with ``notes`` on what is missing.

    Without a report yet, ``report`` has the figures of the ``latest`` window.
    """
    notes: list[str] = []

    def read(file: str, of: Callable[[Path], Any], missing: str = "") -> Any:
        try:
            return of(folder / file)
        except FileNotFoundError:
            if missing:
                notes.append(f"{file} is missing: {missing}")
        except OSError as error:
            notes.append(f"{file} cannot be read: {error.strerror or error}")
        except ValueError as error:
            notes.append(f"{file} is damaged: {error}")
        return None

    windows = read(METRICS_JSONL, read_windows, "there is no course over time")
    if windows is None:
        windows = Windows()
    elif not windows.last:
        notes.append(f"{METRICS_JSONL} has no window of steps yet")
    if windows.damaged:
        notes.append(f"{METRICS_JSONL} has {windows.damaged} damaged lines, which are left out")
    unfinished = "the run has not ended or was killed; what is shown is what it wrote so far"
    report = read(REPORT_JSON, lambda path: _fitting(path, REPORT), unfinished)
    last_step = windows.last.get("step", 0)
    if report and last_step > report.get("steps", math.inf):
        notes.append(
            f"{REPORT_JSON} is of step {report['steps']}; the run has gone on since, to step "
            f"{last_step}"
        )
    config = ".hydra/config.yaml"
    # a page of many runs has no room for pictures
    mistakes = batch = None
    if buckets == BUCKETS:
        mistakes = read("mistakes.json", lambda path: _fitting(path, MISTAKES))
        batch = read("first_batch.json", lambda path: _fitting(path, FIRST_BATCH))
    return {
        "name": name,
        "changed_s": max(stamps(folder))[0] / 1e9,
        "report": fitted(latest(windows), REPORT) if report is None else report,
        "latest": report is None,
        "tuning": read("tuning.json", lambda path: _fitting(path, TUNING)),
        "mistakes": mistakes,
        "first_batch": batch,
        "course": course(windows, buckets),
        "config": read(
            config, lambda _: read_inside(folder, config)[:32_000].decode("utf-8", "replace")
        ),
        "notes": notes,
    }


def _fitting(path: Path, shape: Any) -> Any:
    """Returns what of a JSON file fits ``shape``; ``ValueError``: nothing does."""
    found = fitted(read_json(path), shape)
    if found is None:
        raise ValueError("it does not hold what a run writes")
    return found
