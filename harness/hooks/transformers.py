"""Watches a Hugging Face Trainer with a callback, and reports at the end."""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .own import watching


class WellfedCallback(TrainerCallback):
    """Watches ``trainer.train`` as ``wellfed.watching(out)`` does.

    The Trainer has no callback for errors: a failed training run is reported at process exit.

    Args:
        out: folder for the report; None for ``outputs/<date>/<time>``.
    """

    def __init__(self, out: str | Path | None = None) -> None:
        self._out = out
        self._stack = ExitStack()
        atexit.register(self._failed)

    def on_train_begin(self, *told: Any, **more: Any) -> None:
        """Begins watching before the first batch."""
        self._stack.enter_context(watching(self._out))

    def on_train_end(self, *told: Any, **more: Any) -> None:
        """Reports a completed training run."""
        self._stack.close()

    def _failed(self) -> None:
        error = getattr(sys, "last_value", None) or RuntimeError("training did not finish")
        self._stack.__exit__(type(error), error, error.__traceback__)
