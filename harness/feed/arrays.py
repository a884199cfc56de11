"""The feed's ``arrays`` form: images that all lie in memory, cropped and mirrored by whole batches, without workers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator
from contextlib import closing

import numpy as np
import torch

from harness.data.images import ImageDataset
from harness.feed.gauge import Gauge
from harness.feed.interface import THREADS, FeedSettings, FillableDataset, HostBatch
from harness.feed.order import Order, ProbeOrder
from harness.feed.pixels import Pixels
from harness.feed.threads import ThreadFeed
from harness.watch.stages import START, StageMeter

ARRAYS = "arrays"
_GATHER = "gather"  # the one stage
_AHEAD = 2  # batches that threads are ahead while files are read
_POLL_S = 0.5  # how soon a signal to the trainer ends a wait for them


def in_form(settings: FeedSettings, form: str) -> FeedSettings:
    """``settings`` in another form of the feed; arrays need no workers, so that nothing is ahead and nothing is kept."""
    if form != ARRAYS:
        return dataclasses.replace(settings, backend=form)
    return dataclasses.replace(settings, backend=form, num_workers=0, prefetch_factor=None, persistent_workers=False)


class ArrayFeed:
    """Batches of ``dataset`` in the order of ``order``, bitwise those of the ``processes`` form.

    Files are read and decoded once, by threads, in the first pass that asks for them. With ``Pixels`` on a GPU the batches are
    there too, and nothing is copied.

    Args:
        dataset: one whose images have one form before crop and mirror.
        order: which samples make which batch.
        settings: of a feed without workers.
        gauge: is told what each sample took this process, reading apart.
        pixels: the data set's, to be shared with other feeds; None: this feed's own, on the host.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, where files could not be read within ``settings.timeout_s``.
        MemoryError: from ``next()``.
    """

    worker_pids: tuple[int, ...] = ()

    def __init__(
        self,
        dataset: FillableDataset,
        order: Order | ProbeOrder,
        settings: FeedSettings,
        gauge: Gauge | None = None,
        pixels: Pixels | None = None,
    ) -> None:
        assert isinstance(dataset, ImageDataset) and not settings.num_workers
        self.settings, self.order = settings, order
        self.pixels = pixels or Pixels(dataset)
        self.on_device = self.pixels.device.type != "cpu"
        self.meter: StageMeter | None = (meter := StageMeter((_GATHER,), 0))
        self._timer, self._gauge, self._epoch = meter.timer(0), gauge, 0
        threads = torch.get_num_threads()
        reading = dataclasses.replace(settings, backend=THREADS, num_workers=threads, prefetch_factor=_AHEAD, pin_memory=False)
        self._reader = ThreadFeed(self.pixels.stills, order, reading)

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter()`` gives."""
        self._epoch = epoch

    def prime(self, epoch: int) -> None:
        """Begin to read what is not there yet of ``epoch``, where that takes decoding."""
        if not self._at_hand():
            self._reader.prime(epoch)

    def __iter__(self) -> Iterator[HostBatch]:
        with closing(self._run(_POLL_S)) as batches:
            for batch in batches:
                if batch is not None:
                    yield batch

    def polled(self, poll_s: float) -> Iterator[HostBatch | None]:
        """One pass that gives None whenever ``poll_s`` seconds went by without a batch, which is where files are read."""
        return self._run(poll_s)

    def close(self) -> None:
        """End the threads that read, if any do; what they have read stays."""
        self._reader.close()

    def _run(self, poll_s: float) -> Generator[HostBatch | None, None, None]:
        epoch = self._epoch
        if self._at_hand():
            for indices in self.order.batches(epoch):
                yield self._batch(epoch, indices)
            return
        self._reader.set_epoch(epoch)
        with closing(self._reader.polled(poll_s)) as batches:  # type: ignore[type-var]
            for read in batches:
                if read is not None:
                    self.pixels.keep(read)
                yield None if read is None else self._batch(epoch, read.indices.numpy())
                del read  # or its memory would be held while the next one is awaited

    def _at_hand(self) -> bool:
        """Whether there is nothing to decode."""
        return self.pixels.in_array or self.pixels.complete

    def _batch(self, epoch: int, indices: np.ndarray) -> HostBatch:
        timers, count = self._timer.begin(1), len(indices)  # a batch is timed like a single sample: it has one stage
        self._timer.fill()
        laps = timers[0] if timers else None
        if laps is not None:
            laps.lap(START)
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        images, labels = self.pixels.batch(epoch, indices, self.settings.pin_memory and not self.on_device)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        if laps is not None:
            laps.lap(_GATHER)
        stamps = self._timer.end(count)
        if self._gauge is not None:
            self._gauge.add(0, wall_s / count, cpu_s / count, count)
        return HostBatch(images, labels, torch.from_numpy(indices), (), epoch, stamps)
