"""A signal asks the run to end: a flag is set, every long loop looks at it, and what was trained is
saved.

A second signal ends the process at once, wherever it is, and so does the end of the first one's
grace. Terminals, torchrun and schedulers signal whole groups, parents among them that pass it on:
what comes within a second of the first is the same one.
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

from harness.runtime.errors import Interrupted

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_FREE = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
_SAME_S = 1.0
_START_S = 4.0
_SAY_S = 0.5
_CLEAR_S = 1.0
_END = b"\0"
_received: list[tuple[int, float]] = []
_grace_s = 0.0
_at_once = False


def check() -> None:
    """Return, or raise ``Interrupted`` once a signal has come."""
    if _received:
        raise interrupted()


def check_wait() -> None:
    """The same in a wait for a batch, which may last for half of the grace: if the batch comes, the
    step can be finished.
    """
    if late():
        raise interrupted()


def late() -> bool:
    """Whether a signal came, and half of its grace is gone."""
    return bool(_received) and time.monotonic() - _received[0][1] >= _grace_s / 2


def interrupted() -> Interrupted:
    """The error for the signal that came."""
    return Interrupted(_received[0][0])


def received() -> int:
    """The number of the first signal that came, or 0."""
    return _received[0][0] if _received else 0


def set_grace(seconds: float) -> None:
    """Let this process have so many ``seconds`` after a signal before it is ended where it stands.

    With 0 nothing can be lost yet, and the first signal ends it at once, as ``leave`` does.
    """
    global _grace_s, _at_once
    _grace_s = seconds
    _at_once = not seconds


def leave(code: int) -> NoReturn:
    """End this process as Python does, but for taking down the interpreter: torch's threads for
    gloo may still want it.

    They abort a process that has done all its work, rarely (pytorch#190489). A signal changes
    nothing any more.
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
def caught(grace_s: float = 25.0) -> Iterator[None]:
    """Turn signals into a flag inside the block; the former handlers come back at its end.

    A handler that is there already, as a launcher's own, stays. ``grace_s`` is as in ``set_grace``.
    A process that ends after the block ends in it, lest a second signal of the same second cut
    short what it clears up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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
    """A block in which no signal but those in ``but`` comes in, neither here nor in processes that
    are started in it.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {*_HANDLED} - {*but})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def ignored_in_worker() -> None:
    """Make a worker deaf to the signals that end a run: the trainer decides when its workers go.

    A scheduler sends SIGTERM to the whole process group; workers that died of it would take the
    last batches with them.
    """
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append((number, time.monotonic()))
    if _at_once:
        # an exception might be swallowed, as in an import's callbacks
        if multiprocessing.parent_process() is None:
            _tell(number)
        leave(128 + number)


def _guard(reader: int, own: list[signal.Signals]) -> None:
    """End the process after a second signal, or when the first one's grace is over."""
    first = 0
    first_s = 0.0
    while True:
        left_s = max(0.0, first_s + (_grace_s or _START_S) - time.monotonic()) if first else None
        if not connection.wait([reader], left_s):
            _end(first, f"not saved within checkpoint.grace_s={_grace_s:g}" if _grace_s else "")
        number = os.read(reader, 1)
        if number in (b"", _END):
            return os.close(reader)
        if number[0] not in own:
            continue
        if first and time.monotonic() - first_s > _SAME_S:
            _end(number[0], "the second one: nothing more is saved")
        if not first:
            first = number[0]
            first_s = time.monotonic()


def _end(number: int, why: str) -> None:
    try:
        _tell(number, why)
        if _at_once:
            # the main thread is in C code that hears nothing, as in a wait for another rank
            _within(_CLEAR_S, atexit._run_exitfuncs)
    finally:
        os._exit(128 + number)


def _tell(number: int, why: str = "") -> None:
    # nobody may read what is written
    _within(_SAY_S, lambda: _say(f"error: {Interrupted(number)}{why and ', '}{why}\n"))


def _within(seconds: float, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
