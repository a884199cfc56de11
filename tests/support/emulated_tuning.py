"""A machine with an emulated GPU for the tuner: made-up workers and kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from emulated_run import SIZE
from emulator import EmulatedDevice
from samples import ToldMeter
from torch import Tensor, nn

from harness.config import Config
from harness.feed.base import PROCESSES, FeedSettings, HostBatch
from harness.feed.order import Cursor
from harness.runtime.distributed import World
from harness.runtime.limits import Limits
from harness.training.state import make_state
from harness.training.step import Step
from harness.tuning.training_steps import TrainingBenchmark

LIMITS = Limits(cores=64.0, memory_bytes=10**12, shm_bytes=10**11, open_files=10**6)


def own(num_workers: int = 8) -> FeedSettings:
    """The user's settings."""
    prefetch = 2 if num_workers else None
    return FeedSettings(
        SIZE, num_workers, True, prefetch, num_workers > 0, 120.0, "forkserver", PROCESSES
    )


@dataclass
class Machine:
    """A sample takes a worker ``wall_s``; all of them together give at most ``cap`` images/s.

    ``last`` is the batch that came last, for loops of one's own.
    """

    device: EmulatedDevice
    wall_s: float
    cap: float = math.inf
    backends: tuple[str, ...] = ("processes",)
    last: Any = None
    workers_seen: list[int] = field(default_factory=list)
    cursor: Cursor = field(default_factory=Cursor)

    def rate(self, workers: int) -> float:
        """Images/s that so many workers give."""
        return min(max(1, workers) / self.wall_s, self.cap)

    def batch_bytes(self, settings: FeedSettings) -> int:
        return 10**6

    def held_bytes(self, settings: FeedSettings) -> int:
        return 0

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        return train

    def probe(self, settings: FeedSettings, *, again: bool = False) -> WorkedFeed:
        return WorkedFeed(self, settings)


class WorkedFeed:
    """What the workers of ``machine`` make in virtual time, or the consumer without any."""

    made_on_device = False
    worker_pids = ()

    def __init__(self, machine: Machine, settings: FeedSettings) -> None:
        self.machine = machine
        self.settings = settings
        self.meter = ToldMeter(settings.num_workers)
        self.images = torch.zeros(SIZE, 3, 2, 2, dtype=torch.uint8)
        self.labels = torch.zeros(SIZE, dtype=torch.int64)
        self.began_s = list[float]()
        self.taken_s = list[float]()
        # of each batch, samples that the meter knows of
        self.counted: list[int] = []

    def __len__(self) -> int:
        return 10**9

    def set_epoch(self, epoch: int) -> None: ...
    def prime(self, epoch: int) -> None: ...
    def close(self) -> None: ...

    def __iter__(self) -> Iterator[HostBatch]:
        return (batch for batch in self.polled(math.inf) if batch is not None)

    def polled(self, poll_s: float) -> Iterator[HostBatch | None]:
        device = self.machine.device
        workers = self.settings.num_workers
        self.opened_s = device.now()
        self.batch_s = SIZE * max(self.machine.wall_s, max(1, workers) / self.machine.cap)
        while True:
            ready_s = self._ready(len(self.taken_s)) if workers else device.now() + self.batch_s
            if workers and ready_s - device.now() > poll_s:
                device.clock.sleep(poll_s)
                self._count()
                yield None
                continue
            device.clock.sleep(ready_s - device.now())
            self.taken_s.append(device.now())
            if workers:
                self._count()
            else:
                self.meter.add(0, self.batch_s / SIZE, 0.9 * self.machine.wall_s, SIZE)
            pin = device.pin if self.settings.pin_memory else (lambda tensor: tensor)
            self.machine.last = HostBatch(pin(self.images), pin(self.labels), self.labels)
            yield self.machine.last

    def _ready(self, k: int) -> float:
        """Returns when batch ``k`` is made.

        Its worker begins once it is through, and one of those in flight was taken.
        """
        workers = self.settings.num_workers
        in_flight = self.settings.num_workers * (self.settings.prefetch_factor or 1)
        while len(self.began_s) <= k:
            n = len(self.began_s)
            free_s = self.began_s[n - workers] + self.batch_s if n >= workers else self.opened_s
            room_s = self.taken_s[n - in_flight] if n >= in_flight else self.opened_s
            self.began_s.append(max(free_s, room_s))
            self.counted.append(0)
        return self.began_s[k] + self.batch_s

    def _count(self) -> None:
        in_flight = self.settings.num_workers * (self.settings.prefetch_factor or 1)
        self._ready(len(self.taken_s) + in_flight - 1)
        now = self.machine.device.now()
        for k in range(max(0, len(self.taken_s) - 2), len(self.began_s)):
            done = min(SIZE, max(0, int((now - self.began_s[k]) / self.batch_s * SIZE + 1e-9)))
            if done > self.counted[k]:
                more = done - self.counted[k]
                self.meter.add(
                    k % self.settings.num_workers,
                    self.batch_s / SIZE,
                    0.9 * self.machine.wall_s,
                    more,
                )
            self.counted[k] = max(done, self.counted[k])


class Launching(nn.Module):
    """A network of one layer that launches the kernels of a large one.

    Its first pass takes ``first_s`` more.
    """

    def __init__(
        self,
        device: EmulatedDevice,
        device_s: float,
        launch_s: float,
        kernels: int,
        first_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 10)
        self._device = device
        self._cost = (device_s, launch_s, kernels)
        self._first_s = first_s

    def forward(self, images: Tensor) -> Tensor:
        first_s = self._first_s
        self._first_s = 0.0
        self._device.host(first_s)
        self._device.launch(*self._cost)
        result: Tensor = self.layer(images.flatten(1))
        return result


def trials(
    device: EmulatedDevice, network: nn.Module, *, parts: int = 1, ahead: bool = True
) -> tuple[Step, TrainingBenchmark]:
    """Returns the harness' own step on ``network`` and its trials.

    Of ``parts`` batches an update; ``ahead``: with a prefetcher.
    """
    config = Config()
    world = World(0, 1, 0, 1, device.device)
    config.data.image_size = 2
    config.loader.batch_size = SIZE
    config.trainer.accumulate_steps = parts
    config.loader.device_prefetch = ahead
    config.data.mean = (0.5, 0.5, 0.5)
    config.data.std = (0.5, 0.5, 0.5)
    step = Step(make_state(config, 0, world, 100, network=network))
    return step, TrainingBenchmark(step)
