"""A run that was stopped anywhere and resumed is the one that was never stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
from run_state import digest, logged, wrong_lines

from harness.config import Config
from harness.runtime.errors import DiskError
from harness.training import checkpoint_read

Composed = Callable[..., Config]
COMMON = (
    "data=digits", "trainer.num_threads=1", "device=cpu", "augment.hflip=0.5", "augment.crop=pad",
    "run.name=x",
)  # fmt: skip
run = partial(commands.run_here, stopped=True)


@pytest.mark.usefixtures("kept_globals")
def test_stops_within_epochs_change_nothing(
    composed: Composed, tmp_path: Path, stop_at: Callable[[int | None], None]
) -> None:
    """Stopped at any step and resumed with other backends: one hash, the same figures."""
    config = composed(*COMMON, "trainer.epochs=3", "loader.num_workers=0")
    run(config, tmp_path / "whole")
    ways = {
        5: "loader.backend=processes",
        9: "loader.backend=threads",
        22: "loader.backend=arrays",
        37: "loader.num_workers=0",
    }
    for step, way in ways.items():
        stop_at(step)
        run(composed(*COMMON, "trainer.epochs=3", "resume=auto", way), tmp_path / "parts")
        assert checkpoint_read.read(tmp_path / "parts").record.step == step
    stop_at(None)
    run(
        composed(*COMMON, "trainer.epochs=3", "resume=auto", "loader.device_prefetch=false"),
        tmp_path / "parts",
    )
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    whole = {line["step"]: line for line in logged(tmp_path / "whole") if "val/top1" in line}
    parts = [line for line in logged(tmp_path / "parts") if "val/top1" in line]
    assert [whole[line["step"]] for line in parts] == parts and len(parts) == 3
    steps = [line["step"] for line in logged(tmp_path / "parts") if "train/lr" in line]
    assert steps == sorted({*range(10, 67, 10), 22, 44, 66, *ways})


@pytest.mark.usefixtures("kept_globals")
def test_a_run_without_a_checkpoint_begins_its_lines_again(
    composed: Composed, tmp_path: Path
) -> None:
    """What was logged before a kill without a checkpoint gives way, in TensorBoard too."""
    config = (*COMMON, "loader.num_workers=0", "trainer.max_steps=20")
    run(composed(*config, "checkpoint.enabled=false"), tmp_path)
    whole = logged(tmp_path)
    run(composed(*config, "resume=auto"), tmp_path)
    assert logged(tmp_path) == whole
    assert wrong_lines(tmp_path) == []


@pytest.mark.usefixtures("kept_globals")
@pytest.mark.slow
def test_short_runs_add_up_to_a_long_one(composed: Composed, tmp_path: Path) -> None:
    """trainer.max_steps may end a run anywhere, with accumulated and short batches."""
    common = (
        *COMMON, "trainer.epochs=2", "loader.batch_size=100", "loader.drop_last=false",
        "trainer.accumulate_steps=4", "loader.num_workers=0", "augment.mixup=0.5", "optim=adamw",
    )  # fmt: skip
    run(composed(*common), tmp_path / "whole")
    for steps in (1, 3, 4, 6):
        run(composed(*common, "resume=auto", f"trainer.max_steps={steps}"), tmp_path / "parts")
        assert checkpoint_read.read(tmp_path / "parts").record.step == steps
    run(composed(*common, "resume=auto"), tmp_path / "parts")
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


@pytest.mark.usefixtures("kept_globals")
def test_an_evaluation_that_was_stopped_is_made_again(
    composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal in an evaluation the next run evaluates first, and logs it once."""
    config = composed(*COMMON, "trainer.epochs=1", "loader.num_workers=0")
    with monkeypatch.context() as patched:
        patched.setattr("harness.training.evaluate.signals", SimpleNamespace(received=lambda: 15))
        run(config, tmp_path / "parts")
    assert not any("val/top1" in line for line in logged(tmp_path / "parts"))
    assert checkpoint_read.read(tmp_path / "parts").state["pending"]
    run(
        composed(*COMMON, "trainer.epochs=1", "loader.num_workers=0", "resume=auto"),
        tmp_path / "parts",
    )
    run(config, tmp_path / "whole")
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


@pytest.mark.usefixtures("kept_globals")
def test_a_disk_that_is_full_ends_the_run(
    composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed background save ends the run within a step, after one more try."""
    calls: list[int] = []

    def full(folder: Path, past: object, state: object, step: int, *facts: object) -> None:
        calls.append(step)
        raise DiskError(f"{folder}: No space left on device")

    monkeypatch.setattr("harness.training.checkpoint_write.commit", full)
    config = composed(
        *COMMON, "trainer.epochs=1", "loader.num_workers=0", "checkpoint.every_steps=4"
    )
    with pytest.raises(DiskError, match="No space left"):
        run(config, tmp_path)
    assert calls == [4, 5]


def killed(what: str, folder: Path) -> set[str]:
    """The calls to the disk at which ``tests/support/killed.py`` killed ``what``."""
    support = Path(__file__).with_name("support")
    path = os.pathsep.join([str(support), str(support.parents[1])])
    command = [sys.executable, support / "killed.py", what, folder]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    return set((folder / "events").read_text().splitlines())


CALLS = {"open", "write", "fsync", "replace", "symlink", "unlink"}
AROUND = {f"{when} {call}" for when in ("before", "after") for call in CALLS}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_at_any_call_to_the_disk_loses_nothing(tmp_path: Path) -> None:
    """Killed around any call to the disk and resumed, a run ends the same."""
    assert AROUND | {"before mkdir", "after mkdir"} <= killed("run", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_kill_in_the_last_save_is_seen_by_nobody(tmp_path: Path) -> None:
    """Around any call, the folder and both pointers give the newest state, before a resume too."""
    assert AROUND | {"before mkdir"} <= killed("last", tmp_path)


@pytest.mark.slow
def test_four_ranks_resume_with_the_same_sums(tmp_path: Path) -> None:
    """Gradients of more than two ranks are summed in the same order after a stop."""
    common = (
        "data=digits", "data.image_size=16", "model=small", "dist=spawn", "dist.nprocs=4",
        "loader.batch_size=16", "loader.num_workers=0", "trainer.epochs=1", "device=cpu",
        "trainer.num_threads=1", "watch.tensorboard=false", "resume=auto",
    )  # fmt: skip
    for name, more in (("whole", ()), ("parts", ("trainer.max_steps=9",)), ("parts", ())):
        ran = commands.trained(tmp_path, *common, *more, f"hydra.run.dir={tmp_path / name}")
        assert ran.returncode == 0, ran.stderr
    assert digest(tmp_path / "whole") == digest(tmp_path / "parts")
