"""The feed's ``processes`` backend: torch's ``DataLoader`` with workers that fill whole uint8
batches.
"""

from __future__ import annotations

import itertools
import multiprocessing.util
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from harness.config import ConfigError
from harness.feed.fill import Filler
from harness.feed.gauge import Gauge
from harness.feed.interface import (
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
from harness.runtime.workers import Watchdog
from harness.watch.stages import StageMeter

# how soon a dead worker, or a signal to the trainer, ends a wait
_POLL_S = 2.0

# an epoch and the indices of one batch: the epoch travels with every request
Key = tuple[int, np.ndarray]


class ProcessFeed(Feed):
    """Batches of ``dataset`` in the order of ``order``.

    Every sample is a function of (seed, epoch, index), errors come back as text in the batch, and
    the workers' base seed is drawn from a generator of the feed's own: no setting changes what the
    model sees, and iterating leaves the global generators alone.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, for a worker that died or did not answer within
            ``settings.timeout_s``.
        ConfigError: from ``next()``, for a data set that cannot be pickled.
    """

    def __init__(
        self,
        dataset: FillableDataset,
        order: AnyOrder,
        settings: FeedSettings,
        gauge: Gauge | None = None,
    ) -> None:
        super().__init__(order, settings)
        self._keys = _Keys(order)
        with suppress(RuntimeError, OSError):
            # no shared memory for it: the feed does without
            self.meter = StageMeter(stages_of(dataset), settings.num_workers)
        self._data = _Batches(dataset, self.meter, gauge)
        self._loader: Loader | None = None
        # torch's iterator of this pass, or of the last with persistent workers
        self._pass: Iterator[HostBatch] | None = None
        # that of a primed pass
        self._started: Future[Iterator[HostBatch]] | None = None
        self._workers: list[BaseProcess] = []
        # at exit too: Python waits for them, and they are deaf to SIGTERM
        weakref.finalize(self, _kill, self._workers)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The live workers; empty without any, and until a pass has begun."""
        return tuple(
            worker.pid for worker in self._workers if worker.pid is not None and worker.is_alive()
        )

    def prime(self, epoch: int) -> None:
        """As in ``Feed``, in the background; nothing happens without workers.

        Nor are workers forked: a lock that the step holds at that moment would be held in them for
        ever.
        """
        if self.settings.num_workers and (self.settings.start_method != "fork" or self._workers):
            super().prime(epoch)

    def _batches(self, epoch: int, primed: bool, poll_s: float) -> Iterator[HostBatch | None]:
        given = 0
        with Watchdog(self.settings.timeout_s, self._free) as watchdog:
            try:
                # a primed pass serves where it waits as shortly
                if self._started and poll_s < _POLL_S:
                    self._end()
                started = self._started
                self._started = None
                batches = started.result() if started else self._start(epoch, poll_s)
                watchdog.wait = 0
                for batch in self._polls(batches):
                    if batch is None and watchdog.fired:
                        raise TimeoutError
                    given += batch is not None
                    watchdog.wait = given if batch is None else None
                    yield batch
                    watchdog.wait = given
            except (RuntimeError, OSError, EOFError) as error:
                if not self.settings.num_workers:
                    raise
                if watchdog.fired:
                    signals.check()
                    raise too_slow(self.settings) from error
                raise _loader_error(error) from error

    def _polls(self, batches: Iterator[HostBatch]) -> Iterator[HostBatch | None]:
        """The batches of one pass, and None for each of torch's waits that was in vain.

        Torch looks for dead workers only when a wait is over, so that waits are short ones.
        """
        while True:
            try:
                if (batch := next(batches, None)) is None:
                    return
            except RuntimeError as error:
                if not _is_timeout(error):
                    signals.check()
                    raise
                signals.check_wait()
                batch = None
            yield batch

    def _begin(self, epoch: int) -> None:
        """Start the workers, or wake persistent ones, for ``epoch`` in the background."""
        own = torch.accelerator
        # a new thread is on the first device, and torch's pinning thread takes over the device of
        # the one that starts it
        device = (
            (own.set_device_index, (own.current_device_index(),))
            if self.settings.pin_memory
            else ()
        )
        pool = ThreadPoolExecutor(1, "prime", *device)
        self._started = pool.submit(self._start, epoch, _POLL_S)
        pool.shutdown(wait=False)

    def _start(self, epoch: int, poll_s: float) -> Iterator[HostBatch]:
        s = self.settings
        wait_s = min(poll_s, _POLL_S, s.timeout_s or _POLL_S) if s.num_workers else 0
        if self._loader is not None and self._loader.timeout != wait_s:
            self._end_workers()
        if self._loader is None:
            # for the workers' sockets: a killed one would leave its own folder behind
            multiprocessing.util.get_temp_dir()
            if s.num_workers and s.start_method == "forkserver":
                workers.start_server()
            self._loader = Loader(
                **self._parts(),
                num_workers=s.num_workers,
                pin_memory=s.pin_memory,
                prefetch_factor=s.prefetch_factor,
                persistent_workers=s.persistent_workers,
                timeout=wait_s,
                multiprocessing_context=s.start_method if s.num_workers else None,
                generator=torch.Generator(),
            )
        self._keys.epoch = epoch
        former = signal.getsignal(signal.SIGCHLD)
        try:
            self._pass = iter(self._loader)
        except RuntimeError as error:
            if not _is_timeout(error):
                raise
            # workers of an earlier pass that cannot answer at once, on a machine that was asleep
            self._end_workers()
            return self._start(epoch, poll_s)
        except (PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"num_workers={s.num_workers}: the data set cannot be sent to worker processes "
                f"({error}); define its functions "
                "and classes at the top of a module, or use num_workers=0"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                # torch's raises wherever the trainer happens to be
                signal.signal(signal.SIGCHLD, former or signal.SIG_DFL)
        self._workers[:] = getattr(self._pass, "_workers", ())
        return self._pass

    def _free(self) -> None:
        """End a wait in a read from a worker, which has no limit of its own: kill the workers."""
        queue = getattr(self._pass, "_worker_result_queue", None)
        # torch's pinning thread reads in this one's place, and must be ended before the workers are
        if queue is not None and not self.settings.pin_memory:
            for worker in self._workers:
                worker.kill()
            # with the last writer goes the wait for the rest of a batch
            queue._writer.close()

    def _end(self) -> None:
        """End the workers, busy or not, at once."""
        started = self._started
        self._started = None
        if started:
            # waits until there are workers to end
            started.exception()
        self._end_workers()

    def _end_workers(self) -> None:
        """Kill the workers, then drop torch's iterator: in the other order it waits up to 5 s for
        each that is busy.
        """
        if self._workers:
            _stop_pinning(self._pass)
            _kill(self._workers)
            # torch sets this event when it is dropped; a worker that was killed in a look at it
            # took its lock along
            self._pass._workers_done_event = threading.Event()  # type: ignore[union-attr]
        self._pass = self._loader = None

    def _parts(self) -> dict[str, Any]:
        """What torch's loader is made of: ``__getitems__`` of the data set gives a whole batch for
        a key.
        """
        return {
            "dataset": self._data,
            "batch_sampler": self._keys,
            "collate_fn": _as_it_is,
            "worker_init_fn": _enter_feed,
        }


class Loader(DataLoader[HostBatch]):
    """Torch's, without its warning of many workers: so many were asked for, and threads must not
    filter warnings.
    """

    def check_worker_number_rationality(self) -> None:
        """Says nothing."""


@dataclass(slots=True)
class _Keys:
    """The batch sampler: one request for each batch of the chosen epoch."""

    order: AnyOrder
    epoch: int = 0

    def __iter__(self) -> Iterator[Key]:
        return zip(itertools.repeat(self.epoch), self.order.batches(self.epoch))


class _Batches(Dataset[HostBatch]):
    """The data set as a worker sees it: one request in, one whole batch out."""

    def __init__(
        self, dataset: FillableDataset, meter: StageMeter | None, gauge: Gauge | None
    ) -> None:
        self.dataset = dataset
        self.meter = meter
        self.gauge = gauge
        # this worker's, from its first batch on
        self._filler: Filler | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, key: Key) -> HostBatch:
        epoch, indices = key
        count = len(indices)
        worker = get_worker_info()
        if self._filler is None:
            self._filler = Filler(self.dataset, worker.id if worker else 0, self.meter, self.gauge)
        # what the batch takes besides its samples begins here
        self._filler.begin(count)
        size = self.dataset.image_size
        self._filler.share()
        shape = (count, 3, size, size)
        strides = (3 * size * size, 1, 3 * size, 3)
        if worker is None:
            images = torch.empty_strided(shape, strides, dtype=torch.uint8)
        else:
            # shared from the start, as in torch's own collate: handing it over copies nothing
            storage = torch.UntypedStorage._new_shared(count * 3 * size * size)
            images = torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape, strides)
        labels = torch.zeros(count, dtype=torch.int64)
        errors, stamps = self._filler.fill(epoch, indices, images.numpy(), labels.numpy())
        return HostBatch(images, labels, torch.from_numpy(indices), tuple(errors), epoch, stamps)


def _as_it_is(batch: HostBatch) -> HostBatch:
    return batch


def enter_worker(worker: int) -> None:
    """Prepare worker number ``worker`` in its own process."""
    workers.enter_worker()


def _enter_feed(worker: int) -> None:
    """The same for a worker of this project's own feeds."""
    enter_worker(worker)
    workers.give_way()


def _stop_pinning(batches: object) -> None:
    """End torch's thread that pins batches, while the workers that it reads from are alive: it
    cannot bear their death.
    """
    done, thread = (
        getattr(batches, f"_pin_memory_thread{name}", None) for name in ("_done_event", "")
    )
    if done is not None and thread is not None:
        done.set()
        batches._worker_result_queue.put((None, None))  # type: ignore[attr-defined]  # wakes it
        thread.join(timeout=1.0)
        # where it waits for a worker, the worker's death ends it, with an error that the feed tells
        thread._invoke_excepthook = _as_it_is


def _kill(running: list[BaseProcess]) -> None:
    for worker in running:
        worker.kill()
    for worker in running:
        worker.join(timeout=1.0)
        # one that it was just filling still has its name
        for segment in Path("/dev/shm").glob(f"torch_{worker.pid}_*"):
            segment.unlink(missing_ok=True)
    running.clear()


def _is_timeout(error: Exception) -> bool:
    return "timed out after" in str(error)


def _loader_error(error: Exception) -> LoaderError:
    """The typed form of what torch says of its workers."""
    lines = (str(error) or type(error).__name__).splitlines()
    # a worker's own error comes behind its traceback
    text = lines[-1 if lines[0].startswith("Caught ") else 0].rstrip(". ")
    return LoaderError(
        f"{text}: a worker died, or its batch could not be handed over (out of memory, full "
        "/dev/shm, too many open files); "
        "lower loader.num_workers or loader.batch_size"
    )
