"""Kills a save before and after each of its calls to the disk, and looks at the rest.

Run in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import disk
import torch
from checkpoints import commit

from harness.training import checkpoint

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
            with open(folder.parent / "events", "a") as events:
                events.write(f"{when} {name}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    disk.tell_calls(tell)
    save(folder, step, 0.8)
    os._exit(0)


def look(folder: Path, step: int) -> None:
    """Checks the newest checkpoint, both pointers, and that the next save clears up."""
    found = checkpoint.newest(folder)
    assert found is not None and found[0].step in (30, step), found
    newest = max(folder.glob("step-*.json"), key=checkpoint.order)
    assert found[0].path == newest.with_suffix(".pt"), found
    assert found[1]["w"][0] == found[0].step
    assert checkpoint.read(folder / "last.pt")[0].step in (30, step)
    assert checkpoint.read(folder / "best.pt")[0].step == 10
    committed = {record.path for record in checkpoint.records(folder)}
    assert folder / "step-10.pt" in committed and folder / "step-30.pt" in committed
    save(folder, 50)
    for left in ("*.pt", "*.json"):
        assert len(list(folder.glob(f"step-{left}"))) == 3, sorted(folder.iterdir())
    assert not list(folder.glob(".*"))


def main(base: Path) -> None:
    """Kills at each event of a save, until the save comes through."""
    # Every process here sees the same page cache.
    os.fsync = lambda handle: None
    whole = base / "whole"
    folder = base / "killed"
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
