"""A feed's worker for ``run.py``: batches of known work, timed and not."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import numpy as np

from harness.clock.stages import Lap, StageMeter, StageTimer, Stamps
from harness.feed.base import BatchWorker
from scripts.bench.paired import Cost, Plan

STAGES = ("read", "decode", "crop", "write")
# samples
BATCH = 32


class Making:
    """A dataset whose samples take ``work`` in each stage."""

    stages = STAGES
    image_size = 8
    skips = False

    def __init__(self, work: int) -> None:
        self.work = work

    def __len__(self) -> int:
        return BATCH

    def fill(self, epoch: int, index: int, out: np.ndarray, lap: Lap | None = None) -> int:
        """Does the work and reports each stage to ``lap``."""
        for stage in STAGES:
            sum(range(self.work))
            if lap is not None:
                lap(stage)
        return 0


class Untimed(StageTimer):
    """A timer that reads no clock."""

    def __init__(self) -> None:
        self._stamps = Stamps(0.0, 0.0, 0.0)

    def begin(self, samples: int) -> None:
        """Does nothing."""

    def mark(self, stage: str) -> None:
        """Nothing."""

    def end(self, samples: int) -> Stamps:
        """Returns no times."""
        return self._stamps


class Worker:
    """Makes batches with ``work`` per sample, timed for ``meter`` if given."""

    def __init__(self, work: int, meter: StageMeter | None) -> None:
        self._filler = BatchWorker(Making(work), 0, meter, False)
        if meter is None:
            self._filler.timer = Untimed()
        self._timers: Any = None
        self._indices = np.arange(BATCH)
        self._labels = np.zeros(BATCH, np.int64)
        self._pixels = np.zeros((BATCH, 3, Making.image_size, Making.image_size), np.uint8)

    def make(self, batches: int) -> None:
        """Makes ``batches`` batches."""
        for _ in range(batches):
            self._timers = self._filler.timer.begin(BATCH)
            self._filler.fill(self._timers, 0, self._indices, self._pixels, self._labels)

    def clocks(self) -> Hashable:
        """Returns the clocks that timed samples of the last batch; most batches time none."""
        return self._timers is not None


def timers_cost(work: int, runs: int) -> Cost:
    """Measures the stages' timers on a batch with ``work`` per sample.

    Batches that time samples are separate kinds.
    """
    timed = Worker(work, StageMeter(STAGES, 0))
    bare = Worker(work, None)
    return Cost.of(timed.make, bare.make, Plan(runs, now=time.thread_time, kind=timed.clocks))
