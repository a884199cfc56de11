"""Kills the last save of a run before and after each of its calls to the disk.

And evaluates the run's folder, goes on with ``resume=auto``, and compares with a run that nobody
killed. Run in a process of its own, without threads: each run is a fork of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import disk
import torch
from killed_runs import settings

from harness import job
from harness.config import Config, Mode
from harness.training import checkpoint
from scripts.chaos_left import digest, logged

# the updates of three epochs, so that the last save has a checkpoint to delete, and of all four
BEFORE = 21
ALL = 28


def config(max_steps: int | None = None) -> Config:
    """Settings of four epochs, each evaluated and saved at its end."""
    found = settings()
    found.trainer.epochs = 4
    found.trainer.max_steps = max_steps
    found.checkpoint.every_steps = None
    return found


def evaluating(path: Path) -> Config:
    """Settings of an evaluation."""
    found = settings(str(path))
    found.mode = Mode.evaluate
    return found


def done(config: Config, folder: Path, number: int = 0) -> str | None:
    """Runs in a new process, killed at call ``number`` of a save; returns that call, if there is.

    0: at none.
    """
    told = folder.parent / "told"
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        return told.read_text() if status else None
    left = number
    saves = False
    real = checkpoint.commit

    def save(*given: object) -> object:
        nonlocal saves
        saves = True
        found = real(*given)  # type: ignore[arg-type]
        saves = False
        return found

    def tell(when: str, name: str) -> None:
        nonlocal left
        left -= saves
        if saves and left == 0:
            # by no call that is counted
            handle = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.pwrite(handle, f"{when} {name}".encode(), 0)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.commit = save  # type: ignore[assignment]
    disk.tell_calls(tell)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        job.run(0, job.Job(config, folder, ()))
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)
    os._exit(0)


def evaluated(path: Path, folder: Path) -> tuple[int, float, float]:
    """The step, top-1 and loss of an evaluation of ``path``."""
    folder.mkdir()
    assert done(evaluating(path), folder) is None
    report = json.loads((folder / "report.json").read_text())
    shutil.rmtree(folder)
    return report["steps"], report["top1"], report["loss"]


def pointers(run: Path) -> list[str]:
    """Where the links of a run lead."""
    return [os.readlink(run / "checkpoints" / name) for name in ("last.pt", "best.pt")]


def main(base: Path) -> None:
    """Kills at each call of the last save, until the run comes through; prints what came of it."""
    # every process here sees the same page cache
    os.fsync = lambda handle: None
    torch.set_num_threads(1)
    first, whole, killed, other = (
        base / name for name in ("first", "whole", "killed", "evaluation")
    )
    first.mkdir()
    # here, so that the others find all modules imported
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    job.run(0, job.Job(config(BEFORE), first, ()))
    os.dup2(output, 1)
    shutil.copytree(first, whole, symlinks=True)
    assert done(config(), whole) is None
    expected = {step: evaluated(run, other) for step, run in ((BEFORE, first), (ALL, whole))}
    assert [found[0] for found in expected.values()] == [BEFORE, ALL], expected
    # so that both pointers move in the save
    assert pointers(whole) == [f"step-{ALL}.pt"] * 2, pointers(whole)
    for number in range(1, 500):
        shutil.copytree(first, killed, symlinks=True)
        call = done(config(), killed, number)
        if call is None:
            break
        is_new = (killed / f"checkpoints/step-{ALL}.json").exists()
        newest = ALL if is_new else BEFORE
        left = " ".join(pointers(killed))
        assert evaluated(killed, other) == expected[newest], (number, call)
        for name in ("last.pt", "best.pt"):
            found = checkpoint.read(killed / "checkpoints" / name)[0]
            assert found.step == newest, (number, call, name, found)
        assert done(config(), killed) is None
        assert pointers(killed) == pointers(whole), (number, call, pointers(killed))
        assert digest(killed) == digest(whole), (number, call)
        assert logged(killed) == logged(whole), (number, call)
        print(f"{number} {call:15} newest {newest}, links {left}, then as unharmed", flush=True)
        shutil.rmtree(killed)
    assert call is None, "the save never came through"
    print(f"{number - 1} calls")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
