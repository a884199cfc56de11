"""Kills a run before and after each of its calls to the disk, then its successor.

And looks at what comes of it.

Run in a process of its own, without threads: each run is a fork of it, which has all that must be
imported.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path

import disk
import torch

from harness import job
from harness.config import Config, StartMethod
from scripts.chaos_left import digest, logged


def settings(resume: str | None = "auto") -> Config:
    """Returns settings of seven steps, saved after each second one, evaluated at the end."""
    config = Config(device="cpu", resume=resume)
    config.data.name = "digits"
    config.data.image_size = 32
    config.run.name = "x"
    config.loader.num_workers = 0
    config.loader.batch_size = 200
    config.loader.start_method = StartMethod.spawn
    config.trainer.epochs = 1
    config.trainer.num_threads = 1
    config.checkpoint.every_steps = 2
    config.watch.window_steps = 3
    config.watch.tensorboard = False
    return config


def run(folder: Path, number: int) -> bool:
    """Runs in ``folder``; returns whether the run was killed at its call ``number``.

    The calls' names go to a file.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        return status == signal.SIGKILL
    left = number
    writes = 0

    def tell(when: str, name: str) -> None:
        nonlocal left, writes
        # of a run of writes to one file the first two are enough
        writes = writes + 1 if name == "write" else 0
        left -= writes <= 4
        if left == 0 and writes <= 4:
            with open(folder.parent / "events", "a") as events:
                events.write(f"{when} {name}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    disk.tell_calls(tell)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        job.run(0, job.Job(settings(), folder, ()))
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)
    os._exit(0)


def main(base: Path) -> None:
    """Kills a run at each call, and its successor; the third must end as if unharmed."""
    # every process here sees the same page cache
    os.fsync = lambda handle: None
    torch.set_num_threads(1)
    whole = base / "whole"
    folder = base / "killed"
    number = 0
    killed = True
    whole.mkdir()
    # here, so that the others find all modules imported
    with redirect_stdout(io.StringIO()):
        job.run(0, job.Job(settings(), whole, ()))
    while killed:
        number += 1
        assert number < 1000
        folder.mkdir()
        killed = run(folder, number)
        if killed:
            run(folder, number)
            assert not run(folder, -1)
        assert digest(folder) == digest(whole), number
        assert logged(folder) == logged(whole), (number, logged(folder), logged(whole))
        assert not list(folder.glob("**/.*.tmp")), number
        shutil.rmtree(folder)
    print(number - 1, "calls")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
