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
_GROUPS = 20
# between two agreements of the ranks to go on
_AGREE_S = 0.2

# images and labels on the device
_Batch = tuple[Tensor, Tensor]
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
    """

    def __init__(
        self, step: Step, config: Config, world: World, now: Callable[[], float] | None = None
    ) -> None:
        self._step = step
        self._config = config
        self._world = world
        self._now = now or accelerator.of(world.device).now
        self._parts = config.trainer.accumulate_steps
        # steps: says which part of an update the next one is
        self._made = 0

    @property
    def device(self) -> torch.device:
        """Where the network runs."""
        return self._world.device

    @property
    def overlaps(self) -> bool:
        """Whether the device works on the step while batches are loaded even without workers."""
        return accelerator.of(self.device).has_streams

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block of training mode at whose end all that steps change is as before.

        Learning rates are 0 inside it: many steps on one batch must not make NaNs of the network,
        for the time of those is not the real one, and an update costs the same at any rate. The
        copy of the state is the host's alone.
        """
        state = self._step.state
        step = state.step
        snapshot = Snapshot(
            (state.network, state.optimizer, state.schedule, state.scaler), state.device
        )
        self._made = 0
        with self._step.kept():
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

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        """Some 20 groups of steps on ``batch``, warmed up; at least two, however slow.

        Its bytes are on the device; each step takes them augmented and normalised as in training,
        for that is the step's work, not the loader's. ``steps_of_group`` says how many steps a
        group has. ``limit_s`` counts from the end of the first step, which may compile.
        """
        own = accelerator.of(self.device)
        placed = batch._replace(images=own.copy(batch.images), labels=own.copy(batch.labels))
        with contextlib.closing(self._step.batches(itertools.repeat(placed))) as batches:
            return self._groups(batches, len(placed.labels), limit_s)

    def _groups(self, batches: DataPrefetcher, size: int, limit_s: float) -> StepRun:
        first_s, _ = self._group(batches, 1, warm_up=True)
        begin = self._now()
        for _ in range(_WARM_UP_STEPS - 1):
            step_s = self._world.agreed(self._group(batches, 1, warm_up=True)[0])
            if step_s > limit_s / _WARM_UP_STEPS:
                break
        steps = steps_of_group(step_s, limit_s, self.overlaps)
        if steps >= self._parts:
            # each group has as many updates as the others
            steps += -steps % self._parts
        groups: list[tuple[float, float]] = []
        cpu = time.process_time()
        while len(groups) < _GROUPS and self._world.agreed(
            len(groups) < 2 or self._now() - begin < limit_s
        ):
            groups.append(self._group(batches, steps))
        cpu_s = time.process_time() - cpu
        images = size * steps
        launch_s = (
            0.0
            if self._config.loader.device_prefetch
            else min(launch_s for _, launch_s in groups) / size
        )
        return StepRun(
            images=(images,) * len(groups),
            seconds=tuple(seconds for seconds, _ in groups),
            cpu_s=cpu_s,
            first_s=max(0.0, first_s - step_s),
            launch_s=launch_s,
        )

    def deliver(self, feed: Feed, skip: int, limit_s: float) -> StepRun:
        """Steps on the endless ``feed`` for ``limit_s`` seconds and at least two.

        Left out before them are the first batch, which holds the workers' start, and then ``skip``
        batches, or as many as come in a third of ``limit_s``. Their seconds are the device's, where
        it has a clock. Where another rank's feed fails, it is the steps until then, maybe none. The
        feed stays open.

        Raises:
            Whatever this rank's ``feed`` raises; with several ranks once all have stopped.
        """
        clock = StepClock(self.device, now=self._now, keep_steps=True)
        with contextlib.closing(self._step.batches(feed, clock)) as batches:
            source = _Source(batches, (lambda: self._black(feed)) if self._world.size > 1 else None)
            self._stretch(source, clock, 1, 1, 0.0)
            self._stretch(source, clock, 0, skip, limit_s / 3)
            clock.close_window()
            cpu = time.process_time()
            done = self._stretch(source, clock, 2, math.inf, limit_s)
            cpu_s = time.process_time() - cpu
            clock.settle()
        if source.error is not None:
            raise source.error
        window = clock.close_window()
        stall = (window.stall_fraction or 0.0) if window else 0.0
        seconds = clock.device_steps(len(done)) or tuple(seconds for _, seconds in done)
        return StepRun(tuple(images for images, _ in done), seconds, stall, cpu_s)

    def _stretch(
        self, source: _Source, clock: StepClock, least: int, most: float, limit_s: float
    ) -> list[_Done]:
        """Up to ``most`` steps while ``limit_s`` is not over, but ``least``; fewer once any rank's
        feed has failed.

        The host waits for the device only where it is two steps ahead, or ranks agree.
        """
        done: list[_Done] = []
        begin = end = self._now()
        block = 1
        while True:
            more = len(done) < least or (len(done) < most and end - begin < limit_s)
            told = self._world.gathered((more, block, source.error is not None))
            if not told[0][0] or any(failed for _, _, failed in told):
                break
            block = told[0][1]
            for _ in range(block):
                with clock.waiting():
                    images, labels = source.take()
                with clock.computing():
                    self._train(images, labels)
                    self._step.forget()
                count = len(labels)
                clock.step(count)
                step_s = self._now() - end
                done.append((count, step_s))
                end += step_s
            # at most doubled: the first batches may only have been the ones in store
            if self._world.size > 1:
                block_s = sum(seconds for _, seconds in done[-block:])
                block = max(1, int(min(2 * block, _AGREE_S * block / block_s, most - len(done))))
        # what a device whose own time is not known has left to do is the last step's
        if not self.overlaps:
            accelerator.of(self.device).synchronize()
            if done:
                count, step_s = done[-1]
                done[-1] = count, step_s + self._now() - end
        return done

    def _group(
        self, batches: DataPrefetcher, steps: int, *, warm_up: bool = False
    ) -> tuple[float, float]:
        """The seconds of so many steps, and the host's of the first; each makes an update while
        warming up.
        """
        launch_s = 0.0
        begin = self._now()
        for _ in range(steps):
            images, labels = next(batches)
            self._train(images, labels, warm_up)
            # of the first step alone: before later ones the host may wait for the device
            launch_s = launch_s or self._now() - begin
        self._step.forget()
        accelerator.of(self.device).synchronize()
        return self._now() - begin, launch_s

    def _train(self, images: Tensor, labels: Tensor, update: bool = False) -> None:
        if update:
            self._step(images, labels)
        else:
            self._step(images, labels, part=self._made % self._parts, parts=self._parts)
            self._made += 1
        # several ranks must stop at one step: the launcher ends them
        if self._world.size == 1:
            signals.check()

    def _black(self, feed: Feed) -> _Batch:
        """Returns a batch of black images, as large as those of ``feed``, on the device."""
        n = feed.settings.batch_size
        size = self._config.data.image_size
        labels = torch.zeros(n, dtype=torch.int64)
        batch = HostBatch(torch.zeros(n, 3, size, size, dtype=torch.uint8), labels, labels)
        with contextlib.closing(self._step.batches([batch])) as batches:
            return next(batches)


class _Source:
    """The batches of a feed; once it has failed, a stand-in, for the other ranks wait for this one
    in their updates.

    Without a ``make_stand_in`` the error is raised at once.
    """

    def __init__(self, batches: DataPrefetcher, make_stand_in: Callable[[], _Batch] | None) -> None:
        self.error: Exception | None = None
        self._batches = batches
        self._make_stand_in = make_stand_in
        self._stand_in: _Batch | None = None

    def take(self) -> _Batch:
        """The next batch."""
        if self._stand_in is None:
            try:
                batch = next(self._batches, None)
                assert batch is not None, "a feed for trials has no end"
                return batch
            except Exception as error:
                if self._make_stand_in is None:
                    raise
                self.error = error
                self._stand_in = self._make_stand_in()
        return self._stand_in
