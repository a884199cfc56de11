"""Workers: forks of a server that has their modules, deaf to signals, tied to their trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

from harness.runtime import workers

SCRIPT = """
import multiprocessing, jobs
from harness.runtime import workers
if __name__ == "__main__":
    workers.start_server(["wave"])
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("forkserver").Process(target=jobs.describe_worker, args=(there, "wave"))
    worker.start()
    print(here.recv())
    worker.join()
"""


def test_a_worker_of_the_server() -> None:
    """It has the preloaded modules before it begins, ignores the trainer's signals, and watches the trainer."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    worker = json.loads(ended.stdout)
    assert worker["preloaded"]
    assert worker["deaf"] == {"SIGINT": True, "SIGTERM": True}
    assert "watchdog" in worker["threads"]


def test_a_process_that_nobody_started_watches_nobody() -> None:
    """The main process has no parent to leave with."""
    before = threading.active_count()
    workers.leave_with_parent()
    assert threading.active_count() == before
