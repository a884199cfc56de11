"""Kills saves and runs before and after each of their calls to the disk, and looks at the rest.

    python killed.py save|run|last FOLDER

``save`` kills a save; ``run`` a run, then its successor; ``last`` the last save of a run, which is
evaluated, resumed and compared with a run that nobody killed. In a process of its own, without
threads: each victim is a fork of it, which has all that must be imported.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import disk
import torch
from checkpoints import commit
from run_state import digest, logged

from harness.cli import job
from harness.config import Config, Mode, StartMethod
from harness.feed.order import Order
from harness.runtime.distributed import World
from harness.training import checkpoint_read, checkpoint_write

# the updates of three epochs, so that the last save has a checkpoint to delete, and of all four
BEFORE = 21
ALL = 28


def killed(
    number: int,
    work: Callable[[], object],
    events: Path,
    counts: Callable[[str], bool] = lambda name: True,
) -> bool:
    """Whether ``work`` in a new process was killed at its event ``number``; 0: at none.

    Of all events those with a name that ``counts`` have a number; the last one's name, with before
    or after, is added to a file.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        return status == signal.SIGKILL
    left = number

    def tell(when: str, name: str) -> None:
        nonlocal left
        if not counts(name):
            return
        left -= 1
        if left == 0:
            with open(events, "a") as file:
                file.write(f"{when} {name}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    disk.tell_calls(tell)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        work()
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)
    os._exit(0)


def settings(resume: str = "auto") -> Config:
    """Of seven steps, saved after each second one, evaluated at the end."""
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


def run(config: Config, folder: Path) -> None:
    """A run in this process that prints nothing."""
    folder.mkdir(exist_ok=True)
    with redirect_stdout(io.StringIO()):
        job.run(0, job.Job(config, folder, ()))


def save(folder: Path, step: int, top1: float | None = None) -> None:
    """Save a small state, which holds its step."""
    commit(folder, {"w": torch.full((5000,), float(step)), "step": step, "epoch": 1}, top1)


def look(folder: Path, step: int) -> None:
    """Checks the newest checkpoint, both pointers, and that a start and the next save clear up."""
    found = checkpoint_read.read(folder)
    record = found.record
    assert record is not None and record.step in (30, step), found
    last = record.path
    newest = max(folder.glob("step-*.json"), key=checkpoint_read.order)
    assert last == newest.with_suffix(".pt"), found
    assert found.state["w"][0] == record.step
    best = last if record.top1 == 0.95 else folder / "step-10.pt"
    pointers = {"last.pt": last, "best.pt": best}
    for name, path in pointers.items():
        # whatever the link says until a run starts here
        assert checkpoint_read.read(folder / name).record.path == path
    # all that is asked of a state at a start
    world = World(0, 1, 0, 1, torch.device("cpu"))
    state: Any = SimpleNamespace(step=0, pending=False, config=Config(), world=world)
    checkpoint_write.CheckpointWriter(state, Order(10, 10), folder.parent, ()).close()
    for name, path in pointers.items():
        assert os.readlink(folder / name) == path.name
    committed = {record.path for record in checkpoint_read.records(folder)}
    assert {best, folder / "step-30.pt"} <= committed
    save(folder, 50)
    left = {"last.pt", "best.pt"}
    for path in {best, last, folder / "step-50.pt"}:
        left |= {path.name, path.with_suffix(".json").name}
    assert {path.name for path in folder.iterdir()} == left


def kill_saves(base: Path) -> None:
    """Kills at each event of a save, until the save comes through."""
    whole = base / "whole"
    folder = base / "killed/checkpoints"
    for before, top1 in ((10, 0.9), (20, 0.1), (30, 0.2)):
        save(whole, before, top1)
    for step in (40,):
        for number in range(1, 500):
            shutil.copytree(whole, folder, symlinks=True)
            was_killed = killed(number, partial(save, folder, step, 0.95), base / "events")
            if was_killed:
                look(folder, step)
            shutil.rmtree(folder)
            if not was_killed:
                break
        assert not was_killed, "the save never came through"


def first_writes() -> Callable[[str], bool]:
    """Counts of a run of writes to one file the first two, before and after."""
    writes = 0

    def counts(name: str) -> bool:
        nonlocal writes
        writes = writes + 1 if name == "write" else 0
        return writes <= 4

    return counts


def kill_runs(base: Path) -> None:
    """Kills a run at each call, and its successor; the third must end as if unharmed."""
    whole = base / "whole"
    folder = base / "killed"
    # here, so that the others find all modules imported
    run(settings(), whole)

    def dies(number: int) -> bool:
        return killed(number, lambda: run(settings(), folder), base / "events", first_writes())

    for number in range(1, 1000):
        was_killed = dies(number)
        if was_killed:
            dies(number)
            assert not dies(0)
        assert digest(folder) == digest(whole), number
        assert logged(folder) == logged(whole), (number, logged(folder), logged(whole))
        assert not list(folder.glob("**/.*.tmp")), number
        shutil.rmtree(folder)
        if not was_killed:
            break
    assert not was_killed, "the run never came through"


def long(max_steps: int | None = None) -> Config:
    """Settings of four epochs, each evaluated and saved at its end."""
    found = settings()
    found.trainer.epochs = 4
    found.trainer.max_steps = max_steps
    found.checkpoint.every_steps = None
    return found


def pointers(run: Path) -> list[str]:
    """Where the links of a run lead."""
    return [os.readlink(run / "checkpoints" / name) for name in ("last.pt", "best.pt")]


def kill_last_saves(base: Path) -> None:
    """Kills at each call of the last save, until the run comes through."""
    first, whole, folder, other = (base / name for name in ("first", "whole", "killed", "other"))
    saves = False
    real = checkpoint_write.commit

    def told(*given: Any) -> Any:
        nonlocal saves
        saves = True
        found = real(*given)
        saves = False
        return found

    checkpoint_write.commit = told

    def dies(config: Config, run_folder: Path, number: int = 0) -> bool:
        work = lambda: run(config, run_folder)
        return killed(number, work, base / "events", lambda name: saves)

    def evaluated(path: Path) -> tuple[int, float, float]:
        found = settings(str(path))
        found.mode = Mode.evaluate
        assert not dies(found, other)
        report = json.loads((other / "report.json").read_text())
        shutil.rmtree(other)
        return report["steps"], report["top1"], report["loss"]

    run(long(BEFORE), first)
    shutil.copytree(first, whole, symlinks=True)
    assert not dies(long(), whole)
    expected = {step: evaluated(path) for step, path in ((BEFORE, first), (ALL, whole))}
    assert [found[0] for found in expected.values()] == [BEFORE, ALL], expected
    # so that both pointers move in the save
    assert pointers(whole) == [f"step-{ALL}.pt"] * 2, pointers(whole)
    for number in range(1, 500):
        shutil.copytree(first, folder, symlinks=True)
        was_killed = dies(long(), folder, number)
        if not was_killed:
            break
        newest = ALL if (folder / f"checkpoints/step-{ALL}.json").exists() else BEFORE
        assert evaluated(folder) == expected[newest], number
        for name in ("last.pt", "best.pt"):
            assert checkpoint_read.read(folder / "checkpoints" / name).record.step == newest, (
                number,
                name,
            )
        assert not dies(long(), folder)
        assert pointers(folder) == pointers(whole), (number, pointers(folder))
        assert digest(folder) == digest(whole), number
        assert logged(folder) == logged(whole), number
        shutil.rmtree(folder)
    assert not was_killed, "the save never came through"


if __name__ == "__main__":
    # every process here sees the same page cache
    os.fsync = lambda handle: None
    torch.set_num_threads(1)
    {"save": kill_saves, "run": kill_runs, "last": kill_last_saves}[sys.argv[1]](Path(sys.argv[2]))
