"""Loads batches with threads, in reused memory (``loader.backend=threads``).

Decoders release the GIL. Nothing is copied between workers. ``FeedSettings.batches_ahead``
limits the number of batches in memory.
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
    announced,
    stages_of,
    too_slow,
)
from .order import AnyOrder

# rows in the meter, one per thread: the limit of loader.num_workers and tuner.max_workers
MOST_THREADS = 512
# polling interval for signals
_POLL_S = 0.5
# how long ``close`` waits for busy threads
_JOIN_S = 1.0


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch that all threads are filling.

    Attributes:
        images: pixels in a buffer from the pool.
        coming: number of missing samples; 0 once the batch is complete or has failed.
        handed: number of samples assigned to threads.
        chunks: the first row of each chunk, its failed samples and its times.
        errors: errors from chunks.
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
    """Batches from ``dataset`` in ``order``, bitwise identical to those from ``processes``.

    ``settings.num_workers`` is the number of threads (0: the consumer fills batches on request).
    Ahead of the consumer are ``batches_ahead`` batches and the one being filled. Image memory is
    reused; see ``BufferPool``.

    A thread that returns late from a read has only written to its own batch; it then ends. Threads
    end with the feed and before the interpreter exits, so that none is interrupted in C code.

    Raises:
        BadSample: from ``next()``, for an unreadable sample.
        LoaderError: from ``next()``, if no batch arrived within ``settings.timeout_s``.
        RuntimeError, MemoryError: from ``next()``, if out of memory.
    """

    name = THREADS

    def __init__(self, dataset: FillableDataset, order: AnyOrder, settings: FeedSettings) -> None:
        super().__init__(order, settings)
        self.meter: StageMeter = StageMeter(stages_of(dataset), MOST_THREADS, shared=False)
        self._dataset = dataset
        self._shape = dataset.image_size, dataset.image_size, 3
        self._ahead = 1 + settings.batches_ahead
        # both are set in the first pass; the worker is the consumer's
        self._memory: BufferPool | None = None
        self._own: BatchWorker
        self._pending: deque[_Batch] = deque()
        # whether there are unstarted batches in the pass
        self._more = False
        self._wanted = settings.num_workers
        # how long the consumer has waited for the oldest batch
        self._waited_s = 0.0
        # the garbage collector may close this during one of its own calls
        lock = threading.RLock()
        self._work = threading.Condition(lock)
        self._done = threading.Condition(lock)
        # active threads; all others end
        self._threads: dict[int, threading.Thread] = {}
        weakref.finalize(self, _dismiss, self._threads, self._work)

    def begin(self, epoch: int, first: int = 0) -> None:
        """As in ``Backend``; all batches from the previous pass have been taken."""
        super().begin(epoch, first)
        self._coming = announced(self._coming, self._dataset)
        if self._memory is None:
            # the consumer holds two batches: one in use or being copied, and the one it receives
            size = self.settings.batch_size * math.prod(self._shape)
            self._memory = BufferPool(self._ahead + 2, size, self.settings.pin_memory)
            # the system may have refused more threads last time
            self._wanted = self.settings.num_workers
            self._own = self._filler(0)
        with self._work:
            self._more = True
            self._waited_s = 0.0
            self._start()

    def resize(self, threads: int) -> None:
        """Changes the number of threads, also within a pass; surplus threads finish their chunk.

        If the system refuses more threads, logs a warning and sets ``settings`` to the actual
        number.
        """
        with self._work:
            self._wanted = threads
            if self._threads:
                self._start()
        self.settings = replace(self.settings, num_workers=self._wanted)

    def _start(self) -> None:
        """Starts the requested threads, or fewer if the system refuses more."""
        # a new thread uses the first device
        prepare = accelerator.taking_over() if self.settings.pin_memory else None
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
                    f"{slot} of {self._wanted} loader threads started: {error}; allow more (ulimit "
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
        """As in ``Backend``; raises the error of a failed batch."""
        timeout_s = self.settings.timeout_s
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
                # room for another batch
                self._work.notify_all()
                return self._oldest()
        signals.check_wait()
        self._waited_s += time.monotonic() - began_s
        if 0 < timeout_s <= self._waited_s:
            raise too_slow(timeout_s)
        return None

    def _oldest(self) -> HostBatch:
        """Returns and removes the oldest batch, which is complete, or raises its error."""
        if not self._pending:
            raise StopIteration
        if self._pending[0].errors:
            # error and batch have no names, because the traceback keeps this frame
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
        """As in ``Backend``; waits briefly for busy threads."""
        with self._work:
            self._more = False
            self._memory = None
            self._pending.clear()
            self._done.notify_all()
        _dismiss(self._threads, self._work)

    def _fail(self, error: BaseException) -> None:
        """Stops starting batches; ``error`` is raised instead of the next one."""
        none = np.empty(0, np.int64)
        pending = self._pending
        with self._work:
            if not pending or pending[-1].handed == len(pending[-1].indices):
                pending.append(_Batch(0, none, none, none, 0))
            _spoil(pending[-1], error)
            self._more = False
            self._done.notify_all()

    def _hand_out(self) -> tuple[_Batch, slice] | None:
        """Returns the next samples to fill; None if there is no space or nothing to do."""
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
                # a new batch, in an unreferenced buffer
                assert self._memory is not None
                count = len(indices)
                images = self._memory.acquire(count * math.prod(self._shape))
                images = images.view(count, *self._shape).permute(0, 3, 1, 2)
                labels = torch.empty(count, dtype=torch.int64, pin_memory=self.settings.pin_memory)
                pending.append(_Batch(epoch, indices, images.numpy(), labels.numpy(), count))
            except BaseException as error:
                # before another thread starts the next batch
                self._fail(error)
                return None
        batch = pending[-1]
        # Several chunks per thread, so that threads finish a batch together. At most 8 samples per
        # chunk, because a thread checks between chunks whether it is still needed.
        share = self.settings.batch_size // (4 * max(1, self._wanted))
        first = batch.handed
        batch.handed = min(first + max(1, min(share, 8)), len(batch.indices))
        return batch, slice(first, batch.handed)


def _fill(filler: BatchWorker, batch: _Batch, rows: slice, done: threading.Condition) -> None:
    """Fills the samples at ``rows`` in ``batch``; notifies ``done`` when the batch is complete."""
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
        # a failed batch is complete
        batch.coming -= count if batch.coming else 0
        if not batch.coming:
            done.notify_all()


def _spoil(batch: _Batch, error: BaseException) -> None:
    """Makes the consumer raise ``error`` instead of returning the batch; the rest is not filled."""
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
    """Runs the thread in ``slot``, which fills chunks until unneeded; keeps no feed reference."""
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
                    # the feed may be deleted here, which ends this thread
                    del feed
                    if chunk is None and threads.get(slot) is own:
                        work.wait()
            _fill(filler, *chunk, done)
            # otherwise, this thread's last batch would never be freed
            del chunk
    except BaseException as error:
        # raised by the consumer, unless this thread's pass is over
        with work:
            if threads.get(slot) is own and (feed := owner()) is not None:
                feed._fail(error)


def _dismiss(threads: dict[int, threading.Thread], work: threading.Condition) -> None:
    """Ends ``threads``; waits briefly for busy ones, unless called by one of them."""
    with work:
        leaving = [*threads.values()]
        threads.clear()
        work.notify_all()
    until_s = time.monotonic() + _JOIN_S
    for thread in leaving if threading.current_thread() not in leaving else ():
        thread.join(max(0.0, until_s - time.monotonic()))
