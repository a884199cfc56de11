"""Loads batches by threads, in reused memory (``loader.backend=threads``).

Decoders release the interpreter lock while they work. Nothing is copied or handed over.
``batches_ahead`` of the settings limits the batches in memory.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch

from ..clock.stages import StageMeter, Stamps
from ..runtime import accelerator, signals, workers
from ..runtime.errors import LoaderError
from ..runtime.folder import log
from .base import (
    THREADS,
    Backend,
    BatchWorker,
    BufferPool,
    Failure,
    FeedSettings,
    FillableDataset,
    HostBatch,
    stages_of,
    too_slow,
)
from .order import AnyOrder

# rows of the meter, one a thread: the most that loader.num_workers and tuner.max_workers take
MOST_THREADS = 512
# how soon a signal to the trainer ends a wait
_POLL_S = 0.5
# how long ``close`` waits for threads that are busy
_JOIN_S = 1.0


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch in the making: all threads fill it together.

    Attributes:
        images: in a buffer of the pool.
        coming: samples that are not there; 0 once nothing more will come.
        handed: samples that threads have taken on.
        chunks: the first row of each chunk, its failed samples and its times.
        errors: what ended chunks.
    """

    epoch: int
    indices: np.ndarray
    images: np.ndarray
    labels: np.ndarray
    coming: int
    handed: int = 0
    chunks: list[tuple[int, list[Failure], Stamps]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


class ThreadFeed(Backend):
    """Batches of ``dataset`` in the order of ``order``, bitwise as by ``processes``.

    ``settings.num_workers`` is the number of threads (0: the consumer fills a batch as it asks for
    it). Ahead of the consumer are ``batches_ahead`` batches and the one in the making. The
    images' memory is reused: see ``BufferPool``.

    A thread that returns late from a read finds that it is not wanted any more. It has written to
    the memory of its own batch only. Threads end with the feed, and before the interpreter does:
    none must be cut off in C code.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, if no batch came within ``settings.timeout_s``.
        RuntimeError, MemoryError: from ``next()``, without memory.
    """

    name = THREADS
    shares_interpreter = True

    def __init__(self, dataset: FillableDataset, order: AnyOrder, settings: FeedSettings) -> None:
        super().__init__(order, settings)
        self.meter: StageMeter = StageMeter(stages_of(dataset), MOST_THREADS, shared=False)
        self._dataset = dataset
        self._shape = dataset.image_size, dataset.image_size, 3
        self._batch_size = settings.batch_size
        self._pin_memory = settings.pin_memory
        self._timeout_s = settings.timeout_s
        self._ahead = 1 + settings.batches_ahead
        # both from the first pass on, the filler for the consumer
        self._memory: BufferPool | None = None
        self._own: BatchWorker
        self._pending: deque[_Batch] = deque()
        # whether batches of the pass have not been begun
        self._more = False
        self._wanted = settings.num_workers
        # how long the consumer has waited for the oldest batch
        self._waited_s = 0.0
        # the collector may close this in the middle of a call of its own
        lock = threading.RLock()
        self._work = threading.Condition(lock)
        self._done = threading.Condition(lock)
        # those that serve: one that is not here ends
        self._threads: dict[int, threading.Thread] = {}
        weakref.finalize(self, _dismiss, self._threads, self._work)

    def begin(self, epoch: int, first: int = 0) -> None:
        """As in ``Backend``; all batches of the pass before have been taken."""
        super().begin(epoch, first)
        if self._memory is None:
            # the consumer holds two: one in use or on its way, and the one that it is given
            size = self._batch_size * math.prod(self._shape)
            self._memory = BufferPool(self._ahead + 2, size, self._pin_memory)
            # the system may have had no more the last time
            self._wanted = self.settings.num_workers
            self._own = self._filler(0)
        with self._work:
            self._more = True
            self._waited_s = 0.0
            self._start()

    def resize(self, threads: int) -> None:
        """Changes the number of threads, also within a pass; surplus threads end their chunk first.

        If the system starts no more, a warning says so, and ``settings`` have the number reached.
        """
        assert self.settings.num_workers and 1 <= threads <= MOST_THREADS
        with self._work:
            self._wanted = threads
            if self._threads:
                self._start()
        self.settings = replace(self.settings, num_workers=self._wanted)

    def _start(self) -> None:
        """Starts the threads that are wanted; fewer, or an error, if the system starts no more."""
        # a new thread is on the first device
        prepare = accelerator.taking_over() if self._pin_memory else None
        for slot in sorted({*range(self._wanted)} - self._threads.keys()):
            thread = threading.Thread(
                target=_serve,
                args=(weakref.ref(self), self._threads, self._work, slot, prepare),
                name=f"feed-{slot}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                text = (
                    f"{slot} threads load, and not {self._wanted}: {error}; allow more (ulimit "
                    "-u), or set loader.backend=processes loader.num_workers=0"
                )
                if slot == 0:
                    self._fail(LoaderError(text))
                else:
                    log.warning("%s", text)
                    self._wanted = slot
                break
            self._threads[slot] = thread
        self._work.notify_all()

    def _filler(self, slot: int) -> BatchWorker:
        return BatchWorker(self._dataset, slot, self.meter, self.times_samples)

    def take(self, poll_s: float) -> HostBatch | None:
        """As in ``Backend``; raises whatever failed in place of the batch."""
        timeout_s = self._timeout_s
        began_s = time.monotonic()
        until_s = began_s + min(poll_s, _POLL_S, timeout_s or _POLL_S)
        with self._work:
            while not self._wanted and (chunk := self._hand_out()):
                _fill(self._own, *chunk, self._done)
            while self._pending[0].coming if self._pending else self._more:
                if not self._done.wait(until_s - time.monotonic()):
                    break
            else:
                self._waited_s = 0.0
                # there is room for another batch
                self._work.notify_all()
                return self._oldest()
        signals.check_wait()
        self._waited_s += time.monotonic() - began_s
        if 0 < timeout_s <= self._waited_s:
            raise too_slow(timeout_s)
        return None

    def _oldest(self) -> HostBatch:
        """Takes the oldest batch, of which nothing more will come, or raises its error."""
        if not self._pending:
            raise StopIteration
        if self._pending[0].errors:
            # without names for the error and its batch: the traceback keeps this frame
            raise self._pending.popleft().errors.pop(0)
        batch = self._pending.popleft()
        _, failures, stamps = zip(*sorted(batch.chunks), strict=True)
        return HostBatch(
            torch.from_numpy(batch.images),
            torch.from_numpy(batch.labels),
            torch.from_numpy(batch.indices),
            tuple(chain(*failures)),
            batch.epoch,
            max(stamps),
        )

    def end(self) -> None:
        """As in ``Backend``; waits a moment for threads that are busy."""
        with self._work:
            self._more = False
            self._memory = None
            self._pending.clear()
            self._done.notify_all()
        _dismiss(self._threads, self._work)

    def _fail(self, error: BaseException) -> None:
        """Begins no further batch; ``error`` is raised in place of the first one to be made."""
        none = np.empty(0, np.int64)
        pending = self._pending
        with self._work:
            if not pending or pending[-1].handed == len(pending[-1].indices):
                pending.append(_Batch(0, none, none, none, 0))
            _spoil(pending[-1], error)
            self._more = False
            self._done.notify_all()

    def _hand_out(self) -> tuple[_Batch, slice] | None:
        """Returns the next samples to fill; None without room or without anything to do."""
        pending = self._pending
        if not pending or pending[-1].handed == len(pending[-1].indices):
            if len(pending) == self._ahead or not self._more:
                return None
            try:
                epoch, indices = next(self._coming, (0, None))
                if indices is None:
                    self._more = False
                    self._done.notify_all()
                    return None
                # a new batch, in a buffer that no tensor views any more
                assert self._memory is not None
                count = len(indices)
                images = self._memory.acquire(count * math.prod(self._shape))
                images = images.view(count, *self._shape).permute(0, 3, 1, 2)
                labels = torch.empty(count, dtype=torch.int64, pin_memory=self._pin_memory)
                pending.append(_Batch(epoch, indices, images.numpy(), labels.numpy(), count))
            except BaseException as error:
                # before another thread begins the batch after it
                self._fail(error)
                return None
        batch = pending[-1]
        # Several chunks for each thread, so that threads end a batch together. At most 8 samples:
        # between two chunks a thread looks whether it is still needed.
        share = self._batch_size // (4 * max(1, self._wanted))
        first = batch.handed
        batch.handed = min(first + max(1, min(share, 8)), len(batch.indices))
        return batch, slice(first, batch.handed)


def _fill(filler: BatchWorker, batch: _Batch, rows: slice, done: threading.Condition) -> None:
    """Fills the samples of ``batch`` at ``rows``; notifies ``done`` of its end."""
    count = rows.stop - rows.start
    try:
        chunk = filler.fill(
            filler.timer.begin(count),
            batch.epoch,
            batch.indices[rows],
            batch.images[rows],
            batch.labels[rows],
        )
    except BaseException as error:
        with done:
            _spoil(batch, error)
            done.notify_all()
        return
    with done:
        batch.chunks.append((rows.start, *chunk))
        # of a batch with an error nothing is awaited
        batch.coming -= count if batch.coming else 0
        if not batch.coming:
            done.notify_all()


def _spoil(batch: _Batch, error: BaseException) -> None:
    """Has the consumer raise ``error`` in the batch's place; nobody need fill the rest."""
    batch.errors.append(error)
    batch.handed = len(batch.indices)
    batch.coming = 0


def _serve(
    owner: weakref.ref[ThreadFeed],
    threads: dict[int, threading.Thread],
    work: threading.Condition,
    slot: int,
    prepare: Callable[[], None] | None,
) -> None:
    """The thread of ``slot``: fills chunks until it is not wanted; keeps no feed meanwhile."""
    workers.lower_priority()
    own = threading.current_thread()
    try:
        if prepare:
            prepare()
        filler: BatchWorker | None = None
        while True:
            with work:
                chunk = None
                while chunk is None or filler is None:
                    feed = owner()
                    if feed is None or threads.get(slot) is not own:
                        return
                    if slot >= feed._wanted:
                        del threads[slot]
                        return
                    filler = filler or feed._filler(slot)
                    chunk = feed._hand_out()
                    done = feed._done
                    # the feed may end here, and with it this thread
                    del feed
                    if chunk is None and threads.get(slot) is own:
                        work.wait()
            _fill(filler, *chunk, done)
            # or the last batch of this thread would never be free
            del chunk
    except BaseException as error:
        # handed to the consumer, who raises it, unless the pass of this thread is over
        with work:
            if threads.get(slot) is own and (feed := owner()) is not None:
                feed._fail(error)


def _dismiss(threads: dict[int, threading.Thread], work: threading.Condition) -> None:
    """Ends ``threads``; waits a moment for those that are busy, unless one of them calls."""
    with work:
        leaving = [*threads.values()]
        threads.clear()
        work.notify_all()
    until_s = time.monotonic() + _JOIN_S
    for thread in leaving if threading.current_thread() not in leaving else ():
        thread.join(max(0.0, until_s - time.monotonic()))
