"""Small data sets that worker processes can import, and settings to load them with."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import torch

from harness.clock.stages import SAMPLE, Lap, StageMeter, cells
from harness.data.storage import ArraySource
from harness.data.transforms import CropTransform
from harness.feed.base import PROCESSES, FeedSettings, HostBatch
from harness.feed.order import Order
from harness.runtime import workers
from harness.runtime.errors import BadSample
from harness.runtime.seeding import SampleRng


def eval_transform(size: int, resize: int | None = None) -> CropTransform:
    """Returns a center crop that is never mirrored, as in evaluation."""
    return CropTransform(size, crop="center", hflip=0.0, resize=resize)


class ToldMeter(StageMeter):
    """A meter that emulated workers tell what their samples took."""

    def __init__(self, workers: int) -> None:
        super().__init__((SAMPLE,), workers)

    def add(self, slot: int, wall_s: float, cpu_s: float, count: int = 1) -> None:
        """Count so many samples of a worker, each of which took these seconds."""
        row = cells(self.rows, slot)
        for place, each in enumerate((1.0, wall_s, wall_s**2, cpu_s), 2):
            row[place] += count * each


class Noise:
    """Samples of 3 x 4 x 4 pixels drawn for (epoch, index), labeled ``index % 10``."""

    image_size = 4
    skips = False

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        """Write one sample into ``out`` and return its label."""
        rng = SampleRng(0, epoch, index)
        out[:] = np.array([rng.randrange(256) for _ in range(out.size)], np.uint8).reshape(
            out.shape
        )
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
    """``Noise`` that calls ``trouble`` before it fills sample ``index``; None: any sample."""

    def __init__(self, length: int, index: int | None, trouble: Callable[[], object]) -> None:
        super().__init__(length)
        self.index = index
        self.trouble = trouble

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        if self.index in (None, index):
            self.trouble()
        return super().fill(epoch, index, out)


class Refused(Noise):
    """No sample can be read."""

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        raise BadSample(f"sample {index}", "refused")


class StopsAtStart(Noise):
    """``Noise`` whose workers stop as soon as they have it."""

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__ = state
        halt()


class StopsInItsStart(Noise):
    """``Noise`` whose workers stop before they have taken all of it off the pipe."""

    def __reduce__(self) -> tuple[object, ...]:
        return max, (StopsAtStart(1), bytes(1 << 20))


def halt() -> None:
    """Stop this process, as a read that never comes back stops all its threads."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die_with_lock() -> None:
    """Die as a worker does that is killed while it asks torch's event whether it may go on."""
    frame: Any = sys._getframe()
    while "done_event" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["done_event"]._cond.acquire()
    die()


def refuse_at_length() -> NoReturn:
    raise BadSample("cats/7.jpg", "empty " * 100_000)


def refuse() -> NoReturn:
    raise BadSample("cats/7.jpg", "empty file")


def exhaust() -> NoReturn:
    raise MemoryError("no room")


def stop() -> NoReturn:
    raise StopIteration


def raise_unpicklable() -> NoReturn:
    class Local(RuntimeError):
        pass

    raise Local("cannot travel")


def hang() -> None:
    threading.Event().wait()


def hang_in_a_segment() -> None:
    """Hangs as a worker about to hand over a batch: its segment still has a name."""
    Path(f"/dev/shm/torch_{os.getpid()}_1_1").touch()
    hang()


def wait_for(path: Path) -> None:
    """Come back once ``path`` exists."""
    while not path.exists():
        time.sleep(0.01)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def miss_the_bus() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


def leave_at_once() -> NoReturn:
    os._exit(3)


def leave() -> NoReturn:
    sys.exit(3)


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def draw() -> tuple[float, float, torch.Tensor]:
    """Numbers from each of the global generators."""
    return random.random(), float(np.random.rand()), torch.rand(1)


def settings(
    num_workers: int = 0,
    *,
    batch_size: int = 4,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    timeout_s: float = 60.0,
    start_method: str = "forkserver",
    pin_memory: bool = False,
    backend: str = PROCESSES,
) -> FeedSettings:
    """Settings of a small feed."""
    return FeedSettings(
        batch_size=batch_size,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers and num_workers > 0,
        timeout_s=timeout_s,
        start_method=start_method,
        backend=backend,
    )


def start_server() -> None:
    """Starts the fork server with what workers under pytest import.

    So each worker takes a moment and not seconds.
    """
    workers.start_server(["pytest", "harness.feed.processes", "harness.data.datasets"])


def at_work() -> list[BaseProcess | threading.Thread]:
    """The worker processes and threads of feeds that are still there."""
    return [
        *multiprocessing.active_children(),
        *(t for t in threading.enumerate() if t.name.startswith("feed-")),
    ]


def comes_true(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    """Whether ``condition`` holds, at the latest ``within_s`` seconds from now."""
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextmanager
def making(kind: type[Any], length: int, **usual: Any) -> Iterator[Callable[..., Any]]:
    """A function that makes feeds of ``kind``, by default of ``length`` samples; all are closed."""
    made: list[Any] = []

    def make(
        num_workers: int = 0,
        dataset: Noise | None = None,
        times_samples: bool = False,
        **more: Any,
    ) -> Any:
        dataset = Noise(length) if dataset is None else dataset
        order = Order(len(dataset), more.get("batch_size", 4), seed=3)
        made.append(kind(dataset, order, settings(num_workers, **(usual | more))))
        made[-1].times_samples = times_samples
        return made[-1]

    yield make
    for feed in made:
        feed.close()
    assert comes_true(lambda: at_work() == [])


def assert_same(batches: Sequence[HostBatch], expected: Sequence[HostBatch]) -> None:
    """Images, labels and indices are bitwise the same."""
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        for tensor, like in zip(batch[:3], other[:3], strict=True):
            assert torch.equal(tensor, like)


def numbers(count: int = 6, size: int = 12) -> ArraySource:
    """A source of ``count`` square images of noise, in three classes."""
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return ArraySource(images, np.arange(count) % 3, ["a", "b", "c"], "numbers")


def passes(feed: Any, count: int = 2) -> list[HostBatch]:
    """All batches of the first ``count`` epochs."""
    batches = []
    for epoch in range(count):
        feed.set_epoch(epoch)
        batches += list(feed)
    return batches


def primed(feed: Any, epoch: int) -> Any:
    """``feed`` once its workers have begun with ``epoch`` by themselves."""
    done = feed.meter.work().samples
    feed.prime(epoch)
    assert comes_true(lambda: feed.meter.work().samples > done)
    return feed


def random_states() -> tuple[object, ...]:
    """The states of Python's, numpy's and torch's global generators, to be compared."""
    drawn = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), pickle.dumps(np.random.get_state()), drawn


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_behind() -> list[str]:
    """Worker processes and shared memory of this process that are still there."""
    gc.collect()
    held = [
        os.readlink(path) for path in Path(f"/proc/{os.getpid()}/fd").iterdir() if path.is_symlink()
    ]
    segments = [target for target in held if target.startswith("/dev/shm/torch_")]
    named = [str(path) for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
    return [*map(str, multiprocessing.active_children()), *segments, *named]
