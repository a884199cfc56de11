"""The feed's ``arrays`` form: images that all lie in memory, cropped and mirrored without workers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import torch

from harness.data.images import ImageDataset
from harness.feed.course import AHEAD, Course
from harness.feed.gauge import Gauge
from harness.feed.interface import ARRAYS as ARRAYS
from harness.feed.interface import Feed, FeedSettings, FillableDataset, HostBatch, stages_of
from harness.feed.order import AnyOrder
from harness.feed.pixels import Pixels
from harness.runtime import limits
from harness.watch.stages import START, StageMeter

_GATHER = "gather"  # the stage after those of reading


def in_form(settings: FeedSettings, form: str) -> FeedSettings:
    """``settings`` in another form of the feed; arrays need no workers, so that nothing is ahead and nothing is kept."""
    if form != ARRAYS:
        return dataclasses.replace(settings, backend=form)
    return dataclasses.replace(settings, backend=form, num_workers=0, prefetch_factor=None, persistent_workers=False)


class ArrayFeed(Feed):
    """Batches of ``dataset`` in the order of ``order``, bitwise those of the ``processes`` form.

    Files are read and decoded once, by threads, for the first batch that asks for them. With ``Pixels`` on a GPU the batches
    are there too, and nothing is copied.

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
        pixels: Pixels | None = None,
        readers: int | None = None,
    ) -> None:
        assert isinstance(dataset, ImageDataset) and not settings.num_workers
        super().__init__(order, settings)
        self.readers = readers = readers or max(1, int(limits.measure().cores))
        self.pixels = pixels or Pixels(dataset)
        self.on_device = self.pixels.on_device
        self._reading = dataclasses.replace(
            settings, backend=ARRAYS, num_workers=readers, prefetch_factor=AHEAD, pin_memory=False
        )
        self.meter = StageMeter((*stages_of(self.pixels.stills), _GATHER), readers + 1, shared=False)
        self._timer, self._gauge = self.meter.timer(readers), gauge
        self._course: Course | None = None  # the last pass

    def _batches(self, epoch: int, primed: bool, poll_s: float) -> Iterator[HostBatch | None]:
        course = self._course if primed and self._course else self._begin(epoch)
        for due in course.polled(poll_s):
            yield None if due is None else self._batch(epoch, *due)

    def _begin(self, epoch: int) -> Course:
        """Begin to read what the first batches of ``epoch`` lack."""
        self._course = course = Course(self.order.batches(epoch), self.pixels, self._reading, self.meter)
        course.look_ahead()
        return course

    def _end(self) -> None:
        """End the threads that read, if any do; what they have read stays."""
        if self._course is not None:
            self._course.close()
        self._course = None

    def _batch(self, epoch: int, indices: np.ndarray, read: int) -> HostBatch:
        """The batch of ``indices``, of which so many were counted when they were read."""
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
        stamps = self._timer.end(count - read, batches=int(not read))
        if self._gauge is not None:
            self._gauge.add(0, wall_s / count, cpu_s / count, count)
        return HostBatch(images, labels, torch.from_numpy(indices), (), epoch, stamps)
