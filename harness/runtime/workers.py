"""Starts worker processes fast, ends them with the main process and shields them from signals."""

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

# a watchdog's polling interval
_LOOK_S = 0.5


def start_server(preload: Sequence[str] = ()) -> None:
    """Starts the fork server, which imports ``preload``, unless it is already running.

    Workers are then forked from a process that has these modules and no threads. The first batch
    takes 0.1 s instead of seconds, and no locks of the main process's threads are inherited.

    The server's imports use a core for a few seconds, so start it only for workers and not during a
    measurement.

    Args:
        preload: module names; empty for those passed to ``forkserver.set_forkserver_preload``.
    """
    if preload:
        forkserver.set_forkserver_preload(list(preload))
    start_tracker()
    # the server ignores signals and lives as long as the main process
    with signals.unheard():
        forkserver.ensure_running()


def start_tracker() -> None:
    """Starts Python's resource tracker, which cleans up after killed processes, and mutes its
    warnings.
    """
    ignored = "ignore:resource_tracker"
    if ignored not in sys.warnoptions:
        # inherited at its start
        sys.warnoptions.append(ignored)
    # a separate block, because the call ends by unblocking SIGINT and SIGTERM
    with signals.unheard():
        resource_tracker.ensure_running()


def kill_starting() -> None:
    """Kills the fork server's children that are still starting."""
    known = {child.pid for child in multiprocessing.active_children()}
    # private in Python; without it, a start has no timeout
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    with suppress(psutil.Error):
        for child in psutil.Process(server).children() if server else ():
            if child.pid not in known:
                child.kill()


def enter_worker() -> None:
    """Prepares this process as a worker that ignores signals and ends with the main process."""
    signals.ignored_in_worker()
    die_with_parent()


def lower_priority() -> None:
    """Permanently lowers the calling thread's priority below the training step's.

    If one of the step's OpenMP threads is preempted, the others spin. Loaders still get all idle
    cores, and every core while the step waits for data.
    """
    with suppress(OSError):
        # per thread on Linux; a ninth of the normal weight
        os.nice(10)


def die_with_parent() -> None:
    """Ends this process as soon as its parent has ended, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def leave() -> None:
        connection.wait([parent.sentinel])
        # in a worker; a killed main process leaves it behind
        own: Any = multiprocessing.current_process()
        if folder := own._config.get("tempdir"):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=leave, name="watchdog", daemon=True).start()


class Watchdog:
    """Calls ``free`` to end a wait for workers that lasts too long.

    The limit is ``limit_s`` seconds, or half of a signal's grace period.

    Args:
        limit_s: 0 for no limit.
        free: called repeatedly in the watchdog's thread until the wait is over.

    Attributes:
        wait: a unique number for the current wait; None if there is none.
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
            # counted in polls, because time during which the process was suspended is not a wait
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
