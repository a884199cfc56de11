"""Runs train.py with a sleeping step in place of a device, and with slow files.

For example::

    SLEPT_STEP_MS=40 SLEPT_READ_MS=5,0@20 uv run python -m scripts.bench.tuner.slept_run data=shapes

With ``SLEPT_LARGE=FOLDER@13``, files are read from FOLDER from 13 seconds after the start.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from harness.cli import app
from harness.data.storage import FileSource
from harness.runtime import signals
from scripts.bench.tuner.slept import LARGE, READ, STEP, since_s, sleep

_read = FileSource.read


@cache
def large_files() -> list[Path]:
    """Returns the JPEG files of the folder that ``SLEPT_LARGE`` names."""
    return sorted(Path(os.environ[LARGE].rpartition("@")[0]).rglob("*.jpg"))


def read(self: FileSource, i: int) -> Any:
    """Returns the file's bytes and its label, after the wait."""
    sleep(READ)
    data, label = _read(self, i)
    if LARGE in os.environ and since_s() >= float(os.environ[LARGE].rpartition("@")[2]):
        files = large_files()
        data = files[i % len(files)].read_bytes()
    return data, label


# at each import: workers import this file too
if READ in os.environ or LARGE in os.environ:
    FileSource.read = read  # type: ignore[method-assign]

if __name__ == "__main__":
    if STEP in os.environ:
        import torch

        from harness.training.step import Step

        def step(
            self: Step, images: torch.Tensor, labels: torch.Tensor, *, part: int = 0, parts: int = 1
        ) -> None:
            """Sleeps for the time of a step; the loss is 1."""
            sleep(STEP)
            self._losses.append(torch.ones(()))
            self.state.step += part == parts - 1

        Step.__call__ = step  # type: ignore[method-assign]
    with signals.handle_signals(grace_s=0):
        signals.leave(app.cli())
