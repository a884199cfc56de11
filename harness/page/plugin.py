"""The tab "Data stalls" in TensorBoard, as TensorBoard finds it.

TensorBoard imports this file when it starts and would not start if that failed. So it needs next to
nothing, and whatever goes wrong later is told in the tab.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]

# that there is no run; TensorBoard asks whenever somebody looks at it, and waits for the answer
_RECALL_S = 60.0


class StallsPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Serves the page's scripts, and what the run folders below the logdir hold.

    It reads the folders' own files and no events, so that it works with either of TensorBoard's
    loaders.
    """

    plugin_name = "data_stalls"

    def __init__(
        self, context: base_plugin.TBContext, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._where = context.logdir, getattr(context.flags, "logdir_spec", None)
        self._now = now
        self._has_run = False
        self._looked_s = -_RECALL_S

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """The tab's name and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/tab.js", tab_name="Data stalls")

    def get_plugin_apps(self) -> dict[str, Any]:
        """What is served below ``data/plugin/data_stalls``."""
        try:
            from harness.page import serve

            return serve.apps(serve.logdirs(*self._where))
        except Exception as error:
            return {
                "/tab.js": _confession(
                    f"The page cannot be served: {type(error).__name__}: {error}"
                )
            }

    def is_active(self) -> bool:
        """Whether there is a run to show, or an error to tell."""
        try:
            from harness.page import serve

            if not self._has_run and self._now() - self._looked_s >= _RECALL_S:
                self._has_run = serve.has_run(serve.logdirs(*self._where))
                self._looked_s = self._now()
            return self._has_run
        except Exception:
            return True


def _confession(text: str) -> Any:
    """A script for the tab that shows ``text`` and nothing else."""
    body = (
        f"export async function render() {{ document.body.textContent = {json.dumps(text)}; }}"
    ).encode()
    kind = [
        ("Content-Type", "text/javascript; charset=utf-8"),
        ("X-Content-Type-Options", "nosniff"),
    ]

    def app(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", kind)
        return [body]

    return app
