"""Work for processes that tests start; light, because every one of them imports it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from harness.runtime import signals, workers
from harness.runtime.errors import LoaderError


def note(i: int, folder: Path) -> None:
    """Leave a file that tells who ran."""
    (folder / str(i)).write_text(str(os.getpid()))


def first_fails(i: int, folder: Path) -> None:
    """Process 1 fails once process 0 runs, which would run for ever."""
    if i == 0:
        note(i, folder)
        threading.Event().wait()
    while not (folder / "0").exists():
        pass
    raise LoaderError("loader.num_workers: no more")


def divide(i: int, by: int) -> None:
    """Fail with an error that nobody expects."""
    print(1 / by)


def die(i: int, code: int) -> None:
    """End with ``code``, or by the signal ``-code``, and say nothing."""
    os.kill(os.getpid(), -code) if code < 0 else os._exit(code)


def interrupt_parent(i: int, _: None) -> None:
    """Signal the parent alone, and go on until the signal is passed on."""
    os.kill(os.getppid(), signal.SIGTERM)
    while True:
        signals.check()


def say_pid_and_stay(i: int, _: None) -> None:
    """Print the own process number, and stay."""
    print(os.getpid(), flush=True)
    threading.Event().wait()


def describe_worker(answer: Connection, module: str) -> None:
    """Send what a worker is like once it has entered, and whether ``module`` was there before."""
    preloaded = module in sys.modules
    workers.enter_worker()
    handlers = {number.name: signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)}
    names = [thread.name for thread in threading.enumerate()]
    answer.send(json.dumps({"preloaded": preloaded, "deaf": handlers, "threads": names}))
