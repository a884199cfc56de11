"""Worker processes that start fast, outlive no trainer and leave signals to it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver

from harness.runtime import signals

_NICE = 10  # where processors are short, a ninth of the weight of a thread that has none


def start_server(preload: Sequence[str]) -> None:
    """Start the fork server early, with ``preload`` imported while the trainer imports its own modules.

    A worker is then a fork of a process that has these modules and no threads: 0.1 s for the first batch instead of
    seconds, and none of the locks that a forked trainer's threads may hold.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    forkserver.ensure_running()


def enter_worker() -> None:
    """Prepare this process as a worker: deaf to the trainer's signals, gone as soon as the trainer is."""
    signals.ignored_in_worker()
    leave_with_parent()


def give_way() -> None:
    """Lower the calling thread's priority, for good: the training step goes first where processors are short.

    A step that is torn from its processor makes its other threads spin for it (OpenMP), so that loading beside it costs more
    than the time it takes. What the step leaves is enough: it waits when there is no batch, and then leaves all.
    """
    with suppress(OSError):
        os.nice(_NICE)  # of one thread, in Linux


def leave_with_parent() -> None:
    """End this process as soon as the one that asked for it has ended, however that came about."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_with, args=(parent.sentinel,), name="watchdog", daemon=True).start()


def _leave_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
