"""A checkpoint of a given state, for tests of what reads it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from harness.training import saving
from harness.training.checkpoint import Record, records


def commit(
    folder: Path, state: dict[str, Any], top1: float | None = None, keep_last: int = 2
) -> Record:
    """Saves ``state``, which holds its step and epoch, as a run that has just started."""
    file = BytesIO()
    torch.save(state, file)
    saving.clear(folder)
    facts = state["step"], state["epoch"], top1, keep_last
    return saving.commit(folder, records(folder), file, *facts)[-1]
