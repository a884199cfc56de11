"""A checkpoint of a given state, for tests of what reads it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from harness.training import checkpoint_write
from harness.training.checkpoint_read import Record, records


def commit(
    folder: Path, state: dict[str, Any], top1: float | None = None, keep_last: int = 2
) -> Record:
    """Saves ``state``, which holds its step and epoch, as a run that has just started."""
    file = BytesIO()
    torch.save(state, file)
    checkpoint_write.clear(folder)
    facts = state["step"], state["epoch"], top1, keep_last
    return checkpoint_write.commit(folder, records(folder), file, *facts)[-1]
