"""The feed's ``threads`` form: threads of the trainer fill batches together, in memory that is used again.

Decoders let go of the interpreter lock while they work. Nothing is copied or handed over, and how many batches there are in
memory hangs on ``prefetch_factor`` alone, however many threads there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

from harness.feed.crew import Crew
from harness.feed.gauge import Gauge
from harness.feed.interface import Feed, FeedSettings, FillableDataset, HostBatch, stages_of, too_slow
from harness.feed.order import AnyOrder
from harness.runtime import signals
from harness.watch.stages import StageMeter

_POLL_S = 0.5  # how soon a signal to the trainer ends a wait


def polls(crew: Crew, settings: FeedSettings, poll_s: float) -> Iterator[HostBatch | None]:
    """The batches of ``crew`` until there are no more, and None for each wait that was in vain.

    Raises:
        LoaderError: none came within ``settings.timeout_s``.
    """
    waited_s, timeout_s = 0.0, settings.timeout_s
    while True:
        begin = time.monotonic()
        batch = crew.take(min(poll_s, _POLL_S, timeout_s or _POLL_S))
        if batch is not None:
            waited_s = 0.0
        elif crew.through:
            return
        else:
            signals.check_wait()
            waited_s += time.monotonic() - begin
            if 0 < timeout_s <= waited_s:
                raise too_slow(settings)
        yield batch
        del batch


class ThreadFeed(Feed):
    """Batches of ``dataset`` in the order of ``order``, bitwise those of the ``processes`` form.

    ``settings.num_workers`` is the number of threads (0: samples are filled when the batch is asked for), ``prefetch_factor``
    how many batches are ready ahead, beside the one in the making. The images' memory is lent: see ``Ring``.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, where no batch came within ``settings.timeout_s``.
        MemoryError: from ``next()``.
    """

    def __init__(self, dataset: FillableDataset, order: AnyOrder, settings: FeedSettings, gauge: Gauge | None = None) -> None:
        super().__init__(order, settings)
        self.most_threads = max(settings.num_workers, 8, 4 * (os.cpu_count() or 1)) if gauge is None else gauge.slots
        self.meter = StageMeter(stages_of(dataset), self.most_threads, shared=False)
        self._dataset, self._gauge = dataset, gauge
        self._crew: Crew | None = None

    def resize(self, threads: int) -> None:
        """Have so many threads from now on, also amid a pass; those that are too many leave with their run of samples.

        Where the system starts no more, a warning says so, and ``settings`` have as many as there are.

        Raises:
            ValueError: there are none to add to, or the rows of the gauge or the meter are fewer.
        """
        if not (self.settings.num_workers and 1 <= threads <= self.most_threads):
            raise ValueError(
                f"resize({threads}) of a feed with num_workers={self.settings.num_workers}: choose 1 to {self.most_threads} "
                "threads, for a feed that has any"
            )
        started = threads if self._crew is None else self._crew.resize(threads)
        self.settings = replace(self.settings, num_workers=started)

    def _batches(self, epoch: int, primed: bool, poll_s: float) -> Iterator[HostBatch | None]:
        return polls(self._crew if primed and self._crew else self._begin(epoch), self.settings, poll_s)

    def _begin(self, epoch: int) -> Crew:
        """Let the threads begin with ``epoch``, if there are any."""
        self._crew = crew = self._crew or Crew(self, self._dataset, self.settings, self.meter, self._gauge)
        crew.begin(epoch, self.order.batches(epoch))
        return crew

    def _end(self) -> None:
        """End the threads; one that hangs in a read is left behind."""
        if self._crew is not None:
            self._crew.close()
        self._crew = None
