"""The threads backend: shared batches, elastic threads, ends that leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import samples
from commands import python
from samples import assert_same, comes_true

from harness.feed.base import BufferPool, HostBatch
from harness.feed.order import Order
from harness.feed.prefetcher import DataPrefetcher
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed
from harness.runtime import signals
from harness.runtime.errors import Interrupted, LoaderError

WAIT_S = 10.0  # for what comes at once unless the test fails
MakeFeed = Callable[..., ThreadFeed]


@pytest.fixture
def make_feed(gate: threading.Event) -> Iterator[MakeFeed]:
    """Makes feeds that leave no thread when they are closed with the gate open."""
    with samples.making(ThreadFeed, 0, backend="threads") as make:
        yield make
        gate.set()


@pytest.fixture
def gate() -> threading.Event:
    """Is open at the latest when the test is over."""
    return threading.Event()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wait long for threads that hang."""
    monkeypatch.setattr("harness.feed.threads._JOIN_S", 0.05)


def reference(dataset: samples.Noise, batch_size: int = 4) -> list[HostBatch]:
    """The batches that the trainer itself makes."""
    settings = samples.settings(0, batch_size=batch_size)
    return list(ProcessFeed(dataset, Order(len(dataset), batch_size, seed=3), settings))


def test_an_error_of_a_thread_is_raised_in_the_place_of_its_batch(
    make_feed: MakeFeed, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another thread is amid that batch; the next pass is whole."""

    class Waiting(samples.Noise):
        def fill(self, *args: Any, **named: Any) -> int:
            gate.wait()
            return super().fill(*args, **named)

    real = ThreadFeed._filler

    def filler(feed: ThreadFeed, slot: int) -> Any:
        if slot == 1:
            raise RuntimeError("no second one")
        return real(feed, slot)

    dataset = Waiting(8)
    feed = make_feed(2, dataset, timeout_s=20.0)
    with monkeypatch.context() as patched:
        patched.setattr(ThreadFeed, "_filler", filler)
        with pytest.raises(RuntimeError, match="no second one"):
            next(iter(feed))
    gate.set()
    feed.close()
    assert_same(list(feed), reference(dataset))


class Together(samples.Noise):
    """No sample of the first batch is done before each of ``threads`` threads is at one."""

    def __init__(self, length: int, threads: int) -> None:
        super().__init__(length)
        self.barrier, self.seen = threading.Barrier(threads), set[int]()

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        if threading.get_ident() not in self.seen:
            self.seen.add(threading.get_ident())
            self.barrier.wait(WAIT_S)
        return super().fill(epoch, index, out)


class Counted(samples.Noise):
    """Counts what was begun."""

    begun = 0

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        self.begun += 1
        return super().fill(epoch, index, out)


def test_all_threads_work_on_one_batch(make_feed: MakeFeed) -> None:
    """A batch is shared: its samples are in the hands of all threads at once, each of which the
    meter knows by its slot.
    """
    feed = make_feed(4, Together(4, 4), times_samples=True)
    assert_same(list(feed), reference(samples.Noise(4)))
    assert (feed.meter.work().samples, feed.meter.work().moved) == (4, 4)


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_a_few_batches_are_made_ahead(make_feed: MakeFeed, prefetch_factor: int) -> None:
    """prefetch_factor batches for each thread, beside the one in the making; the next begins with a
    take.
    """
    dataset = Counted(200)
    feed = make_feed(6, dataset, prefetch_factor=prefetch_factor)
    feed.prime(0)
    for taken, batches in enumerate([iter(feed)] * 3):
        wanted = 4 * (6 * prefetch_factor + 1 + taken)
        assert comes_true(lambda wanted=wanted: dataset.begun == wanted)  # type: ignore[misc]
        assert not comes_true(lambda wanted=wanted: dataset.begun > wanted, within_s=0.03)
        next(batches)


def test_the_feed_holds_nothing_of_its_own_while_it_waits(
    make_feed: MakeFeed, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that drops a batch and waits for the next one has the memory of all but those
    ahead free.
    """
    slow = int(Order(60, 4, seed=3).indices(0)[20])
    made = Counter[BufferPool]()
    allocate = BufferPool._allocate

    def counted(pool: BufferPool) -> np.ndarray:
        made[pool] += 1
        return allocate(pool)

    monkeypatch.setattr(BufferPool, "_allocate", counted)
    feed = make_feed(
        3,
        samples.Troubled(60, slow, lambda: gate.wait(WAIT_S)),
        times_samples=True,
    )
    taker = threading.Thread(target=deque, args=(feed, 0))  # takes and drops each
    taker.start()
    assert comes_true(
        lambda: feed.meter.work().samples == 8 * 4 - 1
    )  # three are ahead, the first of which lacks a sample
    pool = feed._memory
    assert pool is not None
    assert comes_true(lambda: made[pool] - len(pool._free) == 3)
    gate.set()
    taker.join(WAIT_S)


@pytest.mark.parametrize("threads", [1, 3])
def test_no_thread_is_idle_while_a_batch_is_wanted(
    make_feed: MakeFeed, gate: threading.Event, threads: int
) -> None:
    """One slow sample holds back its own batch alone: those behind it are made meanwhile, as far as
    may be ahead.
    """
    dataset = samples.Troubled(
        40, int(Order(40, 4, seed=3).indices(0)[0]), lambda: gate.wait(WAIT_S)
    )
    feed = make_feed(threads, dataset, times_samples=True)
    feed.prime(0)
    assert comes_true(lambda: feed.meter.work().samples == (11 if threads > 1 else 0))
    gate.set()
    assert_same(list(feed), reference(samples.Noise(40)))


class TestEnds:
    """A pass that ends early, and a thread that does not."""

    def test_a_late_thread_writes_where_nobody_looks(
        self, make_feed: MakeFeed, gate: threading.Event, impatient: None
    ) -> None:
        """A thread that hangs is left behind; what it writes when it comes back is in no batch of a
        later pass.
        """
        stuck = threading.Event()
        late = threading.Event()

        class Late(samples.Noise):
            def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
                if not stuck.is_set():
                    stuck.set()
                    gate.wait(WAIT_S)
                    out[:] = 0
                    late.set()
                    return 0
                return super().fill(epoch, index, out)

        feed = make_feed(2, Late(60), persistent_workers=True)
        batches = feed.polled(0.001)
        while not stuck.is_set():
            next(batches)
        batches.close()  # type: ignore[attr-defined]
        later = iter(feed)
        given = [next(later) for _ in range(3)]
        gate.set()
        assert late.wait(WAIT_S)
        assert_same([*given, *later], reference(samples.Noise(60)))

    def test_threads_give_way_to_the_step(self, make_feed: MakeFeed, gate: threading.Event) -> None:
        """Where processors are short the step's threads go first: the feed's are nicer, the
        trainer's own is as it was.
        """
        before = os.getpriority(os.PRIO_PROCESS, 0)
        feed = make_feed(2, samples.Troubled(40, 5, lambda: gate.wait(WAIT_S)))
        feed.prime(0)
        expected = [min(19, before + 10)] * 2
        threads = [
            thread.native_id for thread in threading.enumerate() if thread.name.startswith("feed-")
        ]
        assert comes_true(
            lambda: [os.getpriority(os.PRIO_PROCESS, id_ or 0) for id_ in threads] == expected
        )
        assert os.getpriority(os.PRIO_PROCESS, 0) == before
        gate.set()

    def test_closing_waits_for_no_thread_that_hangs(
        self, make_feed: MakeFeed, gate: threading.Event, impatient: None
    ) -> None:
        """close() comes back at once, and the thread ends as soon as it comes back."""
        feed = make_feed(2, samples.Troubled(19, 5, lambda: gate.wait(WAIT_S)))
        feed.prime(0)
        begin = time.monotonic()
        feed.close()
        assert time.monotonic() - begin < WAIT_S / 2
        gate.set()
        assert comes_true(lambda: samples.at_work() == [])

    def test_closing_while_a_pass_begins_leaves_a_feed_that_can_be_primed(
        self, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pass that was just begun ends with an error, and keeps
        no later one from its threads.
        """
        feed = make_feed(2, samples.Noise(19))
        begin = ThreadFeed.begin

        def begin_and_close(feed: ThreadFeed, *given: Any) -> None:
            monkeypatch.setattr(ThreadFeed, "begin", begin)
            feed.begin(*given)
            feed.close()

        monkeypatch.setattr(ThreadFeed, "begin", begin_and_close)
        with pytest.raises(LoaderError, match="ended after 0 of 5 batches"):
            list(feed)
        feed.prime(0)
        assert len(samples.at_work()) == 2
        assert_same(list(feed), reference(samples.Noise(19)))

    def test_closing_amid_a_pass_ends_a_wait(
        self, make_feed: MakeFeed, gate: threading.Event, impatient: None
    ) -> None:
        """A thread that waits in next() comes back with an error
        when another one closes the feed.
        """
        feed = make_feed(1, samples.Troubled(4, 0, lambda: gate.wait(WAIT_S)))
        batches = DataPrefetcher(feed, "cpu", ahead=True)
        raised = []

        def take() -> None:
            try:
                next(batches)
            except LoaderError as error:
                raised.append(str(error))

        taker = threading.Thread(target=take)
        taker.start()
        assert comes_true(lambda: len(samples.at_work()) == 1)
        feed.close()
        taker.join(WAIT_S)
        batches.close()
        assert raised == ["the loader ended after 0 of 1 batches"]
        gate.set()
        assert comes_true(lambda: samples.at_work() == [])
        gate.clear()
        feed.prime(0)  # no pass runs
        assert comes_true(lambda: len(samples.at_work()) == 1)
        gate.set()
        assert len(list(feed)) == 1

    def test_a_feed_that_is_dropped_takes_its_threads_along(self) -> None:
        """Nobody has to call close()."""
        feed = ThreadFeed(samples.Noise(400), Order(400, 4), samples.settings(3))
        next(iter(feed))
        feed.prime(1)
        assert len(samples.at_work()) == 3
        del feed
        gc.collect()
        assert comes_true(lambda: samples.at_work() == [])

    def test_a_signal_ends_a_wait(
        self,
        make_feed: MakeFeed,
        gate: threading.Event,
        impatient: None,
        monkeypatch: pytest.MonkeyPatch,
        unguarded: None,
    ) -> None:
        """A signal to the trainer ends next(), although no batch comes, when half of the grace is
        gone.
        """
        monkeypatch.setattr(signals, "_received", [])  # the next test has had none

        def trouble() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            gate.wait(WAIT_S)

        feed = make_feed(1, samples.Troubled(4, 0, trouble))
        with signals.handle_signals(grace_s=4.0), pytest.raises(Interrupted):
            list(feed)


@pytest.mark.parametrize(
    "error", [SystemExit("left"), KeyboardInterrupt("pressed"), MemoryError("full")], ids=repr
)
def test_whatever_a_thread_raises_comes_out_of_next(
    make_feed: MakeFeed, error: BaseException
) -> None:
    """What is no sample's fault ends the pass as itself, and the threads with it."""

    def trouble() -> None:
        raise error

    feed = make_feed(2, samples.Troubled(19, 5, trouble), persistent_workers=True)
    with pytest.raises(type(error), match=str(error)):
        list(feed)
    assert comes_true(lambda: samples.at_work() == [])


def test_a_failure_comes_in_the_place_of_its_batch(
    make_feed: MakeFeed, gate: threading.Event
) -> None:
    """The batches before it are given, although they are done later;
    those behind it do not matter.
    """

    class Failing(samples.Troubled):
        def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
            if index == indices[7]:
                raise MemoryError("full")
            return super().fill(epoch, index, out)

    indices = Order(19, 4, seed=3).indices(0)
    feed = make_feed(2, Failing(19, int(indices[0]), lambda: gate.wait(WAIT_S)))
    batches = feed.polled(0.01)
    assert [next(batches) for _ in range(20)] == [None] * 20
    gate.set()
    assert_same([next(filter(None, batches))], reference(samples.Noise(19))[:1])
    with pytest.raises(MemoryError, match="full"):
        list(batches)


@pytest.mark.parametrize("prime", [False, True], ids=["iter", "prime"])
def test_a_thread_that_cannot_start_is_a_loader_error(
    make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch, prime: bool
) -> None:
    """The system's refusal comes from next(), with two ways out."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    feed = make_feed(2, samples.Noise(19))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    if prime:
        feed.prime(0)
    with pytest.raises(LoaderError, match=r"^0 of 2 .*: can't start .*ulimit -u"):
        next(iter(feed))


class TestResize:
    """Threads come and go while a pass runs."""

    def test_nothing_is_lost_or_made_twice(self, make_feed: MakeFeed) -> None:
        """A pass during which the number changes at every batch is the same pass."""
        feed = make_feed(2, samples.Noise(200), times_samples=True)
        given = []
        for turn, batch in enumerate(feed):
            given.append(batch)
            feed.resize(1 + turn % 6)
            assert feed.settings.num_workers == 1 + turn % 6
        assert_same(given, reference(samples.Noise(200)))
        assert feed.meter.work().samples == 200

    def test_threads_come_and_go(self, make_feed: MakeFeed) -> None:
        """More start at once, the rest leave when their samples are done; the next pass has as
        many.
        """
        feed = make_feed(2, samples.Noise(400), times_samples=True, persistent_workers=True)
        batches = iter(feed)
        for threads in (5, 1, 3):
            next(batches)
            feed.resize(threads)
            assert comes_true(lambda threads=threads: len(samples.at_work()) == threads)
        list(batches)
        list(feed)
        assert len(samples.at_work()) == 3

    def test_a_thread_that_cannot_start_ends_nothing(
        self, make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """There are as many as the system has started, a warning says so, and the pass is whole."""
        feed = make_feed(2, samples.Noise(200), times_samples=True)
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "feed-3":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        given = []
        for batch in feed:
            given.append(batch)
            feed.resize(6)
            assert feed.settings.num_workers == 3
        assert_same(given, reference(samples.Noise(200)))
        assert "3 of 6 loader threads started: can't start new thread" in caplog.text

    def test_before_a_pass_it_is_a_setting(self, make_feed: MakeFeed) -> None:
        """The first pass begins with the new number."""
        feed = make_feed(1, Together(8, 3), times_samples=True)
        feed.resize(3)
        assert len(list(feed)) == 2


SCRIPT = """
import sys, threading
import numpy as np
import samples
from harness.feed.order import Order
from harness.feed.threads import ThreadFeed

class Busy(samples.Noise):
    def fill(self, epoch, index, out):
        if sys.argv[1] == "hanging" and index == 5: threading.Event().wait()
        return super().fill(epoch, index, out)

settings = samples.settings(3, persistent_workers=True)
feed = ThreadFeed(Busy(4000), Order(4000, 4, shuffle=False), settings)
batches = iter(feed)
first = next(batches)
feed.prime(1)
if sys.argv[1] == "failing": raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("hanging", 0),
        pytest.param("busy", 0, marks=pytest.mark.slow),
        pytest.param("failing", 3, marks=pytest.mark.slow),
    ],
)
def test_a_program_ends_with_a_pass_half_way(how: str, code: int) -> None:
    """A program that forgets close() ends at once and in silence, whatever its threads do."""
    ended = python(SCRIPT, how, OMP_NUM_THREADS="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")
