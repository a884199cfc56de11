"""Training steps made only to be timed, after which the run is as it was."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from harness.config import Config
from harness.feed.interface import Feed, HostBatch
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator, signals
from harness.runtime.distributed import World
from harness.runtime.snapshot import Snapshot
from harness.training.step import Step
from harness.watch.clock import StepClock
from harness.watch.figures import StepRun, steps_of_group

# the first may compile and makes what an update allocates; cuDNN tries its kernels
_WARM_UP_STEPS = 5

# images and labels on the device
_Batches = Iterator[tuple[Tensor, Tensor]]
# a step's images and seconds
_Done = tuple[int, float]


class StepTrials:
    """The training step as tuning measures it.

    Every rank makes the same calls in the same order, inside ``kept()``.

    Args:
        step: the run's own step.
        config: how batches get to the device, and how many make an update.
        world: this rank.
        now: the clock; None: the device's own.

    Attributes:
        device: where the network runs.
        overlaps: whether the device works on the step while batches are loaded.
    """

    def __init__(
        self, step: Step, config: Config, world: World, now: Callable[[], float] | None = None
    ) -> None:
        self._step = step
        self._config = config
        self._world = world
        self._own = accelerator.of(world.device)
        self._now = now or self._own.now
        self.device = world.device
        # even without workers
        self.overlaps = self._own.has_streams
        # steps: says which part of an update the next one is
        self._made = 0

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block of training mode, before training, at whose end all is as before.

        Learning rates are 0 inside: repeated steps on one batch could diverge to NaN, whose timing
        is not representative; an update costs the same at any rate. The copy of the state lies in
        host memory.
        """
        state = self._step.state
        step = state.step
        parts = (state.network, state.optimizer, state.schedule, state.scaler)
        snapshot = Snapshot(parts, state.device)
        self._made = 0
        try:
            state.network.train()
            # LambdaLR multiplies them
            state.schedule.base_lrs = [0.0 for _ in state.optimizer.param_groups]
            for group in state.optimizer.param_groups:
                group["lr"] = 0.0
            yield
        finally:
            snapshot.restore()
            state.step = step
            # a step that failed may have left figures
            self._step.forget()

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        """Times some 20 groups of steps on ``batch``, warmed up; at least two, however slow.

        The batch's bytes are on the device; each step takes them augmented and normalised as in
        training, for that is the step's work, not the loader's. ``steps_of_group`` says how many
        steps a group has. ``limit_s`` counts from the end of the first step, which may compile.
        """
        images = self._own.copy(batch.images)
        placed = batch._replace(images=images, labels=self._own.copy(batch.labels))
        groups: list[tuple[float, float]] = []
        parts = self._config.trainer.accumulate_steps
        with contextlib.closing(self._step.batches(itertools.repeat(placed))) as batches:
            first_s, _ = self._group(batches, 1, 1)
            begin = self._now()
            for _ in range(_WARM_UP_STEPS - 1):
                step_s = self._world.agreed(self._group(batches, 1, 1)[0])
                if step_s > limit_s / _WARM_UP_STEPS:
                    break
            steps = steps_of_group(step_s, limit_s, self.overlaps)
            self._made = 0
            if steps >= parts:
                # each group has as many updates as the others
                steps += -steps % parts
            cpu = time.process_time()
            while len(groups) < 20 and self._world.agreed(
                len(groups) < 2 or self._now() - begin < limit_s
            ):
                groups.append(self._group(batches, steps, parts))
            cpu_s = time.process_time() - cpu
        size = len(placed.labels)
        seconds, launches = zip(*groups, strict=True)
        launch_s = min(launches) / size
        if self._config.loader.device_prefetch:
            launch_s = 0.0
        first_s = max(0.0, first_s - step_s)
        return StepRun((size * steps,) * len(groups), seconds, 0.0, cpu_s, first_s, launch_s)

    def deliver(self, feed: Feed, skip: int, limit_s: float) -> StepRun:
        """Times steps on the endless ``feed`` for ``limit_s`` seconds and at least two.

        Left out before them are the first batch, which holds the workers' start, and then ``skip``
        batches, or as many as come in a third of ``limit_s``. Their seconds are the device's, where
        it has a clock. Where another rank's feed fails, the result has the steps until then, maybe
        none. The feed stays open.

        Raises:
            Whatever this rank's ``feed`` raises; with several ranks once all have stopped.
        """
        clock = StepClock(self.device, now=self._now, keep_steps=True)
        failed: list[Exception] = []
        with contextlib.closing(self._step.batches(feed, clock)) as batches:
            source = self._endless(batches, feed, failed)
            self._stretch(source, failed, clock, 1, 1, 0.0)
            self._stretch(source, failed, clock, 0, skip, limit_s / 3)
            clock.close_window()
            cpu = time.process_time()
            done = self._stretch(source, failed, clock, 2, math.inf, limit_s)
            cpu_s = time.process_time() - cpu
            clock.settle()
        if failed:
            raise failed[0]
        window = clock.close_window()
        stall = window.stall_fraction if window else None
        seconds = clock.device_steps(len(done)) or tuple(seconds for _, seconds in done)
        return StepRun(tuple(images for images, _ in done), seconds, stall or 0.0, cpu_s)

    def _endless(self, batches: DataPrefetcher, feed: Feed, failed: list[Exception]) -> _Batches:
        """Gives ``batches``; once ``feed`` has failed, black ones, and its error is in ``failed``.

        The other ranks wait for this one in their updates. A rank alone raises the error at once.
        """
        try:
            yield from batches
        except Exception as error:
            if self._world.size == 1:
                raise
            failed.append(error)
        size = self._config.data.image_size
        labels = torch.zeros(feed.settings.batch_size, dtype=torch.int64)
        images = torch.zeros(len(labels), 3, size, size, dtype=torch.uint8)
        with contextlib.closing(self._step.batches([HostBatch(images, labels, labels)])) as black:
            yield from itertools.repeat(next(black))

    def _stretch(
        self,
        source: _Batches,
        failed: list[Exception],
        clock: StepClock,
        least: int,
        most: float,
        limit_s: float,
    ) -> list[_Done]:
        """Makes up to ``most`` steps while ``limit_s`` is not over, but ``least``.

        Fewer once any rank's feed has failed. The host waits for the device only where it is two
        steps ahead, or ranks agree.
        """
        done: list[_Done] = []
        begin = end = self._now()
        block = 1
        while True:
            more = len(done) < least or (len(done) < most and end - begin < limit_s)
            ends, longest = self._world.largest(bool(failed) or not more, block)
            if ends:
                break
            block = int(longest)
            for _ in range(block):
                with clock.waiting():
                    images, labels = next(source)
                with clock.computing():
                    self._train(images, labels, self._config.trainer.accumulate_steps)
                clock.step(len(labels))
                step_s = self._now() - end
                done.append((len(labels), step_s))
                end += step_s
            # ranks agree five times a second; the block is at most doubled, for the first batches
            # may only have been the ones in store
            if self._world.size > 1:
                step_s = sum(seconds for _, seconds in done[-block:]) / block
                block = max(1, int(min(2 * block, 0.2 / step_s, most - len(done))))
        # what a device whose own time is not known has left to do is the last step's
        if not self.overlaps:
            self._own.synchronize()
            if done:
                count, step_s = done[-1]
                done[-1] = count, step_s + self._now() - end
        return done

    def _group(self, batches: _Batches, steps: int, parts: int) -> tuple[float, float]:
        """Returns the seconds of ``steps`` steps, and the host's of the first.

        An update has ``parts`` steps.
        """
        launch_s = 0.0
        begin = self._now()
        for _ in range(steps):
            self._train(*next(batches), parts)
            # of the first step alone: before later ones the host may wait for the device
            launch_s = launch_s or self._now() - begin
        self._own.synchronize()
        return self._now() - begin, launch_s

    def _train(self, images: Tensor, labels: Tensor, parts: int) -> None:
        self._step(images, labels, part=self._made % parts, parts=parts)
        # losses would take the device's memory
        self._step.forget()
        self._made += 1
        # several ranks must stop at one step: the launcher ends them
        if self._world.size == 1:
            signals.check()
