"""train.py whose step sleeps in place of computing, as a device would, and whose files may come late.

SLEPT_STEP_MS=40 SLEPT_READ_MS=5,0@20 uv run scripts/slept_run.py data=shapes

``5,0@20`` is 5 until 20 s after the start, and 0 from then on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import train
from harness.data.storage import FolderSource
from harness.runtime import signals

STEP, READ, BEGAN = "SLEPT_STEP_MS", "SLEPT_READ_MS", "SLEPT_BEGAN_S"
os.environ.setdefault(BEGAN, str(time.time()))
_read = FolderSource.read


def sleep(name: str) -> None:
    """Wait as long as the variable ``name`` says for now."""
    now_ms, since_s = 0.0, time.time() - float(os.environ[BEGAN])
    for part in os.environ[name].split(","):
        ms, _, at_s = part.partition("@")
        if since_s >= float(at_s or 0):
            now_ms = float(ms)
    time.sleep(now_ms / 1e3)


def read(self: FolderSource, i: int) -> Any:
    """The file, after the wait."""
    sleep(READ)
    return _read(self, i)


# at each import: workers import this file too
if READ in os.environ:
    FolderSource.read = read  # type: ignore[method-assign]

if __name__ == "__main__":
    if STEP in os.environ:
        import torch

        from harness.training.step import Step

        def step(self: Step, images: torch.Tensor, labels: torch.Tensor, *, part: int = 0, parts: int = 1) -> None:
            """Sleep for as long as a step takes; the loss is 1."""
            sleep(STEP)
            self._losses.append(torch.ones(()))
            self.state.step += part == parts - 1

        Step.__call__ = step  # type: ignore[method-assign]
    sys.argv[1:1] = ["--config-path", str(Path(train.__file__).with_name("conf"))]
    with signals.caught(grace_s=0):
        signals.leave(train.cli())
