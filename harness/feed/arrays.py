"""The feed's ``arrays`` backend: images that all lie in memory, cropped and mirrored there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from harness.data.images import ImageDataset
from harness.feed.interface import (
    Failure,
    Feed,
    FeedSettings,
    FillableDataset,
    HostBatch,
    stages_of,
)
from harness.feed.order import AnyOrder
from harness.feed.pixels import InMemoryImages
from harness.feed.threads import BatchThreads
from harness.watch.stages import START, StageMeter, StageTimer

# the stage after those of reading
_GATHER = "gather"


class ArrayFeed(Feed):
    """Batches of ``dataset`` in the order of ``order``, bitwise those of the ``processes`` backend.

    Files are read and decoded once, by threads, for the first batch that asks for them, one batch
    ahead. With ``InMemoryImages`` on a GPU the batches are there too, and nothing is copied.

    Args:
        dataset: its images have one form before crop and mirror.
        order: which samples make which batch.
        settings: of a feed without workers.
        pixels: the data set's, to be shared with other feeds; None: this feed's own, on the host.
        readers: threads that read files.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, if files could not be read within ``settings.timeout_s``.
        MemoryError: from ``next()``.
    """

    def __init__(
        self,
        dataset: FillableDataset,
        order: AnyOrder,
        settings: FeedSettings,
        pixels: InMemoryImages | None = None,
        readers: int = 1,
    ) -> None:
        assert isinstance(dataset, ImageDataset) and not settings.num_workers
        super().__init__(order, settings)
        self.readers = readers
        self.pixels = pixels or InMemoryImages(dataset)
        self.on_device = self.pixels.on_device
        stages = (*stages_of(self.pixels.untransformed), _GATHER)
        self.meter: StageMeter = StageMeter(stages, readers + 1, shared=False)
        self._timer = StageTimer(self.meter, readers)
        self._threads: BatchThreads | None = None
        # the batches to come, the next ones with how many of their images are being read, and what
        # no thread has taken on yet
        self._coming: Iterator[np.ndarray] = iter(())
        self._due: deque[tuple[np.ndarray, int]] = deque()
        self._wanted: deque[np.ndarray] = deque()

    def batches_of(self, epoch: int, poll_s: float) -> Iterator[HostBatch | None]:
        """As in ``Feed``."""
        coming = self._coming
        # until the end, or until the feed was closed
        while self._due and self._coming is coming:
            indices, missing = self._due.popleft()
            if missing:
                if self._threads is None:
                    return
                for read in self._threads.batches(poll_s):
                    if read is not None:
                        break
                    yield None
                else:
                    return
                read.check()
                self.pixels.keep(read)
                del read
            # threads read for the next batch while this one is used
            self._look_ahead()

            # a batch is timed like a single sample: it has one stage
            timed = self._timer.begin(1)
            self._timer.fill()
            if timed:
                self._timer.lap(START)
            count = len(indices)
            gather = self.pixels.batch
            if self.times_samples:
                gather = self.meter.timed(self.readers, gather, count)
            pin = self.settings.pin_memory and not self.on_device
            images, labels = gather(epoch, indices, pin)
            if timed:
                self._timer.lap(_GATHER)
            # samples that threads have just read were counted by them
            stamps = self._timer.end(count - missing, batches=int(not missing))
            failures: tuple[Failure, ...] = ()
            if replaced := self.pixels.replaced:
                # another feed may have read them
                places = (indices % len(self.pixels.untransformed)).tolist()
                failures = tuple(replaced[i] for i in places if i in replaced)
            yield HostBatch(images, labels, torch.from_numpy(indices), failures, epoch, stamps)
            del images, labels

    def begin(self, epoch: int, first: int = 0) -> None:
        """As in ``Feed``."""
        self._coming = self.order.batches(epoch, first)
        self._due.clear()
        self._wanted.clear()
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Has threads read what the next three batches lack."""
        while len(self._due) < 3 and (indices := next(self._coming, None)) is not None:
            missing = self.pixels.missing(indices)
            self._due.append((indices, len(missing)))
            if not len(missing):
                continue
            if self._threads is None:
                dataset = self.pixels.untransformed
                settings = replace(
                    self.settings,
                    num_workers=self.readers,
                    prefetch_factor=2,
                    pin_memory=False,
                )
                self._threads = BatchThreads(self, dataset, self.meter, settings)
            self._wanted.append(missing)
            self._threads.begin(0, _taken(self._wanted))

    def end(self) -> None:
        """As in ``Feed``."""
        # the threads end; what they have read stays
        if self._threads is not None:
            self._threads.close()
        self._threads = None
        self._coming = iter(())


def _taken(wanted: deque[np.ndarray]) -> Iterator[np.ndarray]:
    # others may be added while threads take from it
    while wanted:
        yield wanted.popleft()
