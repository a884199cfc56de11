"""Small data sets that worker processes can import, and settings to load them with."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from harness.feed.interface import FeedSettings
from harness.runtime import workers
from harness.runtime.errors import BadSample
from harness.runtime.seeding import sample_rng
from harness.watch.stages import Lap


class Noise:
    """Sample ``index`` of an epoch: 3 x 4 x 4 pixels drawn for (epoch, index), with the label ``index % 10``."""

    image_size = 4

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        """Write one sample into ``out`` and return its label."""
        out[:] = np.frombuffer(sample_rng(0, epoch, index).randbytes(out.size), np.uint8).reshape(out.shape)
        return index % 10


class Staged(Noise):
    """``Noise`` in two stages; sample ``bad`` is refused in the second."""

    stages = ("draw", "label")

    def __init__(self, length: int, bad: int | None = None) -> None:
        super().__init__(length)
        self.bad = bad

    def fill(self, epoch: int, index: int, out: np.ndarray, lap: Lap | None = None) -> int:
        label = super().fill(epoch, index, out)
        if lap is not None:
            lap("draw")
        if index == self.bad:
            refuse()
        if lap is not None:
            lap("label")
        return label


class Troubled(Noise):
    """``Noise`` that calls ``trouble`` before it fills sample ``index``."""

    def __init__(self, length: int, index: int, trouble: Callable[[], object]) -> None:
        super().__init__(length)
        self.index, self.trouble = index, trouble

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        if index == self.index:
            self.trouble()
        return super().fill(epoch, index, out)


def refuse() -> NoReturn:
    raise BadSample("cats/7.jpg", "empty file")


def stop() -> NoReturn:
    raise StopIteration


def raise_unpicklable() -> NoReturn:
    class Local(RuntimeError):
        pass

    raise Local("cannot travel")


def hang() -> None:
    threading.Event().wait()


def hang_in_a_segment() -> None:
    """Hang as a worker that is about to hand over a batch: what it shares still has its name."""
    Path(f"/dev/shm/torch_{os.getpid()}_1_1").touch()
    hang()


def wait_for(path: Path) -> None:
    """Come back once ``path`` exists."""
    while not path.exists():
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def draw() -> tuple[float, float, torch.Tensor]:
    """Numbers from each of the global generators."""
    return random.random(), float(np.random.rand()), torch.rand(1)


def settings(
    num_workers: int = 0,
    *,
    batch_size: int = 4,
    prefetch_factor: int = 2,
    persistent_workers: bool = False,
    timeout_s: float = 60.0,
    start_method: str = "forkserver",
) -> FeedSettings:
    """Settings of a small feed."""
    return FeedSettings(
        batch_size=batch_size,
        num_workers=num_workers,
        pin_memory=False,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
        timeout_s=timeout_s,
        start_method=start_method,
    )


def start_server() -> None:
    """Start the fork server with what workers under pytest import, so that each takes a moment and not seconds."""
    workers.start_server(["pytest", "harness.feed.processes", "harness.data.datasets"])


def left_behind() -> list[str]:
    """Worker processes and shared memory of this process that are still there."""
    gc.collect()
    held = [os.readlink(path) for path in Path(f"/proc/{os.getpid()}/fd").iterdir() if path.is_symlink()]
    segments = [target for target in held if target.startswith("/dev/shm/torch_")]
    named = [str(path) for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    return [*map(str, multiprocessing.active_children()), *segments, *named]
