"""Workers: forks of a server that has their modules, deaf to signals, tied to their trainer."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path

import pytest
from commands import python

from harness.runtime import signals, workers

SCRIPT = """
import multiprocessing, jobs
from harness.runtime import workers
if __name__ == "__main__":
    workers.start_server(["wave"])
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    worker = context.Process(target=jobs.describe_worker, args=(there, "wave"))
    worker.start()
    print(here.recv())
    worker.join()
"""


def test_a_worker_of_the_server() -> None:
    """It has the preloaded modules before it begins, ignores the trainer's signals, and watches the
    trainer.
    """
    worker = json.loads(python(SCRIPT).stdout)
    assert worker["preloaded"]
    assert worker["deaf"] == {"SIGINT": True, "SIGTERM": True}
    assert "watchdog" in worker["threads"]


KILLED = """
import multiprocessing, os, signal, jobs
from multiprocessing import forkserver, util
from harness.runtime import workers
connect = forkserver.connect_to_new_process

def half(fds):
    _, pipe = connect(fds)
    os.write(pipe, b"\\x80\\x04")
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    util.get_temp_dir()
    workers.start_server(["harness.runtime.workers"])
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.Process(target=jobs.wait_as_worker, args=(there,)).start()
    here.recv()
    kept = context.Semaphore()
    forkserver.connect_to_new_process = half
    context.Process(target=jobs.wait_as_worker, args=(there,)).start()
"""


def test_a_trainer_killed_as_it_starts_a_worker_leaves_nothing(tmp_path: Path) -> None:
    """No folder of sockets, and no word of the tracker's."""
    ended = python(KILLED, TMPDIR=str(tmp_path))
    assert ended.returncode == -signal.SIGKILL
    assert "resource_tracker" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


GROUP = """
import multiprocessing, os, resource, signal, jobs
from harness.runtime import workers

if __name__ == "__main__":
    signal.signal(NUMBER, signal.SIG_DFL)  # nohup and a shell's background jobs leave it ignored
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    workers.start_server(["harness.runtime.workers"])
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.Process(target=jobs.wait_as_worker, args=(there,)).start()
    here.recv()
    os.killpg(0, NUMBER)
"""


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGHUP])
def test_a_whole_group_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """The workers hear no such signal, and clear up after their trainer."""
    ended = subprocess.run(
        [sys.executable, "-c", GROUP.replace("NUMBER", str(int(number)))],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        start_new_session=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (-number, "")
    assert list(tmp_path.iterdir()) == []


TWICE = """
from multiprocessing import forkserver
from harness.runtime import workers
for _ in range(2):
    workers.start_server(["wave"])
    print(forkserver._forkserver._forkserver_pid)
"""


def test_a_server_is_started_once() -> None:
    """Whoever needs workers asks for it."""
    first, second = python(TWICE).stdout.split()
    assert first == second != "None"


def test_a_process_that_nobody_started_watches_nobody() -> None:
    """The main process has no parent to leave with."""
    before = threading.active_count()
    workers.die_with_parent()
    assert threading.active_count() == before


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look fifty times a second."""
    monkeypatch.setattr("harness.runtime.workers._LOOK_S", 0.02)


def test_a_watchdog_fires_over_one_long_wait(quick: None) -> None:
    """It calls back once a wait has lasted so long, and says so."""
    freed = threading.Event()
    with workers.Watchdog(0.1, freed.set) as watchdog:
        watchdog.wait = 0
        assert freed.wait(30) and watchdog.fired


@pytest.mark.parametrize(
    ("limit_s", "waits"),
    [(0.2, itertools.count()), (0.2, itertools.repeat(None)), (0.0, itertools.repeat(0))],
    ids=["many waits", "no wait", "no limit"],
)
def test_a_watchdog_lets_be(quick: None, limit_s: float, waits: Iterator[int | None]) -> None:
    """Waits that follow each other are not one long wait, the time between two is none, and no
    limit is none.
    """
    with workers.Watchdog(limit_s, pytest.fail) as watchdog:
        for wait in itertools.islice(waits, 50):
            watchdog.wait = wait
            time.sleep(0.01)
    assert not watchdog.fired


def test_a_signal_shortens_a_watchdog_s_limit(
    quick: None, monkeypatch: pytest.MonkeyPatch, unguarded: None
) -> None:
    """Once a signal has come, a wait is ended when half of its grace is gone, long before its own
    limit.
    """
    monkeypatch.setattr(signals, "_received", [])
    freed = threading.Event()
    with workers.Watchdog(3600.0, freed.set) as watchdog, signals.handle_signals(grace_s=10.0):
        watchdog.wait = 0
        assert not freed.wait(0.3)
        signal.raise_signal(signal.SIGTERM)
        assert not freed.wait(1.0)
        signals.set_grace(1.0)
        assert freed.wait(30)


def fired_after_a_stop(answer: connection.Connection) -> None:
    """Send whether a watchdog fired over a wait in which this process was stopped by another."""
    with workers.Watchdog(1.0, lambda: None) as watchdog:
        watchdog.wait = 0
        answer.send(None)
        time.sleep(0.5)
        answer.send(watchdog.fired)


def test_a_trainer_that_was_stopped_has_not_waited(quick: None) -> None:
    """A scheduler that suspends a job and lets it go on does not end it: only time in which it
    looked counts.
    """
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=fired_after_a_stop, args=(there,))
    process.start()
    here.recv()
    os.kill(process.pid or 0, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(process.pid or 0, signal.SIGCONT)
    assert here.recv() is False
    process.join()
