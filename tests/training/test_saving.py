"""When a run is saved, and how ranks agree on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.config import Config, Mode
from harness.feed.order import Order
from harness.runtime import signals
from harness.runtime.distributed import World
from harness.runtime.errors import DiskError
from harness.training import checkpoint_read, checkpoint_write
from harness.training.checkpoint_write import CheckpointWriter, StopAgreement
from harness.training.state import TrainState, make_state

CPU = World(0, 1, 0, 1, torch.device("cpu"))


class Ranks:
    """One of two ranks; ``other`` is what the other one tells."""

    size = 2

    def __init__(self) -> None:
        self.other: tuple[float, ...] = (0, 0, 0, 0.0)
        self.asked = 0

    def largest(self, *values: float) -> list[float]:
        self.asked += 1
        return [max(pair) for pair in zip(values, self.other, strict=True)]


@pytest.fixture
def config() -> Config:
    """Settings under which nothing is saved by time or steps."""
    found = Config()
    found.checkpoint.every_minutes = None
    return found


def test_a_checkpoint_is_due_every_so_many_steps(config: Config) -> None:
    """checkpoint.every_steps counts the run's updates, wherever it began."""
    config.checkpoint.every_steps = 4
    boundary = StopAgreement(config, CPU, 6)
    assert [step for step in range(7, 17) if boundary.ask(step)[1]] == [8, 12, 16]


def test_a_checkpoint_is_due_every_so_many_minutes(config: Config) -> None:
    """checkpoint.every_minutes counts from the one before, and a late one is not made up for."""
    config.checkpoint.every_minutes = 1.0
    now = 0.0
    boundary = StopAgreement(config, CPU, 0, lambda: now)
    due = []
    # the boundary reads ``now``
    for step, now in enumerate((30.0, 59.0, 61.0, 119.0, 300.0, 310.0), 1):  # noqa: B007
        due.append(boundary.ask(step)[1])
    assert due == [False, False, True, False, True, False]


@pytest.mark.parametrize("enabled", [True, False])
def test_without_checkpoints_a_signal_alone_is_heard(
    config: Config, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    """checkpoint.enabled=false saves at no step and at no time."""
    config.checkpoint.enabled = enabled
    config.checkpoint.every_steps = 1
    config.checkpoint.every_minutes = 1e-9
    boundary = StopAgreement(config, CPU, 0)
    assert boundary.ask(1) == (0, enabled)
    monkeypatch.setattr(signals, "_received", [(10, 0.0)])
    assert boundary.ask(2) == (10, enabled)


@pytest.mark.parametrize(
    ("step_s", "asked"),
    [
        pytest.param(0.01, [1, 5, 10, 15, 20], id="quick steps: once a window"),
        pytest.param(
            0.4, [1, 3, 5, 7, 9, 10, 12, 14, 15, 17, 19, 20], id="slow steps: once a second"
        ),
        pytest.param(3.0, list(range(1, 21)), id="slower ones: after each"),
    ],
)
def test_ranks_ask_each_other_soon_enough(config: Config, step_s: float, asked: list[int]) -> None:
    """All ask at the same steps, which the slowest of them decides."""
    config.watch.window_steps = 5
    ranks = Ranks()
    found = []
    now = 0.0
    ranks.other = (0, 0, 0, step_s)
    boundary = StopAgreement(config, ranks, 0, lambda: now)  # type: ignore[arg-type]
    for step in range(1, 21):
        now += min(step_s, 0.01)
        before = ranks.asked
        boundary.ask(step)
        if ranks.asked > before:
            found.append(step)
    assert found == asked


def test_a_rank_hears_of_the_others(config: Config) -> None:
    """A signal or a save that another rank tells of is this one's as well."""
    ranks = Ranks()
    boundary = StopAgreement(config, ranks, 0)  # type: ignore[arg-type]
    ranks.other = (12, 1, 1, 0.0)
    assert boundary.ask(1) == (12, True)
    assert boundary.is_over


def test_the_time_of_a_command_is_over_for_all_ranks_at_once(config: Config) -> None:
    """trainer.max_hours counts from the command's start; several ranks end where they ask."""
    config.trainer.max_hours = 1.0
    now = 100.0
    alone = StopAgreement(config, CPU, 0, lambda: now, began_s=50.0)
    ranks = Ranks()
    together = StopAgreement(config, ranks, 0, lambda: now, began_s=50.0)  # type: ignore[arg-type]
    together.ask(1)
    found = []
    for step, now in ((2, 3649.0), (3, 3650.0)):  # noqa: B007
        alone.ask(step)
        found.append(alone.is_over)
    assert found == [False, True]
    asked = ranks.asked
    ends = []
    while not together.is_over:
        step += 1
        together.ask(step)
        ends.append(step)
    assert ranks.asked == asked + 1 and ends[-1] <= config.watch.window_steps


@pytest.fixture
def state(config: Config) -> TrainState:
    """A fresh network and what trains it."""
    return make_state(config, 0, CPU, 5, network=nn.Linear(3, 2))


def test_each_state_is_written_once(config: Config, state: TrainState, tmp_path: Path) -> None:
    """The state at first is not written, and none twice; an evaluation makes another state."""
    saves = make_saves(config, state, tmp_path)
    saves.save()
    for state.step, state.pending, top1 in (
        (5, True, None),
        (5, True, None),
        (5, False, 0.5),
        (5, False, 0.7),
    ):
        saves.save(top1)
    saves.close()
    found = sorted(
        checkpoint_read.records(tmp_path / "checkpoints"),
        key=lambda record: record.top1 is not None,
    )
    assert [(record.step, record.top1) for record in found] == [(5, None), (5, 0.5)]
    kept = checkpoint_read.read(tmp_path).state
    assert (kept["classes"], kept["ranks"], kept["stop"]) == (["a", "b"], 1, 100)


def make_saves(config: Config, state: TrainState, folder: Path) -> CheckpointWriter:
    """The saves of a run that has classes and images."""
    return CheckpointWriter(state, Order(100, 10), folder, ("a", "b"))


def test_a_state_may_change_while_it_is_saved(
    config: Config, state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given is saved, though training goes on meanwhile; a second save waits."""
    go = threading.Event()
    commit = checkpoint_write.commit

    def later(*given: Any) -> list[checkpoint_read.Record]:
        assert go.wait(10)
        return commit(*given)

    monkeypatch.setattr(checkpoint_write, "commit", later)
    saves = make_saves(config, state, tmp_path)
    # of the second save nothing is so large
    saves._facts["more"] = "x" * 9999
    weight = state.network.get_parameter("weight").detach()
    weight.fill_(1.0)
    state.step = 1
    saves.save()
    weight.fill_(2.0)
    state.step = 2
    saves.check()
    del saves._facts["more"]
    assert not tmp_path.joinpath("checkpoints").exists()
    go.set()
    saves.save()
    saves.close()
    for step in (1, 2):
        found = checkpoint_read.read(tmp_path / "checkpoints" / f"step-{step}.pt").state
        assert found["model"]["weight"].eq(step).all()


@pytest.mark.parametrize("ask", ["save", "check", "close"])
def test_an_error_in_the_background_is_raised_once(
    config: Config, state: TrainState, tmp_path: Path, ask: str
) -> None:
    """The next call of any kind raises what went wrong, and then saving goes on."""
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    saves = make_saves(config, state, tmp_path)
    state.step = 1
    saves.save()
    assert saves._last is not None
    assert isinstance(saves._last.exception(10), DiskError)
    calls: dict[str, Callable[[], object]] = {
        "save": saves.save,
        "check": saves.check,
        "close": saves.close,
    }
    with pytest.raises(
        DiskError,
        match="checkpoints: .*: File exists; .*resume=auto",
    ):
        calls[ask]()
    saves.check()
    if ask != "close":
        folder.unlink()
        # the state that was not written
        saves.save()
        saves.close()
        assert checkpoint_read.read(folder).record.step == 1


def test_a_state_that_could_not_be_written_is_tried_again(
    config: Config, state: TrainState, tmp_path: Path
) -> None:
    """At the end of a run a failed save is made again, whatever went wrong."""
    folder = tmp_path / "checkpoints"
    saves = make_saves(config, state, tmp_path)
    folder.write_text("in the way")
    state.step = 3
    saves.save()
    assert saves._last is not None
    assert isinstance(saves._last.exception(10), DiskError)
    folder.unlink()
    saves.save(at_once=True)
    assert checkpoint_read.read(folder).record.step == 3
    saves.close()


@pytest.mark.parametrize("how", ["disabled", "evaluation", "second rank"])
def test_only_training_s_first_rank_saves(
    config: Config, state: TrainState, tmp_path: Path, how: str
) -> None:
    """Nothing is written without checkpoints, in an evaluation, or by another rank."""
    config.checkpoint.enabled = how != "disabled"
    config.mode = Mode.evaluate if how == "evaluation" else Mode.train
    state.world = World(1, 2, 1, 2, CPU.device) if how == "second rank" else CPU
    saves = CheckpointWriter(state, Order(100, 10), tmp_path, ())
    state.step = 3
    saves.save()
    saves.close()
    assert not list(tmp_path.iterdir())
