"""The feed's ``threads`` backend: threads of the trainer fill batches together, in memory that is
used again.

Decoders release the interpreter lock while they work. Nothing is copied or handed over.
``prefetch_factor`` alone says how many batches there are in memory, however many threads there are.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from harness.feed.buffers import BufferPool
from harness.feed.fill import Errors, Filler
from harness.feed.gauge import Gauge
from harness.feed.interface import (
    ARRAYS,
    Feed,
    FeedSettings,
    FillableDataset,
    HostBatch,
    alone,
    stages_of,
    too_slow,
)
from harness.feed.order import AnyOrder
from harness.runtime import signals, workers
from harness.runtime.errors import LoaderError
from harness.runtime.folder import LOGGER
from harness.watch.stages import StageMeter, Stamps

_log = logging.getLogger(LOGGER)
_POLL_S = 0.5  # how soon a signal to the trainer ends a wait
_IDLE_S = 5.0  # wake-up interval of an idle thread, in case a notification was missed
_JOIN_S = 1.0  # how long ``close`` waits for threads that are busy
# most samples that a thread takes at a time: between two chunks it looks whether it is still needed
_CHUNK = 8
_CHUNKS = (
    4  # chunks per thread and batch, if the batch is large enough: the threads then finish together
)
# batches that a consumer holds: one in use or on its way to the device, and one that it is given
_HELD = 2


class ThreadFeed(Feed):
    """Batches of ``dataset`` in the order of ``order``, bitwise those of the ``processes`` backend.

    ``settings.num_workers`` is the number of threads (0: samples are filled when the batch is asked
    for). Ahead of the consumer are ``prefetch_factor`` batches and the one in the making. The
    images' memory is reused: see ``BufferPool``.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, where no batch came within ``settings.timeout_s``.
        MemoryError: from ``next()``.
    """

    def __init__(
        self,
        dataset: FillableDataset,
        order: AnyOrder,
        settings: FeedSettings,
        gauge: Gauge | None = None,
    ) -> None:
        super().__init__(order, settings)
        self.most_threads = (
            max(settings.num_workers, 8, 4 * (os.cpu_count() or 1))
            if gauge is None
            else gauge.slots
        )
        self.meter = StageMeter(stages_of(dataset), self.most_threads, shared=False)
        self._dataset = dataset
        self._gauge = gauge
        self._threads: BatchThreads | None = None

    def resize(self, threads: int) -> None:
        """Have so many threads from now on, also within a pass; surplus threads leave after their
        chunk of samples.

        Where the system starts no more, a warning says so, and ``settings`` have as many as there
        are.

        Raises:
            ValueError: there are none to add to, or the rows of the gauge or the meter are fewer.
        """
        if not (self.settings.num_workers and 1 <= threads <= self.most_threads):
            raise ValueError(
                f"resize({threads}) of a feed with num_workers={self.settings.num_workers}: choose "
                "1 to "
                f"{self.most_threads} threads, for a feed that has any"
            )
        started = threads if self._threads is None else self._threads.resize(threads)
        self.settings = replace(self.settings, num_workers=started)

    def _batches(self, epoch: int, primed: bool, poll_s: float) -> Iterator[HostBatch | None]:
        threads = self._threads if primed and self._threads else self._begin(epoch)
        return threads.batches(poll_s)

    def _begin(self, epoch: int) -> BatchThreads:
        """Let the threads begin with ``epoch``, if there are any."""
        threads = self._threads or BatchThreads(
            self, self._dataset, self.settings, self.meter, self._gauge
        )
        self._threads = threads
        threads.begin(epoch, self.order.batches(epoch))
        return threads

    def _end(self) -> None:
        """End the threads; one that hangs in a read is left behind."""
        if self._threads is not None:
            self._threads.close()
        self._threads = None


@dataclass(slots=True, eq=False)
class _PendingBatch:
    """A batch in the making: all threads fill it together, the oldest batch first."""

    epoch: int
    indices: np.ndarray
    images: np.ndarray  # in a buffer of the pool
    labels: np.ndarray
    handed: int = 0  # samples that threads have taken on
    made: int = 0  # samples that are there
    chunks: list[tuple[int, Errors, Stamps]] = field(
        default_factory=list
    )  # the first row of each, and what came of it
    failure: BaseException | None = None  # of a chunk

    @property
    def due(self) -> bool:
        """Whether all that will come of it is there."""
        return self.made == len(self.indices) or self.failure is not None

    def batch(self) -> HostBatch:
        """What the chunks are together."""
        self.chunks.sort(key=lambda chunk: chunk[0])
        errors = tuple(error for _, found, _ in self.chunks for error in found)
        begun_s = min(stamps.begun_s for _, _, stamps in self.chunks)
        made_s = max(stamps.made_s for _, _, stamps in self.chunks)
        images, labels, indices = map(torch.from_numpy, (self.images, self.labels, self.indices))
        return HostBatch(
            images, labels, indices, errors, self.epoch, Stamps(begun_s, made_s, made_s, made_s)
        )


class BatchThreads:
    """The threads of one feed; with ``num_workers=0`` whoever takes a batch fills it.

    A thread that returns late from a read finds this closed; it has written to the memory of its
    own batch only.

    Attributes:
        close: ends the threads, once, at the latest when ``owner`` goes.
        through: whether all batches of the pass have been taken.
    """

    def __init__(
        self,
        owner: object,
        dataset: FillableDataset,
        settings: FeedSettings,
        meter: StageMeter | None,
        gauge: Gauge | None = None,
    ) -> None:
        # with the owner, and at exit too: a thread must not be cut off in C code
        self.close = weakref.finalize(owner, self._close)
        self.through = False
        self._settings = settings
        self._image_size = dataset.image_size
        self._pools: tuple[BufferPool, BufferPool] | None = (
            None  # of images and of labels, from the first batch on
        )
        self._device = torch.accelerator.current_device_index() if settings.pin_memory else None
        self._ahead = 1 + (settings.prefetch_factor or 0)
        self._filler = partial(Filler, dataset, meter=meter, gauge=gauge)
        self._own = (
            None if settings.num_workers else self._filler(0)
        )  # the consumer's, where there are no threads
        self._epoch = 0
        self._requests: Iterator[np.ndarray] | None = None  # the indices of each batch to come
        self._pending: deque[_PendingBatch] = deque()
        self._failure: BaseException | None = None  # of no batch: raised after the pending ones
        self._closed = False
        self._wanted = settings.num_workers
        self._threads: dict[int, threading.Thread] = {}
        self._lock = (
            threading.RLock()
        )  # the collector may close this in the middle of a call of its own
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)

    def begin(self, epoch: int, requests: Iterator[np.ndarray]) -> None:
        """Begin a pass; the one before it has been through."""
        with self._lock:
            self._epoch = epoch
            self._requests = requests
            self.through = False
            wanted = self._wanted
            try:
                self._start(wanted)
            except RuntimeError as error:
                text = f"loader.num_workers={wanted}: {error}; lower it"
                if self._settings.backend == ARRAYS:  # whose threads are no setting
                    text = (
                        f"{error}, of {wanted} that were to read files; set {alone(self._settings)}"
                    )
                self._fail(LoaderError(text))

    def resize(self, threads: int) -> int:
        """Have so many threads, or as many more as the system can start; returns how many."""
        with self._lock:
            try:
                self._start(threads)
            except RuntimeError as error:
                _log.warning("%d threads load, and not %d: %s", self._wanted, threads, error)
            return self._wanted

    def batches(self, poll_s: float) -> Iterator[HostBatch | None]:
        """Yields the batches of the pass, and None for each wait of ``poll_s`` that was in vain.

        Raises:
            LoaderError: no batch came within ``settings.timeout_s``.
        """
        timeout_s = self._settings.timeout_s
        waited_s = 0.0
        while True:
            begin_s = time.monotonic()
            batch = self.take(min(poll_s, _POLL_S, timeout_s or _POLL_S))
            if batch is not None:
                waited_s = 0.0
            elif self.through:
                return
            else:
                signals.check_wait()
                waited_s += time.monotonic() - begin_s
                if 0 < timeout_s <= waited_s:
                    raise too_slow(self._settings)
            yield batch
            del batch

    def take(self, wait_s: float) -> HostBatch | None:
        """Returns the next batch; None if it is not there within ``wait_s`` seconds, or there is
        none.
        """
        with self._lock:
            while self._own is not None and not self._settled():
                if (chunk := self._hand_out()) is not None:
                    self._fill(self._own, *chunk)
                del chunk
            if not self._done.wait_for(self._settled, wait_s):
                return None
            first = self._pending.popleft() if self._pending else None
            error = self._failure if first is None else first.failure
            if error is not None:
                try:
                    raise error
                finally:
                    # or its traceback would keep this frame and the batch, and these the error
                    self._failure = None
                    if first is not None:
                        first.failure = None
                    del error, first
            self.through = first is None
            self._work.notify_all()  # there is room for another one
        return first.batch() if first is not None else None

    def _settled(self) -> bool:
        """Whether there is no reason to wait: a batch is there, or none will come."""
        if self._pending:
            return self._pending[0].due
        return self._failure is not None or self._closed or self._requests is None

    def _start(self, threads: int) -> None:
        """Have so many threads; where one cannot be started, those before it."""
        for slot in range(threads):
            if slot not in self._threads:
                thread = threading.Thread(
                    target=self._serve, args=(slot,), name=f"feed-{slot}", daemon=True
                )
                thread.start()
                self._threads[slot] = thread
            self._wanted = max(self._wanted, slot + 1)
        self._wanted = threads
        self._work.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Begin no further batch, and have ``error`` raised after those that were begun."""
        self._failure = self._failure or error
        self._requests = None
        self._done.notify_all()

    def _close(self) -> None:
        """End the threads; those that are busy for longer than a moment are not waited for."""
        with self._lock:
            self._closed = True
            self._pending.clear()
            threads = [
                thread
                for thread in self._threads.values()
                if thread is not threading.current_thread()
            ]
            self._work.notify_all()
            self._done.notify_all()
        until_s = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _serve(self, slot: int) -> None:
        """The thread of ``slot``."""
        workers.give_way()
        try:
            if self._device is not None:  # a new thread is on the first one
                torch.accelerator.set_device_index(self._device)
            filler = self._filler(slot)
            while (chunk := self._next_chunk(slot)) is not None:
                self._fill(filler, *chunk)
                del chunk  # or the last batch of this thread would never be free
        except BaseException as error:  # handed to the consumer, who raises it
            with self._lock:
                self._fail(error)

    def _next_chunk(self, slot: int) -> tuple[_PendingBatch, slice] | None:
        """Waits for samples for the thread of ``slot``; returns None where it is to leave."""
        with self._lock:
            while not self._closed and slot < self._wanted:
                if (chunk := self._hand_out()) is not None:
                    return chunk
                self._work.wait(_IDLE_S)
            self._threads.pop(slot, None)
            return None

    def _hand_out(self) -> tuple[_PendingBatch, slice] | None:
        """Returns the next samples to fill; None where there is no room, or nothing to do."""
        if not self._pending or self._pending[-1].handed == len(self._pending[-1].indices):
            if len(self._pending) == self._ahead or self._requests is None:
                return None
            if (indices := next(self._requests, None)) is None:
                self._requests = None
                self._done.notify_all()
                return None
            self._pending.append(self._new_batch(indices))
        last = self._pending[-1]
        first = last.handed
        share = self._settings.batch_size // (_CHUNKS * max(1, self._wanted))
        last.handed = min(first + max(1, min(share, _CHUNK)), len(last.indices))
        return last, slice(first, last.handed)

    def _new_batch(self, indices: np.ndarray) -> _PendingBatch:
        """Returns an empty batch for ``indices``, in buffers that no tensor views any more."""
        shape = (len(indices), self._image_size, self._image_size, 3)
        if self._pools is None:
            settings = self._settings
            pool = partial(BufferPool, self._ahead + _HELD, pin_memory=settings.pin_memory)
            self._pools = (
                pool(slot_bytes=settings.batch_size * math.prod(shape[1:])),
                pool(slot_bytes=settings.batch_size * 8),
            )
        images = self._pools[0].acquire(math.prod(shape)).view(shape).permute(0, 3, 1, 2).numpy()
        labels = self._pools[1].acquire(len(indices) * 8).view(torch.int64).numpy()
        return _PendingBatch(self._epoch, indices, images, labels)

    def _fill(self, filler: Filler, pending: _PendingBatch, rows: slice) -> None:
        """Fill the samples of ``pending`` that are at ``rows``."""
        count = rows.stop - rows.start
        try:
            filler.begin(count)
            last = rows.stop == len(pending.indices)
            errors, stamps = filler.fill(
                pending.epoch,
                pending.indices[rows],
                pending.images[rows],
                pending.labels[rows],
                batches=int(last),
            )
        except BaseException as error:  # raised by the consumer, when the batch is due
            pending.failure = pending.failure or error
        with self._lock:
            if pending.failure is None:
                pending.chunks.append((rows.start, errors, stamps))
                pending.made += count
            if pending.due:
                self._done.notify_all()
