"""A signal sets a flag; every long loop looks at it.

A second signal acts at once, so that a process stuck in one call can still be ended by hand. Terminals, torchrun and
schedulers signal whole groups, parents among them that pass it on: what comes within a second of the first is the same one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from harness.runtime.errors import Interrupted

_HANDLED = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 1.0
_received: list[tuple[int, float]] = []


def check() -> None:
    """Return, or raise ``Interrupted`` once a signal has come."""
    if _received:
        raise interrupted()


def interrupted() -> Interrupted:
    """The error for the signal that came."""
    return Interrupted(_received[0][0])


def received() -> int:
    """The number of the first signal that came, or 0."""
    return _received[0][0] if _received else 0


@contextmanager
def caught() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a flag inside the block; the former handlers come back at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    former = {number: signal.signal(number, _note) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ignored_in_worker() -> None:
    """Make a worker deaf to the signals that end a run: the trainer decides when its workers go.

    A scheduler sends SIGTERM to the whole process group; workers that died of it would take the last batches with them.
    """
    for number in (*_HANDLED, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _note(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if _received and now - _received[0][1] > _SAME_S:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    _received.append((number, now))
