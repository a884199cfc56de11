"""A checkpoint of a given state, for tests of what reads it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from harness.training import checkpoint
from harness.training.checkpoint import Record


def commit(
    folder: Path, state: dict[str, Any], top1: float | None = None, keep_last: int = 2
) -> Record:
    """Saves ``state``, which holds its step and epoch."""
    file = checkpoint.packed(state, BytesIO())
    return checkpoint.commit(folder, file, state["step"], state["epoch"], top1, keep_last)
