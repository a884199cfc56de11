"""Turns a signal into a flag that long loops check, so that the run saves and ends.

A second signal ends the process at once, and so does the end of the first one's grace. A signal to
a process group often arrives twice, directly and by a parent: repeats within a second are ignored.
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
# by SIGQUIT a trainer ends at once, and its workers clear up after it
_UNHEARD = {*_HANDLED, signal.SIGQUIT}
# not those that nohup, or a shell for its background, has ignored
_FREE = (signal.SIG_DFL, signal.default_int_handler, None)
# repeats of a signal
_SAME_S = 1.0
# the grace of a process that has none, to end by itself, and its end in words
_START_S = 4.0
_STARTING = " while starting; nothing is lost"
# written to the guard's pipe when the block is over
_END = b"\0"
_received: list[tuple[int, float]] = []
_grace_s = 0.0
_at_once = False
_rescue: Callable[[], str] | None = None


def check() -> None:
    """Raises ``Interrupted`` once a signal has come."""
    if _received:
        raise interrupted()


def check_wait() -> None:
    """Raises ``Interrupted`` once half of a signal's grace is gone.

    For waits for a batch: if the batch comes in time, the step can be finished.
    """
    if late():
        raise interrupted()


def late() -> bool:
    """Whether a signal has come and half of its grace is gone."""
    return bool(_received) and time.monotonic() - _received[0][1] >= _grace_s / 2


def interrupted() -> Interrupted:
    """Returns the error for the signal that has come."""
    return Interrupted(_received[0][0])


def received() -> int:
    """Returns the number of the first signal that has come, or 0."""
    return _received[0][0] if _received else 0


def set_grace(seconds: float) -> None:
    """Sets the ``seconds`` between a signal and the end of this process, wherever it is then.

    With 0 nothing can be lost yet: the first signal ends the process at once, as ``leave`` does.
    """
    global _grace_s, _at_once
    _grace_s = seconds
    _at_once = not seconds


def set_rescue(rescue: Callable[[], str] | None) -> None:
    """Sets what another thread does when three quarters of a signal's grace are over.

    The main thread may wait for a device without end, as behind an all-reduce that misses a rank.
    ``rescue`` returns words for the line with which this process then ends.
    """
    global _rescue
    _rescue = rescue


def leave(code: int) -> NoReturn:
    """Ends this process as Python does, but leaves the interpreter standing.

    Torch's threads for gloo may still want it, and rarely abort a process that has done all its
    work (pytorch#190489). A signal changes nothing any more.
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
    """Opens a block of the main thread in which signals set a flag; the former handlers come back.

    A handler that is there already, such as a launcher's, stays, and so does a signal that is
    ignored. ``grace_s`` is as in ``set_grace``. Call ``leave`` inside the block: after it, a
    repeated signal would cut short what the process clears up.
    """
    _received.clear()
    set_grace(grace_s)
    own = [number for number in _HANDLED if signal.getsignal(number) in _FREE]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = {number: signal.signal(number, _note) for number in own}
    # the kernel's own handler writes there, also while this thread is in C code
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
    """Opens a block that lets in no signals but ``but``, also in processes started in it."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD - {*but})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def ignored_in_worker() -> None:
    """Makes a worker deaf to the signals that end a run.

    The trainer decides when workers end.

    A scheduler sends SIGTERM to the whole process group; workers that died of it would take the
    last batches with them.
    """
    signal.set_wakeup_fd(-1)
    for number in _UNHEARD:
        signal.signal(number, signal.SIG_IGN)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append((number, time.monotonic()))
    if _at_once:
        # an exception might be swallowed, as in an import's callbacks
        if multiprocessing.parent_process() is None:
            _tell(number, _STARTING)
        leave(128 + number)


def _guard(reader: int, own: list[signal.Signals]) -> None:
    """Ends the process after a second signal, or when the first one's grace is over."""
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
            _end(number[0], ", the second one: nothing more is saved")


def _end(number: int, why: str) -> None:
    try:
        _tell(number, why)
        if _at_once:
            # the main thread is in C code that hears nothing, as in a wait for another rank
            _within(1.0, atexit._run_exitfuncs)
    finally:
        os._exit(128 + number)


def _tell(number: int, why: str) -> None:
    def say() -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"error: {Interrupted(number)}{why}\n")
            sys.stderr.flush()

    # nobody may read what is written
    _within(0.5, say)


def _within(seconds: float, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
