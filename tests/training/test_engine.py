"""The turn from an epoch to its evaluation and back: who is primed, and when."""

from __future__ import annotations

import math
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import pytest
import samples
import torch
from torch import nn

from harness.clock.clock import StepClock
from harness.config import AugmentConfig, Config
from harness.feed.base import Backend, Failure, HostBatch
from harness.feed.order import Order
from harness.feed.processes import ProcessFeed
from harness.monitor.goodput import GoodputTimer
from harness.monitor.monitor import Monitor
from harness.runtime.distributed import World
from harness.runtime.errors import NonFiniteError
from harness.training import checkpoint_read
from harness.training.checkpoint_write import CheckpointWriter
from harness.training.engine import Engine
from harness.training.state import make_state
from harness.training.step import Step

CPU = World(0, 1, 0, 1, torch.device("cpu"))
MakeEngine = Callable[..., Engine]


class Recorded:
    """A feed of ``count`` batches of noise that notes what is asked of it."""

    made_on_device = False
    meter = None
    worker_pids: tuple[int, ...] = ()
    settings = samples.settings()

    def __init__(self, name: str, count: int, log: list[str]) -> None:
        self.name = name
        self.count = count
        self.log = log
        self.replaced: deque[Failure] = deque()
        self.order = Order(count * self.settings.batch_size, self.settings.batch_size)

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.log.append(f"{self.name} epoch {epoch}")

    def prime(self, epoch: int) -> None:
        self.log.append(f"{self.name} prime {epoch}")

    def __iter__(self) -> Iterator[HostBatch]:
        try:
            for place in range(self.count):
                self.log.append(f"{self.name} batch {place}")
                yield HostBatch(
                    torch.full((2, 3, 4, 4), place, dtype=torch.uint8),
                    torch.zeros(2).long(),
                    torch.arange(2),
                )
        finally:
            self.log.append(f"{self.name} end")

    def polled(self, poll_s: float) -> Iterator[HostBatch | None]:
        return iter(self)

    def close(self) -> None: ...


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    def make(
        feed: Backend, val_feed: Backend, augment: AugmentConfig | None = None, **trainer: int
    ) -> Engine:
        config = Config(augment=augment or AugmentConfig())
        config.checkpoint.enabled = False
        for name, value in trainer.items():
            setattr(config.trainer, name, value)
        network = nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
        state = make_state(config, 0, CPU, len(feed), network=network)
        step = Step(state, 10)
        return Engine(
            step,
            lambda size: feed,
            val_feed,
            Monitor(StepClock(), GoodputTimer(0.0)),
            tmp_path,
            ("a",),
        )

    return make


def run(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, batches: int = 3, **trainer: int
) -> tuple[Engine, list[str]]:
    """A whole run on recorded feeds; an epoch ends only with its last step."""
    monkeypatch.setattr("harness.training.engine._WARM_UP_S", 0.0)
    log: list[str] = []
    engine = make_engine(Recorded("train", batches, log), Recorded("val", 1, log), **trainer)
    engine.fit()
    return engine, log


def test_each_side_is_primed_before_its_turn(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation is primed before the last step, the next epoch before the evaluation."""
    _, log = run(make_engine, monkeypatch, epochs=2)
    epoch = ["train batch 0", "train batch 1", "val prime 0", "train batch 2", "train end"]
    evaluation = ["val batch 0", "val end"]
    # nothing follows, so that nothing ends the pass before
    epoch_1 = [
        *epoch[:-1],
        *evaluation,
        "train end",
    ]
    assert log == ["train epoch 0", *epoch, "train prime 1", *evaluation, "train epoch 1", *epoch_1]


def test_evaluation_sees_images_as_they_are(make_engine: MakeEngine) -> None:
    """Training batches are augmented and mixed; validation batches are only normalized."""
    wanted = AugmentConfig(color_jitter=(0.9, 0.0, 0.0, 0.0), random_erasing=1.0, cutmix=1.0)
    feeds = [Recorded(name, 4, []) for name in ("train", "val")]
    engine = make_engine(*feeds, augment=wanted)
    plain = make_engine(*feeds)
    for (images, labels), (expected, whole) in zip(
        engine.val_batches, plain.val_batches, strict=True
    ):
        assert torch.equal(images, expected) and torch.equal(labels, whole)
    for (images, labels), (expected, _) in zip(
        engine.train_batches, plain.train_batches, strict=True
    ):
        assert not torch.equal(images, expected) and labels.shape == (2, 10)


def test_nothing_is_primed_for_an_evaluation_that_is_not_due(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eval_every_epochs=2 the first epoch primes nothing."""
    _, log = run(make_engine, monkeypatch, epochs=3, eval_every_epochs=2)
    primed = [entry for entry in log if "prime" in entry or "epoch" in entry]
    assert primed == [
        "train epoch 0",
        "train epoch 1",
        "val prime 0",
        "train prime 2",
        "train epoch 2",
        "val prime 0",
    ]


@pytest.mark.parametrize(
    ("trainer", "primed_before"),
    [
        pytest.param({"max_steps": 2}, "train batch 1", id="amid the epoch"),
        pytest.param({"max_steps": 3}, "train batch 2", id="at its end"),
        pytest.param({"accumulate_steps": 2}, "train batch 2", id="steps of several batches"),
    ],
)
def test_the_last_step_is_where_the_run_ends(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    trainer: dict[str, int],
    primed_before: str,
) -> None:
    """Validation is primed before the last step by max_steps and accumulation, and once."""
    _, log = run(
        make_engine, monkeypatch, epochs=1 if "accumulate_steps" in trainer else 5, **trainer
    )
    assert log[log.index("val prime 0") + 1] == primed_before
    assert "train prime 1" not in log and log.count("val prime 0") == 1


def test_the_rate_shown_is_the_last_step_s(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a cosine to 0 it is not 0, which no step has used."""
    engine, _ = run(make_engine, monkeypatch, batches=4, epochs=1)
    # the peak, three quarters through
    rate = 0.1 * (1 + math.cos(0.75 * math.pi)) / 2
    assert engine._shown.startswith(f"lr {rate:.3g}, ")


def test_the_end_of_an_epoch_is_foreseen_by_its_steps(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation is primed as soon as a window has shown how long a step takes."""
    monkeypatch.setattr("harness.training.engine._WARM_UP_S", 1e9)
    log: list[str] = []
    engine = make_engine(Recorded("train", 30, log), Recorded("val", 1, log), epochs=1)
    engine.fit()
    assert log[log.index("val prime 0") - 1] == "train batch 9"


def fit(make_engine: MakeEngine, val_workers: int, **trainer: int) -> Engine:
    train = ProcessFeed(
        samples.Noise(24), Order(24, 4), samples.settings(2, persistent_workers=True)
    )
    val = ProcessFeed(samples.Noise(8), Order(8, 4, shuffle=False), samples.settings(val_workers))
    torch.manual_seed(0)
    engine = make_engine(train, val, **trainer)
    engine.fit()
    return engine


def test_priming_changes_no_weight(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, kept_globals: None
) -> None:
    """With real workers, priming leaves weights bitwise the same, and no process."""
    primed = fit(make_engine, 1, epochs=3)
    assert multiprocessing.active_children() == []
    monkeypatch.setattr(ProcessFeed, "prime", lambda feed, epoch: None)
    plain = fit(make_engine, 1, epochs=3)
    assert primed.evaluation == plain.evaluation
    for mine, theirs in zip(
        primed.state.network.parameters(), plain.state.network.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("error", [MemoryError(), NonFiniteError("diverged")])
def test_an_error_in_an_evaluation_loses_no_step(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    """The state is whole there, and saved; one that has gone wrong is not."""
    log: list[str] = []
    engine = make_engine(Recorded("train", 3, log), Recorded("val", 1, log))
    engine.config.checkpoint.enabled = True
    engine.saves = CheckpointWriter(engine.state, engine.order, tmp_path, ("a",))

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(Engine, "evaluate", fails)
    with pytest.raises(type(error)):
        engine.fit()
    saved = [
        (record.step, record.epoch) for record in checkpoint_read.records(tmp_path / "checkpoints")
    ]
    assert saved == ([] if isinstance(error, NonFiniteError) else [(3, 1)])


def test_an_error_after_priming_leaves_no_process(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, kept_globals: None
) -> None:
    """A run that fails between priming and evaluation ends the workers of both feeds."""
    primed: list[ProcessFeed] = []
    real = ProcessFeed.prime

    def noted(feed: ProcessFeed, epoch: int) -> None:
        real(feed, epoch)
        primed.append(feed)

    def fails(engine: Engine, epoch: int) -> None:
        assert len(primed) == 1
        raise NonFiniteError("diverged")

    monkeypatch.setattr(ProcessFeed, "prime", noted)
    monkeypatch.setattr(Engine, "_close_window", fails)
    with pytest.raises(NonFiniteError):
        fit(make_engine, 1, epochs=2)
    assert multiprocessing.active_children() == []


def test_the_last_whole_update_is_saved_while_a_rank_is_lost(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has done 3 of 5 updates when a collective begins that never ends."""
    engine = make_engine(Recorded("train", 9, []), Recorded("val", 1, []))
    state = engine.state
    state.config.checkpoint.enabled = True
    engine._may_hang = True
    engine.saves = CheckpointWriter(state, engine.order, engine.folder, ("a",))
    events = iter([True, True, True, False, False])
    monkeypatch.setattr(engine._own, "event", lambda: Mock(query=Mock(return_value=next(events))))
    for step in range(1, 6):
        state.step = state.schedule.last_epoch = step
        state.samples = 2 * step
        engine._note_update()
    files = []

    def save(content: object, file: BytesIO, _save: Callable[..., None] = torch.save) -> None:
        files.append(file)
        _save(content, file)

    monkeypatch.setattr(torch, "save", save)
    engine.saves.save()
    engine._rescue()
    saved = checkpoint_read.read(engine.folder / "checkpoints/last.pt")
    assert [saved.state[name] for name in ("step", "samples")] == [3, 6]
    assert saved.state["schedule"]["last_epoch"] == 3
    # the one before may hang while it writes
    assert files[0] is not files[1]
