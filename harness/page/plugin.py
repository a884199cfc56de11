"""The tab "Data stalls" in TensorBoard, as TensorBoard finds it.

TensorBoard imports this file when it starts and would not start if that failed. So it needs next to
nothing, and whatever goes wrong later is told in the tab.
"""

from __future__ import annotations

import json
from typing import Any

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]


class StallsPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Serves the page's scripts, and what the run folders below the logdir hold.

    It reads the folders' own files and no events, so that it works with either of TensorBoard's
    loaders.
    """

    plugin_name = "data_stalls"

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._logdir = context.logdir
        self._spec = getattr(context.flags, "logdir_spec", None)
        self._has_run = False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Returns the tab's name and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/tab.js", tab_name="Data stalls")

    def get_plugin_apps(self) -> dict[str, Any]:
        """Returns what is served below ``data/plugin/data_stalls``, by path."""
        try:
            from harness.page import serve

            return serve.apps(serve.logdirs(self._logdir, self._spec))
        except Exception as error:
            said = json.dumps(f"The page cannot be served: {type(error).__name__}: {error}")

        # a script that shows what is wrong and nothing else
        def confess(environ: Any, start: Any) -> list[bytes]:
            kind = ("Content-Type", "text/javascript; charset=utf-8")
            start("200 OK", [kind, ("X-Content-Type-Options", "nosniff")])
            body = f"export async function render() {{ document.body.textContent = {said}; }}"
            return [body.encode()]

        return {"/tab.js": confess}

    def is_active(self) -> bool:
        """Says whether there is a run to show, or an error to tell."""
        try:
            from harness.page import serve

            if not self._has_run:
                self._has_run = serve.has_run(serve.logdirs(self._logdir, self._spec))
            return self._has_run
        except Exception:
            return True
