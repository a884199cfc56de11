"""Work for processes that tests start; light, because every one of them imports it."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from multiprocessing.connection import Connection
from pathlib import Path

from harness.config import Config
from harness.runtime import signals, workers
from harness.runtime.errors import DiskError, LoaderError


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


def lose_the_other(i: int, folder: Path) -> None:
    """Process 1 is killed later than process 0 says that it lost it."""
    if i == 0:
        note(i, folder)
        raise RuntimeError(GLOO)
    while not (folder / "0").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


GLOO = (
    "[/src/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:44938. This is "
    "typically caused by a remote worker crashing."
)


def wait_as_worker(there: Connection) -> None:
    """A worker that is ready and does nothing more."""
    workers.enter_worker()
    there.send("ready")
    threading.Event().wait()


def divide(i: int, by: int) -> None:
    """Fail with an error that nobody expects."""
    print(1 / by)


def die(i: int, code: int) -> None:
    """End with ``code``, or by the signal ``-code``, and say nothing."""
    os.kill(os.getpid(), -code) if code < 0 else os._exit(code)


def fail_to_save(i: int, folder: Path) -> None:
    """Signals the parent once both run; process 0 then finds no room.

    Process 1 ends by the signal a moment before.
    """
    signals.set_grace(20.0)
    note(i, folder)
    while not all((folder / name).exists() for name in "01"):
        time.sleep(0.01)
    if i == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    while not signals.received():
        time.sleep(0.01)
    if i == 0:
        time.sleep(0.5)
        raise DiskError("checkpoints: no room")
    signals.check()


def leave_things(i: int, folder: Path) -> None:
    """Return while a thread still works and a callback waits for the end; both leave a file."""
    threading.Thread(target=lambda: (time.sleep(0.3), (folder / "thread").touch())).start()
    atexit.register((folder / "callback").touch)
    print("written", end="")


def clear_up(i: int, job: tuple[Path, str]) -> None:
    """Signals the whole group, and clears up for longer than the signal takes to pass on."""
    folder, stage = job
    signals.set_grace(20.0)

    def clear() -> None:
        time.sleep(0.6)
        (folder / "cleared").touch()

    if stage == "at exit":
        atexit.register(clear)
    try:
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        signals.check()
    finally:
        if stage == "in a block":
            clear()


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
    handlers = {
        number.name: signal.getsignal(number) == signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    names = [thread.name for thread in threading.enumerate()]
    answer.send(json.dumps({"preloaded": preloaded, "deaf": handlers, "threads": names}))


def join_and_agree(local_rank: int, job: tuple[Config, Path]) -> None:
    """Join, use every collective once, and leave what came of it in a file."""
    # only this work needs it
    import torch

    from harness.runtime.distributed import joined

    config, folder = job
    with joined(local_rank, config) as world:
        values = torch.tensor([1.0, 10.0]) * (world.rank + 1)
        copied = torch.full((2,), float(world.rank))
        world.copy_from(0, [copied])
        found = {
            "world": [world.rank, world.size, world.local_rank, world.local_size],
            "device": [str(world.device), world.is_main],
            "total": world.total(values).tolist(),
            "own": values.tolist(),
            "copied": copied.tolist(),
            "agreed": world.agreed({"rank": world.rank}),
            "gathered": world.gathered({"rank": world.rank}),
            "largest": world.largest(world.rank * 15, -world.rank),
            "smallest": world.smallest(0.1 + world.rank),
            "threads": torch.get_num_threads(),
        }
    (folder / f"{local_rank}.json").write_text(json.dumps(found))


def share(local_rank: int, job: tuple[Config, Path]) -> None:
    """Join, get what rank 1 alone can read, and leave what came of it in a file."""
    import torch

    from harness.runtime.distributed import World, joined
    from harness.runtime.errors import CheckpointError

    config, folder = job
    kinds = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64)
    held = OrderedDict((str(kind), torch.arange(6).reshape(2, 3).to(kind)) for kind in kinds)
    images = torch.arange(48.0).reshape(2, 3, 2, 4)
    held["last"] = images.to(memory_format=torch.channels_last)
    held["cut"] = images[..., ::2]
    held["none"], held["one"] = torch.empty(0, 3), torch.tensor(7)
    # as of a module
    held._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]

    def read(world: World, text: str = "") -> object:
        if world.rank != 1 or text:
            raise CheckpointError(text or "read by another rank")
        return "x.pt", {"model": held, "steps": [1, (2, None)]}

    with joined(local_rank, config) as world:
        name, state = world.shared(1, lambda: read(world))
        same = {key: torch.equal(state["model"][key], held[key]) for key in held}
        last = state["model"]["last"].is_contiguous(memory_format=torch.channels_last)
        found = [name, same, last, state["steps"] == [1, (2, None)], state["model"]._metadata]
        try:
            world.shared(1, lambda: read(world, "damaged"))
        except CheckpointError as error:
            found.append(str(error))
    (folder / f"{local_rank}.json").write_text(json.dumps(found))


def thaw(local_rank: int, job: tuple[Config, Path]) -> None:
    """Trains two epochs, the first with a head alone; leaves in a file what came of it."""
    import torch
    from torch import nn

    from harness.runtime.distributed import World, joined
    from harness.training.state import make_state
    from harness.training.step import Step

    config, folder = job

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 5))

    with joined(local_rank, config) as world:
        step = Step(make_state(config, 0, world, 3, network=network()), 5)
        first = [p.detach().clone() for p in step.state.network[0].parameters()]
        images = torch.arange(48.0).reshape(8, 6).sin()
        own = slice(4 * world.rank, 4 * world.rank + 4)
        for epoch in range(2):
            step.state.epoch = epoch
            step.begin_epoch()
            for _ in range(3):
                step(images[own], torch.arange(8)[own] % 5)
            if epoch == 0:
                frozen = all(map(torch.equal, first, step.state.network[0].parameters()))
        one = World(0, 1, 0, 1, world.device)
        alone = Step(make_state(config, 0, one, 3, network=network()), 5)
        for epoch in range(2):
            alone.state.epoch = epoch
            alone.begin_epoch()
            for _ in range(3):
                alone(images, torch.arange(8) % 5)
        both = [
            (*s.state.network.parameters(), *s.state.evaluated.parameters()) for s in (step, alone)
        ]
        like_one = all(map(torch.allclose, *both))
        weights = [tensor.tolist() for tensor in both[0]]
    found = {"frozen": frozen, "like_one": like_one, "weights": weights}
    (folder / f"{local_rank}.json").write_text(json.dumps(found))
