"""Starts and ends the processes of a run together, and reports the first error."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from . import signals, workers
from .errors import LOST_RANK, RunError, message, tell_crashes

# of the others, once a process has failed
_GRACE_S = 5.0


class ProcessError(RunError):
    """A process of the run failed; the text is its own, or how it died."""

    # without a code while it is unpickled, which then sets the attribute
    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def command(ranks: str | None = None) -> list[str]:
    """Returns the words that start such a run again; ``ranks`` is an option for torchrun."""
    installed = re.search(r"(^|/)(wellfed|(wellfed|harness)/__main__\.py)$", sys.argv[0])
    # of submitit's workers it is another one
    script = sys.argv[0] if sys.argv[0].endswith("train.py") else "train.py"
    module = ["-m", "wellfed"] if installed else [script]
    if ranks is not None:
        return ["torchrun", ranks, *module]
    words = ["wellfed"] if installed else ["python", script]
    if "UV" in os.environ:
        return ["uv", "run", words[-1]]
    # a shell may find another one by that name, or none
    if os.path.dirname(shutil.which(words[0]) or "") != os.path.dirname(sys.executable):
        return [sys.executable, *module]
    return words


def setting(override: str) -> str:
    """Returns the name that an override sets, without Hydra's signs for adding and deleting."""
    return override.partition("=")[0].lstrip("+~")


def run_processes(
    work: Callable[[int, Any], Any], job: Any, count: int, grace_s: float = 25.0
) -> None:
    """Runs ``work(i, job)`` in ``count`` fresh processes, i from 0, and waits for all.

    A signal to this process is passed on, and all then have ``grace_s`` seconds. After a failure
    the others have five, or ``grace_s`` if they may be saving, and are then ended.

    Raises:
        ProcessError: with the text and the exit code of the first process that failed; after a
            signal, of the first that failed otherwise than by the signal.
    """
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # joblib's own, which a new process is told to use and does not know
        multiprocessing.set_start_method("spawn", force=True)
    workers.start_tracker()
    context = multiprocessing.get_context("spawn")
    started: dict[SpawnProcess, Connection] = {}
    # to end in the middle of a start would leave half a process
    signals.set_grace(grace_s)
    try:
        for i in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(work, i, job, there), name=f"rank{i}")
            # until the process can hear a signal to the whole group without a traceback; SIGTERM
            # ends it at once
            with signals.unheard(signal.SIGTERM):
                process.start()
            there.close()
            started[process] = here
        failure = _watch(started, grace_s)
    finally:
        for process in started:
            process.terminate()
        # for what a process removes as it ends
        deadline_s = time.monotonic() + 1.0
        for process in started:
            process.join(max(0.0, deadline_s - time.monotonic()))
            process.kill()
            process.join()
    if failure is not None:
        raise failure


def _enter(work: Callable[[int, Any], Any], i: int, job: Any, errors: Connection) -> None:
    workers.die_with_parent()
    tell_crashes()
    with signals.handle_signals(grace_s=0):
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            work(i, job)
            code = 0
        except BaseException as error:
            text, code = message(error)
            # a pipe that nobody reads yet holds 64 KiB
            errors.send((text[:4000], code))
        signals.leave(code)


def _watch(started: Mapping[SpawnProcess, Connection], grace_s: float) -> ProcessError | None:
    """Waits until all have ended, or for the grace after a failure; returns the failure."""
    failure: ProcessError | None = None
    passed_on = False
    deadline_s = math.inf
    running = list(started)
    while running and time.monotonic() < deadline_s:
        wait([process.sentinel for process in running], timeout=0.2)
        if signals.received() and not passed_on:
            passed_on = True
            for process in running:
                process.terminate()
        ended = [process for process in running if not process.is_alive()]
        running = [process for process in running if process not in ended]
        for process in ended:
            if (found := _failure(process, started[process])) is None:
                continue
            if signals.received():
                # others fail as well once one is gone
                if not 1 < found.exit_code < 128 or found.exit_code == LOST_RANK:
                    found = ProcessError(*message(signals.interrupted()))
                # a failure tells more than the signal
                if failure is None or failure.exit_code > 128 > found.exit_code:
                    failure = found
            elif failure is None or failure.exit_code == LOST_RANK:
                failure = found
                # at these ends the first rank saves
                rest_s = max(_GRACE_S, grace_s) if found.exit_code in (3, 6) else _GRACE_S
                deadline_s = time.monotonic() + rest_s
    return failure


def _failure(process: SpawnProcess, pipe: Connection) -> ProcessError | None:
    """Returns what made a process that has ended fail, if anything did."""
    code = process.exitcode
    if not code:
        return None
    # a process may die before it can say why
    with suppress(EOFError):
        if pipe.poll():
            return ProcessError(*pipe.recv())
    if code > 0:
        return ProcessError(f"{process.name} ended with exit code {code}", code)
    name = signal.Signals(-code).name
    return ProcessError(f"{process.name} was killed by signal {-code} ({name})", 128 - code)
