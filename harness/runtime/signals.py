"""Turns signals into a flag that long loops check, so that the run saves and ends.

A second signal ends the process immediately, as does the end of the grace period. A signal to a
process group often arrives twice, directly and through a parent, so repeats within a second are
ignored.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from types import FrameType
from typing import NoReturn

from . import user_code
from .errors import Interrupted

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# SIGQUIT ends the main process immediately; its workers clean up
_UNHEARD = {*_HANDLED, signal.SIGQUIT}
# except signals ignored by nohup or for background jobs
_FREE = (signal.SIG_DFL, signal.default_int_handler, None)
# within this time, a repeated signal is ignored
_SAME_S = 1.0
# shutdown time for a process without a grace period, and its message
_START_S = 4.0
_STARTING = " before this process started its work"
# written to the guard's pipe at the end of the block
_END = b"\0"
_received: list[tuple[int, float]] = []
_grace_s = 0.0
_at_once = False
_rescue: Callable[[], str] | None = None


def check() -> None:
    """Raises ``Interrupted`` if a signal was received."""
    if _received:
        raise interrupted()


def check_wait() -> None:
    """Raises ``Interrupted`` after half of the grace period.

    For use while waiting for a batch, because a batch that arrives in time is still used for a
    step.
    """
    if late():
        raise interrupted()


def late() -> bool:
    """Whether half of a signal's grace period is over."""
    return bool(_received) and time.monotonic() - _received[0][1] >= _grace_s / 2


def interrupted() -> Interrupted:
    """Returns the error for the received signal."""
    return Interrupted(received())


def received() -> int:
    """Returns the number of the first signal, or 0."""
    return _received[0][0] if _received else 0


def set_grace(seconds: float) -> None:
    """Sets the ``seconds`` between a signal and the forced end of this process.

    With 0, when nothing can be lost yet, the first signal ends the process immediately, like
    ``leave``.
    """
    global _grace_s, _at_once
    _grace_s = seconds
    _at_once = not seconds


def set_rescue(rescue: Callable[[], str] | None) -> None:
    """Sets a function that another thread calls after three quarters of the grace period.

    The main thread may be stuck waiting for a device, for example in an all-reduce with a missing
    rank. ``rescue`` returns text for the final line of this process.
    """
    global _rescue
    _rescue = rescue


def leave(code: int) -> NoReturn:
    """Ends this process as Python does, but without finalizing the interpreter.

    Torch's Gloo threads may still need it, and rarely abort a finished process (pytorch#190489).
    Signals have no effect after this.
    """
    global _at_once
    _at_once = False
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


@contextmanager
def handle_signals(grace_s: float = 25.0) -> Iterator[None]:
    """A block in the main thread in which signals set a flag; restores the handlers afterward.

    Existing handlers, such as a launcher's, and ignored signals are kept. ``grace_s`` is as in
    ``set_grace``. Call ``leave`` inside the block, because a repeated signal after the block would
    interrupt the cleanup.
    """
    _received.clear()
    set_grace(grace_s)
    own = [number for number in _HANDLED if signal.getsignal(number) in _FREE]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = {number: signal.signal(number, _note) for number in own}
    # the C-level handler writes to the pipe, even while this thread is in C code
    former_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_guard, args=(reader, own), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former_writer)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.write(writer, _END)
        os.close(writer)


@contextmanager
def unheard(*but: signal.Signals) -> Iterator[None]:
    """A block that masks all signals except ``but``, including in processes started in it."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD - {*but})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def ignored_in_worker() -> None:
    """Makes a worker ignore the signals that end a run.

    The main process ends its workers.

    A scheduler sends SIGTERM to the whole process group, which would lose the workers' last
    batches.
    """
    signal.set_wakeup_fd(-1)
    for number in _UNHEARD:
        signal.signal(number, signal.SIG_IGN)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append((number, time.monotonic()))
    if _at_once:
        # an exception might be swallowed, for example in import callbacks
        if multiprocessing.parent_process() is None:
            _tell(number, _STARTING)
        leave(128 + number)


def _guard(reader: int, own: list[signal.Signals]) -> None:
    """Ends the process after a second signal, or after the first one's grace period."""
    first = 0
    first_s = 0.0
    while True:
        left_s = None
        if first:
            grace_s = (0.75 if _rescue else 1.0) * (_grace_s or _START_S)
            left_s = max(0.0, first_s + grace_s - time.monotonic())
        if not connection.wait([reader], left_s):
            late = f", not saved within checkpoint.grace_s={_grace_s:g}" if _grace_s else _STARTING
            with suppress(Exception):
                if where := user_code.current_place(threading.main_thread().ident):
                    late += f"; your code did not return{where}"
            if _rescue:
                with suppress(Exception):
                    late = _rescue()
            _end(first, late)
        number = os.read(reader, 1)
        if number in (b"", _END):
            return os.close(reader)
        if number[0] not in own:
            continue
        if not first:
            first = number[0]
            first_s = time.monotonic()
        elif time.monotonic() - first_s > _SAME_S:
            _end(number[0], ", the second signal; not saving")


def _end(number: int, why: str) -> None:
    try:
        _tell(number, why)
        if _at_once:
            # the main thread is stuck in C code, for example waiting for another rank
            _within(1.0, atexit._run_exitfuncs)
    finally:
        os._exit(128 + number)


def _tell(number: int, why: str) -> None:
    def say() -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"error: {Interrupted(number)}{why}\n")
            sys.stderr.flush()

    # output may be closed
    _within(0.5, say)


def _within(seconds: float, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
