"""Summarizes a finished sweep: a table of its jobs, and one page for all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..monitor.console import aligned, say
from ..runtime.files import read_written, write_whole
from ..runtime.folder import log
from .page.document import write_sweep
from .page.runs import REPORT_JSON, find_runs, overrides, read_run, repeats

_FIGURES = {"top1": ".4f", "images_per_s": ".0f", "data_wait_fraction": ".1%"}


def report_failure(folder: Path, error: str, overridden: Sequence[str]) -> None:
    """Writes a report for a job that ended with ``error``, unless there is one with steps."""
    path = folder / REPORT_JSON
    run = {"name": folder.name, "overrides": overridden}
    with suppress(OSError, ValueError):
        if not path.exists() or "steps" not in read_written(path):
            found = {"status": "failed", "error": error, "run": run}
            write_whole(path, json.dumps(found).encode())


def conclude(sweep: Any) -> None:
    """Prints a table of the jobs in the folder ``sweep.dir`` and writes a page for them."""
    try:
        root = Path(sweep.dir)
        jobs = {name: read_run(at, name)["report"] for name, at in find_runs(root).items()}
        # no job started
        if not jobs:
            return
        typed = [*map(overrides, jobs.values())]
        shared = set(max(typed)).intersection(*filter(None, typed))
        rows = []
        for (name, job), overridden in zip(jobs.items(), typed, strict=True):
            figures = [
                format(job[key], digits) if key in job else "-" for key, digits in _FIGURES.items()
            ]
            differs = " ".join(each for each in overridden if each not in shared)
            rows.append((name, differs, *figures, job.get("error") or job.get("status", "-")))
        columns = ("job", "differs", "top-1", "images/s", "data wait", "status")
        for line in ("", *aligned(columns, rows), *repeats(find_runs(root))):
            say(line)
        say(f"look at them   {os.path.relpath(write_sweep(root)[0])}")
    except Exception as error:
        # a failing table must not change how the sweep ends
        log.warning("the table of jobs: %s: %s", type(error).__name__, error)
