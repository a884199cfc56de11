"""Waits in place of a device's steps and of slow storage, as environment variables say."""

from __future__ import annotations

import os
import time

STEP = "SLEPT_STEP_MS"
READ = "SLEPT_READ_MS"
BEGAN = "SLEPT_BEGAN_S"
os.environ.setdefault(BEGAN, str(time.time()))


def sleep(name: str) -> None:
    """Waits as long as the variable ``name`` says for now.

    ``5,0@20`` is 5 ms until 20 s after the start, and 0 from then on.
    """
    now_ms = 0.0
    since_s = time.time() - float(os.environ[BEGAN])
    for part in os.environ.get(name, "0").split(","):
        ms, _, at_s = part.partition("@")
        if since_s >= float(at_s or 0):
            now_ms = float(ms)
    time.sleep(now_ms / 1e3)
