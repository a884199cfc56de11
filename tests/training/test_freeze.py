"""What is frozen stays as it is, and is trained from its epoch on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config import Config, ConfigError, DistConfig, DistName, to_plain
from harness.runtime.distributed import World, launch
from harness.training import models
from harness.training.checkpoint_read import Saved
from harness.training.optimizer import frozen_names
from harness.training.state import make_state
from harness.training.step import Step
from harness.tuning.training_steps import TrainingBenchmark

CPU = World(0, 1, 0, 1, torch.device("cpu"))
FACTS: dict[str, Any] = {"classes": ["a"], "ranks": 1, "length": 100, "stop": 96}
BACKBONE = ["0.weight", "0.bias", "1.weight", "1.bias"]
pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> nn.Module:
    """A convolution, a norm and a head; the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(200, 5)
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(8, 3, 12, 12, generator=generator)
    return images, torch.randint(0, 5, (8,), generator=generator)


def settled(**optim: Any) -> Config:
    config = Config()
    config.optim.lr = 0.05
    config.optim.freeze = "all_but_head"
    for name, value in optim.items():
        setattr(config.optim, name, value)
    return config


def make(config: Config, model: nn.Module | None = None) -> Step:
    return Step(make_state(config, 0, CPU, 2, network=model or network()), 5)


def epoch(step: Step, number: int, batches: int = 2) -> None:
    """One epoch of training, as the engine does it."""
    step.state.epoch = number
    step.begin_epoch()
    for seed in range(batches):
        step(*batch(10 * number + seed))
    step.state.epoch = number + 1


def kept(step: Step) -> dict[str, Tensor]:
    """The state of the network, copied."""
    return copy.deepcopy(step.state.network.state_dict())


def changed(step: Step, before: dict[str, Tensor]) -> set[str]:
    """What is not bitwise as before."""
    return {key for key, value in kept(step).items() if not torch.equal(value, before[key])}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_only_the_head_is_trained(name: str) -> None:
    """All else, statistics too, stays; without gradients and without state in the optimizer."""
    step = make(settled(name=name))
    before = kept(step)
    epoch(step, 0)
    assert changed(step, before) == {"4.weight", "4.bias"}
    held = step.state.optimizer.state
    for key, parameter in step.state.network.named_parameters():
        assert (parameter in held) is (key not in BACKBONE)
    step(*batch(0), part=0, parts=2)
    gradients = {key: p.grad is not None for key, p in step.state.network.named_parameters()}
    assert [key for key, there in gradients.items() if there] == ["4.weight", "4.bias"]


def test_a_pattern_names_what_begins_with_it() -> None:
    """Parameters alone may be frozen: the norm's statistics then go on."""
    step = make(settled(freeze=r"0|1\.weight"))
    before = kept(step)
    epoch(step, 0)
    rest = {"1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert changed(step, before) == rest | {"4.weight", "4.bias"}


def test_what_the_network_froze_itself_stays_frozen() -> None:
    """Thawing leaves parameters alone that the user's own function froze."""
    model = network()
    model[0].bias.requires_grad_(False)
    step = make(settled(freeze_epochs=1), model)
    before = kept(step)
    epoch(step, 0)
    epoch(step, 1)
    assert before.keys() - changed(step, before) == {"0.bias"}


@pytest.mark.parametrize("stop", [None, 0, 1, 2], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_thaw_is_that_of_a_loop_written_out(name: str, stop: int | None) -> None:
    """Bitwise, after a resume in any epoch too: the rest begins with fresh optimizer state."""
    config = settled(name=name, freeze_epochs=1, decay_norm_and_bias=True, momentum=0.9)
    config.schedule.name = type(config.schedule.name).constant
    step = make(config)
    for number in range(3):
        if number == stop:
            saved = copy.deepcopy(step.state.to_dict(FACTS | {"settings": to_plain(config)}))
            step = make(config)
            step.state.load(Saved("x", saved))
            # as where the step is made after the checkpoint was taken over
            step = Step(step.state, 5)
        epoch(step, number)

    model = network()
    common = {"lr": 0.05, "weight_decay": 1e-4, "fused": True}
    kind: Any = torch.optim.AdamW
    if name == "sgd":
        kind = torch.optim.SGD
        common["momentum"] = 0.9
    optimizers = [kind(model[4].parameters(), **common), kind(model[:2].parameters(), **common)]
    for number in range(3):
        model.train()
        if number == 0:
            model[1].eval()
        for seed in range(2):
            images, labels = batch(10 * number + seed)
            F.cross_entropy(model(images), labels).backward()
            for optimizer in optimizers[: 1 + (number > 0)]:
                optimizer.step()
            model.zero_grad()
    before = copy.deepcopy(model.state_dict())
    assert changed(step, before) == set()


def test_a_first_update_after_the_thaw_may_be_skipped() -> None:
    """Parameters that have no momentum yet do no harm."""
    step = make(settled(freeze_epochs=1))
    epoch(step, 0)
    step.begin_epoch()
    images, labels = batch(3)
    bad = torch.full((8, 5), float("nan"))
    before = [p.detach().clone() for p in step.state.network.parameters()]
    step(images, bad)
    assert all(
        torch.equal(a, b) for a, b in zip(before, step.state.network.parameters(), strict=True)
    )
    step(images, labels)
    assert step.read().skipped == 1


def test_trials_leave_what_is_frozen() -> None:
    """Timed steps train what the epoch trains, and change nothing."""
    step = make(settled())
    before = kept(step)
    with TrainingBenchmark(step).preserved_state():
        step(*batch(0))
        assert not step.state.network[1].training and step.state.network.training
        assert len(step.state.optimizer.state) == 2
    assert changed(step, before) == set()


@pytest.mark.parametrize(
    ("freeze", "text"),
    [
        ("layer9", "matches no parameter of model.name=small; .* 0.weight, 1.bias"),
        (".", "matches every parameter of model.name=small; .* 0.weight"),
        ("", "matches every parameter"),
        ("layer(", "not a regular expression"),
        (r"1\.running_mean", "matches no parameter"),
    ],
)
def test_what_freezes_nothing_or_all_is_refused(freeze: str, text: str) -> None:
    """The line names setting, value, network and what there is."""
    with pytest.raises(ConfigError, match=rf"optim.freeze=.*: {text}"):
        frozen_names(models.small(5), freeze, "small")


def test_a_network_of_a_head_alone_cannot_freeze_the_rest() -> None:
    """There is none."""
    with pytest.raises(ConfigError, match="matches no parameter"):
        make(settled(), nn.Sequential(nn.Flatten(), nn.Linear(432, 5)))


@pytest.mark.slow
def test_two_ranks_thaw_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP shares the gradients of what is trained, before and after."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    config = settled(freeze_epochs=1, ema_decay=0.5)
    config.device = "cpu"
    config.dist = DistConfig(name=DistName.spawn, nprocs=2, timeout_s=60.0)
    config.trainer.num_threads = 1
    launch(jobs.thaw, (config, tmp_path), config)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["frozen"] and first["like_one"]
