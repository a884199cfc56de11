"""What a probe counts and when it stops, by a made-up feed and a made-up clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import samples
import torch

from harness.feed.base import HostBatch
from harness.runtime import signals
from harness.runtime.errors import BadSample, Interrupted, LoaderError
from harness.runtime.limits import Limits
from harness.tuning.lab import LoaderBenchmark, Supply
from harness.tuning.measures import Rate

BATCH = 10
LIMITS = Limits(cores=2.0, memory_bytes=10**10, shm_bytes=10**9, open_files=10_000)


class OneRank:
    """A world of one; ``told`` is what the other ranks say, when this one goes on."""

    def __init__(self, told: float = math.inf) -> None:
        self.told = told

    def smallest(self, value: float) -> float:
        return min(value, self.told)

    def agreed(self, value: Any) -> Any:
        return value

    def gathered(self, value: Any) -> list[Any]:
        return [value]


class TimedFeed:
    """Workers that each make ``rate`` samples a second from ``start_s`` on, on a clock of their
    own; ``queue_s`` more at first.

    In the first ``queue_s`` seconds they are ten times as fast, as long as the queue takes them.
    ``failure`` is raised at 2 s. The work of ``idle`` ones is done by the others. In the first
    ``cold_s`` seconds they are ten times as slow. Each sample takes this process ``receive_s`` of a
    processor, and half its time more where it is made here.
    """

    made_on_device = False
    worker_pids = ()

    def __init__(
        self,
        rate: float,
        workers: int = 2,
        start_s: float = 0.5,
        *,
        queue_s: float = 0.0,
        failure: Exception | None = None,
        ends_s: float = math.inf,
        idle: int = 0,
        cold_s: float = 0.0,
        receive_s: float = 0.0,
        backend: str = "processes",
    ) -> None:
        self.settings = dataclasses.replace(
            samples.settings(workers, batch_size=BATCH), backend=backend
        )
        self.cold_s, self.receive_s = cold_s, receive_s
        self.meter, self.idle = samples.ToldMeter(workers), idle
        self.rate, self.start_s, self.queue_s, self.failure, self.ends_s = (
            rate,
            start_s,
            queue_s,
            failure,
            ends_s,
        )
        self.clock = 1000.0
        self.polls: list[float] = []
        self.closed = 0

    def now(self) -> float:
        return self.clock

    def cpu_now(self) -> float:
        work = self.meter.work()
        here = self.settings.backend != "processes" or not self.settings.num_workers
        return work.samples * self.receive_s + (work.cpu_s if here else 0.0)

    def set_epoch(self, epoch: int) -> None: ...

    def prime(self, epoch: int) -> None: ...

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[HostBatch]:
        return (batch for batch in self.polled(1.0) if batch is not None)

    def polled(self, poll_s: float) -> Iterator[HostBatch | None]:
        done = 0
        given = 0
        while True:
            self.polls.append(poll_s)
            self.clock += poll_s / 5
            elapsed = self.clock - 1000.0
            if self.failure is not None and elapsed > 2:
                raise self.failure
            active = max(0.0, min(elapsed, self.ends_s) - self.start_s)
            due = int(
                len(self.worker_slots)
                * self.rate
                * (active + 9 * min(active, self.queue_s) - 0.9 * min(active, self.cold_s))
            )
            for sample in range(done, due):
                self.meter.add(
                    sample % (len(self.worker_slots) - self.idle), 1 / self.rate, 0.5 / self.rate
                )
            done = max(done, due)
            given += (ready := (given + 1) * BATCH <= done)
            labels = torch.zeros(BATCH, dtype=torch.int64)
            yield (
                HostBatch(torch.zeros(BATCH, 3, 2, 2, dtype=torch.uint8), labels, labels)
                if ready
                else None
            )

    @property
    def worker_slots(self) -> range:
        return range(max(1, self.settings.num_workers))

    def close(self) -> None:
        self.clock += 100.0
        self.closed += 1


class Timed(LoaderBenchmark):
    """A lab on the clocks of ``feed``."""

    feed: Any = None

    @property
    def now(self) -> Any:
        return self.feed.now


def measure(
    feed: TimedFeed, limit_s: float = 1.5, ranks: OneRank | None = None, skip: int = 0
) -> Supply:
    world: Any = ranks or OneRank()
    lab = Timed(cast(Any, None), cast(Any, None), LIMITS, world)
    lab.feed = feed
    # of single samples, no batch of which comes
    lab.batch = cast(Any, "seen")
    with mock.patch("time.process_time", feed.cpu_now):
        return lab.supplied(cast(Any, feed), limit_s, skip)


def test_samples_are_counted_in_the_workers() -> None:
    """The rate is theirs, although not one batch of theirs may be ready: start-up and end are left
    out.
    """
    feed = TimedFeed(rate=0.8)  # a batch takes a worker twelve seconds
    supply = measure(feed)
    assert supply.batches <= 1
    assert supply.rate.images_per_s == pytest.approx(1.6, rel=0.35)
    assert supply.rate.low <= 1.6 <= supply.rate.high
    assert feed.closed == 1


def test_the_queue_that_fills_first_is_left_out() -> None:
    """A burst of batches at the start does not count."""
    supply = measure(TimedFeed(rate=500.0, queue_s=0.03))
    assert supply.rate.images_per_s == pytest.approx(1000.0, rel=0.03)


def test_a_probe_may_begin_after_some_batches() -> None:
    """Those that are slow at first, because they are made once, do not count."""
    feed = TimedFeed(rate=500.0, queue_s=0.03)
    supply = measure(feed, skip=50)
    assert supply.batches > 50 + supply.images // BATCH


def test_what_is_skipped_is_not_measured_however_long_it_takes() -> None:
    """The window opens behind it, not a second after the start: what
    is made only once may be slow.
    """
    feed = TimedFeed(rate=100.0, cold_s=3.0)  # in which time six batches come
    supply = measure(feed, skip=6)
    assert supply.rate.images_per_s == pytest.approx(200.0, rel=0.03)


@pytest.mark.parametrize(
    ("backend", "workers"),
    [("processes", 2), ("processes", 0), ("threads", 2), ("arrays", 0)],
    ids=["processes", "the trainer", "threads", "arrays"],
)
def test_making_a_sample_here_is_not_receiving_it(backend: str, workers: int) -> None:
    """Processor time counts once, wherever it was spent."""
    cost = measure(TimedFeed(rate=100.0, workers=workers, backend=backend, receive_s=0.002)).cost
    assert (cost.cpu_s, cost.receive_s) == (pytest.approx(0.005), pytest.approx(0.002))


def test_workers_that_have_nothing_to_do_are_not_waited_for() -> None:
    """Threads share their batches: the window opens with the queue full, whoever has filled it."""
    feed = TimedFeed(rate=500.0, idle=1)
    assert measure(feed).rate.images_per_s == pytest.approx(1000.0, rel=0.03)


def test_the_cost_of_a_sample_comes_with_it() -> None:
    """Seconds of wall and of processor time, and no spread among equal samples."""
    cost = measure(TimedFeed(rate=100.0)).cost
    assert (cost.wall_s, cost.cpu_s) == (pytest.approx(0.01), pytest.approx(0.005))
    assert cost.variation == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("rate", "limits"), [(500.0, 1), (0.8, 3)], ids=["known", "few samples"])
def test_a_rate_that_is_not_known_at_the_limit_is_given_three(rate: float, limits: int) -> None:
    """Where the interval is over 20 %."""
    supply = measure(TimedFeed(rate=rate), limit_s=1.0)
    lasted_s = supply.points[-1][0] - supply.points[0][0]
    assert lasted_s == pytest.approx(limits, abs=0.1)


def test_a_first_probe_brings_a_batch() -> None:
    """It goes on until one has come, however long the figures have been known; the copy that the
    steps get holds no shared memory.
    """
    feed = TimedFeed(rate=0.8)
    lab = Timed(cast(Any, None), cast(Any, None), LIMITS, cast(Any, OneRank()))
    lab.feed = feed
    assert lab.supplied(cast(Any, feed), 1.5).batches == 1
    assert lab.batch is not None and not lab.batch.images.is_shared()
    assert len(lab.batch.labels) == BATCH


@pytest.mark.parametrize("kind", [BadSample, LoaderError])
def test_errors_come_through(kind: type[Exception]) -> None:
    """As they are, and with the feed closed."""
    feed = TimedFeed(
        rate=0.9,
        failure=BadSample("7.jpg", "it broke") if kind is BadSample else LoaderError("it broke"),
    )
    with pytest.raises(kind, match="it broke"):
        measure(feed, limit_s=5.0)
    assert feed.closed == 1


def test_all_ranks_stop_together() -> None:
    """Where another rank's feed failed, this one ends too and says so."""
    feed = TimedFeed(rate=100.0)
    with pytest.raises(LoaderError, match="another rank"):
        measure(feed, ranks=OneRank(told=-1.0))
    assert feed.closed == 1


def test_a_rank_that_cannot_count_tells_the_others() -> None:
    """They are in the probe already, and would wait for it there."""
    told: list[float] = []

    class Waiting(OneRank):
        def smallest(self, value: float) -> float:
            told.append(value)
            return value

    class Starting(TimedFeed):
        def polled(self, poll_s: float) -> Iterator[None]:
            self.meter = None
            while True:
                self.clock += poll_s
                yield None

        def cpu_now(self) -> float:
            return 0.0

    feed = Starting(rate=100.0)
    with pytest.raises(LoaderError, match="no shared memory for counting samples"):
        measure(feed, ranks=Waiting())
    assert (told, feed.closed) == ([-1.0], 1)


def test_a_signal_ends_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted comes between two polls, and the feed is closed."""
    monkeypatch.setattr(signals, "_received", [(15, 0.0)])
    feed = TimedFeed(rate=100.0)
    with pytest.raises(Interrupted):
        measure(feed)
    assert feed.closed == 1


def test_the_tutorials_passes_hold_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four passes over fifteen batches, each with its own start."""
    feeds: list[TimedFeed] = []

    def fresh(*_: object) -> TimedFeed:
        feeds.append(TimedFeed(rate=1000.0, start_s=3.0))
        return feeds[-1]

    probes: Any = SimpleNamespace(probe=fresh, batch_bytes=lambda _: 0, held_bytes=lambda _: 0)
    ranks: Any = OneRank()
    monkeypatch.setattr(LoaderBenchmark, "now", lambda _: sum(feed.clock for feed in feeds))
    trial = LoaderBenchmark(probes, cast(Any, None), LIMITS, ranks).attempt(
        samples.settings(2), "passes"
    )
    assert (trial.kind, len(feeds)) == ("supply", 4)
    assert trial.rate is not None and 4 * 15 * BATCH / trial.images_per_s > 4 * 3.0


def test_a_rate_has_an_interval() -> None:
    """Blocks that agree give a narrow one, a lone block an open one."""
    assert Rate.of([10, 10, 10], [1, 1, 1]) == Rate(10.0, 10.0, 10.0)
    uneven = Rate.of([8, 12, 10, 9, 11], [1] * 5)
    assert uneven.low == pytest.approx(10 - 2.776 * math.sqrt(0.5), rel=0.01) and uneven.high > 11
    assert Rate.of([10], [2]) == Rate(5.0, 0.0, math.inf)
