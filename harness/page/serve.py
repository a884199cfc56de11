"""What the tab in TensorBoard asks for: the page's files, the list of runs, one run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from harness.page.report import ASSETS, SCRIPTS, STYLE, listed
from harness.page.runs import BUCKETS, FILES, each_run, find_runs, run_json, stamp, told

_FEW_BUCKETS = 60  # points of a small chart beside others
_GLANCED_AT = 2000  # folders, to see whether there is a run at all
_REMOTE = re.compile(r"\w+://")

App = Callable[[Mapping[str, Any], Callable[..., Any]], Iterable[bytes]]  # WSGI
Query = Mapping[str, list[str]]


def logdirs(logdir: str | None, spec: str | None) -> dict[str, str]:
    """Folders by label from ``--logdir``, whose label is empty, or else from
    ``--logdir_spec=label:path,label:path``.
    """
    if logdir:
        return {"": _expanded(str(logdir))}
    found: dict[str, str] = {}
    for item in filter(None, (spec or "").split(",")):
        label, colon, path = item.partition(":")
        if not colon or "/" in label or path.startswith("//"):
            label = path = item
        found[label] = _expanded(path)
    return found


def _expanded(path: str) -> str:
    """``path`` with a leading ``~`` as the home folder, which TensorBoard expands too."""
    return path if _REMOTE.match(path) else os.path.expanduser(path)


def has_run(folders: Mapping[str, str]) -> bool:
    """Whether there is a run in one of ``folders``, or may be one: so many folders that a glance
    cannot tell.
    """
    unseen: list[str] = []
    return any(
        next(each_run(Path(path), unseen, _GLANCED_AT), None) or unseen
        for path in _local(folders).values()
    )


def apps(folders: Mapping[str, str]) -> dict[str, App]:
    """What is served, by path: the page's files, ``/runs`` with few points of each, and
    ``/run?name=`` with as many as fit.
    """
    files = {f"/{name}": _file(ASSETS / name) for name in ("tab.js", STYLE, *SCRIPTS)}
    return {
        **files,
        "/runs": _answer(partial(_list, folders)),
        "/run": _answer(partial(_one, folders)),
    }


def _local(folders: Mapping[str, str]) -> dict[str, str]:
    return {label: path for label, path in folders.items() if not _REMOTE.match(path)}


def _runs(folders: Mapping[str, str], notes: list[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for label, path in _local(folders).items():
        found |= {
            f"{label}/{name}" if label else name: folder
            for name, folder in find_runs(Path(path), notes).items()
        }
    return found


def _list(folders: Mapping[str, str], query: Query) -> str:
    remote = [path for label, path in folders.items() if label not in _local(folders)]
    notes = [
        f"{path} is not on this machine: this page reads run folders on a local disk only"
        for path in remote
    ]
    runs = told(_runs(folders, notes), partial(_run, buckets=_FEW_BUCKETS), notes)
    return listed(runs, notes)


def _one(folders: Mapping[str, str], query: Query) -> str:
    name = query.get("name", [""])[0]
    return _run(
        _runs(folders, [])[name], name, BUCKETS
    )  # a name is looked up and never made into a path


def _run(folder: Path, name: str, buckets: int) -> str:
    """One run as JSON, read anew if one of its files has changed."""
    return _unchanged(folder, name, buckets, tuple(stamp(folder / file) for file in FILES))


@lru_cache(maxsize=1024)
def _unchanged(folder: Path, name: str, buckets: int, stamps: object) -> str:
    return run_json(folder, name, buckets=buckets)


def _file(path: Path) -> App:
    kind = "text/css" if path.suffix == ".css" else "text/javascript"
    return lambda environ, start: _reply(start, "200 OK", kind, path.read_bytes())


def _answer(make: Callable[[Query], str]) -> App:
    """Serves the JSON that ``make`` gives for a query; what goes wrong is told in the tab and stops
    nothing else.
    """

    def app(environ: Mapping[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            status = "200 OK"
            text = make(parse_qs(environ.get("QUERY_STRING", "")))
        except KeyError as error:
            status = "404 Not Found"
            text = json.dumps({"error": f"there is no run {error}"})
        except Exception as error:
            status = "500 Internal Server Error"
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        return _reply(start, status, "application/json", text.encode())

    return app


def _reply(start: Callable[..., Any], status: str, kind: str, body: bytes) -> list[bytes]:
    headers = {
        "Content-Type": f"{kind}; charset=utf-8",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    start(status, [*headers.items(), ("Content-Length", str(len(body)))])
    return [body]
