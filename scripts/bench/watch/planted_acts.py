"""Plants bottlenecks of a given size into a run: slow data, steps or Python."""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from harness.clock.clock import StepClock
from harness.data.datasets import Splits
from harness.data.transforms import CropTransform
from harness.feed.prefetcher import Normalize
from harness.monitor.writer import RunWriter
from harness.training.engine import Engine
from harness.training.step import Step, StepFigures
from scripts.bench.differential import Emulated, EmulatedEvent, EmulatedStream
from scripts.bench.watch.planted_data import (
    BATCH,
    SIDE,
    Blur,
    ColdFolder,
    Encoded,
    Huge,
    Memory,
    Paced,
    SlowDisk,
    SlowToCollate,
    images,
    splits,
)

FILES = 96
FILE_MB = 2
# extra memory a run may need beyond that after five steps
OWN_MB = 32
BURN = """
import sys, time
end, share = time.monotonic() + 300, float(sys.argv[1])
while time.monotonic() < end:
    until = time.process_time() + 0.01
    while time.process_time() < until:
        pass
    time.sleep(0.01 / share - 0.01)
"""
ORPHAN = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
"""
# environment variable with a run's control group
GROUP = "PLANTED_GROUP"


@contextmanager
def stepping(act: Callable[[], object], data: Splits | None = None) -> Iterator[None]:
    """Replaces every step by ``act``, on a normalizing device, and trains on ``data``."""

    def step(
        self: Step, images: torch.Tensor, labels: torch.Tensor, *, part: int = 0, parts: int = 1
    ) -> None:
        act()
        self._losses.append(torch.zeros(()))
        self.state.step += 1

    with ExitStack() as stack:
        stack.enter_context(patch.object(Step, "__call__", step))
        stack.enter_context(
            patch.object(
                Normalize, "__call__", lambda self, images: images[:, :, :SIDE, :SIDE].float()
            )
        )
        stack.enter_context(
            patch("harness.data.datasets.load", lambda *_: data or images(Memory()))
        )
        yield


def sleeping(step_s: float, data: Splits | None = None) -> AbstractContextManager[None]:
    """Makes steps sleep for ``step_s`` seconds."""
    return stepping(functools.partial(time.sleep, step_s), data)


@contextmanager
def asynchronous(
    act: Callable[[EmulatedStream], object], data: Splits | None = None
) -> Iterator[None]:
    """Makes steps asynchronous, with a device clock; ``act`` enqueues the work."""
    device = EmulatedStream("device")
    idle = EmulatedStream("idle")
    read = Step.read
    clock = StepClock(Emulated(EmulatedEvent, lambda: device, idle, device.sleep))

    def waiting_read(self: Step) -> StepFigures:
        event = EmulatedEvent()
        event.record(device)
        event.synchronize()
        return read(self)

    with (
        patch("harness.monitor.monitor.StepClock", lambda *_, **__: clock),
        patch.object(Step, "read", waiting_read),
        stepping(lambda: act(device), data),
    ):
        yield


def slow_disk(size: float) -> AbstractContextManager[None]:
    return sleeping(0.01, images(SlowDisk(size / 1e3)))


def async_slow_disk(size: float) -> AbstractContextManager[None]:
    return asynchronous(lambda device: device.sleep(0.01), images(SlowDisk(size / 1e3)))


@contextmanager
def files(megabytes: float, count: int, cold: bool) -> Iterator[Splits]:
    """Yields ``count`` small images in files of ``megabytes`` each, on the temporary disk."""
    with tempfile.TemporaryDirectory() as folder:
        small = Encoded(64).data
        for i in range(count):
            path = Path(folder) / "a" / f"{i}.jpg"
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.write(small + os.urandom(1 << 20) * round(megabytes))
                file.flush()
                os.fsync(file.fileno())
        yield images(ColdFolder(Path(folder), cold))


@contextmanager
def cold_files(size: float) -> Iterator[None]:
    """Reads files from a disk that this process's control group throttles."""
    with files(FILE_MB, 12, cold=True) as data, sleeping(0.002, data):
        join()
        yield


def heavy_decode(size: float) -> AbstractContextManager[None]:
    return sleeping(0.005, images(Encoded(round(size))))


def slow_transform(size: float) -> AbstractContextManager[None]:
    return sleeping(0.01, images(Memory(), Blur(CropTransform(SIDE), size / 1e3)))


def slow_collate(size: float) -> AbstractContextManager[None]:
    return sleeping(0.01, splits(SlowToCollate(size / 1e3)))


def huge_batches(size: float) -> AbstractContextManager[None]:
    return sleeping(0.002, splits(Huge(size)))


def slow_step(size: float) -> AbstractContextManager[None]:
    return sleeping(size / 1e3)


def balanced(size: float) -> AbstractContextManager[None]:
    """Makes loading 4 to 8 % longer than a step of ``size`` milliseconds."""
    return sleeping(size / 1e3, images(Paced(1.06 * size / 1e3 / BATCH)))


def collections(size: float) -> AbstractContextManager[None]:
    """Makes each step garbage-collect ``size`` thousand objects."""
    alive = [[] for _ in range(round(1e3 * size))]  # type: ignore[var-annotated]

    def act(alive: object = alive) -> None:
        time.sleep(0.005)
        gc.collect()

    return stepping(act)


@contextmanager
def slow_logging(size: float) -> Iterator[None]:
    write = RunWriter.scalars

    def slow(self: RunWriter, *args: Any, **named: Any) -> None:
        time.sleep(size / 1e3)
        write(self, *args, **named)

    with patch.object(RunWriter, "scalars", slow), sleeping(0.01):
        yield


@contextmanager
def slow_callback(size: float) -> Iterator[None]:
    """Slows the loop outside of the step."""
    one_step = Engine._one_step

    def slow(self: Engine, *args: Any) -> None:
        one_step(self, *args)
        time.sleep(size / 1e3)

    with patch.object(Engine, "_one_step", slow), asynchronous(lambda device: device.sleep(0.01)):
        yield


def slow_launches(size: float) -> AbstractContextManager[None]:
    """Makes a step ``size`` launches of 4 ms, each for a kernel of 0.4 ms."""

    def act(device: EmulatedStream) -> None:
        for _ in range(round(size)):
            time.sleep(0.004)
            device.sleep(0.0004)

    return asynchronous(act)


def pageable_copies(size: float) -> AbstractContextManager[None]:
    return stepping(lambda: None, splits(Huge(size)))


@contextmanager
def tiny_memory(size: float) -> Iterator[None]:
    """Limits the page cache to a fraction ``size`` of the files during training.

    The run has its own control group.
    """
    join()
    one_step = Engine._one_step
    group = Path(os.environ[GROUP])

    def squeezing(self: Engine, *args: Any) -> None:
        one_step(self, *args)
        if self.state.step == 5:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = (
                int((group / "memory.usage_in_bytes").read_text())
                - int(stat["total_cache"])
                + int(stat["total_shmem"])
            )
            (group / "memory.limit_in_bytes").write_text(
                str(used + round((OWN_MB + size * FILES * FILE_MB) * 2**20))
            )
        elif self.state.step == self.config.trainer.max_steps:
            (group / "memory.limit_in_bytes").write_text("-1")

    with (
        files(FILE_MB, FILES, cold=False) as data,
        patch.object(Engine, "_one_step", squeezing),
        sleeping(0.002, data),
    ):
        yield


def quota(size: float) -> AbstractContextManager[None]:
    """Decodes in a control group limited to ``size`` cores."""
    join()
    return heavy_decode(400)


@contextmanager
def burning(cores: float) -> Iterator[None]:
    """Runs other programs that use ``cores`` cores, for at most five minutes.

    They are not children of this process.
    """
    count = math.ceil(cores)
    with ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-c", ORPHAN, sys.executable, "-c", BURN, str(cores / count)]
            started = subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=30
            )
            stack.callback(os.kill, int(started.stdout), signal.SIGKILL)
        yield


@contextmanager
def neighbors(size: float) -> Iterator[None]:
    """CPU-bound steps and loading, beside other programs."""

    def act() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    with burning(size), stepping(act, images(Encoded(200))):
        yield


def join() -> None:
    """Enters this process's control group, with all future children."""
    (Path(os.environ[GROUP]) / "cgroup.procs").write_text(str(os.getpid()))
