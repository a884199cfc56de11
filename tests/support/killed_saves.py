"""Kills a save before and after each of its calls to the disk, and looks at the rest.

Run in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import disk
import torch
from checkpoints import commit

from harness.config import Config
from harness.feed.order import Order
from harness.runtime.distributed import World
from harness.training import checkpoint
from harness.training.saving import Place, Saves

MOST = 500


def save(folder: Path, step: int, top1: float | None = None) -> None:
    """Save a small state, which holds its step."""
    state = {"w": torch.full((5000,), float(step)), "step": step, "epoch": 1}
    commit(folder, state, top1)


def killed_at(number: int, folder: Path, step: int) -> bool:
    """Returns whether a save in a new process was killed at its event ``number``.

    The events' names go to a file.
    """
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    left = number

    def tell(when: str, name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            with open(folder.parents[1] / "events", "a") as events:
                events.write(f"{when} {name}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    disk.tell_calls(tell)
    save(folder, step, 0.95)
    os._exit(0)


def start(run: Path) -> None:
    """Starts to save where a run goes on."""
    world = World(0, 1, 0, 1, torch.device("cpu"))
    # all that is asked of it at a start
    state: Any = SimpleNamespace(step=0, pending=False)
    Saves(Config(), world, state, Order(10, 10), Place(run, ())).close()


def look(folder: Path, step: int) -> None:
    """Checks the newest checkpoint, both pointers, and that a start and the next save clear up."""
    found = checkpoint.newest(folder)
    assert found is not None and found[0].step in (30, step), found
    last = found[0].path
    newest = max(folder.glob("step-*.json"), key=checkpoint.order)
    assert last == newest.with_suffix(".pt"), found
    assert found[1]["w"][0] == found[0].step
    best = last if found[0].top1 == 0.95 else folder / "step-10.pt"
    pointers = {"last.pt": last, "best.pt": best}
    for name, path in pointers.items():
        # whatever the link says until a run starts here
        assert checkpoint.read(folder / name)[0].path == path
    start(folder.parent)
    for name, path in pointers.items():
        assert os.readlink(folder / name) == path.name
    committed = {record.path for record in checkpoint.records(folder)}
    assert {best, folder / "step-30.pt"} <= committed
    save(folder, 50)
    left = {"last.pt", "best.pt"}
    for path in {best, last, folder / "step-50.pt"}:
        left |= {path.name, path.with_suffix(".json").name}
    assert {path.name for path in folder.iterdir()} == left


def main(base: Path) -> None:
    """Kills at each event of a save, until the save comes through."""
    # Every process here sees the same page cache.
    os.fsync = lambda handle: None
    whole = base / "whole"
    folder = base / "killed/checkpoints"
    for before, top1 in ((10, 0.9), (20, 0.1), (30, 0.2)):
        save(whole, before, top1)
    for step in (30, 40):
        for number in range(1, MOST):
            shutil.copytree(whole, folder, symlinks=True)
            killed = killed_at(number, folder, step)
            if killed:
                look(folder, step)
            shutil.rmtree(folder)
            if not killed:
                break
        assert not killed, "the save never came through"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
