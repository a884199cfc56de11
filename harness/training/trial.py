"""Training steps made only to be timed, after which the run is as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from harness.config import Config
from harness.feed.interface import Backend, HostBatch
from harness.feed.timed import Batches, TimedSteps
from harness.runtime.distributed import World
from harness.runtime.snapshot import Snapshot
from harness.training.step import Step
from harness.watch.clock import StepClock
from harness.watch.figures import StepRun


class StepTrials(TimedSteps):
    """The training step as tuning measures it, inside ``kept()``.

    Args:
        step: the run's own step.
        config: how batches get to the device, and how many make an update.
        world: this rank.
        now: the clock; None: the device's own.
    """

    def __init__(
        self, step: Step, config: Config, world: World, now: Callable[[], float] | None = None
    ) -> None:
        super().__init__(world, config.trainer.accumulate_steps, now)
        self._step = step
        self._config = config

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block of training mode, before training, at whose end all is as before.

        Learning rates are 0 inside: repeated steps on one batch could diverge to NaN, whose timing
        is not representative; an update costs the same at any rate. The copy of the state lies in
        host memory. An average of the weights stands still.
        """
        state = self._step.state
        step = state.step
        parts = (state.network, state.optimizer, state.schedule, state.scaler)
        snapshot = Snapshot(parts, state.device)
        self._made = 0
        average = state.average
        state.average = None
        try:
            state.train()
            # LambdaLR multiplies them
            state.schedule.base_lrs = [0.0 for _ in state.optimizer.param_groups]
            for group in state.optimizer.param_groups:
                group["lr"] = 0.0
            yield
        finally:
            snapshot.restore()
            state.step = step
            state.average = average
            # a step that failed may have left figures
            self._step.forget()

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        """As in ``TimedSteps``."""
        run = super().demand(batch, limit_s)
        if self._config.loader.device_prefetch:
            # a thread of its own loads while the host launches
            run = replace(run, launch_s=0.0)
        return run

    def repeated(self, batch: HostBatch) -> Batches:
        """As in ``TimedSteps``: the batch's bytes are on the device.

        Each step takes them augmented and normalised as in training, for that is the step's work,
        not the loader's.
        """
        images = self._own.copy(batch.images)
        placed = batch._replace(images=images, labels=self._own.copy(batch.labels))
        with closing(self._step.batches(itertools.repeat(placed))) as batches:
            yield from batches

    def fed(self, feed: Backend, clock: StepClock) -> Batches:
        """As in ``TimedSteps``; once ``feed`` has failed, black batches, unless a rank is alone."""
        with closing(self._step.batches(feed, clock)) as batches:
            try:
                yield from batches
            except Exception as error:
                if self.world.size == 1:
                    raise
                self._failed = error
        size = self._config.data.image_size
        labels = torch.zeros(feed.settings.batch_size, dtype=torch.int64)
        images = torch.zeros(len(labels), 3, size, size, dtype=torch.uint8)
        with closing(self._step.batches([HostBatch(images, labels, labels)])) as black:
            yield from itertools.repeat(next(black))

    def train(self, batch: Tensor, labels: Tensor, *, part: int, parts: int) -> None:
        """As in ``TimedSteps``."""
        self._step(batch, labels, part=part, parts=parts)
        # losses would take the device's memory
        self._step.forget()
