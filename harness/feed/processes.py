"""Loads batches with ``DataLoader`` worker processes (``loader.backend=processes``)."""

from __future__ import annotations

import multiprocessing.util
import resource
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..clock.stages import COLLATE, SHARE, StageMeter
from ..config import ConfigError
from ..runtime import accelerator, signals, workers
from ..runtime.errors import LoaderError
from ..runtime.workers import Watchdog
from .base import (
    PROCESSES,
    Backend,
    BatchWorker,
    FeedSettings,
    FillableDataset,
    HostBatch,
    Request,
    Requests,
    stages_of,
    too_slow,
)
from .order import AnyOrder

# polling interval for dead workers and signals
_POLL_S = 2.0
# minimum start-up timeout of workers, in addition to loader.timeout_s
_START_S = 5.0
# the main process and the workers have about 30 open files each, before batches
_FILES = 64


class ProcessFeed(Backend):
    """Batches from ``dataset`` in ``order``.

    Every sample is a function of (seed, epoch, index), failures are returned as text in the batch,
    and a private generator supplies the workers' base seed. No setting changes the samples, and the
    global RNGs are not used.

    Raises:
        BadSample: from ``next()``, for an unreadable sample.
        LoaderError: from ``next()``, for a worker that died or did not respond within
            ``settings.timeout_s``.
        ConfigError: from ``next()``, for an unpicklable dataset or a failed user function.
    """

    name = PROCESSES

    def __init__(self, dataset: FillableDataset, order: AnyOrder, settings: FeedSettings) -> None:
        super().__init__(order, settings)
        self._dataset = dataset
        self._keys = _Keys()
        # without shared memory there is no meter
        with suppress(RuntimeError, OSError):
            self.meter = StageMeter(stages_of(dataset), settings.num_workers)
        self._loader: Loader | None = None
        # torch's iterator for this pass or, with persistent workers, for the last one
        self._pass: Any = None
        # worker start-up of the current pass
        self._started: Future[None] | None = None
        # number of batches taken
        self._taken = 0
        self._watchdog: Watchdog
        self._workers: list[BaseProcess] = []
        # also at exit, because Python joins workers, which ignore SIGTERM
        weakref.finalize(self, _kill, self._workers)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the live workers; empty until a pass has begun."""
        return tuple(worker.pid for worker in self._workers if worker.pid and worker.is_alive())

    def prime(self, epoch: int) -> None:
        """As in ``Backend``, but does nothing without workers or if they would be forked.

        A lock that the step holds at that moment would stay locked forever in a forked worker.
        """
        if self.settings.num_workers and (self.settings.start_method != "fork" or self._workers):
            super().prime(epoch)

    def guard(self) -> Watchdog:
        """As in ``Backend``; ends a blocking read from a worker."""
        # without a reference to this object, whose deletion ends the workers
        free = partial(ProcessFeed._free, weakref.proxy(self))
        self._watchdog = Watchdog(self.settings.timeout_s, free)
        return self._watchdog

    def take(self, poll_s: float) -> HostBatch | None:
        """As in ``Backend``."""
        watchdog = self._watchdog
        try:
            if self._started is not None:
                # the future has no name, because an error's traceback keeps this frame
                self._started.result()
                self._started = None
            # closed while the pass started
            if self._pass is None:
                raise StopIteration
            # short waits, because torch checks for dead workers only afterwards
            self._pass._timeout = min(poll_s, self._poll_s)
            watchdog.wait = self._taken
            batch = self.fetch()
            if batch is not None:
                self._taken += 1
                # the consumer has the batch
                watchdog.wait = None
            elif watchdog.fired:
                raise TimeoutError
            return batch
        except ConfigError as error:
            # a worker's own error follows its traceback
            raise ConfigError(str(error).rpartition("ConfigError: ")[2].strip()) from error
        except (RuntimeError, OSError, EOFError) as error:
            if not self.settings.num_workers:
                raise
            if watchdog.fired or isinstance(error, TimeoutError):
                signals.check()
                raise too_slow(self.settings.timeout_s) from error
            # here too
            lines = (str(error) or type(error).__name__).splitlines()
            text = lines[-1 if lines[0].startswith("Caught ") else 0].rstrip(". ")
            raise LoaderError(
                f"{text}: a worker died, or its batch could not be handed over (out of memory, "
                "full /dev/shm, too many open files); lower loader.num_workers or "
                "loader.batch_size"
            ) from error

    def fetch(self) -> HostBatch | None:
        """Returns torch's next batch, or None after a timeout."""
        try:
            batch: HostBatch = next(self._pass)
            return batch
        except RuntimeError as error:
            if not _is_timeout(error):
                signals.check()
                raise
            signals.check_wait()
            return None

    def begin(self, epoch: int, first: int = 0) -> None:
        """Starts the workers, or wakes persistent ones, for ``epoch`` in the background."""
        super().begin(epoch, first)
        self._keys.coming = self._coming
        # a new thread uses the first device, which torch's pinning thread would inherit
        prepare = accelerator.taking_over() if self.settings.pin_memory else None
        pool = ThreadPoolExecutor(1, "begin", prepare)
        self._started = pool.submit(self._start)
        pool.shutdown(wait=False)

    def _start(self) -> None:
        """Creates torch's iterator over the remaining batches, with its workers started."""
        s = self.settings
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if s.num_workers and 0 <= files < _FILES:
            # otherwise, a worker would print endlessly
            raise LoaderError(
                f"num_workers={s.num_workers}: {files} open files are allowed (ulimit -n), but "
                f"worker processes need {_FILES}; raise the limit, or set loader.backend=threads"
            )
        if self._loader is None:
            # for the workers' sockets, because a killed worker would leave its own folder behind
            multiprocessing.util.get_temp_dir()
            if s.num_workers and s.start_method == "forkserver":
                workers.start_server()
            self._loader = Loader(
                **self.parts(),
                num_workers=s.num_workers,
                pin_memory=s.pin_memory,
                prefetch_factor=s.prefetch_factor,
                persistent_workers=bool(s.persistent_workers),
                timeout=self._poll_s if s.num_workers else 0,
                multiprocessing_context=s.start_method if s.num_workers else None,
                generator=torch.Generator(),
            )
        if self._pass is not None:
            # the previous pass may have polled faster than persistent workers can respond
            self._pass._timeout = self._poll_s
        before = multiprocessing.active_children()
        limit_s = s.timeout_s and max(s.timeout_s, _START_S)
        try:
            # a stuck worker does not read the dataset from the pipe
            with Watchdog(limit_s, workers.kill_starting) as watchdog:
                watchdog.wait = 0
                self._pass = iter(self._loader)
        except RuntimeError as error:
            if not _is_timeout(error):
                raise
            # persistent workers may respond late after the machine was suspended
            self._end_workers()
            self._start()
            return
        except (PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"num_workers={s.num_workers}: the dataset cannot be pickled for worker processes "
                f"({error}); define its functions and classes at module level, or use "
                "num_workers=0"
            ) from error
        except OSError as error:
            # kills the workers that had already started
            _kill([child for child in multiprocessing.active_children() if child not in before])
            if watchdog.fired:
                raise TimeoutError from error
            raise
        self._workers[:] = getattr(self._pass, "_workers", ())

    @property
    def _poll_s(self) -> float:
        return min(_POLL_S, self.settings.timeout_s or _POLL_S)

    def _free(self) -> None:
        """Ends a read from a worker, because the read has no timeout of its own."""
        queue = getattr(self._pass, "_worker_result_queue", None)
        # torch's pinning thread reads instead, and must end before the workers do
        if queue is not None and not self.settings.pin_memory:
            for worker in self._workers:
                worker.kill()
            # closing the last writer ends the wait for the rest of a batch
            queue._writer.close()

    def end(self) -> None:
        """As in ``Backend``."""
        if self._started is not None:
            # waits until workers have started
            self._started.exception()
            self._started = None
        self._end_workers()

    def _end_workers(self) -> None:
        """Ends the workers immediately, busy or not, and drops torch's iterator.

        In the reverse order, torch would wait up to 5 s per busy worker.
        """
        if self._workers:
            # torch's pinning thread fails if the workers it reads from die
            thread = getattr(self._pass, "_pin_memory_thread", None)
            if thread is not None:
                self._pass._pin_memory_thread_done_event.set()
                # wakes the thread
                self._pass._worker_result_queue.put((None, None))
                thread.join(timeout=1.0)
                # if it is waiting for a worker, the worker's death ends it with an error that the
                # feed reports
                thread._invoke_excepthook = _as_it_is
            if getattr(self._pass, "_worker_pids_set", False):
                # otherwise, torch's SIGCHLD handler raises if another loader has set it
                _remove_worker_pids(id(self._pass))
                self._pass._worker_pids_set = False
            _kill(self._workers)
        self._pass = self._loader = None

    def parts(self) -> dict[str, Any]:
        """Returns the arguments for torch's loader; in the worker, a key is a whole batch."""
        return {
            "dataset": _Batches(self._dataset, self.meter, self.times_samples),
            "batch_sampler": self._keys,
            "collate_fn": _as_it_is,
            "worker_init_fn": _enter_worker,
        }


class Loader(DataLoader[HostBatch]):
    """Torch's loader without the warning about many workers; threads must not filter warnings."""

    def check_worker_number_rationality(self) -> None:
        """Does not warn, because the user or the tuner selected this number."""

    def _get_iterator(self) -> Any:
        return _Iterator(self) if self.num_workers else super()._get_iterator()


class _Iterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator, possibly incomplete if a worker could not start.

    The event that ends its workers is not shared, because a worker killed while checking a shared
    event would keep its lock, and torch would wait for it.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        # kept, because a worker may not have opened it yet
        self._shared_event = self._workers_done_event
        self._workers_done_event: Any = threading.Event()

    def __del__(self) -> None:
        with suppress(AttributeError):
            super().__del__()


class _Keys:
    """The batch sampler: each batch's epoch and indices, sent with every request."""

    coming: Requests

    def __iter__(self) -> Requests:
        return self.coming


@dataclass(eq=False)
class _Batches(Dataset[HostBatch]):
    """The dataset in a worker, which makes a whole batch per request."""

    dataset: FillableDataset
    meter: StageMeter | None
    times_samples: bool
    # this worker's, set at its first batch
    _filler: BatchWorker | None = None

    def __getitems__(self, key: Request) -> HostBatch:
        epoch, indices = key
        count = len(indices)
        if expect := getattr(self.dataset, "expect", None):
            expect(indices)
        worker = get_worker_info()
        if self._filler is None:
            slot = worker.id if worker else 0
            self._filler = BatchWorker(self.dataset, slot, self.meter, self.times_samples)
        # here the batch's own time starts, excluding samples
        timer = self._filler.timer
        lap = timer.begin(count)
        size = self.dataset.image_size
        labels = torch.zeros(count, dtype=torch.int64)
        timer.mark(COLLATE)
        # allocated in shared memory, as in torch's collate function, so no copy is needed later
        new = torch.UntypedStorage._new_shared if worker else torch.UntypedStorage
        memory = torch.empty(0, dtype=torch.uint8).set_(new(count * 3 * size * size))
        images = memory.view(count, size, size, 3).permute(0, 3, 1, 2)
        timer.mark(SHARE)
        failures, stamps = self._filler.fill(lap, epoch, indices, images.numpy(), labels.numpy())
        return HostBatch(images, labels, torch.from_numpy(indices), tuple(failures), epoch, stamps)


def _as_it_is(batch: HostBatch) -> HostBatch:
    return batch


def _enter_worker(worker: int) -> None:
    workers.enter_worker()
    workers.lower_priority()


def _kill(running: list[BaseProcess]) -> None:
    for worker in running:
        worker.kill()
    for worker in running:
        worker.join(timeout=1.0)
        # a segment that is being filled still has its name
        for segment in Path("/dev/shm").glob(f"torch_{worker.pid}_*"):
            segment.unlink(missing_ok=True)
    running.clear()


def _is_timeout(error: Exception) -> bool:
    return "timed out after" in str(error)
