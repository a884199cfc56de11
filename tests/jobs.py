"""Work for processes that tests start; light, because every one of them imports it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from harness.config import Config
from harness.runtime import signals, workers
from harness.runtime.errors import LoaderError


def note(i: int, folder: Path) -> None:
    """Leave a file that tells who ran."""
    (folder / str(i)).write_text(str(os.getpid()))


def first_fails(i: int, folder: Path) -> None:
    """Process 1 fails once process 0 runs, which would run for ever."""
    if i == 0:
        note(i, folder)
        threading.Event().wait()
    while not (folder / "0").exists():
        time.sleep(0.01)
    raise LoaderError("loader.num_workers: no more")


def divide(i: int, by: int) -> None:
    """Fail with an error that nobody expects."""
    print(1 / by)


def die(i: int, code: int) -> None:
    """End with ``code``, or by the signal ``-code``, and say nothing."""
    os.kill(os.getpid(), -code) if code < 0 else os._exit(code)


def interrupt_parent(i: int, _: None) -> None:
    """Signal the parent alone, and go on until the signal is passed on."""
    os.kill(os.getppid(), signal.SIGTERM)
    while True:
        signals.check()
        time.sleep(0.01)


def say_pid_and_stay(i: int, _: None) -> None:
    """Print the own process number, and stay."""
    print(os.getpid(), flush=True)
    threading.Event().wait()


def describe_worker(answer: Connection, module: str) -> None:
    """Send what a worker is like once it has entered, and whether ``module`` was there before."""
    preloaded = module in sys.modules
    workers.enter_worker()
    handlers = {number.name: signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)}
    names = [thread.name for thread in threading.enumerate()]
    answer.send(json.dumps({"preloaded": preloaded, "deaf": handlers, "threads": names}))


def join_and_agree(local_rank: int, job: tuple[Config, Path]) -> None:
    """Join, use every collective once, and leave what came of it in a file."""
    import torch  # only this work needs it

    from harness.runtime.distributed import joined

    config, folder = job
    with joined(local_rank, config) as world:
        values = torch.tensor([1.0, 10.0]) * (world.rank + 1)
        copied = torch.full((2,), float(world.rank))
        world.barrier()
        world.copy_from_first([copied])
        found = {
            "world": [world.rank, world.size, world.local_rank, world.local_size, str(world.device), world.is_main],
            "total": world.total(values).tolist(),
            "own": values.tolist(),
            "copied": copied.tolist(),
            "agreed": world.agreed({"rank": world.rank}),
            "largest": world.largest(world.rank * 15),
            "smallest": world.smallest(0.1 + world.rank),
            "threads": torch.get_num_threads(),
        }
    (folder / f"{local_rank}.json").write_text(json.dumps(found))
