"""Starts worker processes fast, ends them with the trainer and keeps signals from them."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any

import psutil

from . import signals

# how often a watchdog looks
_LOOK_S = 0.5


def start_server(preload: Sequence[str] = ()) -> None:
    """Starts the fork server, which imports ``preload``, unless there is one already.

    A worker is then a fork of a process that has these modules and no threads: 0.1 s for the first
    batch instead of seconds, and none of the locks that a forked trainer's threads may hold.

    The server imports beside the trainer, which takes a processor for some seconds: start it only
    for workers, and not beside a measurement.

    Args:
        preload: names of modules; none: those that ``forkserver.set_forkserver_preload`` was told.
    """
    if preload:
        forkserver.set_forkserver_preload(list(preload))
    start_tracker()
    # the server lives as long as the trainer, whatever its process group is sent
    with signals.unheard():
        forkserver.ensure_running()


def start_tracker() -> None:
    """Starts Python's tracker, which removes what a killed process left, with its warnings off."""
    ignored = "ignore:resource_tracker"
    if ignored not in sys.warnoptions:
        # it is started with these
        sys.warnoptions.append(ignored)
    # a block of its own, for this ends by letting in SIGINT and SIGTERM
    with signals.unheard():
        resource_tracker.ensure_running()


def kill_starting() -> None:
    """Kills the fork server's children that no one has been given yet, and ends their start."""
    known = {child.pid for child in multiprocessing.active_children()}
    # private to Python: without it a start has no limit
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    with suppress(psutil.Error):
        for child in psutil.Process(server).children() if server else ():
            if child.pid not in known:
                child.kill()


def enter_worker() -> None:
    """Prepares this process as a worker: deaf to signals, and gone with the trainer."""
    signals.ignored_in_worker()
    die_with_parent()


def lower_priority() -> None:
    """Lowers the calling thread's priority for good: the training step goes first.

    If one of the step's OpenMP threads is preempted, the others spin. Loaders still get every core
    that the step leaves idle, and all cores while the step waits for data.
    """
    with suppress(OSError):
        # of one thread, in Linux; a ninth of a normal thread's weight
        os.nice(10)


def die_with_parent() -> None:
    """Ends this process as soon as its parent has ended, in any way."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def leave() -> None:
        connection.wait([parent.sentinel])
        # in a worker the trainer's, which a killed one has left
        own: Any = multiprocessing.current_process()
        if folder := own._config.get("tempdir"):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=leave, name="watchdog", daemon=True).start()


class Watchdog:
    """Calls ``free`` once a wait for workers lasts too long, which ends the wait.

    Too long is over ``limit_s`` seconds, or after half of a signal's grace.

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
        def look() -> None:
            look_s = min(_LOOK_S, self._limit_s)
            # counted by looks: a trainer that a scheduler has stopped was not waiting meanwhile
            seen = None
            waited_s = 0.0
            while not self._over.wait(look_s):
                if seen is not None and seen == self.wait:
                    waited_s += look_s
                else:
                    waited_s = 0.0
                seen = self.wait
                if waited_s >= self._limit_s or (waited_s and signals.late()):
                    self.fired = True
                    self._free()

        threading.Thread(target=look, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
