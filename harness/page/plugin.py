"""The tab "Data stalls" in TensorBoard: the page's files, the list of runs, one run.

TensorBoard imports this file when it starts and would not start if that failed. So it imports the
rest of the page only when asked. What goes wrong with a request is told in the tab.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]

# folders, to see whether there is a run at all
_GLANCED_AT = 2000
# that there is no run is remembered for so long
_RECALL_S = 60.0


class StallsPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Serves the page's scripts, and what the run folders below the logdir hold.

    It reads the folders' own files and no events, so that it works with either of TensorBoard's
    loaders.
    """

    plugin_name = "data_stalls"

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._logdirs = logdirs(context.logdir, getattr(context.flags, "logdir_spec", None))
        self._has_run = False
        self._looked_s = -_RECALL_S

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Returns the tab's name and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/tab.js", tab_name="Data stalls")

    def is_active(self) -> bool:
        """Says whether there is, or may be, a run to show, or an error."""
        try:
            from harness.page.runs import each_run

            # TensorBoard asks again and again, and waits for the answer
            if not self._has_run and time.monotonic() - self._looked_s >= _RECALL_S:
                self._looked_s = time.monotonic()
                unseen: list[str] = []
                self._has_run = any(
                    # more folders than a glance can tell of
                    any(each_run(Path(path), unseen, _GLANCED_AT)) or unseen
                    for path in self._logdirs.values()
                )
            return self._has_run
        except Exception:
            return True

    def get_plugin_apps(self) -> dict[str, Any]:
        """Returns what is served below ``data/plugin/data_stalls``, by path.

        It is the page's files, ``/runs`` with few points of each run, and ``/run?name=`` with as
        many as fit.
        """
        from harness.page import document, runs

        def found(notes: list[str]) -> dict[str, Path]:
            folders: dict[str, Path] = {}
            for label, path in self._logdirs.items():
                if "://" in path:
                    notes.append(
                        f"{path} is not on this machine: the page reads folders on a disk only"
                    )
                    continue
                for name, folder in runs.find_runs(Path(path), notes).items():
                    folders[os.path.join(label, name)] = folder
            return folders

        # made again if one of the run's files has changed
        kept = lru_cache(maxsize=1024)(lambda stamps, *run: runs.run_json(*run))

        def tell(folder: Path, name: str, buckets: int = 60) -> str:
            return kept(runs.stamps(folder), folder, name, buckets)

        def every(query: str) -> str:
            notes: list[str] = []
            return document.listed(runs.told(found(notes), tell, notes), notes)

        def one(query: str) -> str:
            name = parse_qs(query).get("name", [""])[0]
            # a name is looked up and never made into a path
            return tell(found([])[name], name, runs.BUCKETS)

        def file(name: str) -> Callable[[str], str]:
            return lambda query: document.asset(name)

        served = {"/runs": _app("application/json", every), "/run": _app("application/json", one)}
        for name in ("tab.js", document.STYLE, *document.SCRIPTS):
            kind = "text/css" if name == document.STYLE else "text/javascript"
            served[f"/{name}"] = _app(kind, file(name))
        return served


def logdirs(logdir: str | None, spec: str | None) -> dict[str, str]:
    """Returns folders by label, from ``--logdir`` or from ``--logdir_spec=label:path,label:path``.

    The label of ``--logdir`` is empty. A tilde is the home folder, as TensorBoard has it.
    """
    if logdir:
        return {"": os.path.expanduser(logdir)}
    found = {}
    for item in filter(None, (spec or "").split(",")):
        label, colon, path = item.partition(":")
        if not colon or "/" in label or path.startswith("//"):
            label = path = item
        found[label] = os.path.expanduser(path)
    return found


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
