"""Measures a loader: how many images it supplies with nothing consuming, and what a sample costs
inside its workers.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil
import torch

from harness.feed.gauge import Gauge, Work
from harness.feed.interface import PROCESSES, Feed, FeedSettings, HostBatch
from harness.runtime import accelerator, signals
from harness.runtime.errors import LoaderError
from harness.tuning.figures import Ranks, Rate, SampleCost
from harness.tuning.search import in_flight

POLL_S = 0.05
STUCK_S = 10.0  # without a single sample for so long, the workers hang
START_S = 0.5  # more for each worker that starts, at the least
_QUEUE_S = 0.3  # so long the queue may take to fill before the window opens all the same
_SHORTEST_S = 0.4  # a window that is shorter tells nothing
_PRECISE = 0.05  # half of the interval over the mean with which a probe is done
# one that is still so wide at the limit is given so many times the limit
_VAGUE = 0.2
_LONGER = 3.0
_BLOCKS = 10

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Supply:
    """What a loader gave with nothing consuming.

    Attributes:
        rate: images/s, counted sample by sample in the workers.
        images: the samples in the window.
        cost: of one sample.
        worker_bytes: private memory of one worker; 0 without workers.
        batches: how many came.
        batch: the last of them, in memory of its own; None where none came.
        first_s: seconds until the first sample was seen to be done: what the workers took to start,
            and it.
    """

    rate: Rate
    images: int
    cost: SampleCost
    worker_bytes: int
    batches: int
    batch: HostBatch | None
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Until:
    """When a probe is over: after ``limit_s``, sooner where ``target`` is decided, not before a
    batch where one is needed.

    It begins after ``skip`` batches besides those that fill the queue. The workers are given
    ``start_s`` to start.
    """

    limit_s: float
    target: float | None = None
    need_batch: bool = False
    skip: int = 0
    start_s: float = 0.0


def measure_supply(
    feed: Feed,
    gauge: Gauge,
    ranks: Ranks,
    until: Until,
    now: Clock = time.perf_counter,
    cpu_now: Clock = time.process_time,
) -> Supply:
    """Take batches from ``feed`` as fast as it gives them, and count samples in its workers; closes
    the feed.

    A worker's batches may take seconds each, and come in bursts: counting batches here would say
    nothing in a short time. The window opens when every worker has moved and the queue is full,
    after what is to be skipped. It closes at an interval of 5 %, at one that lies on one side of
    the target, or after the limit, three of them if the interval is over 20 % (uneven samples). The
    clock is read before any worker is ended. All ranks stop together.

    Raises:
        BadSample: a sample cannot be read.
        LoaderError: a worker died, or none has finished a sample for ten seconds, or for a while
            longer at the start.
    """
    failure: Exception | None = None
    batches = feed.polled(POLL_S)
    looked = now()
    meter = _Meter(gauge, feed.settings, until, cpu_now, looked)
    try:
        while True:
            failure = failure or _take(batches, meter, now)
            if failure is None and now() - looked < POLL_S:
                continue
            over = -1.0 if failure else float(meter.look(now()))
            looked = now()
            if (
                agreed := ranks.smallest(over)
            ) != 0:  # every rank comes here equally often, whatever its own feed does
                break
        if failure is not None:
            raise failure
        if agreed < 0:
            raise LoaderError("refused on another rank")
        return meter.supply(_worker_bytes(feed))
    finally:
        # or its traceback would keep this frame, and this frame the error, and both the feed's last
        # batches
        failure = None
        if hasattr(batches, "close"):
            batches.close()
        feed.close()


def _take(batches: Iterator[HostBatch | None], meter: _Meter, now: Clock) -> Exception | None:
    """Take a batch, or none within the poll; the error that came in its place."""
    try:
        batch = next(batches)
    except StopIteration:
        return LoaderError("the feed ended while it was measured")
    except Exception as error:  # told to all ranks before it is raised
        return error
    signals.check()
    if batch is not None:
        meter.received(batch)
    return meter.stuck(now())


def _worker_bytes(feed: Feed) -> int:
    for pid in feed.worker_pids[:1]:
        try:
            return int(psutil.Process(pid).memory_full_info().uss)
        except psutil.Error:
            continue
    return 0


@dataclass(slots=True)
class _Meter:
    """The window of one probe: (time, work so far) pairs, from when the feed runs steadily."""

    gauge: Gauge
    settings: FeedSettings
    until: Until
    cpu_now: Clock
    opened: float
    points: list[tuple[float, Work]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of this process, at each point
    batches: int = 0
    last: HostBatch | None = None
    began: float | None = None  # when every worker had moved, or all were seen to be at work
    seen: tuple[float, int] | None = (
        None  # when a sample was last seen to be done, and how many were
    )
    first_s: float = 0.0

    @property
    def workers(self) -> int:
        return max(1, self.settings.num_workers)

    def received(self, batch: HostBatch) -> None:
        self.batches += 1
        self.last = batch

    def stuck(self, at: float) -> Exception | None:
        """The error for workers that finish nothing."""
        samples = self.gauge.read().samples
        if self.seen is None or samples > self.seen[1]:
            self.seen = (at, samples)
        if samples and not self.first_s:
            self.first_s = at - self.opened
        allowed_s = STUCK_S + (self.until.start_s if samples == 0 else 0.0)
        if at - self.seen[0] <= allowed_s:
            return None
        what = "sample" if samples == 0 else "further sample"
        return LoaderError(
            f"no {what} within {allowed_s:g} s: the workers hang, or the storage does"
        )

    def look(self, at: float) -> bool:
        """Note how far the workers are; whether enough is known."""
        work = self.gauge.read()
        skipped = self.batches >= self.until.skip
        full = self.batches > self.until.skip + in_flight(
            self.settings
        )  # what came before is no measure of the feed's speed
        if self.began is None and (full or (skipped and work.moved >= self.workers)):
            self.began = at
        if self.began is None or not (full or self.points or at - self.began >= _QUEUE_S):
            return False
        if not self.points or at - self.points[-1][0] >= min(0.02, self.until.limit_s / _BLOCKS):
            self.points.append((at, work))
            self.cpu_s.append(self.cpu_now())
        return self._enough(at - self.points[0][0])

    def _enough(self, elapsed_s: float) -> bool:
        none = (
            self.points[0][1].samples == self.points[-1][1].samples
        )  # one may take longer than the limit
        if elapsed_s < min(_SHORTEST_S, self.until.limit_s) or len(self.points) < 3 or none:
            return False
        rate = self.rate()
        target = self.until.target
        decided = target is not None and not rate.low <= target <= rate.high
        limit_s = self.until.limit_s * (_LONGER if rate.half_width > _VAGUE else 1.0)
        known = decided or rate.half_width <= _PRECISE or elapsed_s >= limit_s
        return known and (self.batches > 0 or not self.until.need_batch)

    def rate(self) -> Rate:
        """Images/s over the window; the interval is that of ten blocks, and no less than what its
        ends cut in two.
        """
        times = [at for at, _ in self.points]
        samples = [work.samples for _, work in self.points]
        step = (times[-1] - times[0]) / min(_BLOCKS, len(times) - 1)
        edges = [0]
        for i, at in enumerate(times):
            if i and (at - times[edges[-1]] >= step * (1 - 1e-9) or i == len(times) - 1):
                edges.append(i)
        pairs = list(itertools.pairwise(edges))
        rate = Rate.of(
            [samples[b] - samples[a] for a, b in pairs], [times[b] - times[a] for a, b in pairs]
        )
        cut = math.sqrt(self.workers) / (times[-1] - times[0])
        mean = rate.images_per_s
        return Rate(mean, max(0.0, min(rate.low, mean - cut)), max(rate.high, mean + cut))

    def supply(self, worker_bytes: int) -> Supply:
        """The figures of the window."""
        first = self.points[0][1]
        last = self.points[-1][1]
        count = last.samples - first.samples
        wall = (last.wall_s - first.wall_s) / count
        square = (last.wall_sq_s2 - first.wall_sq_s2) / count
        variation = math.sqrt(max(0.0, square - wall**2)) / wall
        made = (last.cpu_s - first.cpu_s) / count
        receive = (self.cpu_s[-1] - self.cpu_s[0]) / count
        if (
            self.settings.backend != PROCESSES or self.settings.num_workers == 0
        ):  # the samples are made in this process
            receive = max(0.0, receive - made)
        cost = SampleCost(wall, made, variation, receive)
        return Supply(
            self.rate(), count, cost, worker_bytes, self.batches, _owned(self.last), self.first_s
        )


def _owned(batch: HostBatch | None) -> HostBatch | None:
    """A copy outside shared memory."""
    return (
        None
        if batch is None
        else batch._replace(
            images=batch.images.clone(), labels=batch.labels.clone(), indices=batch.indices.clone()
        )
    )


def measure_passes(
    feed_of: Callable[[], Feed], passes: int, batches: int, now: Clock = time.perf_counter
) -> tuple[int, float]:
    """Images and seconds of ``passes`` passes over ``batches`` batches each, as the tutorial times
    them: start-up included.
    """
    images = 0
    begin = now()
    for _ in range(passes):
        feed = feed_of()
        iterator = iter(feed)
        try:
            for _ in range(batches):
                images += len(next(iterator).labels)
                signals.check()
        finally:
            if hasattr(iterator, "close"):
                iterator.close()
            feed.close()
    return images, now() - begin


def measure_copies(
    images: torch.Tensor, device: torch.device, repeats: int = 10
) -> tuple[float, float]:
    """Median seconds of a batch's copy to a CUDA device from pageable and from page-locked memory,
    in turn.

    Measured on the device, by events, as its own stream sees it: from pageable memory the driver
    first copies to a page-locked buffer of its own, and the host waits for that.

    Raises:
        RuntimeError: there is no room for it.
    """
    own = accelerator.of(device)
    sources = (images, own.pin(images))
    taken_s = ([0.0] * repeats, [0.0] * repeats)
    for turn in range(repeats + 2):
        for source, seconds in zip(sources, taken_s, strict=True):
            start = own.event(timed=True)
            end = own.event(timed=True)
            start.record(own.stream())
            own.copy(source)
            end.record(own.stream())
            end.synchronize()  # one copy at a time: each is measured alone
            if turn >= 2:
                seconds[turn - 2] = start.elapsed_time(end) / 1e3
    return statistics.median(taken_s[0]), statistics.median(taken_s[1])
