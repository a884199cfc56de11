"""Defines a backend, its batches and settings, the buffer pool and how a worker loads."""

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

# backends for every dataset
PROCESSES = "processes"
THREADS = "threads"
# backend for images that fit in memory
ARRAYS = "arrays"

# worker losses on one batch after which the pass ends, because the batch may kill every worker
_TRIES = 3
# maximum number and bytes of batches announced before they start
_AHEAD = 8
AHEAD_BYTES = 64 << 20
# the epoch and sample indices of a batch
Request = tuple[int, np.ndarray]
Requests = Iterator[Request]


class Failure(NamedTuple):
    """An unreadable sample.

    Attributes:
        sample: its index in the dataset.
        where: its location, for messages.
        reason: the error.
        replaced: whether another sample replaces it; otherwise, its pixels are undefined.
    """

    sample: int
    where: str
    reason: str
    replaced: bool


class HostBatch(NamedTuple):
    """One batch on the host.

    Attributes:
        images: uint8 ``[N, 3, H, W]``, 0..255, in channels_last memory, as written by decoders.
        labels: int64 ``[N]``.
        indices: int64 ``[N]``, sample indices from an order.
        failures: the unreadable samples.
        epoch: seeds augmentation on the device.
        stamps: when the batch was made and handed over; None for synthetic batches.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    failures: tuple[Failure, ...] = ()
    epoch: int = 0
    stamps: Stamps | None = None

    def pin_memory(self) -> HostBatch:
        """Returns the batch in pinned memory, except the indices; called by torch's loader."""
        # timestamps last
        return self._replace(
            images=self.images.pin_memory(),
            labels=self.labels.pin_memory(),
            stamps=self.stamps and self.stamps.pin_memory(),
        )


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """Fully resolved feed settings, with torch's names.

    ``dataclasses.replace`` changes them and adjusts dependent settings: without workers,
    ``prefetch_factor`` and ``persistent_workers`` are None; otherwise, they are 2 and True by
    default. For threads, ``prefetch_factor`` may be None, which means two batches in total. Arrays
    have no workers.
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
        """The total prefetch depth of all workers, in batches."""
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
    """Makes the batches in one order; iterates over one chosen epoch at a time.

    A new pass ends the previous one. Subclasses implement ``take`` and, to prefetch, ``begin`` and
    ``end``. Consumers call ``iter``, ``polled``, ``set_epoch``, ``prime`` and ``close``.

    Attributes:
        name: value of ``loader.backend``.
        made_on_device: whether batches are made on the device and need no copy.
        restarts: whether lost workers are replaced. Batches depend only on their position in the
            order, so none is lost or repeated.
        order: assigns samples to batches.
        settings: the loader settings.
        meter: measures the workers; None without workers or shared memory.
        times_samples: whether ``meter`` also times individual samples, for probes; set it before
            the first pass.
        replaced: replaced unreadable samples in this backend's batches, to be collected.
    """

    name: ClassVar[str]
    made_on_device = False
    restarts = False
    meter: StageMeter | None = None
    times_samples = False

    def __init__(self, order: AnyOrder, settings: FeedSettings) -> None:
        self.order = order
        self.settings = settings
        self._epoch = 0
        # the epoch of a primed pass
        self._primed: int | None = None
        # a new object per pass, so that a pass can detect a later one
        self._running: object | None = None
        # upcoming batches, for backends without prefetching
        self._coming: Requests = iter(())
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
        """Starts ``epoch`` in the background, so that its ``iter()`` finds batches.

        Never blocks. An error surfaces from ``next()``. Does nothing while another pass runs.
        """
        if self._running is None and self._primed is None:
            self.begin(epoch)
            self._primed = epoch

    def __iter__(self) -> Iterator[HostBatch]:
        # without a limit, no wait times out
        return cast(Iterator[HostBatch], self.polled(math.inf))

    def polled(self, poll_s: float, check: bool = True) -> Generator[HostBatch | None, None, None]:
        """Iterates over one pass; yields None after each ``poll_s`` seconds without a batch.

        A wait lasts at most 2 s (0.5 s for threads). An infinite ``poll_s`` yields only batches.

        Args:
            poll_s: timeout per batch, in seconds.
            check: whether to raise an error for a batch with a missing sample.

        Raises:
            BadSample: a sample in the batch cannot be read.
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
                            # frees its memory while waiting for the next batch
                            del batch
                    break
                except StopIteration:
                    break
                except LoaderError as error:
                    tries += 1
                    if not self.restarts or tries == _TRIES:
                        raise
                    # as text, because an error keeps its frames and their batches alive
                    text = "loader.restart_workers: %s. New workers continue with batch %d"
                    log.warning(text, str(error), given + 1)
                self.end()
                self.begin(epoch, given)
            if given < wanted:
                raise LoaderError(f"the loader ended after {given} of {wanted} batches")
        finally:
            # unless a later pass has taken over the workers
            if self._running in (None, own):
                self._running = None
                # requested batches would arrive in the next pass
                if not (0 < given == wanted and self.settings.persistent_workers):
                    self.close()

    def close(self) -> None:
        """Ends the workers; the next ``iter()`` starts new ones. Safe to call twice."""
        self._primed = self._running = None
        self.end()

    def begin(self, epoch: int, first: int = 0) -> None:
        """Starts the pass over ``epoch`` at batch ``first`` without waiting."""
        self._coming = zip(repeat(epoch), self.order.batches(epoch, first))

    @abstractmethod
    def take(self, poll_s: float) -> HostBatch | None:
        """Returns the next batch in the pass, or None after ``poll_s`` seconds without one.

        Raises:
            StopIteration: the pass is over.
            LoaderError: workers were lost, or a batch timed out.
        """

    def guard(self) -> AbstractContextManager[object]:
        """Returns the context for the waits in a pass, until workers are lost."""
        return nullcontext()

    # backends without prefetching have nothing to end
    def end(self) -> None:  # noqa: B027
        """Ends the prefetching of a pass."""


class FillableDataset(Protocol):
    """A dataset that a feed can load.

    If a dataset has an attribute ``stages``, the stage names of ``fill``, some calls to ``fill``
    pass a fourth argument: a function to call at the end of each stage with the stage's name.

    Attributes:
        image_size: image side length in pixels.
        skips: whether ``fill`` is called again for a failed sample with the keyword ``instead``,
            another index to read with the random numbers for ``index``.
    """

    image_size: int
    skips: bool

    def __len__(self) -> int: ...

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        """Writes a sample into ``out``, uint8 ``[3, S, S]``; returns its label."""
        ...


def stages_of(dataset: FillableDataset) -> tuple[str, ...]:
    """Returns the stages of ``dataset``; by default, ``sample``."""
    stages = getattr(dataset, "stages", None)
    # a user's dataset may use this name for something else
    return stages if isinstance(stages, tuple) else (SAMPLE,)


def announced(coming: Requests, dataset: FillableDataset) -> Requests:
    """Iterates over ``coming`` and announces some batches ahead to ``dataset``.

    Its method ``expect``, if it has one, takes sample indices and returns the number of bytes that
    are read ahead; if this is 0, the batch need not wait.
    """
    expect = getattr(dataset, "expect", None)
    waiting: deque[tuple[int, Request]] = deque()
    size = 0
    for request in coming:
        waiting.append((expect(request[1]) if expect else 0, request))
        size += waiting[-1][0]
        while waiting and (not size or size > AHEAD_BYTES or len(waiting) > _AHEAD):
            part, first = waiting.popleft()
            size -= part
            yield first
    for _, request in waiting:
        yield request


class BatchWorker:
    """Fills samples in one worker: a process, a thread or the main process.

    For each chunk, call ``timer.begin``, then ``fill``.

    Args:
        dataset: source of the samples.
        slot: the worker's row in ``meter``.
        meter: records each chunk's time by stage; None: chunks are only timed.
        times_samples: whether it also records the time for each readable sample.

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
        """Writes samples into a batch; returns their failures and the chunk's timestamps.

        Args:
            lap: the result of ``timer.begin`` for the chunk.
            epoch: epoch of the samples.
            indices: int64 ``[N]``, from an order.
            pixels: output, uint8 ``[N, 3, S, S]`` with any strides.
            labels: output, int64 ``[N]``.

        Raises:
            MemoryError: an allocation failed, which is not the sample's fault.
            ConfigError: a user function failed.
        """
        failures: list[Failure] = []
        first = self._stages[0]
        # a dataset with stages reports when they end
        told = first != SAMPLE
        laps = (lap,) if lap and told else ()
        # time so far belongs to the batch
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
                    # time without a lap is assigned to the first stage, usually reading
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
        """Returns a sample's failure; writes another sample in its place if requested.

        The error is kept as text, because an unpicklable one would never arrive (pytorch #142884).
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
    """A pool of batch buffers.

    There is no release call. A buffer becomes free when the last tensor or array that views it is
    deleted. Code that reads a buffer asynchronously, such as a copy to the device, must hold a view
    until it is done. Consumers never wait: if no buffer is free, new memory is allocated. Free
    buffers in excess of ``slots`` are released.

    Args:
        slots: number of free buffers to keep.
        slot_bytes: size of the largest batch.
        pin_memory: whether the memory is pinned.
    """

    def __init__(self, slots: int, slot_bytes: int, pin_memory: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self._pin_memory = pin_memory
        # with atomic appends and pops, because buffers return in any thread at any time
        self._free: deque[np.ndarray] = deque(maxlen=slots)

    def acquire(self, count: int) -> Tensor:
        """Returns ``count`` bytes, uint8 ``[count]``, of the most recently used free buffer.

        Raises:
            RuntimeError: no buffer is free, and torch cannot allocate one.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._allocate()
        # the tensor's storage keeps this array, and thus the buffer, until the last tensor is gone
        view = slot[:count]
        weakref.finalize(view, _take_back, weakref.ref(self), slot).atexit = False
        return torch.from_numpy(view)

    def _allocate(self) -> np.ndarray:
        size = self.slot_bytes
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory).numpy()


def _take_back(owner: weakref.ref[BufferPool], slot: np.ndarray) -> None:
    # a batch that outlives its pool must not keep other buffers
    if (pool := owner()) is not None:
        pool._free.append(slot)


def too_slow(timeout_s: float) -> LoaderError:
    """Returns the error for a batch that timed out."""
    where = user_code.current_place()
    why = f"your code does not return{where}" if where else "a worker or the storage is stuck"
    return LoaderError(
        f"no batch within loader.timeout_s={timeout_s:g}: {why}; raise the timeout, or find the "
        "sample with loader.backend=processes loader.num_workers=0"
    )
