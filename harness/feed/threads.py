"""The feed's ``threads`` form: threads of the trainer fill batches together, in memory that is used again.

Decoders let go of the interpreter lock while they work. Nothing is copied or handed over, and how many batches there are in
memory hangs on ``prefetch_factor`` alone, however many threads there are.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from harness.feed.crew import Crew
from harness.feed.gauge import Gauge
from harness.feed.interface import FeedSettings, FillableDataset, HostBatch, only_batches, stages_of, too_slow
from harness.feed.order import Order, ProbeOrder
from harness.runtime import signals
from harness.runtime.errors import BadSample, LoaderError
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


class ThreadFeed:
    """Batches of ``dataset`` in the order of ``order``, bitwise those of the ``processes`` form.

    ``settings.num_workers`` is the number of threads (0: samples are filled when the batch is asked for), ``prefetch_factor``
    how many batches are ready ahead, beside the one in the making. The images' memory is lent: see ``Ring``.

    Raises:
        BadSample: from ``next()``, for a sample that cannot be read.
        LoaderError: from ``next()``, where no batch came within ``settings.timeout_s``.
        MemoryError: from ``next()``.
    """

    on_device = False
    worker_pids: tuple[int, ...] = ()

    def __init__(
        self, dataset: FillableDataset, order: Order | ProbeOrder, settings: FeedSettings, gauge: Gauge | None = None
    ) -> None:
        self.settings = settings
        self.order = order
        self.most_threads = max(settings.num_workers, os.cpu_count() or 1) if gauge is None else gauge.slots
        self.meter: StageMeter | None = StageMeter(stages_of(dataset), self.most_threads, shared=False)
        self._dataset, self._gauge = dataset, gauge
        self._epoch = 0
        self._primed: int | None = None  # the epoch of a pass that was begun ahead of time
        self._running = False
        self._crew: Crew | None = None
        self._end_crew: Callable[[], object] | None = None

    def __len__(self) -> int:
        return self.order.count(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter()`` gives."""
        self._epoch = epoch

    def prime(self, epoch: int) -> None:
        """Let the threads begin with ``epoch``; the next ``iter()``, if it is of that epoch, goes on with its batches.

        An error surfaces from ``next()``. Nothing happens without threads, and while another pass runs.
        """
        if self.settings.num_workers and not self._running and self._primed is None:
            self._start(epoch)
            self._primed = epoch

    def resize(self, threads: int) -> None:
        """Have so many threads from now on, also amid a pass; those that are too many leave with their run of samples.

        Raises:
            ValueError: there are none to add to, or the rows of the gauge or the meter are fewer.
        """
        if not (self.settings.num_workers and 1 <= threads <= self.most_threads):
            raise ValueError(
                f"resize({threads}) of a feed with num_workers={self.settings.num_workers}: choose 1 to {self.most_threads} "
                "threads, for a feed that has any"
            )
        self.settings = replace(self.settings, num_workers=threads)
        if self._crew is not None:
            self._crew.resize(threads)

    def __iter__(self) -> Iterator[HostBatch]:
        return only_batches(self._run(_POLL_S))

    def polled(self, poll_s: float) -> Iterator[HostBatch | None]:
        """One pass that gives None whenever ``poll_s`` seconds, at most 0.5, went by without a batch; never without threads."""
        return self._run(poll_s)

    def close(self) -> None:
        """End the threads; one that hangs in a read is left behind. The next ``iter()`` starts new ones."""
        self._primed, self._running = None, False
        if self._end_crew is not None:
            self._end_crew()
        self._crew = self._end_crew = None

    def _run(self, poll_s: float) -> Generator[HostBatch | None, None, None]:
        given, wanted, crew = 0, len(self), self._begin()
        try:
            for batch in polls(crew, self.settings, poll_s):
                if batch is not None and batch.errors:
                    raise BadSample(*batch.errors[0])
                given += batch is not None
                yield batch
                del batch
                if given == wanted:
                    break
            if given != wanted:
                raise LoaderError(f"the feed ended after {given} of {wanted} batches; no batch may be lost")
        finally:
            if crew is self._crew:  # not that of a later pass
                self._running = False
                if given < wanted or not self.settings.persistent_workers:  # what was asked for would come in the next one
                    self.close()

    def _begin(self) -> Crew:
        """The threads at work on the chosen epoch: the primed pass if it is of that one."""
        if self._running or self._primed not in (None, self._epoch):
            self.close()
        if self._primed is None or self._crew is None:
            self._start(self._epoch)
        assert self._crew is not None
        self._primed, self._running = None, True
        return self._crew

    def _start(self, epoch: int) -> None:
        if self._crew is None:
            self._crew = Crew(self._dataset, self.settings, self.meter, self._gauge)
            self._end_crew = weakref.finalize(self, self._crew.close)  # at exit too: a thread must not be cut off in C code
        self._crew.begin(epoch, self.order.batches(epoch))
