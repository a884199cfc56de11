"""The page as a file: ``report.html`` of a run or of a sweep, which needs nothing but itself."""

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

from harness.page.course import declared
from harness.page.runs import BUCKETS, find_runs, run_json, told
from harness.runtime.files import write_whole

ASSETS = Path(__file__).parent
SCRIPTS = (  # each imports from those before it
    "dom.js", "format.js", "marks.js", "plot.js", "bars.js", "course.js", "supply.js", "run.js", "sweep.js", "page.js",
)  # fmt: skip
STYLE = "page.css"
_FEWEST_BUCKETS = 60

_log = logging.getLogger(
    "wellfed"
)  # the run's own, whose name stands in a room that is too heavy to import


def write_report(folder: Path) -> None:
    """Write ``report.html`` of the run in ``folder``, whole or not at all; a page that cannot be
    made costs a warning alone.
    """
    try:
        name = run_name(folder)
        write_page(folder / "report.html", [run_json(folder, name)], (), name)
    except (
        Exception
    ) as error:  # the run is over and has its report.json: nothing here may change how it ends
        _log.warning("%s: %s; the run goes on without it", folder / "report.html", error)


def write_sweep(root: Path) -> tuple[Path, int, list[str]]:
    """Write ``report.html`` of all runs at and below ``root``; the file, of how many runs it is,
    and what is not in it.

    Raises:
        FileNotFoundError: there is no run.
        OSError: the file cannot be written.
    """
    notes: list[str] = []
    folders = find_runs(root, notes)
    if not folders:
        raise FileNotFoundError(
            f"{root}: no run below it (a folder with report.json or metrics.jsonl); give a run or "
            "a sweep"
        )
    buckets = max(
        _FEWEST_BUCKETS, min(BUCKETS, 3 * BUCKETS // len(folders))
    )  # the page stays below a megabyte
    path = root / "report.html"
    runs = told(folders, partial(run_json, buckets=buckets), notes)
    write_page(path, runs, notes, run_name(root))
    return path, len(runs), notes


def run_name(folder: Path) -> str:
    """Returns the name of a run as ``tensorboard --logdir outputs`` shows it, such as
    ``2026-11-22/05-51-05``.
    """
    parts = folder.resolve().parts
    roots = [place for place, part in enumerate(parts[:-1]) if part in ("outputs", "multirun")]
    return "/".join(parts[roots[-1] + 1 :]) if roots else parts[-1]


def write_page(path: Path, runs: Sequence[str], notes: Sequence[str], name: str) -> None:
    """Writes the page of ``runs``, as ``run_json`` gives them, with ``notes`` on top, whole or not
    at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, page(runs, notes, title=f"Data stalls: {name}").encode())


def page(runs: Sequence[str], notes: Sequence[str], title: str) -> str:
    """The whole page as HTML."""
    script = bundle()
    data = listed(runs, notes).replace("<", "\\u003c")  # cannot end its element
    parts = {
        "title": html.escape(title),
        "digest": base64.b64encode(
            hashlib.sha256(script.encode()).digest()
        ).decode(),  # no other script may run
        "style": asset(STYLE),
        "data": data,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset("page.html"))


def listed(runs: Sequence[str], notes: Sequence[str]) -> str:
    """The JSON that the page starts from: ``runs``, as ``run_json`` gives them, and ``notes`` on
    all of them.
    """
    head = json.dumps({"notes": [*notes], "declared": declared()})
    return f'{head[:-1]}, "runs": [{",".join(runs)}]}}'


def bundle() -> str:
    """All scripts as one, each in a scope of its own; in TensorBoard they are served as the modules
    that they are.
    """
    return f"const modules = {{}};\n{''.join(map(_scoped, SCRIPTS))}"


def _scoped(name: str) -> str:
    """A script as a function's body that gives its exports."""
    text = re.sub(
        r'^import (\{.*\}) from "\./(.*)";$', r'const \1 = modules["\2"];', asset(name), flags=re.M
    )
    exports = re.findall(r"^export (?:async )?(?:function|const) (\w+)", text, flags=re.M)
    body = re.sub(r"^export ", "", text, flags=re.M)
    return f'modules["{name}"] = (() => {{\n{body}return {{ {", ".join(exports)} }};\n}})();\n'


def asset(name: str) -> str:
    """The text of a file that lies beside this one."""
    return (ASSETS / name).read_text(encoding="utf-8")
