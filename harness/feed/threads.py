"""The feed's ``threads`` backend: threads of the trainer fill batches together, in reused memory.

Decoders release the interpreter lock while they work. Nothing is copied or handed over.
``prefetch_factor`` alone says how many batches there are in memory, however many threads there are.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from harness.feed.buffers import BufferPool
from harness.feed.fill import Filler
from harness.feed.interface import (
    Failure,
    Feed,
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
# wake-up interval of an idle thread, in case a notification was missed
_IDLE_S = 5.0
# how long ``close`` waits for threads that are busy
_JOIN_S = 1.0


class ThreadFeed(Feed):
    """Batches of ``dataset`` in the order of ``order``, bitwise those of the ``processes`` backend.

    ``settings.num_workers`` is the number of threads (0: samples are filled when the batch is asked
    for). Ahead of the consumer are ``prefetch_factor`` batches and the one in the making. The
    images' memory is reused: see ``BufferPool``.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, if no batch came within ``settings.timeout_s``.
        MemoryError: from ``next()``.
    """

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

    def batches_of(self, epoch: int, poll_s: float) -> Iterator[HostBatch | None]:
        """As in ``Feed``."""
        threads = self._threads
        # closed while the pass began
        if threads is None:
            return iter(())
        return threads.batches(poll_s)

    def begin(self, epoch: int, first: int = 0) -> None:
        """As in ``Feed``."""
        if self._threads is None:
            self._threads = BatchThreads(
                self, self._dataset, self.meter, self.settings, self.times_samples
            )
        self._threads.begin(epoch, self.order.batches(epoch, first))

    def end(self) -> None:
        """As in ``Feed``."""
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
        dataset: gives the samples.
        meter: of the feed.
        settings: of the feed.
        times_samples: as the feed has it.

    Attributes:
        close: ends the threads; safe to call twice.
    """

    def __init__(
        self,
        owner: object,
        dataset: FillableDataset,
        meter: StageMeter | None,
        settings: FeedSettings,
        times_samples: bool = False,
    ) -> None:
        # with the owner, and at exit too: a thread must not be cut off in C code
        self.close = weakref.finalize(owner, self._close)
        # makes that of a slot
        self._filler = partial(Filler, dataset, meter=meter, times_samples=times_samples)
        self._image_size = dataset.image_size
        self._settings = settings
        self._device: int | None = None
        if settings.pin_memory:
            self._device = torch.accelerator.current_device_index()
        self._ahead = 1 + (settings.prefetch_factor or 0)
        # the consumer holds two: one in use or on its way, and the one that it is given
        pool = partial(BufferPool, self._ahead + 2, pin_memory=settings.pin_memory)
        self._images = pool(slot_bytes=settings.batch_size * 3 * dataset.image_size**2)
        self._labels = pool(slot_bytes=settings.batch_size * 8)
        # the consumer's, without threads
        self._own: Filler | None = None
        if not settings.num_workers:
            self._own = self._filler(0)
        self._epoch = 0
        # the indices of each batch to come
        self._requests: Iterator[np.ndarray] | None = None
        self._pending: deque[_PendingBatch] = deque()
        self._wanted = settings.num_workers
        self._threads: dict[int, threading.Thread] = {}
        # the collector may close this in the middle of a call of its own
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)

    def begin(self, epoch: int, requests: Iterator[np.ndarray]) -> None:
        """Begins a pass; all batches of the pass before have been taken."""
        with self._lock:
            self._epoch = epoch
            self._requests = requests
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

    def batches(self, poll_s: float) -> Iterator[HostBatch | None]:
        """Iterates over the pass, and yields None after each ``poll_s`` seconds without a batch.

        Raises:
            LoaderError: no batch came within ``settings.timeout_s``.
        """
        timeout_s = self._settings.timeout_s
        wait_s = min(poll_s, _POLL_S, timeout_s or _POLL_S)
        waited_s = 0.0
        while True:
            begin_s = time.monotonic()
            batch = None
            with self._lock:
                while self._own is not None and not self._settled():
                    if (chunk := self._hand_out()) is not None:
                        self._fill(self._own, *chunk)
                    del chunk
                settled = self._done.wait_for(self._settled, wait_s)
                if settled:
                    if not self._pending:
                        return
                    batch = self._take()
                    waited_s = 0.0
            if not settled:
                signals.check_wait()
                waited_s += time.monotonic() - begin_s
                if 0 < timeout_s <= waited_s:
                    raise too_slow(self._settings)
            yield batch
            # the memory of the batch must be free while the next one is awaited
            del batch

    def _take(self) -> HostBatch:
        """Returns the oldest batch, or raises what failed in its place."""
        # without a name for the error or its batch: the traceback keeps this frame and its names
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
        none = np.empty(0, np.int64)
        self._pending.append(_PendingBatch(self._epoch, none, none, none, failures=[error]))
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
                            self._work.wait(_IDLE_S)
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
            indices = next(self._requests, None)
            if indices is None:
                self._requests = None
                self._done.notify_all()
                return None
            # a new batch, in buffers that no tensor views any more
            shape = (len(indices), self._image_size, self._image_size, 3)
            images = self._images.acquire(math.prod(shape)).view(shape).permute(0, 3, 1, 2)
            labels = self._labels.acquire(len(indices) * 8).view(torch.int64)
            pending.append(_PendingBatch(self._epoch, indices, images.numpy(), labels.numpy()))
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
            failed, stamps = filler.fill(
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
                pending.chunks.append((rows.start, failed, stamps))
                pending.made += count
            if pending.due:
                self._done.notify_all()
