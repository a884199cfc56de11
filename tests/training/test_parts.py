"""Optimizers, losses, schedules and blocks that a setting names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_state import digest, logged
from torch import nn
from torch.optim import lr_scheduler
from torchvision import models as zoo

from harness.config import (
    Config,
    ConfigError,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
    ScheduleName,
    TrainerConfig,
)
from harness.feed.order import Order
from harness.runtime.distributed import World
from harness.training import models
from harness.training.blocks import checkpoint_blocks
from harness.training.losses import make_loss
from harness.training.optimizer import lr_factor, make_optimizer
from harness.training.state import make_state
from harness.training.step import Step
from tests.support.commands import run_here

Composed = Callable[..., Config]
ALONE = World(0, 1, 0, 1, torch.device("cpu"))
OWN = """
import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, beta=0.99):
        super().__init__(groups, {"beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(average.lerp(p.grad, 0.1).sign(), alpha=group["lr"] / group["count"])
                average.lerp_(p.grad, 1 - group["beta"])


def focal(logits, labels):
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def rows(logits, labels):
    return logits.sum(1)


def breaks(logits, labels):
    raise KeyError("gamma")
"""
NAMES = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
]  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's in the current folder."""
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def stepped(config: Config, classes: int = 5) -> Step:
    """A step of a linear network on 12 x 12 pixels."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, classes))
    return Step(make_state(config, classes, ALONE, 10, network=network), classes)


@pytest.mark.parametrize("name", [*NAMES, "own_parts:Lion"])
@pytest.mark.usefixtures("own")
def test_every_optimizer_leaves_an_update_out(name: str) -> None:
    """By torch's name or the user's it trains; a gradient that is not finite changes no weight."""
    config = Config(optim=OptimConfig(name=name, lr=0.01, weight_decay=0.0))
    step = stepped(config)
    network = step.state.network
    images, labels = torch.randn(4, 3, 12, 12), torch.arange(4)
    step(images, labels)
    before = copy.deepcopy([*network.parameters()])
    step(images * float("nan"), labels)
    assert all(map(torch.equal, before, network.parameters()))
    assert step.read().skipped == 1
    step(images, labels.flip(0))
    assert not torch.equal(before[0], next(network.parameters()))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("LBFGS", {}),
        ("SparseAdam", {}),
        ("Optimizer", {}),
        ("adamW", {}),
        ("RMSprop", {"alhpa": 0.9}),
        ("own_parts:Lion", {"betas": (0.9, 0.99)}),
        ("own_parts:focal", {}),
        ("own_parts:nothing", {}),
    ],
)
@pytest.mark.usefixtures("own")
def test_an_optimizer_that_cannot_be_had_is_refused(name: str, args: dict[str, Any]) -> None:
    """The line names the setting."""
    config = OptimConfig(name=name, args=args, weight_decay=0.0)
    with pytest.raises(ConfigError, match=rf"^optim\.name={name}: "):
        make_optimizer(nn.Linear(2, 2), config)


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: uv sync --extra timm")
def test_optimizers_of_timm_are_timms() -> None:
    """Lamb's weights are those of timm's own after the same steps."""
    from timm.optim import Lamb

    config = Config(optim=OptimConfig(name="lamb", lr=0.01, weight_decay=0.02))
    step = stepped(config)
    reference = copy.deepcopy(step.state.network)
    weight, bias = reference.parameters()
    optimizer = Lamb(
        [{"params": [weight], "weight_decay": 0.02}, {"params": [bias], "weight_decay": 0.0}], 0.01
    )
    for _ in range(3):
        images, labels = torch.randn(4, 3, 12, 12), torch.arange(4)
        step.state.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        for group in (*step.state.optimizer.param_groups, *optimizer.param_groups):
            group["lr"] = 0.01
        step(images, labels)
        F.cross_entropy(reference(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, step.state.network.parameters(), reference.parameters()))


@pytest.mark.parametrize(
    ("smoothing", "threshold"), [(0.0, None), (0.1, None), (0.1, 0.2), (0.0, 0.2)]
)
def test_bce_is_that_of_timm(smoothing: float, threshold: float | None) -> None:
    """For labels and for mixed ones, written out; and by timm's class, where it is installed."""
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    shares = F.one_hot(labels, 4).float()
    loss = make_loss(
        OptimConfig(loss="bce", label_smoothing=smoothing, bce_threshold=threshold), None
    )
    wanted = shares * (1 - smoothing) + smoothing / 4
    if threshold is not None:
        wanted = wanted.gt(threshold).float()
    p = logits.sigmoid()
    written = -(wanted * p.log() + (1 - wanted) * (1 - p).log()).mean()
    assert float(loss(logits, labels)) == pytest.approx(float(written), rel=1e-5)
    assert torch.equal(loss(logits, labels), loss(logits, shares))
    if find_spec("timm"):
        from timm.loss import BinaryCrossEntropy

        timms = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
        assert float(loss(logits, labels)) == pytest.approx(float(timms(logits, labels)), rel=1e-6)


@pytest.mark.usefixtures("own")
def test_a_loss_of_ones_own() -> None:
    """Its number is trained on; another form or an error is one line."""
    step = stepped(Config(optim=OptimConfig(loss="own_parts:focal")))
    step(torch.randn(4, 3, 12, 12), torch.arange(4))
    assert step.read().loss is not None
    for name in ("own_parts:rows", "own_parts:breaks"):
        step = stepped(Config(optim=OptimConfig(loss=name)))
        with pytest.raises(ConfigError, match=rf"^optim\.loss={name}: "):
            step(torch.randn(4, 3, 12, 12), torch.arange(4))


def rates(schedule: Any, epochs: int, per_epoch: int = 1) -> list[float]:
    """The rates of torch's ``schedule``, stepped so often an epoch."""
    found = []
    for _ in range(epochs * per_epoch):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


def sgd(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    """torchvision's: five epochs of warm-up from a hundredth, then a cosine."""
    warmup = lr_scheduler.LinearLR(optimizer, 0.01, total_iters=5)
    main = lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
    return lr_scheduler.SequentialLR(optimizer, [warmup, main], [5])


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (
            ScheduleConfig(ScheduleName.cosine, warmup_epochs=5, warmup_start=0.01, per_epoch=True),
            lambda: rates(sequence(sgd()), 20),
        ),
        (
            ScheduleConfig(ScheduleName.exponential, step_epochs=1, gamma=0.9, per_epoch=True),
            lambda: rates(lr_scheduler.ExponentialLR(sgd(), 0.9), 20),
        ),
        (
            ScheduleConfig(ScheduleName.onecycle, warmup_start=0.04, final_fraction=4e-6),
            lambda: rates(
                lr_scheduler.OneCycleLR(sgd(), 1.0, total_steps=200, cycle_momentum=False), 20, 10
            ),
        ),
    ],
    ids=["torchvision", "exponential", "onecycle"],
)
def test_schedules_are_torchs(config: ScheduleConfig, theirs: Callable[[], list[float]]) -> None:
    """At every update, of 10 an epoch."""
    expected = theirs()
    each = 200 // len(expected)
    ours = [lr_factor(step, config, 20, 10) for step in range(200)]
    assert ours == pytest.approx([lr for lr in expected for _ in range(each)], rel=1e-6)


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: uv sync --extra timm")
def test_a_schedule_is_timms() -> None:
    """Cosine under a warm-up, stepped once an epoch."""
    from timm.scheduler import CosineLRScheduler

    timms = CosineLRScheduler(sgd(0.5), t_initial=20, lr_min=0.005, warmup_t=5, warmup_lr_init=0.05)
    expected = []
    for epoch in range(20):
        timms.step(epoch)
        expected.append(timms.optimizer.param_groups[0]["lr"])
    config = ScheduleConfig(
        ScheduleName.cosine, warmup_epochs=5, warmup_start=0.1, final_fraction=0.01,
        per_epoch=True, warmup_overlaps=True,
    )  # fmt: skip
    assert [0.5 * lr_factor(10 * epoch, config, 20, 10) for epoch in range(20)] == pytest.approx(
        expected
    )


@pytest.mark.usefixtures("kept_globals")
def test_a_plateau_lowers_the_rate(composed: Composed, tmp_path: Path) -> None:
    """As ReduceLROnPlateau on the same evaluations, and after a resume."""
    common = (
        "data=digits", "data.fraction=0.1", "optim.lr=1e-9", "schedule=plateau",
        "schedule.patience_epochs=1", "schedule.gamma=0.5", "loader.num_workers=0",
        "trainer.num_threads=1", "run.name=x",
    )  # fmt: skip
    for epochs in (3, 5):
        run_here(composed(*common, f"trainer.epochs={epochs}", "resume=auto"), tmp_path)
    lines = logged(tmp_path)
    tops = [line["val/top1"] for line in lines if "val/top1" in line]
    reference = lr_scheduler.ReduceLROnPlateau(sgd(1e-9), "max", 0.5, 1, threshold=0.0, eps=0.0)
    expected = []
    for top1 in tops:
        expected.append(reference.optimizer.param_groups[0]["lr"])
        reference.step(top1)
    found = {line["epoch"]: line["train/lr"] for line in lines if "train/lr" in line}
    assert [*found.values()] == pytest.approx(expected) and expected[-1] < 1e-9


def test_repeats_keep_the_epochs_length() -> None:
    """Each image of a part of the set comes so often, as another sample each time."""
    order = Order(10, 2, seed=3, repeats=3)
    for epoch in range(3):
        found = order.indices(epoch)
        assert len(found) == 10 == len({*found})
        places = (found % 10).tolist()
        assert sorted(map(places.count, {*places})) == [1, 3, 3, 3]


def test_recomputed_blocks_give_the_same_gradients() -> None:
    """Bitwise, running statistics too, with dropout; nothing else of the network changes."""
    torch.manual_seed(0)
    plain = zoo.efficientnet_b0(num_classes=3)
    network = copy.deepcopy(plain)
    checkpoint_blocks(network)
    assert network.state_dict().keys() == plain.state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    for each in (plain, network):
        torch.manual_seed(1)
        each(images).square().sum().backward()
    pairs = zip(plain.parameters(), network.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None)
    assert all(map(torch.equal, plain.buffers(), network.buffers()))
    copied = copy.deepcopy(network)
    assert torch.equal(copied.eval()(images), network.eval()(images))
    with pytest.raises(ConfigError, match=r"^trainer\.checkpoint_blocks=true"):
        checkpoint_blocks(nn.Linear(2, 2))


def test_synchronized_norms_need_a_gpu() -> None:
    config = Config(trainer=TrainerConfig(sync_batch_norm=True))
    with pytest.raises(ConfigError, match=r"^trainer\.sync_batch_norm=true"):
        make_state(config, 2, World(0, 2, 0, 2, torch.device("cpu")), 10)


@pytest.mark.slow
@pytest.mark.usefixtures("own", "kept_globals")
@pytest.mark.parametrize(
    "parts",
    [
        (
            "optim.name=own_parts:Lion", "optim.args={beta:0.9}", "optim.lr=1e-3",
            "optim.loss=own_parts:focal",
        ),
        (
            "optim.name=NAdam", "optim.lr=2e-3", "optim.loss=bce", "data.repeats=3",
            "augment.auto=three",
        ),
    ],
    ids=["own", "torch"],
)  # fmt: skip
def test_a_resume_with_such_parts_is_exact(
    composed: Composed,
    tmp_path: Path,
    stop_at: Callable[[int | None], None],
    parts: tuple[str, ...],
) -> None:
    """Stopped within epochs, continued by other backends: one hash."""
    common = (
        "data=digits", "trainer.num_threads=1", "device=cpu", "augment.hflip=0.5",
        "augment.crop=pad", "run.name=x", "trainer.epochs=2", *parts,
    )  # fmt: skip
    run_here(composed(*common, "loader.num_workers=0"), tmp_path / "whole")
    for step, way in ((7, "processes"), (30, "arrays"), (None, "threads")):
        stop_at(step)
        run_here(
            composed(*common, "resume=auto", f"loader.backend={way}"),
            tmp_path / "parts",
            stopped=step is not None,
        )
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_arguments_of_the_network() -> None:
    """They reach it as they are typed; one that it does not take is refused in a line."""
    given = ModelConfig("resnet18", args={"width_per_group": 32, "groups": 1})
    with pytest.raises(ConfigError, match=r"^model\.name=resnet18: "):
        models.build(given, 2, image_size=32)
    given = ModelConfig("resnet50", args={"width_per_group": 32})
    network = models.build(given, 2, image_size=32)
    assert network.get_parameter("layer1.0.conv1.weight").shape[0] == 32
    with pytest.raises(ConfigError, match=r"^model\.args=\{wide:2\}: "):
        models.build(ModelConfig("small", args={"wide": 2}), 2, image_size=32)
