"""The feed's ``threads`` backend: threads of the trainer fill batches together, in reused memory.

Decoders release the interpreter lock while they work. Nothing is copied or handed over.
``prefetch_factor`` sets how many batches are in memory, however many threads there are.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from harness.feed.buffers import BufferPool
from harness.feed.fill import Filler
from harness.feed.interface import (
    THREADS,
    Backend,
    Failure,
    FeedSettings,
    FillableDataset,
    HostBatch,
    stages_of,
    too_slow,
)
from harness.feed.order import AnyOrder
from harness.runtime import signals, workers
from harness.runtime.errors import LoaderError
from harness.runtime.folder import log
from harness.watch.stages import StageMeter, Stamps

# rows of the meter, one a thread: the most that loader.num_workers and tuner.max_workers take
MOST_THREADS = 512
# how soon a signal to the trainer ends a wait
_POLL_S = 0.5
# how long ``close`` waits for threads that are busy
_JOIN_S = 1.0


class ThreadFeed(Backend):
    """Batches of ``dataset`` in the order of ``order``, bitwise as by ``processes``.

    ``settings.num_workers`` is the number of threads (0: samples are filled when the batch is asked
    for). Ahead of the consumer are ``prefetch_factor`` batches and the one in the making. The
    images' memory is reused: see ``BufferPool``.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, if no batch came within ``settings.timeout_s``.
        RuntimeError, MemoryError: from ``next()``, without memory.
    """

    name = THREADS
    shares_interpreter = True

    def __init__(self, dataset: FillableDataset, order: AnyOrder, settings: FeedSettings) -> None:
        super().__init__(order, settings)
        self.meter = StageMeter(stages_of(dataset), MOST_THREADS, shared=False)
        self._dataset = dataset
        self._threads: BatchThreads | None = None

    def resize(self, threads: int) -> None:
        """Changes the number of threads, also within a pass; surplus threads end their chunk first.

        If the system starts no more, a warning says so, and ``settings`` have the number reached.
        """
        assert self.settings.num_workers and 1 <= threads <= MOST_THREADS
        if self._threads is not None:
            threads = self._threads.resize(threads)
        self.settings = replace(self.settings, num_workers=threads)

    def begin(self, epoch: int, first: int = 0) -> None:
        """As in ``Backend``."""
        super().begin(epoch, first)
        if self._threads is None:
            filler = partial(
                Filler, self._dataset, meter=self.meter, times_samples=self.times_samples
            )
            self._threads = BatchThreads(self, filler, self._dataset.image_size, self.settings)
        self._threads.begin(self._coming)

    def take(self, poll_s: float) -> HostBatch | None:
        """As in ``Backend``."""
        # closed while the pass began
        if self._threads is None:
            raise StopIteration
        return self._threads.take(poll_s)

    def end(self) -> None:
        """As in ``Backend``."""
        if self._threads is not None:
            self._threads.close()
        self._threads = None


@dataclass(slots=True, eq=False)
class _PendingBatch:
    """A batch in the making: all threads fill it together, the oldest batch first.

    Attributes:
        images: in a buffer of the pool.
        handed: samples that threads have taken on.
        made: samples that are there.
        chunks: the first row of each chunk, its failed samples and its times.
        failures: what ended chunks.
    """

    epoch: int
    indices: np.ndarray
    images: np.ndarray
    labels: np.ndarray
    handed: int = 0
    made: int = 0
    chunks: list[tuple[int, list[Failure], Stamps]] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    @property
    def due(self) -> bool:
        """Whether nothing more will come of the batch."""
        return self.made == len(self.indices) or bool(self.failures)


class BatchThreads:
    """The threads of one feed; with ``num_workers=0`` the consumer fills its batches itself.

    A thread that returns late from a read finds the pool closed. It has written to the memory of
    its own batch only.

    Args:
        owner: its end ends the threads.
        filler: makes the filler of a slot.
        image_size: side of an image in pixels.
        settings: of the feed.

    Attributes:
        close: ends the threads; safe to call twice.
    """

    def __init__(
        self,
        owner: object,
        filler: Callable[[int], Filler],
        image_size: int,
        settings: FeedSettings,
    ) -> None:
        # with the owner, and at exit too: a thread must not be cut off in C code
        self.close = weakref.finalize(owner, self._close)
        self._filler = filler
        self._shape = image_size, image_size, 3
        self._settings = settings
        self._device: int | None = None
        if settings.pin_memory:
            self._device = torch.accelerator.current_device_index()
        self._ahead = 1 + (settings.prefetch_factor or 0)
        # the consumer holds two: one in use or on its way, and the one that it is given
        size = settings.batch_size * math.prod(self._shape)
        self._memory = BufferPool(self._ahead + 2, size, settings.pin_memory)
        # the consumer's, without threads
        self._own = None if settings.num_workers else filler(0)
        # the epoch and the indices of each batch to come
        self._requests: Iterator[tuple[int, np.ndarray]] | None = None
        self._pending: deque[_PendingBatch] = deque()
        # raised when no batch is pending
        self._errors: list[BaseException] = []
        self._wanted = settings.num_workers
        self._threads: dict[int, threading.Thread] = {}
        # how long the consumer has waited for the oldest batch
        self._waited_s = 0.0
        # the collector may close this in the middle of a call of its own
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)

    def begin(self, requests: Iterator[tuple[int, np.ndarray]]) -> None:
        """Begins a pass; all batches of the pass before have been taken."""
        with self._lock:
            self._requests = requests
            self._waited_s = 0.0
            self.resize(self._wanted)

    def resize(self, threads: int) -> int:
        """Starts or ends threads; returns their number, less if the system starts no more.

        Without a single one the pass ends with a LoaderError.
        """
        with self._lock:
            self._wanted = threads
            for slot in sorted({*range(threads)} - self._threads.keys()):
                thread = threading.Thread(
                    target=self._serve, args=(slot,), name=f"feed-{slot}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    self._wanted = slot
                    text = (
                        f"{slot} threads load, and not {threads}: {error}; allow more (ulimit -u), "
                        "or set loader.backend=processes loader.num_workers=0"
                    )
                    if slot == 0:
                        self._fail(LoaderError(text))
                    else:
                        log.warning("%s", text)
                    break
                self._threads[slot] = thread
            self._work.notify_all()
            return self._wanted

    def take(self, poll_s: float) -> HostBatch | None:
        """Returns the oldest batch, or None after ``poll_s`` seconds without it.

        Raises:
            StopIteration: no batch will come.
            LoaderError: no batch came within ``settings.timeout_s``.
            Whatever failed in place of the batch.
        """
        timeout_s = self._settings.timeout_s
        began_s = time.monotonic()
        with self._lock:
            while self._own is not None and not self._settled():
                if (chunk := self._hand_out()) is not None:
                    self._fill(self._own, *chunk)
                del chunk
            if self._done.wait_for(self._settled, min(poll_s, _POLL_S, timeout_s or _POLL_S)):
                self._waited_s = 0.0
                return self._oldest()
        signals.check_wait()
        self._waited_s += time.monotonic() - began_s
        if 0 < timeout_s <= self._waited_s:
            raise too_slow(self._settings)
        return None

    def _oldest(self) -> HostBatch:
        # without names for errors and their batch: the traceback keeps this frame and its names
        if not self._pending:
            raise self._errors.pop(0) if self._errors else StopIteration
        if self._pending[0].failures:
            raise self._pending.popleft().failures.pop(0)
        first = self._pending.popleft()
        # there is room for another batch
        self._work.notify_all()
        _, failures, stamps = zip(*sorted(first.chunks), strict=True)
        begun_s = min(each.begun_s for each in stamps)
        made_s = max(each.made_s for each in stamps)
        return HostBatch(
            torch.from_numpy(first.images),
            torch.from_numpy(first.labels),
            torch.from_numpy(first.indices),
            tuple(chain(*failures)),
            first.epoch,
            Stamps(begun_s, made_s, made_s, made_s),
        )

    def _settled(self) -> bool:
        """Whether a batch is there, or none will come."""
        return self._pending[0].due if self._pending else self._requests is None

    def _fail(self, error: BaseException) -> None:
        """Begins no further batch, and has ``error`` raised after those that were begun."""
        self._errors.append(error)
        self._requests = None
        self._done.notify_all()

    def _close(self) -> None:
        """Ends the threads; waits a moment for those that are busy."""
        with self._lock:
            self._wanted = 0
            self._requests = None
            self._pending.clear()
            threads = {*self._threads.values()} - {threading.current_thread()}
            self._work.notify_all()
            self._done.notify_all()
        until_s = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _serve(self, slot: int) -> None:
        """The thread of ``slot``: fills chunks of the oldest batch until it is to leave."""
        workers.give_way()
        try:
            if self._device is not None:
                # a new thread is on the first device
                torch.accelerator.set_device_index(self._device)
            filler = self._filler(slot)
            while True:
                with self._lock:
                    chunk = None
                    while chunk is None:
                        if slot >= self._wanted:
                            self._threads.pop(slot, None)
                            return
                        if (chunk := self._hand_out()) is None:
                            self._work.wait()
                self._fill(filler, *chunk)
                # or the last batch of this thread would never be free
                del chunk
        except BaseException as error:
            # handed to the consumer, who raises it
            with self._lock:
                self._fail(error)

    def _hand_out(self) -> tuple[_PendingBatch, slice] | None:
        """Returns the next samples to fill; None without room or without anything to do."""
        pending = self._pending
        if not pending or pending[-1].handed == len(pending[-1].indices):
            if len(pending) == self._ahead or self._requests is None:
                return None
            epoch, indices = next(self._requests, (0, None))
            if indices is None:
                self._requests = None
                self._done.notify_all()
                return None
            # a new batch, in a buffer that no tensor views any more
            count = len(indices)
            images = self._memory.acquire(count * math.prod(self._shape)).view(count, *self._shape)
            labels = torch.empty(count, dtype=torch.int64, pin_memory=self._settings.pin_memory)
            images = images.permute(0, 3, 1, 2)
            pending.append(_PendingBatch(epoch, indices, images.numpy(), labels.numpy()))
        last = pending[-1]
        # Several chunks for each thread, so that threads end a batch together. At most 8 samples:
        # between two chunks a thread looks whether it is still needed.
        share = self._settings.batch_size // (4 * max(1, self._wanted))
        first = last.handed
        last.handed = min(first + max(1, min(share, 8)), len(last.indices))
        return last, slice(first, last.handed)

    def _fill(self, filler: Filler, pending: _PendingBatch, rows: slice) -> None:
        """Fills the samples of ``pending`` at ``rows``."""
        count = rows.stop - rows.start
        try:
            chunk = filler.fill(
                filler.timer.begin(count),
                pending.epoch,
                pending.indices[rows],
                pending.images[rows],
                pending.labels[rows],
                batches=int(rows.stop == len(pending.indices)),
            )
        except BaseException as error:
            # raised by the consumer, when the batch is due
            pending.failures.append(error)
        with self._lock:
            if not pending.failures:
                pending.chunks.append((rows.start, *chunk))
                pending.made += count
            if pending.due:
                self._done.notify_all()
