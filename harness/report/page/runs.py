"""Finds run folders, and reads the page's content from their files."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ...runtime.files import known, natural, number, read_inside, read_written
from .course import Windows, course, latest, read_windows

# points of a full-width chart
BUCKETS = 400
REPORT_JSON = "report.json"
METRICS_JSONL = "metrics.jsonl"
FILES = (REPORT_JSON, METRICS_JSONL, "tuning.json", "mistakes.json", "first_batch.json")


def find_runs(root: Path) -> dict[str, Path]:
    """Returns the run folders at and below ``root``, by relative path, in natural order.

    Links are not followed.
    """
    found = {}
    for path, folders, files in os.walk(root):
        if REPORT_JSON in files or METRICS_JSONL in files:
            name = os.path.relpath(path, root)
            found[root.resolve().name if name == "." else name] = Path(path)
            folders[:] = [name for name in folders if name not in ("checkpoints", "trace")]
        folders[:] = [name for name in folders if not name.startswith(".")]
    return dict(sorted(found.items(), key=lambda run: natural(run[0])))


def stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Returns the modification times in ns and sizes in bytes of a run's files."""
    found = [(0, 0)]
    for name in FILES:
        with suppress(OSError):
            status = (folder / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
    return tuple(found)


def overrides(report: Mapping[str, Any]) -> list[str]:
    """Returns a run's overrides, except for ``resume=auto``, which does not change its result."""
    return [each for each in report.get("run", {}).get("overrides", []) if each != "resume=auto"]


def repeats(folders: Mapping[str, Path]) -> list[str]:
    """Returns a line on mean and spread per group of runs that differ only in fold and seed."""
    found: defaultdict[tuple[str, ...], dict[tuple[str, ...], float]] = defaultdict(dict)
    asked: dict[tuple[str, ...], str] = {}
    for folder in folders.values():
        with suppress(OSError, ValueError, KeyError):
            report = read_written(folder / REPORT_JSON)
            run, top1 = report["run"], report["top1"]
            if report["status"] != "completed":
                continue
            typed = overrides(report)
            own = tuple(x for x in typed if x.startswith(("data.fold=", "seed=")))
            key = tuple(sorted({*typed} - {*own}))
            kind = f"of {run['folds']} folds" if "folds" in run else "seeds"
            asked[key] = "runs" if len(own) > 1 else kind
            found[key][own] = top1
    return [
        f"{len(top1)} {asked[typed]}  top-1 {mean(top1.values()):.4f} "
        f"± {stdev(top1.values()):.4f} "
        f"({min(top1.values()):.4f} to {max(top1.values()):.4f})  {' '.join(typed)}"
        for typed, top1 in found.items()
        if len(top1) > 1
    ]


def map_runs(
    folders: Mapping[str, Path], tell: Callable[[Path, str], str], notes: list[str]
) -> list[str]:
    """Returns the result of ``tell`` for each run in ``folders``; a failure adds a note."""
    found = []
    for name, folder in folders.items():
        try:
            found.append(tell(folder, name))
        except Exception as error:
            notes.append(f"run {name} cannot be shown: {type(error).__name__}: {error}")
    return found


def run_json(folder: Path, name: str, buckets: int = BUCKETS) -> str:
    """Returns one run as ASCII JSON."""
    run = read_run(folder, name, buckets=buckets)
    return json.dumps(run, allow_nan=False, separators=(",", ":"))


def read_run(folder: Path, name: str, buckets: int = BUCKETS) -> dict[str, Any]:
    """Returns one run for the page, with ``notes`` about missing and damaged files.

    Before there is a report, ``report`` contains the ``latest`` window's metrics.
    """
    notes = []

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

    windows = read(METRICS_JSONL, read_windows, "there are no charts over time")
    if windows is None:
        windows = Windows()
    elif not windows.last:
        notes.append(f"{METRICS_JSONL} has no window of steps yet")
    if windows.damaged:
        notes.append(f"{METRICS_JSONL} has {windows.damaged} malformed lines, which were skipped")
    unfinished = "the run is unfinished or was killed; the page shows its output so far"
    report = read(REPORT_JSON, read_written, unfinished)
    last_step = windows.last.get("step", 0)
    if report and last_step > (number(report.get("steps")) or math.inf):
        notes.append(
            f"{REPORT_JSON} is from step {report['steps']}; the run has since continued to step "
            f"{last_step}"
        )
    config = ".hydra/config.yaml"
    # a page of many runs has no room for pictures
    mistakes = batch = None
    if buckets == BUCKETS:
        mistakes = read("mistakes.json", read_written)
        batch = read("first_batch.json", partial(read_written, kind=list))
    return {
        "name": name,
        "changed_s": max(stamps(folder))[0] / 1e9,
        "report": known(latest(windows)) if report is None else report,
        "latest": report is None,
        "tuning": read("tuning.json", read_written),
        "mistakes": mistakes,
        "first_batch": batch,
        "course": course(windows, buckets),
        "config": read(
            config, lambda _: read_inside(folder, config)[:32_000].decode("utf-8", "replace")
        ),
        "notes": notes,
    }
