"""The processes backend: the same pixels under every setting, typed
ends, and no worker left behind.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest
import samples
import torch
from commands import python
from samples import assert_same, comes_true, is_alive, primed

from harness.config import ConfigError
from harness.feed.base import HostBatch
from harness.feed.order import Order
from harness.feed.prefetcher import DataPrefetcher
from harness.feed.processes import ProcessFeed, _Batches
from harness.runtime import signals
from harness.runtime.errors import Interrupted, LoaderError

LENGTH = 19
ORDER = Order(LENGTH, 4, seed=3)
MakeFeed = Callable[..., ProcessFeed]


@pytest.fixture
def make_feed() -> Iterator[MakeFeed]:
    """Makes feeds that leave no worker when they are closed."""
    with samples.making(ProcessFeed, LENGTH) as make:
        yield make


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for dead workers more often."""
    monkeypatch.setattr("harness.feed.processes._POLL_S", 0.2)


def workers() -> list[BaseProcess]:
    return multiprocessing.active_children()


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "from the prefetcher's thread"])
def test_a_killed_worker_is_a_loader_error(make_feed: MakeFeed, quick: None, ahead: bool) -> None:
    """A worker that is killed ends the pass within seconds, long before loader.timeout_s, and takes
    the others along.
    """
    feed = make_feed(2, samples.Troubled(LENGTH, 5, samples.die))
    begin = time.monotonic()
    with pytest.raises(LoaderError, match=r"worker.*exited unexpectedly.*lower loader.num_workers"):
        list(DataPrefetcher(feed, "cpu", ahead=ahead))
    assert time.monotonic() - begin < 10
    assert workers() == []


@pytest.mark.parametrize(
    "way",
    [samples.crash, samples.miss_the_bus, samples.leave_at_once, samples.leave, samples.interrupt],
    ids=lambda way: way.__name__,
)
def test_a_worker_that_leaves_is_a_loader_error(
    make_feed: MakeFeed, quick: None, way: Callable[[], object]
) -> None:
    """However a sample ends its worker: no wait without end, and the same error."""
    begin = time.monotonic()
    with pytest.raises(LoaderError, match=r"worker.*exited unexpectedly.*lower loader.num_workers"):
        list(make_feed(2, samples.Troubled(LENGTH, 5, way)))
    assert time.monotonic() - begin < 10
    assert workers() == []


def test_workers_need_open_files(make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too low a limit is named before a worker starts."""
    monkeypatch.setattr("harness.feed.processes.resource.getrlimit", lambda kind: (48, 48))
    with pytest.raises(LoaderError, match=r"48 open files are allowed \(ulimit -n\).* need 64"):
        list(make_feed(1))


def test_workers_that_cannot_start_are_a_loader_error(
    make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that the second one meets: the system's words alone, and the first one goes."""
    fork = os.fork
    forked: list[int] = []

    def limited() -> int:
        if forked:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(0)
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    with pytest.raises(LoaderError, match=r"Resource temporarily .*lower loader.num_workers"):
        list(make_feed(2, start_method="fork"))
    assert forked and workers() == []


def test_a_worker_without_room_for_a_batch_is_a_loader_error(
    make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system said comes first, then what to do."""

    def refuse(size: int) -> NoReturn:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    with pytest.raises(
        LoaderError,
        match=r"^RuntimeError: unable .* No space left on device \(28\): .* lower "
        r"loader.num_workers",
    ):
        list(make_feed(1, start_method="fork"))


@pytest.mark.parametrize("in_worker", [False, True])
def test_a_worker_s_batch_is_shared_from_the_start(
    monkeypatch: pytest.MonkeyPatch, in_worker: bool
) -> None:
    """Handing it over copies nothing; the trainer's own batches take no shared memory."""
    info = SimpleNamespace(id=0) if in_worker else None
    monkeypatch.setattr("harness.feed.processes.get_worker_info", lambda: info)
    images = _Batches(samples.Noise(LENGTH), None, None).__getitems__((0, np.arange(3))).images
    assert images.is_shared() is in_worker
    assert images.is_contiguous(memory_format=torch.channels_last)
    pixels = np.empty((3, 3, 4, 4), np.uint8)
    for index in range(3):
        samples.Noise(LENGTH).fill(0, index, pixels[index])
    assert np.array_equal(images, pixels)


@pytest.fixture
def no_other_loader() -> Iterator[None]:
    """Torch's handler of SIGCHLD, which the loader of another test may have set, is away."""
    former = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, former)


@pytest.mark.usefixtures("no_other_loader")
def test_a_worker_that_dies_between_two_steps_does_not_disturb_the_step(
    make_feed: MakeFeed, quick: None
) -> None:
    """The death of a child of the trainer's own (fork) surfaces
    in next() alone, as a LoaderError.
    """
    batches = iter(make_feed(2, samples.Noise(80), start_method="fork"))
    next(batches)
    workers()[0].kill()
    time.sleep(0.2)  # a step, in the middle of which torch's own handler of SIGCHLD would raise
    with pytest.raises(LoaderError, match="worker"):
        list(batches)


def test_workers_give_way_to_the_step(make_feed: MakeFeed) -> None:
    """Where processors are short the step goes first: workers are nicer than the trainer, whose
    priority stays.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    feed = make_feed(2, persistent_workers=True)
    list(feed)  # each has given a batch
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in feed.worker_pids} == {
        min(19, before + 10)
    }
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_persistent_workers_serve_every_epoch(make_feed: MakeFeed) -> None:
    """Persistent workers are the same processes in the second epoch; close() ends them, and iter()
    starts new ones.
    """
    feed = make_feed(2, persistent_workers=True)
    list(feed)
    first = {worker.pid for worker in workers()}
    list(feed)
    assert {worker.pid for worker in workers()} == first and len(first) == 2
    feed.close()
    assert workers() == []
    feed.close()
    assert_same(list(feed), list(make_feed(0)))
    assert first.isdisjoint(worker.pid for worker in workers())


def test_workers_that_sleep_at_the_start_of_an_epoch_are_replaced(
    make_feed: MakeFeed, quick: None
) -> None:
    """Persistent workers that do not answer at once cost a new start, and neither the run nor a
    batch.
    """
    feed = make_feed(2, persistent_workers=True)
    list(feed)
    for worker in workers():
        os.kill(worker.pid or 0, signal.SIGSTOP)
    assert_same(list(feed), list(make_feed(0)))


def stop(which: int | None = None) -> None:
    """Stop so many of the workers, or all, as a read from a dead server would."""
    for worker in workers()[:which]:
        os.kill(worker.pid or 0, signal.SIGSTOP)


def queued(feed: ProcessFeed, batches: int) -> None:
    """Come back when the workers of ``feed`` have made so many batches of 4, and have had time to
    queue them.
    """
    assert comes_true(lambda: feed.meter.work().samples >= 4 * batches)
    time.sleep(0.3)


TOO_SLOW = r"^no batch within loader.timeout_s=[12]: "


def ends_in_time(
    batches: Iterator[HostBatch], error: type[Exception] = LoaderError, match: str = TOO_SLOW
) -> None:
    """``batches`` end with ``error`` soon after a limit of one second, and leave no worker and no
    shared memory.
    """
    begin = time.monotonic()
    pids = [worker.pid for worker in workers()]
    with pytest.raises(error, match=match):
        list(batches)
    assert time.monotonic() - begin < 15
    assert workers() == []
    assert [segment for pid in pids for segment in Path("/dev/shm").glob(f"torch_{pid}_*")] == []


@pytest.mark.parametrize("persistent_workers", [False, True], ids=["own workers", "persistent"])
@pytest.mark.parametrize(
    ("num_workers", "stopped"), [(1, 1), (2, 1)], ids=["the one", "one of two"]
)
def test_a_worker_that_stops_behind_its_batches_is_a_loader_error(
    make_feed: MakeFeed, quick: None, num_workers: int, stopped: int, persistent_workers: bool
) -> None:
    """A batch that is queued, but whose memory its worker cannot hand over, is not waited for
    without a limit.
    """
    many = samples.Noise(5 * LENGTH)  # so that each worker has some left
    feed = make_feed(
        num_workers, many, times_samples=True, persistent_workers=persistent_workers, timeout_s=2.0
    )
    if persistent_workers:
        list(feed)
    batches = iter(feed)
    before = feed.meter.work().samples // 4
    next(batches)
    queued(feed, before + 1 + num_workers)
    stop(stopped)
    ends_in_time(batches)
    assert_same(list(feed), list(make_feed(0, many)))


def test_workers_that_stop_at_their_start_are_a_loader_error(
    make_feed: MakeFeed, quick: None
) -> None:
    """The first batch has the same limit."""
    ends_in_time(iter(make_feed(2, samples.StopsAtStart(LENGTH), timeout_s=1.0)))


def test_workers_that_stop_before_they_have_the_data_set_are_a_loader_error(
    make_feed: MakeFeed, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is not held up at the pipe, and another feed's workers live on."""
    monkeypatch.setattr("harness.feed.processes._START_S", 1.0)
    other = iter(make_feed(1, samples.Noise(80)))
    next(other)
    [running] = workers()
    with pytest.raises(LoaderError, match=TOO_SLOW):
        list(make_feed(2, samples.StopsInItsStart(LENGTH), timeout_s=1.0))
    assert workers() == [running]
    assert len(list(other)) == 19


def test_a_worker_that_stops_in_a_batch_is_a_loader_error(make_feed: MakeFeed, quick: None) -> None:
    """Half of a message is in the pipe: the wait for the rest ends too."""
    in_second_batch = int(ORDER.indices(0)[5])
    batches = iter(
        make_feed(
            1, samples.Troubled(LENGTH, in_second_batch, samples.refuse_at_length), timeout_s=1.0
        )
    )
    next(batches)
    time.sleep(0.5)  # the pipe is full, and the rest of the batch's long error waits
    stop()
    ends_in_time(batches)


DEAF = """
import samples
from torch.utils.data import DataLoader
from harness.feed.order import Order
from harness.feed.processes import ProcessFeed

for _ in DataLoader(list(range(4)), num_workers=1):
    pass
for attempt in range(4):
    feed = ProcessFeed(
        samples.Noise(6), Order(6, 2), samples.settings(2, batch_size=2, start_method="fork")
    )
    list(feed)
    feed.close()
print("done")
"""


def test_another_loader_s_handler_does_not_see_our_workers_end() -> None:
    """Torch's handler of SIGCHLD, which any loader sets, raises nothing where a feed is closed."""
    done = python(DEAF)
    assert done.stdout == "done\n", done.stderr


def test_a_signal_is_heard_in_a_wait_for_a_stopped_worker(
    make_feed: MakeFeed, quick: None, monkeypatch: pytest.MonkeyPatch, unguarded: None
) -> None:
    """SIGTERM ends the wait for a batch's memory when half of the grace is gone, long before
    loader.timeout_s.
    """
    monkeypatch.setattr(signals, "_received", [])
    feed = make_feed(2, times_samples=True)
    with signals.handle_signals(grace_s=2.0):
        batches = iter(feed)
        next(batches)
        queued(feed, 3)
        stop()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        ends_in_time(batches, Interrupted, "stopped by SIGTERM")


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have torch's thread that pins without a device; it copies in its place, once the event is
    set.
    """
    go = threading.Event()

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        assert go.wait(30)
        return tensor.clone()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return go


def test_a_stopped_worker_that_the_pinning_thread_waits_for(
    make_feed: MakeFeed, quick: None, pinning: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where torch's thread waits for the worker, the error is the same, no thread stays, and
    nothing else is said.
    """
    feed = make_feed(1, times_samples=True, timeout_s=1.0, pin_memory=True)
    primed(feed, 0)
    queued(feed, 2)
    stop()
    pinning.set()
    ends_in_time(iter(feed))
    assert comes_true(
        lambda: not [thread for thread in threading.enumerate() if "pin_memory" in thread.name]
    )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("persistent_workers", [False, True], ids=["own workers", "persistent"])
@pytest.mark.parametrize("end", ["pass", "feed"])
def test_an_early_end_kills_and_leaves_nothing(
    make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch, end: str, persistent_workers: bool
) -> None:
    """Ending a pass or the feed leaves no process, descriptor or segment, and does not wait for
    workers that are busy.
    """
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 1000
    )  # torch waits so long for each
    list(make_feed(1))  # what is opened once
    in_second_batch = int(ORDER.indices(0)[5])
    dataset = samples.Troubled(LENGTH, in_second_batch, samples.hang_in_a_segment)
    feed = make_feed(1, dataset, persistent_workers=persistent_workers)
    before = len(os.listdir("/proc/self/fd"))
    batches = iter(feed)
    next(batches)
    (pid,) = feed.worker_pids
    segment = Path(f"/dev/shm/torch_{pid}_1_1")
    samples.wait_for(segment)
    feed.close() if end == "feed" else batches.close()  # type: ignore[attr-defined]
    del batches
    assert (workers(), feed.worker_pids, segment.exists()) == ([], (), False)
    assert comes_true(
        lambda: len(os.listdir("/proc/self/fd")) <= before
    )  # a queue's own thread closes its pipe


def test_the_workers_are_known_by_their_pids(make_feed: MakeFeed) -> None:
    """worker_pids are the live processes: none before the first pass, and not one that died."""
    feed = make_feed(2, persistent_workers=True)
    assert feed.worker_pids == ()
    list(feed)
    assert (
        set(feed.worker_pids) == {worker.pid for worker in workers()} and len(feed.worker_pids) == 2
    )
    workers()[0].kill()
    workers()[0].join()
    assert feed.worker_pids == tuple(worker.pid for worker in workers())
    assert make_feed(0).worker_pids == ()


@pytest.mark.parametrize(
    ("num_workers", "start_method"), [(0, "forkserver"), (2, "fork")], ids=["no workers", "forked"]
)
def test_priming_starts_nothing_where_it_must_not(
    make_feed: MakeFeed, num_workers: int, start_method: str
) -> None:
    """Without workers there is nothing to begin, and none is forked in the middle of a step; the
    pass comes all the same.
    """
    feed = make_feed(num_workers, start_method=start_method)
    threads = threading.active_count()
    feed.prime(0)
    assert (threading.active_count(), workers()) == (threads, [])
    assert_same(list(feed), list(make_feed(0)))


@pytest.mark.parametrize("end", [ProcessFeed.close, None], ids=["close", "forgotten"])
def test_a_primed_pass_that_nobody_takes_leaves_nothing(
    make_feed: MakeFeed, end: Callable[..., None] | None
) -> None:
    """close() ends primed workers, as does dropping the feed."""
    order = Order(LENGTH, 4)
    feed = ProcessFeed(samples.Noise(LENGTH), order, samples.settings(1))
    feed.times_samples = True
    primed(feed, 0)
    assert len(workers()) == 1
    if end is not None:
        end(feed)
        assert workers() == []
    del feed
    gc.collect()
    assert workers() == []


def test_closing_waits_for_a_start_under_way(
    make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prime() comes back before the workers are started, and a close() at that moment ends them all
    the same.
    """
    begun = threading.Event()
    go = threading.Event()
    start = ProcessFeed._start

    def late(*given: Any) -> Iterator[HostBatch]:
        begun.set()
        go.wait(30)
        return start(*given)

    monkeypatch.setattr(ProcessFeed, "_start", late)
    feed = make_feed(1)
    feed.prime(0)
    assert begun.wait(30) and workers() == []
    threading.Timer(0.05, go.set).start()
    feed.close()
    assert go.is_set() and workers() == []


def test_signals_to_a_worker_are_ignored(make_feed: MakeFeed) -> None:
    """A scheduler's SIGTERM to the whole group leaves the workers at work: the trainer decides when
    they go.
    """
    feed = make_feed(2, samples.Noise(40))
    batches = iter(feed)
    given = [next(batches) for _ in range(2)]  # both workers have entered
    for worker in workers():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
    given += batches
    assert_same(given, list(make_feed(0, samples.Noise(40))))


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_a_data_set_that_cannot_be_pickled_fails_at_once(make_feed: MakeFeed) -> None:
    """The first next() says in one line what keeps it from the workers, and the way out."""
    feed = make_feed(1, samples.Troubled(LENGTH, 0, lambda: None))
    with pytest.raises(ConfigError, match="^num_workers=1: .*lambda.*; define its"):
        next(iter(feed))


SCRIPT = """
import multiprocessing, sys
from harness.runtime import workers
if __name__ == "__main__":
    if sys.argv[1] == "forkserver": workers.start_server(["harness.feed.processes"])
    import samples
    from harness.feed.order import Order
    from harness.feed.processes import ProcessFeed, _Batches
    settings = samples.settings(2, persistent_workers=True, start_method=sys.argv[1])
    feed = ProcessFeed(samples.Noise(40), Order(40, 4), settings)
    batches = iter(feed)
    for _ in range(4): next(batches)
    print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
    sys.stdin.read()
"""


def either(quick: str) -> list[object]:
    """All start methods, of which only ``quick`` runs every time:
    a trainer takes seconds to start.
    """
    rest = {"forkserver", "fork", "spawn"} - {quick}
    return [quick, *(pytest.param(method, marks=pytest.mark.slow) for method in sorted(rest))]


@pytest.fixture
def trainer(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A trainer with two live workers, and the workers."""
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    with process:
        assert process.stdout is not None
        yield process, [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all have ended before torch's own workers would look for their trainer, which they do
    every 5 s.
    """
    return comes_true(lambda: not any(map(is_alive, processes)), within_s=4.0)


@pytest.mark.parametrize("trainer", either("forkserver"), indirect=True)
def test_no_worker_outlives_a_killed_trainer(
    trainer: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    """Soon after the trainer's SIGKILL its workers are gone."""
    process, its_workers = trainer
    assert len(its_workers) == 2
    process.kill()
    process.wait()
    assert gone(its_workers)


@pytest.mark.parametrize("trainer", either("fork"), indirect=True)
def test_a_trainer_ends_with_a_pass_half_way(
    trainer: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    """A trainer that forgot close() ends at once and in silence, although its workers are deaf to
    SIGTERM.
    """
    process, its_workers = trainer
    begin = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert time.monotonic() - begin < 5
    assert gone(its_workers)
