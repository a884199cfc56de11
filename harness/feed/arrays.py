"""The feed's ``arrays`` backend: images that all lie in memory, cropped and mirrored without
workers.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from harness.data.images import ImageDataset
from harness.feed.gauge import Gauge
from harness.feed.interface import ARRAYS as ARRAYS
from harness.feed.interface import Feed, FeedSettings, FillableDataset, HostBatch, stages_of
from harness.feed.order import AnyOrder
from harness.feed.pixels import InMemoryImages
from harness.feed.threads import BatchThreads
from harness.runtime import limits
from harness.runtime.errors import BadSample, LoaderError
from harness.watch.stages import START, StageMeter

# batches that are looked at before they are due
_AHEAD = 2
# the stage after those of reading
_GATHER = "gather"


def in_form(settings: FeedSettings, form: str) -> FeedSettings:
    """Returns ``settings`` for another backend; arrays need no workers: nothing is ahead and
    nothing is kept.
    """
    if form != ARRAYS:
        return dataclasses.replace(settings, backend=form)
    return dataclasses.replace(
        settings, backend=form, num_workers=0, prefetch_factor=None, persistent_workers=False
    )


class ArrayFeed(Feed):
    """Batches of ``dataset`` in the order of ``order``, bitwise those of the ``processes`` backend.

    Files are read and decoded once, by threads, for the first batch that asks for them. With
    ``InMemoryImages`` on a GPU the batches are there too, and nothing is copied.

    Args:
        dataset: one whose images have one form before crop and mirror.
        order: which samples make which batch.
        settings: of a feed without workers.
        gauge: is told what each sample took this process, reading apart.
        pixels: the data set's, to be shared with other feeds; None: this feed's own, on the host.
        readers: threads that read files; None: as many as there are processors for this process.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, where files could not be read within ``settings.timeout_s``.
        MemoryError: from ``next()``.
    """

    def __init__(
        self,
        dataset: FillableDataset,
        order: AnyOrder,
        settings: FeedSettings,
        gauge: Gauge | None = None,
        pixels: InMemoryImages | None = None,
        readers: int | None = None,
    ) -> None:
        assert isinstance(dataset, ImageDataset) and not settings.num_workers
        super().__init__(order, settings)
        self.readers = readers = readers or max(1, int(limits.measure().cores))
        self.pixels = pixels or InMemoryImages(dataset)
        self.on_device = self.pixels.on_device
        self._reading = dataclasses.replace(
            settings, backend=ARRAYS, num_workers=readers, prefetch_factor=_AHEAD, pin_memory=False
        )
        self.meter = StageMeter(
            (*stages_of(self.pixels.untransformed), _GATHER), readers + 1, shared=False
        )
        self._timer = self.meter.timer(readers)
        self._gauge = gauge
        # the latest
        self._pass: _Pass | None = None

    def _batches(self, epoch: int, primed: bool, poll_s: float) -> Iterator[HostBatch | None]:
        begun = self._pass if primed and self._pass else self._begin(epoch)
        for due in begun.batches(poll_s):
            yield None if due is None else self._batch(epoch, *due)

    def _begin(self, epoch: int) -> _Pass:
        """Begin to read what the first batches of ``epoch`` lack."""
        self._pass = begun = _Pass(
            self.order.batches(epoch), self.pixels, self._reading, self.meter
        )
        begun.look_ahead()
        return begun

    def _end(self) -> None:
        """End the threads that read, if any do; what they have read stays."""
        if self._pass is not None:
            self._pass.close()
        self._pass = None

    def _batch(self, epoch: int, indices: np.ndarray, read: int) -> HostBatch:
        """The batch of ``indices``, of which so many were counted when they were read."""
        # a batch is timed like a single sample: it has one stage
        timers = self._timer.begin(1)
        count = len(indices)
        self._timer.fill()
        laps = timers[0] if timers else None
        if laps is not None:
            laps.lap(START)
        wall_s = time.perf_counter()
        cpu_s = time.thread_time()
        images, labels = self.pixels.batch(
            epoch, indices, self.settings.pin_memory and not self.on_device
        )
        wall_s = time.perf_counter() - wall_s
        cpu_s = time.thread_time() - cpu_s
        if laps is not None:
            laps.lap(_GATHER)
        stamps = self._timer.end(count - read, batches=int(not read))
        if self._gauge is not None:
            self._gauge.add(0, wall_s / count, cpu_s / count, count)
        return HostBatch(images, labels, torch.from_numpy(indices), (), epoch, stamps)


class _Pass:
    """One pass over images of which some are in memory; threads read the others, a few batches
    ahead.

    Args:
        batches: the indices of each batch.
        pixels: hold images, and take in those that were read.
        settings: of the threads, which start only once there is something to read.
        meter: is told what they do, by slot.
    """

    def __init__(
        self,
        batches: Iterator[np.ndarray],
        pixels: InMemoryImages,
        settings: FeedSettings,
        meter: StageMeter | None,
    ) -> None:
        self._indices = batches
        self._pixels = pixels
        # the next batches, and how many images of each are read
        self._due: deque[tuple[np.ndarray, int]] = deque()
        # what no thread has taken on yet
        self._wanted: deque[np.ndarray] = deque()
        self._threads = BatchThreads(self, pixels.untransformed, settings, meter)
        self.close = self._threads.close

    def look_ahead(self) -> bool:
        """Have threads read what the next batches lack; returns whether there is another batch."""
        while len(self._due) <= _AHEAD and (indices := next(self._indices, None)) is not None:
            missing = self._pixels.missing(indices)
            self._due.append((indices, len(missing)))
            if len(missing):
                self._wanted.append(missing)
                self._threads.begin(0, _taken(self._wanted))
        return bool(self._due)

    def batches(self, poll_s: float) -> Iterator[tuple[np.ndarray, int] | None]:
        """Yields the indices of each batch once its images are there, and how many of them were
        read just now.

        None stands for a wait of ``poll_s`` seconds that was in vain.

        Raises:
            BadSample: an image cannot be read.
            LoaderError: a batch was not read within ``settings.timeout_s``, or this was closed
                meanwhile.
            MemoryError: there is not enough.
        """
        while self.look_ahead():
            indices, missing = self._due.popleft()
            if missing:
                yield from self._read(poll_s)
            yield indices, missing

    def _read(self, poll_s: float) -> Iterator[None]:
        """Take in the next batch that threads have read."""
        for read in self._threads.batches(poll_s):
            if read is not None:
                if read.errors:
                    raise BadSample(*read.errors[0])
                return self._pixels.keep(read)
            yield None
        raise LoaderError("the feed was closed amid a pass; no batch may be lost")


def _taken(wanted: deque[np.ndarray]) -> Iterator[np.ndarray]:
    while wanted:
        yield wanted.popleft()
