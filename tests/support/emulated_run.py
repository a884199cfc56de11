"""A training loop on an emulated GPU in virtual time, as the engine's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from emulator import EmulatedDevice, VirtualClock, emulated
from torch import Tensor

from harness.clock.clock import StepClock
from harness.clock.figures import Window
from harness.clock.stages import StageCost, StageTotals
from harness.config import Precision, TrainerConfig
from harness.feed.base import PROCESSES, FeedSettings
from harness.feed.prefetcher import DataPrefetcher
from harness.report.evidence import Evidence
from harness.report.verdict import Verdict, judge

# images in a batch
SIZE = 256


class MadeFeed:
    """Batches of ``workers`` made-up processes, which take ``batch_s(k)`` for batch k.

    They begin a batch once one of those ``in_flight`` was taken. Page-locked where ``pinned``.
    """

    def __init__(
        self,
        device: EmulatedDevice,
        batch_s: float | Callable[[int], float],
        *,
        workers: int = 8,
        in_flight: int | None = None,
        batches: int = 10**9,
        pinned: bool = True,
        size: int = SIZE,
    ) -> None:
        self.device = device
        self.workers = workers
        self.batches = batches
        self.pinned = pinned
        self.batch_s = batch_s if callable(batch_s) else lambda k: batch_s
        self.in_flight = in_flight or 2 * workers
        self.images = torch.zeros(size, 3, 2, 2, dtype=torch.uint8)
        self.labels = torch.zeros(size, dtype=torch.int64)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        own = self.device
        ready_s = list[float]()
        taken_s = list[float]()
        begin_s = own.now()
        for k in range(self.batches):
            free_s = ready_s[k - self.workers] if k >= self.workers else begin_s
            room_s = taken_s[k - self.in_flight] if k >= self.in_flight else begin_s
            while len(ready_s) <= k:
                ready_s.append(max(free_s, room_s) + self.batch_s(k))
            own.clock.sleep(ready_s[k] - own.now())
            taken_s.append(own.now())
            yield (
                (own.pin(self.images), own.pin(self.labels))
                if self.pinned
                else (self.images, self.labels)
            )


@dataclass
class Loop:
    """A run: what each of its steps takes, in seconds.

    Attributes:
        device_s, launch_s, kernels: of one batch's forward and backward, on the device and to
            launch.
        loader_s: between two batches of the feed, where nothing holds it up.
        copy_s: of one batch to the device.
        prepare_s, prepare_launch_s: augmenting and normalizing it there.
        python_s: in the loop between two steps; ``log_s`` at each window's end.
        parts: batches of an update; epoch: steps of an epoch.
        streams: the device has more than one, and its events tell the time.
    """

    device_s: float = 70e-3
    launch_s: float = 15e-3
    kernels: int = 170
    loader_s: float | Callable[[int], float] = 20e-3
    # of a sample
    decode_s: float = 0.1e-3
    copy_s: float = 0.7e-3
    pinned: bool = True
    prepare_s: float = 0.3e-3
    prepare_launch_s: float = 0.05e-3
    python_s: float = 0.05e-3
    log_s: float = 0.7e-3
    steps: int = 200
    parts: int = 1
    epoch: int | None = None
    window: int = 10
    ahead: bool | None = None
    made_there: bool = False
    streams: bool = True
    settings: FeedSettings = field(
        default_factory=lambda: FeedSettings(SIZE, 8, True, 2, True, 120.0, "forkserver", PROCESSES)
    )

    def device(self) -> EmulatedDevice:
        """An emulated GPU on which a copy takes ``copy_s``."""
        per_s = SIZE * (12 + 8) / self.copy_s
        clock = VirtualClock(wake_s=0.05e-3)
        own = EmulatedDevice(
            clock,
            pinned_per_s=per_s,
            pageable_per_s=per_s,
            launch_s=20e-6,
            record_s=4e-6,
            wake_s=0.05e-3,
        )
        own.has_streams = self.streams
        return own

    def run(self) -> Result:
        """Train, and judge."""
        own = self.device()
        with emulated(own):
            return self._run(own)

    def _run(self, own: EmulatedDevice) -> Result:
        clock = StepClock(own.device)
        workers = 1 if callable(self.loader_s) else 8
        batch_s = self.loader_s if callable(self.loader_s) else workers * self.loader_s
        epoch = self.epoch or self.steps
        feed = MadeFeed(
            own,
            batch_s,
            workers=workers,
            in_flight=16,
            batches=epoch * self.parts,
            pinned=self.pinned,
        )

        def prepare(images: Tensor, batch: Any) -> Tensor:
            own.launch(self.prepare_s, self.prepare_launch_s, 10)
            return images

        batches = DataPrefetcher(feed, own.device, clock=clock, ahead=self.ahead, augment=prepare)
        # as of a backend that makes its batches on the device
        batches._transfer.made_there = self.made_there
        spans: list[tuple[float, float]] = []
        with contextlib.closing(batches):
            for _ in range(self.steps // epoch):
                spans.append(self._epoch(own, clock, batches, epoch))
        total = clock.total()
        decoding = StageCost(1000 * workers * self.decode_s, 1000 * workers * self.decode_s)
        made = StageTotals(1000, decoding.wall_s, {"decode": decoding})
        evidence = Evidence(
            window=total, stages=made, settings=self.settings, cores=16, device="cuda", sampled={},
            autotuned=False,
            trainer=TrainerConfig(precision=Precision.bf16, channels_last=True, compile=True),
        )  # fmt: skip
        return Result(own, total, judge(evidence), spans, SIZE * self.parts * (epoch - 1))

    def _epoch(
        self, own: EmulatedDevice, clock: StepClock, batches: DataPrefetcher, steps: int
    ) -> tuple[float, float]:
        """One epoch; from the end of its first step on the device to that of its last."""
        clock.start_epoch()
        given = iter(batches)
        first_s = 0.0
        for step in range(1, steps + 1):
            for _ in range(self.parts):
                with clock.waiting():
                    next(given)
                with clock.computing():
                    own.launch(self.device_s, self.launch_s, self.kernels)
            own.host(self.python_s)
            clock.step(SIZE * self.parts)
            first_s = first_s or own.stream().until_s
            if step % self.window == 0 or step == steps:
                clock.settle()
                clock.close_window()
                with clock.noted("logging"):
                    own.host(self.log_s)
        return first_s, own.stream().until_s


@dataclass
class Result:
    """What the clock reported, and the device did, without each epoch's first step."""

    device: EmulatedDevice
    window: Window
    verdict: Verdict
    spans: list[tuple[float, float]]
    # of an epoch, but for its first step
    images: int

    @property
    def wall_s(self) -> float:
        return sum(end_s - begin_s for begin_s, end_s in self.spans)

    @property
    def busy(self) -> float:
        """The share of the time in which a kernel ran."""
        return sum(self.device.busy_between(*span) for span in self.spans) / self.wall_s

    @property
    def images_per_s(self) -> float:
        return self.images * len(self.spans) / self.wall_s
