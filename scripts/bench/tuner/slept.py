"""Waits in place of a device's steps and of slow storage, as environment variables say."""

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
    """Waits as long as the variable ``name`` says for now.

    ``5,0@20`` is 5 ms until 20 s after the start, and 0 from then on.
    """
    now_ms = 0.0
    now_s = since_s()
    for part in os.environ.get(name, "0").split(","):
        ms, _, at_s = part.partition("@")
        if now_s >= float(at_s or 0):
            now_ms = float(ms)
    time.sleep(now_ms / 1e3)
