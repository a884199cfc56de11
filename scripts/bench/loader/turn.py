"""Runs one measurement of ``run.py`` in a separate process, from JSON to JSON.

It is light because each worker process imports it, as a user's worker imports train.py; the fork
server starts before torch is imported, as in train.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.runtime import workers

_ROOT = Path(__file__).resolve().parents[3]
_PRELOADED = ["hydra", "harness.feed.processes", "harness.data.datasets"]
_LIMIT_S = 900.0


class FailedError(Exception):
    """A measurement failed; the text is the last line of its output."""


def ask(measure: str, cache: str, /, **arguments: Any) -> dict[str, Any]:
    """Returns the result of ``measure`` in a fresh process.

    Args:
        measure: a name in ``in_use.MEASURES``.
        cache: the process's cache folder.
        **arguments: of the measurement.

    Raises:
        FailedError: it failed or timed out.
    """
    told = json.dumps({"measure": measure, **arguments})
    command = [sys.executable, "-m", "scripts.bench.loader.turn", told]
    env = {**os.environ, "WELLFED_CACHE": cache}
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"took more than {_LIMIT_S:g} s") from error
    # the last line is the result or the error
    if done.returncode != 0:
        raise FailedError(
            (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main(told: str) -> None:
    """Prints, as the last line, the result of the measurement ``told`` with its arguments."""
    asked = json.loads(told)
    if asked.pop("serves", False):
        workers.start_server(_PRELOADED)
    from scripts.bench.loader import in_use

    print(json.dumps(in_use.MEASURES[asked.pop("measure")](**asked)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
