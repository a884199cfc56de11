"""What the tab in TensorBoard asks for: the page's files, the list of runs, one run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from harness.page.report import SCRIPTS, STYLE, asset, listed
from harness.page.runs import BUCKETS, each_run, find_runs, run_json, stamps, told

# folders, to see whether there is a run at all
_GLANCED_AT = 2000

App = Callable[[Mapping[str, Any], Callable[..., Any]], Iterable[bytes]]  # WSGI


def has_run(root: Path) -> bool:
    """Says whether there is a run below ``root``, or so much that a glance cannot tell."""
    unseen: list[str] = []
    return any(each_run(root, unseen, _GLANCED_AT)) or bool(unseen)


def apps(root: Path) -> dict[str, App]:
    """Returns what is served, by path.

    They are the page's files, ``/runs`` with few points of each run below ``root``, and
    ``/run?name=`` with as many as fit.
    """

    def every(query: str) -> str:
        notes: list[str] = []
        if re.match(r"\w+:/", str(root)):
            notes.append(
                f"{root} is not on this machine: the page reads run folders on a disk only"
            )
        runs = find_runs(root, notes)
        shown = told(runs, lambda folder, name: _run(folder, name, 60, stamps(folder)), notes)
        return listed(shown, notes)

    def one(query: str) -> str:
        name = parse_qs(query).get("name", [""])[0]
        # a name is looked up and never made into a path
        folder = find_runs(root, [])[name]
        return _run(folder, name, BUCKETS, stamps(folder))

    def file(name: str) -> Callable[[str], str]:
        return lambda query: asset(name)

    served = {"/runs": _app("application/json", every), "/run": _app("application/json", one)}
    for name in ("tab.js", STYLE, *SCRIPTS):
        kind = "text/css" if name == STYLE else "text/javascript"
        served[f"/{name}"] = _app(kind, file(name))
    return served


@lru_cache(maxsize=1024)
def _run(folder: Path, name: str, buckets: int, files: object) -> str:
    """Returns one run as JSON, which is made again if one of its ``files`` has changed."""
    return run_json(folder, name, buckets=buckets)


def _app(kind: str, make: Callable[[str], str]) -> App:
    """Returns what serves the text that ``make`` gives for a query.

    What goes wrong is told in the tab and stops nothing else.
    """

    def app(environ: Mapping[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        status = "200 OK"
        try:
            text = make(environ.get("QUERY_STRING", ""))
        except KeyError as error:
            status = "404 Not Found"
            text = json.dumps({"error": f"there is no run {error}"})
        except Exception as error:
            status = "500 Internal Server Error"
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        body = text.encode()
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        start(status, [*headers.items()])
        return [body]

    return app
