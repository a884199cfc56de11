"""Serves the "Data stalls" tab in TensorBoard.

TensorBoard imports this file at startup and would not start if that failed, so the rest of the page
is imported on request. The tab shows request errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]
from werkzeug import Request, Response


class StallsPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Serves the page's scripts and the runs below the logdir.

    It reads the runs' own files, not events, so it works with either of TensorBoard's loaders.
    """

    plugin_name = "data_stalls"

    def __init__(self, context: base_plugin.TBContext) -> None:
        # TensorBoard expands a tilde too
        self._logdir = os.path.expanduser(context.logdir or "")

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Returns the tab's name and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/tab.js", tab_name="Data stalls")

    def is_active(self) -> bool:
        """Returns True, because there may be runs, and searching all folders is slow."""
        return True

    def get_plugin_apps(self) -> dict[str, Any]:
        """Returns the apps served under ``data/plugin/data_stalls``, keyed by path.

        These are the page's files, ``/runs`` with few points per run, and ``/run?name=`` with as
        many as fit.
        """
        from . import document, runs

        def found(notes: list[str]) -> dict[str, Path]:
            if self._logdir and "://" not in self._logdir:
                return runs.find_runs(Path(self._logdir))
            notes.append(f"--logdir={self._logdir}: the page reads only local folders")
            return {}

        # rebuilt if one of the run's files changes
        kept = lru_cache(maxsize=1024)(lambda stamps, *run: runs.run_json(*run))

        def tell(folder: Path, name: str, buckets: int = 60) -> str:
            return kept(runs.stamps(folder), folder, name, buckets)

        def every(query: Mapping[str, str]) -> str:
            notes: list[str] = []
            return document.listed(runs.map_runs(found(notes), tell, notes), notes)

        def one(query: Mapping[str, str]) -> str:
            # names are looked up, never used as paths
            return tell(found([])[query["name"]], query["name"], runs.BUCKETS)

        def file(name: str) -> Callable[[Mapping[str, str]], str]:
            return lambda query: document.asset(name)

        served = {"/runs": _app("application/json", every), "/run": _app("application/json", one)}
        for name in ("tab.js", document.STYLE, *document.SCRIPTS):
            kind = "text/css" if name == document.STYLE else "text/javascript"
            served[f"/{name}"] = _app(kind, file(name))
        return served


def _app(kind: str, make: Callable[[Mapping[str, str]], str]) -> Any:
    """Returns an app that serves the text that ``make`` returns for a query.

    Errors are shown in the tab and have no other effect.
    """

    @Request.application
    def app(request: Request) -> Response:
        status = 200
        try:
            text = make(request.args)
        except KeyError as error:
            status = 404
            text = json.dumps({"error": f"there is no run {error}"})
        except Exception as error:
            status = 500
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return Response(text, status, headers, content_type=f"{kind}; charset=utf-8")

    return app
