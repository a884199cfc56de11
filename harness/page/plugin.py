"""The tab "Data stalls" in TensorBoard, as TensorBoard finds it.

TensorBoard imports this file when it starts and would not start if that failed. So it needs the
standard library alone, and whatever goes wrong later is told in the tab.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]

from harness.page import serve


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

    def get_plugin_apps(self) -> dict[str, Any]:
        """Returns what is served below ``data/plugin/data_stalls``, by path."""
        return serve.apps(self._root)

    def is_active(self) -> bool:
        """Says whether there is a run to show, or an error to tell."""
        try:
            # TensorBoard asks again and again: a run that was seen is not looked for
            self._has_run = self._has_run or serve.has_run(self._root)
        except Exception:
            return True
        return self._has_run
