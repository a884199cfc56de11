"""Threads that fill batches together, the oldest first, and what they share.

A batch in the making is shared by all threads: the first is there after its samples' time divided by the threads.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from harness.feed.fill import Errors, Filler
from harness.feed.gauge import Gauge
from harness.feed.interface import ARRAYS, FeedSettings, FillableDataset, HostBatch, alone
from harness.feed.ring import Ring
from harness.runtime import workers
from harness.runtime.errors import LoaderError
from harness.runtime.folder import LOGGER
from harness.watch.stages import StageMeter, Stamps

_log = logging.getLogger(LOGGER)
_IDLE_S = 5.0  # how soon a thread sees that it is not needed, should it not have heard
_JOIN_S = 1.0  # how long ``close`` waits for threads that are busy
_RUN = 8  # most samples that a thread takes on at a time: a thread looks up between two runs
_RUNS = 4  # that a thread takes on of each batch, if it is that large: so all end with it at nearly the same time
_HELD = 2  # batches that a consumer holds: one in use or on its way to the device, and one that it is given


@dataclass(slots=True, eq=False)
class _Making:
    """A batch in the making."""

    epoch: int
    indices: np.ndarray
    images: np.ndarray  # lent by the ring
    labels: np.ndarray
    handed: int = 0  # samples that threads have taken on
    made: int = 0  # samples that are there
    runs: list[tuple[int, Errors, Stamps]] = field(default_factory=list)  # the first row of each, and what came of it
    failure: BaseException | None = None  # of a run

    @property
    def complete(self) -> bool:
        return self.made == len(self.indices)

    @property
    def due(self) -> bool:
        """Whether all that will come of it is there."""
        return self.complete or self.failure is not None

    def batch(self) -> HostBatch:
        """What the runs have made together."""
        self.runs.sort(key=lambda run: run[0])
        errors = tuple(error for _, found, _ in self.runs for error in found)
        made_s = max(stamps.made_s for _, _, stamps in self.runs)
        stamps = Stamps(min(stamps.begun_s for _, _, stamps in self.runs), made_s, made_s, made_s)
        images, labels, indices = (torch.from_numpy(array) for array in (self.images, self.labels, self.indices))
        return HostBatch(images, labels, indices, errors, self.epoch, stamps)


class Crew:
    """The threads of one feed, or none, where whoever takes a batch fills it.

    One that comes back late from a read finds its crew closed; the memory that it has written to was its batch's alone.

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
        self._settings, self._image_size = settings, dataset.image_size
        self._rings: tuple[Ring, Ring] | None = None  # of images and of labels, from the first batch on
        self._device = torch.accelerator.current_device_index() if settings.pin_memory else None
        self._ahead = 1 + (settings.prefetch_factor or 0)
        self._filler = partial(Filler, dataset, meter=meter, gauge=gauge)
        self._own = None if settings.num_workers else self._filler(0)  # the consumer's, where there are no threads
        self._epoch = 0
        self._requests: Iterator[np.ndarray] | None = None  # the indices of each batch to come
        self._makings: deque[_Making] = deque()
        self._failure: BaseException | None = None  # of no batch: it comes after those that are in the making
        self._closed = False
        self._wanted, self._threads = settings.num_workers, dict[int, threading.Thread]()
        self._lock = threading.RLock()  # the collector may close a crew in the middle of a call of its own
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)

    def begin(self, epoch: int, requests: Iterator[np.ndarray]) -> None:
        """Begin a pass; the one before it has been through."""
        with self._lock:
            self._epoch, self._requests, self.through = epoch, requests, False
            wanted = self._wanted
            try:
                self._start(wanted)
            except RuntimeError as error:
                text = f"loader.num_workers={wanted}: {error}; lower it"
                if self._settings.backend == ARRAYS:  # whose threads are no setting
                    text = f"{error}, of {wanted} that were to read files; set {alone(self._settings)}"
                self._fail(LoaderError(text))

    def resize(self, threads: int) -> int:
        """Have so many threads, or as many more as the system can start; returns how many."""
        with self._lock:
            try:
                self._start(threads)
            except RuntimeError as error:
                _log.warning("%d threads load, and not %d: %s", self._wanted, threads, error)
            return self._wanted

    def _start(self, threads: int) -> None:
        """Have so many threads; where one cannot be started, those before it."""
        for slot in range(threads):
            if slot not in self._threads:
                thread = threading.Thread(target=self._serve, args=(slot,), name=f"feed-{slot}", daemon=True)
                thread.start()
                self._threads[slot] = thread
            self._wanted = max(self._wanted, slot + 1)
        self._wanted = threads
        self._work.notify_all()

    def take(self, wait_s: float) -> HostBatch | None:
        """The next batch; None if it is not there within ``wait_s`` seconds, or there is none."""
        with self._lock:
            while self._own is not None and not self._settled():
                if (run := self._hand_out()) is not None:
                    self._fill(self._own, *run)
                del run
            if not self._done.wait_for(self._settled, wait_s):
                return None
            first = self._makings.popleft() if self._makings else None
            error = self._failure if first is None else first.failure
            if error is not None:
                try:
                    raise error
                finally:  # or its traceback would keep this frame and the batch, and these the error
                    self._failure = None
                    if first is not None:
                        first.failure = None
                    del error, first
            self.through = first is None
            self._work.notify_all()  # there is room for another one
        return first.batch() if first is not None else None

    def _close(self) -> None:
        """End the threads; those that are busy for longer than a moment are not waited for."""
        with self._lock:
            self._closed = True
            self._makings.clear()
            threads = [thread for thread in self._threads.values() if thread is not threading.current_thread()]
            self._work.notify_all()
            self._done.notify_all()
        until_s = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _settled(self) -> bool:
        """Whether there is no reason to wait: a batch is there, or none will come."""
        if self._makings:
            return self._makings[0].due
        return self._failure is not None or self._closed or self._requests is None

    def _serve(self, slot: int) -> None:
        workers.give_way()
        try:
            if self._device is not None:  # a new thread is on the first one
                torch.accelerator.set_device_index(self._device)
            filler = self._filler(slot)
            while (run := self._next_run(slot)) is not None:
                self._fill(filler, *run)
                del run  # or the last batch of this thread would never be free
        except BaseException as error:  # handed to the consumer, who raises it
            with self._lock:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """No further batch is begun, and ``error`` comes after those that were."""
        self._failure, self._requests = self._failure or error, None
        self._done.notify_all()

    def _next_run(self, slot: int) -> tuple[_Making, slice] | None:
        """Samples for the thread of ``slot``, which waits for them; None where it is to leave."""
        with self._lock:
            while not self._closed and slot < self._wanted:
                if (run := self._hand_out()) is not None:
                    return run
                self._work.wait(_IDLE_S)
            self._threads.pop(slot, None)
            return None

    def _hand_out(self) -> tuple[_Making, slice] | None:
        """The next samples to fill; None where there is no room, or nothing to do."""
        if not self._makings or self._makings[-1].handed == len(self._makings[-1].indices):
            if len(self._makings) == self._ahead or self._requests is None:
                return None
            if (indices := next(self._requests, None)) is None:
                self._requests = None
                self._done.notify_all()
                return None
            self._makings.append(self._new_making(indices))
        last, first = self._makings[-1], self._makings[-1].handed
        share = self._settings.batch_size // (_RUNS * max(1, self._wanted))
        last.handed = min(first + max(1, min(share, _RUN)), len(last.indices))
        return last, slice(first, last.handed)

    def _new_making(self, indices: np.ndarray) -> _Making:
        s, side = self._settings, self._image_size
        shape = (len(indices), side, side, 3)
        if self._rings is None:
            slots, each = self._ahead + _HELD, s.batch_size
            self._rings = Ring(slots, each * math.prod(shape[1:]), s.pin_memory), Ring(slots, each * 8, s.pin_memory)
        images = self._rings[0].lend(math.prod(shape)).view(shape).permute(0, 3, 1, 2).numpy()
        labels = self._rings[1].lend(len(indices) * 8).view(torch.int64).numpy()
        return _Making(self._epoch, indices, images, labels)

    def _fill(self, filler: Filler, making: _Making, rows: slice) -> None:
        """Fill the samples of ``making`` that are at ``rows``."""
        try:
            filler.begin(rows.stop - rows.start)
            last = rows.stop == len(making.indices)
            indices, images, labels = making.indices[rows], making.images[rows], making.labels[rows]
            errors, stamps = filler.fill(making.epoch, indices, images, labels, batches=int(last))
        except BaseException as error:  # raised by the consumer, when the batch is due
            making.failure = making.failure or error
        with self._lock:
            if making.failure is None:
                making.runs.append((rows.start, errors, stamps))
                making.made += rows.stop - rows.start
            if making.due:
                self._done.notify_all()
