"""Worker processes that start fast, outlive no trainer and leave signals to it."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker

from harness.runtime import signals

# where processors are short, a ninth of the weight of a thread that has none
_NICE = 10
# how often a watchdog looks
_LOOK_S = 0.5


_planned = False  # whether a fork server of ours is to serve


def plan_server(preload: Sequence[str]) -> None:
    """Have the fork server import ``preload`` when it starts: with the first worker, or by
    ``start_server``.

    A worker is then a fork of a process that has these modules and no threads: 0.1 s for the first
    batch instead of seconds, and none of the locks that a forked trainer's threads may hold.
    """
    global _planned
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    _planned = True


def start_server(preload: Sequence[str] | None = None) -> None:
    """Start the fork server, if one is planned or ``preload`` is given: it imports beside what the
    trainer does.

    Importing takes a processor for some seconds. That is for nothing where no worker follows, and
    spoils what is measured meanwhile.
    """
    if preload is not None:
        plan_server(preload)
    if not _planned:
        return
    # it lives as long as the trainer, whatever its process group is sent, and so does Python's
    # tracker of shared memory
    with signals.unheard():
        resource_tracker.ensure_running()
    # again, for starting the tracker ends by letting in SIGINT and SIGTERM
    with signals.unheard():
        forkserver.ensure_running()


def enter_worker() -> None:
    """Prepare this process as a worker: deaf to the trainer's signals, gone as soon as the trainer
    is.
    """
    signals.ignored_in_worker()
    leave_with_parent()


def give_way() -> None:
    """Lower the calling thread's priority, for good: the training step goes first where processors
    are short.

    A step that is torn from its processor makes its other threads spin for it (OpenMP), so that
    loading beside it costs more than the time it takes. What the step leaves is enough: it waits
    when there is no batch, and then leaves all.
    """
    with suppress(OSError):
        # of one thread, in Linux
        os.nice(_NICE)


def leave_with_parent() -> None:
    """End this process as soon as the one that asked for it has ended, however that came about."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(
            target=_leave_with, args=(parent.sentinel,), name="watchdog", daemon=True
        ).start()


def _leave_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


class Watchdog:
    """Calls ``free`` while one wait for workers lasts over ``limit_s`` seconds, or a signal's grace
    is half gone.

    It is for waits that have no limit of their own: ``free`` kills the workers, and the wait ends
    with an error.

    Args:
        limit_s: 0 for no limit.
        free: called in a thread of the watchdog's own, until the wait is over.

    Attributes:
        wait: a number that differs from wait to wait; None while there is none.
        fired: whether ``free`` was called.
    """

    def __init__(self, limit_s: float, free: Callable[[], object]) -> None:
        self.wait: int | None = None
        self.fired = False
        self._limit_s = limit_s or math.inf
        self._free = free
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _look(self) -> None:
        look_s = min(_LOOK_S, self._limit_s)
        # counted by looks: a trainer that was stopped itself, as by a scheduler, has not waited in
        # that time
        seen = None
        waited_s = 0.0
        while not self._over.wait(look_s):
            waited_s = waited_s + look_s if seen is not None and seen == self.wait else 0.0
            seen = self.wait
            if waited_s >= self._limit_s or (waited_s and signals.late()):
                self.fired = True
                self._free()
