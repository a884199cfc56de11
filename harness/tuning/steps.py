"""Times the training steps in any loop, on one preloaded batch and on a feed."""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, closing
from typing import Any, NamedTuple

from torch import Tensor

from ..clock.clock import StepClock
from ..config import ConfigError
from ..feed.base import Backend, HostBatch
from ..runtime import accelerator, signals
from ..runtime.distributed import World

# the input to a step and its labels, one per image
Batches = Generator[tuple[Any, Tensor], None, None]
# the first step allocates optimizer state and may compile; cuDNN benchmarks kernels
_WARM_UP_STEPS = 5


class StepBenchmark(ABC):
    """Times steps; subclasses define the step and how batches reach it (``repeated``, ``fed``).

    Every rank makes the same calls in the same order.

    Args:
        world: this rank.
        parts: steps per update.

    Raises:
        ConfigError: the device cannot report when it is busy.

    Attributes:
        device: the network's device.
        overlaps: whether the device runs the step while batches are loaded.
        copies: whether ``repeated`` yields copies, which are made before a step's time begins.
    """

    copies = False

    def __init__(self, world: World, parts: int = 1) -> None:
        self.world = world
        self.device = world.device
        self._own = accelerator.get(world.device)
        if not self._own.tells:
            raise ConfigError(
                f"device={world.device}: steps on this type of device cannot be timed; set the "
                "number of workers manually"
            )
        self._now = self._own.now
        # even without workers
        self.overlaps = self._own.has_events
        self._parts = parts
        # number of steps, which determines the next one's part of an update
        self._made = 0
        # the feed's error, raised later if other ranks wait for this one
        self._failed: Exception | None = None

    @abstractmethod
    def preserved_state(self) -> AbstractContextManager[None]:
        """Returns a context manager that restores everything that steps change.

        It restores weights, buffers, optimizer, counters and random states.
        """

    @abstractmethod
    def repeated(self, batch: HostBatch) -> Batches:
        """Yields ``batch`` and its labels for each step, endlessly."""

    @abstractmethod
    def fed(self, feed: Backend, clock: StepClock) -> Batches:
        """Yields the batches from ``feed`` and their labels, endlessly."""

    @abstractmethod
    def train(self, batch: Any, labels: Tensor, *, part: int, parts: int) -> None:
        """Runs one step: number ``part`` of the ``parts`` steps in an update."""

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        """Times 2 to 20 groups of steps on ``batch`` after a warm-up.

        A group has as many steps as fit in 25 ms. ``limit_s`` starts at the end of the first step,
        which may compile. If a step is an update and takes longer than that, only the second step
        is timed.
        """
        groups: list[tuple[float, float]] = []
        with closing(self.repeated(batch)) as batches:
            first_s, _ = self._group(batches, 1, 1)
            begin = self._now()
            for _ in range(_WARM_UP_STEPS - 1):
                cpu_s = time.process_time()
                group = self._group(batches, 1, 1)
                step_s = self.world.agreed(group[0])
                if step_s > limit_s / _WARM_UP_STEPS:
                    break
            steps = max(1, int(0.025 / step_s))
            # after synchronizing, a device idles until the next group's first launch; this is
            # little if three steps exceed the limit
            if self.overlaps and 3 * step_s <= limit_s:
                steps = max(3, steps)
            if self.copies:
                # copies need memory
                steps = min(16, steps)
            self._made = 0
            if steps >= self._parts:
                # all groups have the same number of updates
                steps += -steps % self._parts
            if step_s > limit_s and self._parts == 1:
                groups.append(group)
            else:
                cpu_s = time.process_time()
            least = len(groups) or 2
            while len(groups) < 20 and self.world.agreed(
                len(groups) < least or self._now() - begin < limit_s
            ):
                groups.append(self._group(batches, steps, self._parts))
            cpu_s = time.process_time() - cpu_s
        size = len(batch.labels)
        seconds, launches = zip(*groups, strict=True)
        launch_s = min(launches) / size
        first_s = max(0.0, first_s - step_s)
        return StepRun((size * steps,) * len(groups), seconds, 0.0, cpu_s, first_s, launch_s)

    def deliver(self, feed: Backend, skip: int, limit_s: float) -> StepRun:
        """Times at least two steps on the endless ``feed``, for ``limit_s`` seconds.

        The first batch, which includes worker startup, is left out, and so are the next ``skip``
        batches or as many as arrive in a third of ``limit_s``. Times come from the device's clock,
        if it has one. If another rank's feed fails, the result contains the steps so far, possibly
        none. The feed stays open.

        Raises:
            Whatever this rank's ``feed`` raises; with several ranks, once all have stopped.
        """
        clock = StepClock(self.device, now=self._now)
        self._failed = None
        with closing(self.fed(feed, clock)) as batches:
            # not counted: the first batch, which includes worker startup, and prefetched ones
            self._stretch(batches, clock, 1, 1, 0.0)
            self._stretch(batches, clock, 0, skip, limit_s / 3)
            clock.close_window()
            images, seconds = self._stretch(batches, clock, 2, math.inf, limit_s)
            clock.settle()
        failed = self._failed
        # its traceback references a batch
        self._failed = None
        if failed is not None:
            raise failed
        window = clock.close_window()
        stall = window.stall_fraction if window else None
        steps_s = clock.device_steps(len(images)) or tuple(seconds)
        return StepRun(tuple(images), steps_s, stall or 0.0)

    def _stretch(
        self,
        batches: Batches,
        clock: StepClock,
        least: int,
        most: float,
        limit_s: float,
    ) -> tuple[list[int], list[float]]:
        """Runs ``least`` to ``most`` steps within ``limit_s``.

        Returns the images and the seconds for each step; fewer steps if any rank's feed has failed.
        The host waits for the device only when it is two steps ahead or when ranks agree.
        """
        images: list[int] = []
        seconds: list[float] = []
        begin = end = self._now()
        block = 1
        while True:
            more = len(seconds) < least or (len(seconds) < most and end - begin < limit_s)
            ends, longest = self.world.largest(self._failed is not None or not more, block)
            if ends:
                break
            block = int(longest)
            for _ in range(block):
                with clock.waiting():
                    batch, labels = next(batches)
                with clock.computing():
                    self._one_step(batch, labels, self._parts)
                clock.step(len(labels))
                images.append(len(labels))
                seconds.append(self._now() - end)
                end += seconds[-1]
            # ranks agree five times a second; the block is at most doubled, because the first
            # batches may have been prefetched
            if self.world.size > 1:
                step_s = sum(seconds[-block:]) / block
                block = max(1, int(min(2 * block, 0.2 / step_s, most - len(seconds))))
        # without a device clock, work that is still queued counts toward the last step
        if not self._own.has_streams:
            self._own.synchronize()
            if seconds:
                seconds[-1] += self._now() - end
        return images, seconds

    def _group(self, batches: Batches, steps: int, parts: int) -> tuple[float, float]:
        """Returns the seconds for ``steps`` steps, and the host's seconds for the first.

        An update has ``parts`` steps.
        """
        given: Iterable[tuple[Any, Tensor]] = itertools.islice(batches, steps)
        if self.copies:
            given = list(given)
        launch_s = 0.0
        begin = self._now()
        for batch, labels in given:
            self._one_step(batch, labels, parts)
            # otherwise, the device would hold two batches while the next one is made
            del batch, labels
            # only for the first step: in later ones, the host may wait for the device
            launch_s = launch_s or self._now() - begin
        self._own.synchronize()
        return self._now() - begin, launch_s

    def _one_step(self, batch: Any, labels: Tensor, parts: int) -> None:
        self.train(batch, labels, part=self._made % parts, parts=parts)
        self._made += 1
        # multiple ranks must stop at the same step, so the launcher ends them
        if self.world.size == 1:
            signals.check()


class StepRun(NamedTuple):
    """Consecutive steps, or groups of them.

    Attributes:
        images: number of images per step or group.
        seconds: duration of each step or group, from the end of the previous one.
        stall_fraction: as in ``Window``, by the device's clock if it has one.
        cpu_s: CPU time of all threads in this process during the steps; only from ``demand``.
        first_s: extra time for the very first step: compilation, kernel selection.
        launch_s: host seconds per image during which a loop that loads in its own thread cannot
            load.
    """

    images: tuple[int, ...]
    seconds: tuple[float, ...]
    stall_fraction: float = 0.0
    cpu_s: float = 0.0
    first_s: float = 0.0
    launch_s: float = 0.0
