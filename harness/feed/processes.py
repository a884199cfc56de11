"""The feed's ``processes`` form: torch's ``DataLoader`` with workers that fill whole uint8 batches."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from harness.feed.interface import FeedSettings, FillableDataset, HostBatch
from harness.feed.order import Order, ProbeOrder
from harness.runtime import signals, workers
from harness.runtime.errors import BadSample, LoaderError

_POLL_S = 2.0  # how soon a dead worker, or a signal to the trainer, ends a wait

Key = tuple[int, np.ndarray]  # an epoch and the indices of one batch: the epoch travels with every request


class ProcessFeed:
    """Batches of ``dataset`` in the order of ``order``.

    Every sample is a function of (seed, epoch, index), errors come back as text in the batch, and the workers' base seed is
    drawn from a generator of the feed's own: no setting changes what the model sees, and iterating leaves the global
    generators alone.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, for a worker that died or did not answer within ``settings.timeout_s``.
    """

    on_device = False

    def __init__(self, dataset: FillableDataset, order: Order | ProbeOrder, settings: FeedSettings) -> None:
        self.settings = settings
        self.order = order
        self._keys = _Keys(order)
        self._batches = _Batches(dataset)
        self._loader: DataLoader[HostBatch] | None = None
        self._workers: list[BaseProcess] = []
        weakref.finalize(self, _kill, self._workers)  # at exit too: Python waits for them, and they are deaf to SIGTERM

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter()`` gives."""
        self._keys.epoch = epoch

    def __iter__(self) -> Iterator[HostBatch]:
        given = 0
        try:
            batches = self._start()
            while (batch := self._take(batches)) is not None:
                if batch.errors:
                    raise BadSample(*batch.errors[0])
                given += 1
                yield batch
            if given != len(self):
                raise LoaderError(f"the feed ended after {given} of {len(self)} batches; no batch may be lost")
        except (RuntimeError, OSError) as error:
            if not self.settings.num_workers:
                raise
            _kill(self._workers)  # torch would wait 5 s for each that hangs
            raise _loader_error(error, self.settings) from error
        finally:
            batches = iter(())
            if given < len(self):  # torch cannot begin anew before the workers are through with what was asked of them
                self.close()

    def close(self) -> None:
        """End the workers, those that hang by force; the next ``iter()`` starts new ones."""
        self._loader = None
        _kill(self._workers)

    def _start(self) -> Iterator[HostBatch]:
        former = signal.getsignal(signal.SIGCHLD)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # so it was asked for
                if self._loader is None:
                    self._loader = self._make_loader()
                batches = iter(self._loader)
        except RuntimeError as error:
            if not _is_timeout(error):
                raise
            self.close()  # workers of an earlier pass that cannot answer at once, on a machine that was asleep
            return self._start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, former or signal.SIG_DFL)  # torch's raises wherever the trainer happens to be
        self._workers[:] = getattr(batches, "_workers", ())
        return batches

    def _take(self, batches: Iterator[HostBatch]) -> HostBatch | None:
        """The next batch, or None at the end.

        Torch looks for dead workers only when a wait is over, so that the wait is cut into short ones.
        """
        begin = time.monotonic()
        while True:
            try:
                return next(batches, None)
            except RuntimeError as error:
                signals.check()
                timeout_s = self.settings.timeout_s
                if not _is_timeout(error) or 0 < timeout_s <= time.monotonic() - begin:
                    raise

    def _make_loader(self) -> DataLoader[HostBatch]:
        s = self.settings
        return DataLoader(
            self._batches,
            batch_sampler=self._keys,  # type: ignore[arg-type]  # torch passes on whatever a batch sampler gives
            num_workers=s.num_workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type]  # __getitems__ gives a whole batch
            pin_memory=s.pin_memory,
            prefetch_factor=s.prefetch_factor,
            persistent_workers=s.persistent_workers,
            timeout=min(_POLL_S, s.timeout_s or _POLL_S) if s.num_workers else 0,
            worker_init_fn=_enter_worker if s.num_workers else None,
            multiprocessing_context=multiprocessing.get_context(s.start_method) if s.num_workers else None,
            generator=torch.Generator(),
        )


class _Keys:
    """The batch sampler: one request for each batch of the chosen epoch."""

    def __init__(self, order: Order | ProbeOrder) -> None:
        self.order = order
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Key]:
        epoch = self.epoch
        for indices in self.order.batches(epoch):
            yield epoch, indices


class _Batches(Dataset[HostBatch]):
    """The data set as a worker sees it: one request in, one whole batch out."""

    def __init__(self, dataset: FillableDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, key: Key) -> HostBatch:
        epoch, indices = key
        size = self.dataset.image_size
        images = torch.empty((len(indices), 3, size, size), dtype=torch.uint8)
        labels = torch.zeros(len(indices), dtype=torch.int64)
        pixels, errors = images.numpy(), []
        for row, index in enumerate(indices.tolist()):
            try:
                labels[row] = self.dataset.fill(epoch, index, pixels[row])
            except BadSample as error:
                errors.append((error.where, error.reason))
            except Exception as error:  # as text: one that cannot be pickled would never arrive (pytorch #142884)
                errors.append((f"sample {index}", f"{type(error).__name__}: {error}"))
        return HostBatch(images, labels, torch.from_numpy(indices), tuple(errors))


def _as_it_is(batch: HostBatch) -> HostBatch:
    return batch


def _enter_worker(worker: int) -> None:
    workers.enter_worker()


def _kill(running: list[BaseProcess]) -> None:
    for worker in running:
        worker.kill()
    for worker in running:
        worker.join(timeout=1.0)
    running.clear()


def _is_timeout(error: Exception) -> bool:
    return "timed out after" in str(error)


def _loader_error(error: Exception, settings: FeedSettings) -> LoaderError:
    """The typed form of what torch says of its workers."""
    if _is_timeout(error):
        return LoaderError(
            f"no batch within loader.timeout_s={settings.timeout_s:g}: a worker hangs or the storage does; raise the time, "
            "or find the sample with loader.num_workers=0"
        )
    text = str(error).splitlines()[0].rstrip(". ")
    return LoaderError(
        f"{text}: a worker died, or its batch could not be handed over (out of memory, full /dev/shm, too many open files); "
        "lower loader.num_workers or loader.batch_size"
    )
