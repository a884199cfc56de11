"""Starts and ends a run's processes together, and reports the first error."""

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
from pathlib import Path
from typing import Any

from . import signals, workers
from .errors import LOST_RANK, RunError, message, tell_crashes

# grace period for the others after a process has failed
_GRACE_S = 5.0


class ProcessError(RunError):
    """A process of the run failed; the text is its own message, or the signal that killed it."""

    # unpickling passes no code, but then sets the attribute
    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def command(ranks: str | None = None) -> list[str]:
    """Returns the command that restarts a run; ``ranks`` is an option for torchrun."""
    installed = re.search(r"(^|/)(wellfed|(wellfed|harness)/__main__\.py)$", sys.argv[0])
    # differs in submitit's workers
    script = sys.argv[0] if sys.argv[0].endswith("train.py") else "train.py"
    module = ["-m", "wellfed"] if installed else [script]
    if ranks is not None:
        return ["torchrun", ranks, *module]
    words = ["wellfed"] if installed else ["python", script]
    if "UV" in os.environ:
        project = Path(sys.prefix).parent
        outside = not Path.cwd().is_relative_to(project)
        return ["uv", "run", *["--project", str(project)] * outside, words[-1]]
    # a shell may find a different one, or none
    if os.path.dirname(shutil.which(words[0]) or "") != os.path.dirname(sys.executable):
        return [sys.executable, *module]
    return words


def setting(override: str) -> str:
    """Returns an override's setting name, without Hydra's prefixes for adding and deleting."""
    return override.partition("=")[0].lstrip("+~")


def run_processes(
    work: Callable[[int, Any], Any], job: Any, count: int, grace_s: float = 25.0
) -> None:
    """Runs ``work(i, job)`` in ``count`` fresh processes, i from 0, and waits for all of them.

    A signal to this process is forwarded; all processes then have ``grace_s`` seconds to exit.
    After a failure, the others have five seconds, or ``grace_s`` if they may be saving, before they
    are terminated.

    Raises:
        ProcessError: with the text and exit code of the first process that failed; after a signal,
            those of the first that failed for another reason.
    """
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # joblib's start method, which new processes would use but do not know
        multiprocessing.set_start_method("spawn", force=True)
    workers.start_tracker()
    context = multiprocessing.get_context("spawn")
    started: dict[SpawnProcess, Connection] = {}
    # a start must not be interrupted halfway
    signals.set_grace(grace_s)
    try:
        for i in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(work, i, job, there), name=f"rank{i}")
            # until the process can handle group signals without a traceback; SIGTERM ends it
            with signals.unheard(signal.SIGTERM):
                process.start()
            there.close()
            started[process] = here
        failure = _watch(started, grace_s)
    finally:
        for process in started:
            process.terminate()
        # time for cleanup at process exit
        deadline_s = time.monotonic() + 1.0
        for process in started:
            process.join(max(0.0, deadline_s - time.monotonic()))
            process.kill()
            process.join()
    if failure:
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
            # an unread pipe holds up to 64 KiB
            errors.send((text[:4000], code))
        signals.leave(code)


def _watch(started: Mapping[SpawnProcess, Connection], grace_s: float) -> ProcessError | None:
    """Waits until all have ended, or for the grace period after a failure; returns the failure."""
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
            if not (found := _failure(process, started[process])):
                continue
            if signals.received():
                # others also fail after one has ended
                if not 1 < found.exit_code < 128 or found.exit_code == LOST_RANK:
                    found = ProcessError(*message(signals.interrupted()))
                # a failure is more informative than the signal
                if not failure or failure.exit_code > 128 > found.exit_code:
                    failure = found
            elif not failure or failure.exit_code == LOST_RANK:
                failure = found
                # with these exit codes, the first rank saves
                rest_s = max(_GRACE_S, grace_s) if found.exit_code in (3, 6) else _GRACE_S
                deadline_s = time.monotonic() + rest_s
    return failure


def _failure(process: SpawnProcess, pipe: Connection) -> ProcessError | None:
    """Returns the failure of an ended process, if any."""
    code = process.exitcode
    if not code:
        return None
    # a process may die without a message
    with suppress(EOFError):
        if pipe.poll():
            return ProcessError(*pipe.recv())
    if code > 0:
        return ProcessError(f"{process.name} exited with code {code}", code)
    name = signal.Signals(-code).name
    return ProcessError(f"{process.name} was killed by signal {-code} ({name})", 128 - code)
