"""Sleeps in place of device steps and slow storage, as set by environment variables."""

from __future__ import annotations

import os
import time

STEP = "SLEPT_STEP_MS"
READ = "SLEPT_READ_MS"
BEGAN = "SLEPT_BEGAN_S"
LARGE = "SLEPT_LARGE"
os.environ.setdefault(BEGAN, str(time.time()))


def since_s() -> float:
    """Returns the seconds since the command."""
    return time.time() - float(os.environ[BEGAN])


def sleep(name: str) -> None:
    """Sleeps for the present value of the variable ``name``.

    ``5,0@20`` means 5 ms until 20 s after the start, then 0.
    """
    now_ms = 0.0
    now_s = since_s()
    for part in os.environ.get(name, "0").split(","):
        ms, _, at_s = part.partition("@")
        if now_s >= float(at_s or 0):
            now_ms = float(ms)
    time.sleep(now_ms / 1e3)
