"""Writes ``report.html`` for a run or a sweep as one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from string import Template

from ...runtime.files import write_whole
from .course import declared
from .runs import BUCKETS, find_runs, map_runs, repeats, run_json

ASSETS = Path(__file__).parent
# each imports from those before it
SCRIPTS = (
    "dom.js", "format.js", "marks.js", "plot.js", "bars.js",
    "course.js", "supply.js", "mistakes.js", "run.js", "sweep.js", "page.js",
)  # fmt: skip
STYLE = "page.css"

# the run's logger; the module that defines it is slow to import
_log = logging.getLogger("wellfed")


def write_report(folder: Path) -> None:
    """Writes ``report.html`` for the run in ``folder`` atomically.

    Failures are only logged.
    """
    path = folder / "report.html"
    try:
        name = run_name(folder)
        write_whole(path, page([run_json(folder, name)], (), name).encode())
    # the run is over: a failure here must not change how it ends
    except Exception as error:
        _log.warning("%s: %s; the run continues without it", path, error)


def write_sweep(root: Path) -> tuple[Path, int, list[str]]:
    """Writes ``report.html`` for all runs at and below ``root``.

    Returns its path, the number of runs, and notes about repeats and omissions.

    Raises:
        FileNotFoundError: there is no run.
        OSError: the file cannot be written.
    """
    folders = find_runs(root)
    if not folders:
        raise FileNotFoundError(
            f"{root} contains no run (a folder with report.json or metrics.jsonl); pass a run or "
            "sweep folder"
        )
    # with more runs, each gets fewer points, so that a sweep's page stays below a megabyte
    buckets = max(60, min(BUCKETS, 3 * BUCKETS // len(folders)))
    notes = repeats(folders)
    runs = map_runs(folders, partial(run_json, buckets=buckets), notes)
    path = root / "report.html"
    write_whole(path, page(runs, notes, run_name(root)).encode())
    return path, len(runs), notes


def run_name(folder: Path) -> str:
    """Returns a run's name as TensorBoard shows it below ``outputs``: ``2026-11-22/05-51-05``."""
    path = folder.resolve()
    below = re.search(r"(?s).*/(?:outputs|multirun)/(.+)", str(path))
    return below[1] if below else path.name


def page(runs: Sequence[str], notes: Sequence[str], name: str) -> str:
    """Returns the page as HTML: ``runs``, as from ``run_json``, below ``notes``."""
    script = bundle()
    return Template(asset("page.html")).substitute(
        title=html.escape(f"Data stalls: {name}"),
        # no other script may run
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=asset(STYLE),
        # a run's text cannot end its element
        data=listed(runs, notes).replace("<", "\\u003c"),
        script=script,
    )


def listed(runs: Sequence[str], notes: Sequence[str]) -> str:
    """Returns the JSON that the page starts from: ``runs``, and ``notes`` about all of them."""
    head = json.dumps({"notes": notes, "declared": declared()})
    return f'{head[:-1]}, "runs": [{",".join(runs)}]}}'


def bundle() -> str:
    """Returns all scripts as one, each in a function that returns its exports.

    TensorBoard gets the original modules.
    """
    parts = ["const modules = {};\n"]
    for name in SCRIPTS:
        text = asset(name)
        exports = re.findall(r"^export (?:async )?(?:function|const) (\w+)", text, re.M)
        text = re.sub(
            r'^import (\{.*\}) from "\./(.*)";$', r'const \1 = modules["\2"];', text, flags=re.M
        )
        text = re.sub(r"^export ", "", text, flags=re.M)
        given = ", ".join(exports)
        parts.append(f'modules["{name}"] = (() => {{\n{text}return {{ {given} }};\n}})();\n')
    return "".join(parts)


def asset(name: str) -> str:
    """Returns the text of a file in this folder."""
    return (ASSETS / name).read_text(encoding="utf-8")
