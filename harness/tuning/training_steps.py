"""Times a run's training steps for tuning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from ..clock.clock import StepClock
from ..config import Precision
from ..feed.base import Backend, HostBatch
from ..training.optimizer import Schedule
from ..training.step import Step, autocast_of
from .snapshot import Snapshot
from .steps import Batches, StepBenchmark, StepRun


class TrainingBenchmark(StepBenchmark):
    """The training step as measured by tuning, inside ``preserved_state()``.

    Args:
        step: the run's own step.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step.world, step.config.trainer.accumulate_steps)
        self._step = step

    @contextmanager
    def preserved_state(self) -> Iterator[None]:
        """Enters training mode and restores everything at the end.

        Learning rates are 0 during this time, because repeated steps on one batch could diverge to
        NaN, for which timings are not representative. An update costs the same at any learning
        rate. The copy of the state is in host memory. The weights' EMA is not updated.
        """
        state = self._step.state
        step = state.step
        snapshot = Snapshot((state.network, state.optimizer, state.scaler), self.device)
        self._made = 0
        average = state.average
        state.average = None
        schedule = state.schedule
        try:
            self._step.begin_epoch()
            state.schedule = Schedule(state.optimizer, lambda _: 0.0)
            yield
        finally:
            snapshot.restore()
            state.step = step
            state.average = average
            state.schedule = schedule
            # a failed step may have left metrics
            self._step.forget()

    @contextmanager
    def in_bf16(self) -> Iterator[None]:
        """Makes steps compute in bfloat16."""
        own = self._step.autocast
        self._step.autocast = autocast_of(Precision.bf16, self.device)
        try:
            yield
        finally:
            self._step.autocast = own

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        """As in ``StepBenchmark``."""
        run = super().demand(batch, limit_s)
        if self._step.config.loader.device_prefetch:
            # a separate thread loads while the host launches the step
            run = run._replace(launch_s=0.0)
        return run

    def repeated(self, batch: HostBatch) -> Batches:
        """As in ``StepBenchmark``; the batch is on the device as uint8.

        Each step augments and normalizes the batch as in training, because that is part of the
        step, not of the loader.
        """
        images = self._own.copy(batch.images)
        placed = batch._replace(images=images, labels=self._own.copy(batch.labels))
        with closing(self._step.batches(itertools.repeat(placed))) as batches:
            yield from batches

    def fed(self, feed: Backend, clock: StepClock) -> Batches:
        """As in ``StepBenchmark``; with several ranks, yields black batches if ``feed`` fails."""
        with closing(self._step.batches(feed, clock)) as batches:
            try:
                yield from batches
            except Exception as error:
                if self.world.size == 1:
                    raise
                self._failed = error
        size = self._step.config.data.image_size
        labels = torch.zeros(feed.settings.batch_size, dtype=torch.int64)
        images = torch.zeros(len(labels), 3, size, size, dtype=torch.uint8)
        yield from self.repeated(HostBatch(images, labels, labels))

    def train(self, batch: Tensor, labels: Tensor, *, part: int, parts: int) -> None:
        """As in ``StepBenchmark``."""
        self._step(batch, labels, part=part, parts=parts)
        # stored losses would use device memory
        self._step.forget()
