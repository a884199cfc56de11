"""Watches a Lightning Trainer with a callback, and reports at the end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from .own import watching


class WellfedCallback(Callback):
    """Watches ``trainer.fit`` as ``wellfed.watching(out)`` does.

    Args:
        out: folder for the report; None for ``outputs/<date>/<time>``.
    """

    def __init__(self, out: str | Path | None = None) -> None:
        self._out = out
        self._stack = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begins watching before the first batch is requested."""
        if stage == "fit":
            self._stack.enter_context(watching(self._out))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Reports a fit that ends with an error or Ctrl-C."""
        self._stack.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reports a completed fit."""
        self._stack.close()
