"""Processes of a run: started together, ended together, with the first error brought home."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from harness.runtime import signals, workers
from harness.runtime.errors import RunError, tell_crashes, told

_GRACE_S = 5.0
# for what a process removes as it ends
_CLEAR_S = 1.0
_POLL_S = 0.2
# characters of an error: a pipe that nobody reads yet holds 64 KiB
_TEXT = 4000
# exit codes of ends at which the first rank saves
_SAVES = (3, 6)


class ProcessError(RunError):
    """A process of the run failed; the text is its own, or how it died."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[ProcessError], tuple[str, int]]:
        return ProcessError, (str(self), self.exit_code)


def began_s(stat: Path = Path("/proc/self/stat")) -> float:
    """When this process started, on ``time.perf_counter``, to a hundredth of a second; now, where
    the system does not say.
    """
    try:
        fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age_s = 0.0
    return time.perf_counter() - age_s


def command(ranks: str | None = None) -> list[str]:
    """The words by which such a run is started again: the script's or the command's; ``ranks``,
    torchrun's, is its option.
    """
    called = Path(sys.argv[0])
    installed = called.name == "wellfed" or called.parts[-2:] == ("harness", "__main__.py")
    if ranks is not None:
        return ["torchrun", ranks, *(["-m", "harness"] if installed else ["train.py"])]
    if installed:
        return ["wellfed"]
    return ["uv", "run", "train.py"] if "UV" in os.environ else ["python", "train.py"]


def run_processes(
    work: Callable[[int, Any], Any], job: Any, count: int, grace_s: float = 25.0
) -> None:
    """Run ``work(i, job)`` in ``count`` fresh processes, i = 0 .. count - 1, and wait for all.

    A signal to this process is passed on, and all then have ``grace_s`` seconds. When one process
    fails by itself, the others have five, or ``grace_s`` where they may be saving; then they are
    ended.

    Raises:
        ProcessError: with the text and the exit code of the first process that failed; after a
            signal, of the first that failed otherwise than by it.
    """
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # joblib's own, which a new process is told to use and does not know
        multiprocessing.set_start_method("spawn", force=True)
    context = multiprocessing.get_context("spawn")
    started: list[tuple[SpawnProcess, Connection]] = []
    try:
        for i in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(work, i, job, there), name=f"rank{i}")
            # until it can hear a signal to the whole group without a traceback; SIGTERM ends it at
            # once
            with signals.unheard(signal.SIGTERM):
                process.start()
            there.close()
            started.append((process, here))
        signals.set_grace(grace_s)
        failure = _watch(started, grace_s)
    finally:
        _end([process for process, _ in started])
    if failure is not None:
        raise failure


def _enter(work: Callable[[int, Any], Any], i: int, job: Any, errors: Connection) -> None:
    workers.leave_with_parent()
    tell_crashes()
    with signals.caught(grace_s=0):
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            work(i, job)
            code = 0
        except BaseException as error:
            text, code = told(error)
            errors.send((text[:_TEXT], code))
        signals.leave(code)


def _watch(started: list[tuple[SpawnProcess, Connection]], grace_s: float) -> ProcessError | None:
    """Wait until all have ended, or one has failed and the others had their grace; the first
    failure.
    """
    failure: ProcessError | None = None
    passed_on = False
    deadline = float("inf")
    open_ = list(started)
    while open_ and time.monotonic() < deadline:
        wait([process.sentinel for process, _ in open_], timeout=_POLL_S)
        if signals.received() and not passed_on:
            passed_on = True
            for process, _ in open_:
                process.terminate()
        for process, pipe in [item for item in open_ if not item[0].is_alive()]:
            open_.remove((process, pipe))
            if not process.exitcode:
                continue
            found = _failure(process, pipe)
            if failure is None and not signals.received():
                deadline = time.monotonic() + (
                    max(_GRACE_S, grace_s) if found.exit_code in _SAVES else _GRACE_S
                )
            if failure is None or (
                signals.received() and failure.exit_code > 128 > found.exit_code
            ):
                failure = found
    return failure


def _failure(process: SpawnProcess, pipe: Connection) -> ProcessError:
    said: tuple[str, int] | None = None
    with suppress(EOFError):
        # it died before it could say why; its exit code says how
        said = pipe.recv() if pipe.poll() else None
    if signals.received() and (said is None or said[1] == 1):
        # others fail as well once one is gone
        return ProcessError(str(signals.interrupted()), signals.interrupted().exit_code)
    if said is not None:
        return ProcessError(*said)
    code = process.exitcode or 0
    if code < 0:
        return ProcessError(
            f"{process.name} was killed by signal {-code} ({signal.Signals(-code).name})",
            128 - code,
        )
    return ProcessError(f"{process.name} ended with exit code {code}", code)


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _CLEAR_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
