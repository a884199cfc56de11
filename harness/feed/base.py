"""Defines a backend, its batches and settings, the buffer pool and a worker's loading."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ..clock.stages import COLLATE, SAMPLE, START, Lap, StageMeter, StageTimer, Stamps
from ..config import ConfigError
from ..runtime import user_code
from ..runtime.errors import BadSample, LoaderError, is_out_of_memory
from ..runtime.folder import log
from ..runtime.seeding import instead_of
from .order import AnyOrder

# the backends that can serve every data set
PROCESSES = "processes"
THREADS = "threads"
# the backend for images that all fit in memory
ARRAYS = "arrays"

# losses of workers at one batch that end the pass: one that kills each worker is never there
_TRIES = 3


class Failure(NamedTuple):
    """A sample that could not be read.

    Attributes:
        sample: its place in the data set.
        where: where it lies, for people.
        reason: why it cannot be read.
        replaced: whether another one was put in its place; else its pixels are undefined.
    """

    sample: int
    where: str
    reason: str
    replaced: bool


class HostBatch(NamedTuple):
    """One batch on the host.

    Attributes:
        images: uint8 ``[N, 3, H, W]``, 0..255, in channels_last memory, as decoders write them.
        labels: int64 ``[N]``.
        indices: int64 ``[N]``, the samples' places in the data set, as an order gives them.
        failures: the samples that could not be read.
        epoch: the epoch, of which augmentation on the device is a function.
        stamps: when the batch was made and handed over; None for a batch that nobody made.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    failures: tuple[Failure, ...] = ()
    epoch: int = 0
    stamps: Stamps | None = None

    def pin_memory(self) -> HostBatch:
        """Returns the batch in page-locked memory, but for the indices; torch's loader calls it."""
        # stamped last
        return self._replace(
            images=self.images.pin_memory(),
            labels=self.labels.pin_memory(),
            stamps=self.stamps and self.stamps.pin_memory(),
        )


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """The settings of a feed with nothing left to derive; the names are torch's.

    ``dataclasses.replace`` changes them, and what goes with a number of workers follows: without
    any, ``prefetch_factor`` and ``persistent_workers`` are None, else 2 and True unless given. With
    threads ``prefetch_factor`` may stay None: two batches in all. Arrays have no workers.
    """

    batch_size: int
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool | None
    timeout_s: float
    start_method: str
    backend: str = PROCESSES

    def __post_init__(self) -> None:
        workers = 0 if self.backend == ARRAYS else self.num_workers
        depth = self.prefetch_factor or (None if self.backend == THREADS else 2)
        for name, value in (
            ("num_workers", workers),
            ("prefetch_factor", depth if workers else None),
            ("persistent_workers", self.persistent_workers is not False if workers else None),
        ):
            # the class is frozen
            object.__setattr__(self, name, value)

    @property
    def batches_ahead(self) -> int:
        """The most batches that all workers together make ahead of the consumer."""
        if self.num_workers and self.prefetch_factor is None:
            return 2
        return self.num_workers * (self.prefetch_factor or 0)

    def __str__(self) -> str:
        text = f"num_workers={self.num_workers} pin_memory={str(self.pin_memory).lower()}"
        if self.prefetch_factor is not None:
            text += f" prefetch_factor={self.prefetch_factor}"
        if self.backend != PROCESSES:
            text += f" backend={self.backend}"
        return text


class Backend(ABC):
    """Makes the batches of one order; iterates over one epoch, the chosen one, at a time.

    A new pass ends the pass before. A subclass implements ``take``, and if it works ahead
    ``begin`` and ``end``. Consumers call ``iter``, ``polled``, ``set_epoch``, ``prime``, ``close``.

    Attributes:
        name: as ``loader.backend`` has it.
        shares_interpreter: whether samples are made in the trainer's process.
        made_on_device: whether batches are on the device already, so that nothing is copied.
        restarts: whether new workers take the place of lost ones. A batch is a function of its
            place in the order, so that none is lost and none comes twice.
        order: which samples make which batch.
        settings: how the batches are made.
        meter: what the workers do; None without workers or without shared memory.
        times_samples: whether ``meter`` counts single samples too, for probes; to be set before
            the first pass.
        replaced: samples of this backend's batches that could not be read and were replaced, for
            whoever wants to take them.
    """

    name: ClassVar[str]
    shares_interpreter: ClassVar[bool] = False
    made_on_device = False
    restarts = False
    meter: StageMeter | None = None
    times_samples = False

    def __init__(self, order: AnyOrder, settings: FeedSettings) -> None:
        self.order = order
        self.settings = settings
        self._epoch = 0
        # the epoch of a pass that was begun ahead of time
        self._primed: int | None = None
        # another object for each pass, so that a pass can see that a later one has begun
        self._running: object | None = None
        # the epoch and the indices of each batch to come, of a backend that makes nothing ahead
        self._coming: Iterator[tuple[int, np.ndarray]] = iter(())
        # another thread may add to it
        self.replaced: deque[Failure] = deque()

    def __len__(self) -> int:
        return self.order.count(self._epoch)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the live workers; empty for threads."""
        return ()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next ``iter()``."""
        self._epoch = epoch

    def prime(self, epoch: int) -> None:
        """Begins ``epoch`` in the background, so that an ``iter()`` of that epoch finds batches.

        Never blocks. An error surfaces from ``next()``. Does nothing while another pass runs.
        """
        if self._running is None and self._primed is None:
            self.begin(epoch)
            self._primed = epoch

    def __iter__(self) -> Iterator[HostBatch]:
        # without a limit there are no vain waits
        return cast(Iterator[HostBatch], self.polled(math.inf))

    def polled(self, poll_s: float, check: bool = True) -> Generator[HostBatch | None, None, None]:
        """Iterates over one pass, and yields None after each ``poll_s`` seconds without a batch.

        A wait lasts 2 s at most, whatever ``poll_s`` is; 0.5 s for threads. With an infinite
        ``poll_s`` there are batches only.

        Args:
            poll_s: how long to wait for a batch.
            check: refuse a batch that lacks a sample.

        Raises:
            BadSample: a sample of the batch cannot be read.
            LoaderError: a batch was lost, or the workers were.
        """
        if self._running is not None or self._primed not in (None, self._epoch):
            self.close()
        own = self._running = object()
        epoch = self._epoch
        given = tries = 0
        wanted = len(self)
        try:
            if wanted and self._primed is None:
                self.begin(epoch)
            self._primed = None
            while True:
                try:
                    with self.guard():
                        while given < wanted and self._running is own:
                            batch = self.take(poll_s)
                            if batch is not None:
                                for failure in batch.failures:
                                    if check and not failure.replaced:
                                        raise BadSample(failure.where, failure.reason)
                                self.replaced += batch.failures
                                given += 1
                                tries = 0
                            if batch is not None or poll_s < math.inf:
                                yield batch
                            # its memory must be free while the next one is awaited
                            del batch
                    break
                except StopIteration:
                    break
                except LoaderError as error:
                    tries += 1
                    if not self.restarts or tries == _TRIES:
                        raise
                    # as text: an error keeps the frames that it came through, and their batches
                    text = "loader.restart_workers: %s. New workers go on with batch %d"
                    log.warning(text, str(error), given + 1)
                self.end()
                self.begin(epoch, given)
            if given < wanted:
                raise LoaderError(
                    f"the feed ended after {given} of {wanted} batches; no batch may be lost"
                )
        finally:
            self._leave(own, is_whole=0 < given == wanted)

    def _leave(self, own: object, is_whole: bool) -> None:
        """Ends a pass, unless a later one has begun: the workers are then that one's."""
        if self._running in (None, own):
            self._running = None
            # batches that were asked for would come in the next pass
            if not (is_whole and self.settings.persistent_workers):
                self.close()

    def close(self) -> None:
        """Ends the workers; the next ``iter()`` starts new ones. Safe to call twice."""
        self._primed = self._running = None
        self.end()

    def begin(self, epoch: int, first: int = 0) -> None:
        """Begins the pass of ``epoch`` at its batch ``first`` without waiting."""
        self._coming = zip(repeat(epoch), self.order.batches(epoch, first))

    @abstractmethod
    def take(self, poll_s: float) -> HostBatch | None:
        """Returns the next batch of the pass, or None after ``poll_s`` seconds without one.

        Raises:
            StopIteration: no batch will come.
            LoaderError: the workers were lost, or a batch did not come in time.
        """

    def guard(self) -> AbstractContextManager[object]:
        """Returns the block that the waits of a pass are in, until workers are lost."""
        return nullcontext()

    # a backend that makes nothing ahead has nothing to end
    def end(self) -> None:  # noqa: B027
        """Ends what a pass has begun."""


class FillableDataset(Protocol):
    """A data set that a feed can serve.

    A data set with an attribute ``stages``, the names of what ``fill`` does, is given a fourth
    argument by some calls of ``fill``: a function to call at the end of each stage with its name.

    Attributes:
        image_size: side of an image in pixels.
        skips: whether ``fill`` is called again for a sample that raised an error, with the keyword
            ``instead``: another place to read, with the random numbers of ``index``.
    """

    image_size: int
    skips: bool

    def __len__(self) -> int: ...

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        """Writes a sample into ``out``, uint8 ``[3, S, S]``; returns its label."""
        ...


def stages_of(dataset: FillableDataset) -> tuple[str, ...]:
    """Returns the stages that ``dataset`` names, or ``sample``."""
    stages = getattr(dataset, "stages", None)
    # a data set that is not ours may use the name for something else
    return stages if isinstance(stages, tuple) else (SAMPLE,)


class BatchWorker:
    """What one worker does, a process, a thread or the trainer itself: it fills samples.

    For each chunk call ``timer.begin``, then ``fill``.

    Args:
        dataset: gives the samples.
        slot: the worker's row of ``meter``.
        meter: counts what each chunk took, by stage; None: chunks are timed all the same.
        times_samples: whether it also counts what each readable sample took.

    Attributes:
        timer: times the chunk.
    """

    def __init__(
        self, dataset: FillableDataset, slot: int, meter: StageMeter | None, times_samples: bool
    ) -> None:
        self._dataset: Any = dataset
        self._stages = stages_of(dataset)
        meter = meter or StageMeter(self._stages, slot + 1, shared=False)
        self._fill: Any = meter.timed(slot, dataset.fill) if times_samples else dataset.fill
        self.timer = StageTimer(meter, slot)

    def fill(
        self,
        lap: Lap | None,
        epoch: int,
        indices: np.ndarray,
        pixels: np.ndarray,
        labels: np.ndarray,
    ) -> tuple[list[Failure], Stamps]:
        """Writes samples into a batch; returns their failures, and when the chunk was made.

        Args:
            lap: what ``timer.begin`` returned for the chunk.
            epoch: of the samples.
            indices: their places in the data set, int64 ``[N]``, as an order gives them.
            pixels: where they go, uint8 ``[N, 3, S, S]`` with any strides.
            labels: where their labels go, int64 ``[N]``.

        Raises:
            MemoryError: no sample's fault, whichever allocator refused.
            ConfigError: no sample's fault either: a function of the user's failed.
        """
        failures: list[Failure] = []
        first = self._stages[0]
        # a data set that names its stages tells of their ends
        told = first != SAMPLE
        laps = (lap,) if lap and told else ()
        # until here the time is the batch's
        self.timer.mark(COLLATE)
        for row, index in enumerate(indices.tolist()):
            try:
                if lap:
                    lap(START)
                labels[row] = self._fill(epoch, index, pixels[row], *laps)
                if lap and not told:
                    lap(SAMPLE)
            except Exception as error:
                if lap:
                    # time without a lap counts for the first stage, most often reading
                    lap(first)
                if is_out_of_memory(error):
                    raise MemoryError(str(error)) from error
                if isinstance(error, ConfigError):
                    raise
                failures.append(self._failure(error, epoch, index, pixels[row], labels[row:]))
        return failures, self.timer.end(len(indices))

    def _failure(
        self, error: Exception, epoch: int, index: int, out: np.ndarray, label: np.ndarray
    ) -> Failure:
        """Returns why a sample could not be read; writes another in its place, if that is wanted.

        As text: an error that cannot be pickled would never arrive (pytorch #142884).
        """
        where, reason = f"sample {index}", f"{type(error).__name__}: {error}"
        if isinstance(error, BadSample):
            where, reason = error.where, error.reason
        length = len(self._dataset)
        for other in instead_of(index % length, length) if self._dataset.skips else ():
            with suppress(BadSample):
                label[0] = self._dataset.fill(epoch, index, out, instead=other)
                return Failure(index % length, where, reason, True)
        return Failure(index % length, where, reason, False)


class BufferPool:
    """A pool of buffers for batches.

    There is no release call: a buffer is free again when the last tensor or array that views it is
    gone. Code that reads a buffer asynchronously, such as a copy on its way to the device, must
    hold such a tensor until it is done. A consumer that keeps more batches than ``slots`` never
    waits: a buffer is new memory where none is free, and beyond ``slots`` free ones it is given
    back.

    Args:
        slots: number of buffers that are kept for use again.
        slot_bytes: size of the largest batch.
        pin_memory: whether the memory is page-locked.
    """

    def __init__(self, slots: int, slot_bytes: int, pin_memory: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self._pin_memory = pin_memory
        # appends and pops are atomic: buffers come back in any thread, in the middle of anything
        self._free: deque[np.ndarray] = deque(maxlen=slots)

    def acquire(self, count: int) -> Tensor:
        """Returns ``count`` bytes, uint8 ``[count]``, of the most recently used free buffer.

        Raises:
            RuntimeError: no buffer is free, and torch has no memory for another.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._allocate()
        # the storage of the tensor holds this array, and with it the buffer, until the last tensor
        # of the storage is gone
        view = slot[:count]
        weakref.finalize(view, _take_back, weakref.ref(self), slot).atexit = False
        return torch.from_numpy(view)

    def _allocate(self) -> np.ndarray:
        size = self.slot_bytes
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory).numpy()


def _take_back(owner: weakref.ref[BufferPool], slot: np.ndarray) -> None:
    # a batch that outlives its pool must not keep the pool's other buffers
    if (pool := owner()) is not None:
        pool._free.append(slot)


def too_slow(timeout_s: float) -> LoaderError:
    """Returns the error for a batch that did not come in time."""
    where = user_code.current_place()
    why = f"your code does not return{where}" if where else "a worker hangs or the storage does"
    return LoaderError(
        f"no batch within loader.timeout_s={timeout_s:g}: {why}; raise the time, or "
        "find the sample with loader.backend=processes loader.num_workers=0"
    )
