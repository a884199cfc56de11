"""The tab "Data stalls" in TensorBoard: the page's files, the list of runs, one run.

TensorBoard imports this file when it starts and would not start if that failed. So it needs the
standard library alone, and whatever goes wrong later is told in the tab.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]

from harness.page.report import SCRIPTS, STYLE, asset, listed
from harness.page.runs import BUCKETS, each_run, find_runs, run_json, stamps, told

# folders, to see whether there is a run at all
_GLANCED_AT = 2000


class StallsPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Serves the page's scripts, and what the run folders below the logdir hold.

    It reads the folders' own files and no events, so that it works with either of TensorBoard's
    loaders.
    """

    plugin_name = "data_stalls"

    def __init__(self, context: base_plugin.TBContext) -> None:
        # --logdir_spec has none, and nothing is found
        self._root = Path(context.logdir or os.devnull).expanduser()
        self._has_run = False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Returns the tab's name and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/tab.js", tab_name="Data stalls")

    def is_active(self) -> bool:
        """Says whether there is, or may be, a run to show, or an error."""
        unseen: list[str] = []
        try:
            # TensorBoard asks again and again: a run that was seen is not looked for
            self._has_run = self._has_run or any(each_run(self._root, unseen, _GLANCED_AT))
        except Exception:
            return True
        # more folders than a glance can tell of
        return self._has_run or bool(unseen)

    def get_plugin_apps(self) -> dict[str, Any]:
        """Returns what is served below ``data/plugin/data_stalls``, by path.

        It is the page's files, ``/runs`` with few points of each run, and ``/run?name=`` with as
        many as fit.
        """

        def every(query: str) -> str:
            notes: list[str] = []
            if re.match(r"\w+:/", str(self._root)):
                notes.append(
                    f"{self._root} is not on this machine: the page reads folders on a disk only"
                )
            runs = find_runs(self._root, notes)
            shown = told(runs, lambda folder, name: _run(folder, name, 60, stamps(folder)), notes)
            return listed(shown, notes)

        def one(query: str) -> str:
            name = parse_qs(query).get("name", [""])[0]
            # a name is looked up and never made into a path
            folder = find_runs(self._root, [])[name]
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
    """Returns one run as JSON, made again if one of its ``files`` has changed."""
    return run_json(folder, name, buckets=buckets)


def _app(kind: str, make: Callable[[str], str]) -> Any:
    """Returns what serves the text that ``make`` gives for a query.

    What goes wrong is told in the tab and stops nothing else.
    """

    # as WSGI has it
    def app(environ: Any, start: Any) -> list[bytes]:
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
