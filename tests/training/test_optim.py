"""Parameter groups and the learning rate over time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, StepLR

from harness.config import Config, ModelConfig, OptimConfig, ScheduleConfig, ScheduleName
from harness.feed.feeds import Feeds
from harness.runtime.distributed import World
from harness.training import models
from harness.training.optimizer import depths, lr_factor, make_optimizer
from harness.training.state import make_state


def network() -> nn.Module:
    """A convolution, a norm and a head."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_norms_and_biases_have_no_weight_decay() -> None:
    """Only parameters with two dimensions or more are decayed, and none is lost."""
    decayed, plain = make_optimizer(network(), OptimConfig(weight_decay=0.1)).param_groups
    assert [p.ndim for p in decayed["params"]] == [4, 2]
    assert {p.ndim for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(plain["params"]) == len(list(network().parameters()))


def test_decay_norm_and_bias_decays_everything() -> None:
    """With the setting there is one group, as in pytorch/examples."""
    (group,) = make_optimizer(
        network(), OptimConfig(decay_norm_and_bias=True, weight_decay=0.1)
    ).param_groups
    assert group["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("settings", "torchs"),
    [
        ({"step_epochs": 3}, partial(StepLR, step_size=3)),
        ({"milestones": (2, 3, 6)}, partial(MultiStepLR, milestones=[2, 3, 6])),
    ],
    ids=["StepLR", "MultiStepLR"],
)
def test_step_schedule_is_torchs(
    settings: dict[str, Any], torchs: Callable[..., LRScheduler]
) -> None:
    """The step schedule gives torch's rates when those are stepped once per epoch."""
    config = ScheduleConfig(name=ScheduleName.step, gamma=0.2, **settings)
    optimizer = torch.optim.SGD(network().parameters(), lr=0.5)
    reference = torchs(optimizer, gamma=0.2)
    ours = []
    theirs = []
    for epoch in range(8):
        for step in range(5):
            ours.append(0.5 * lr_factor(epoch * 5 + step, config, 8, 5))
            theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert ours == pytest.approx(theirs)


def test_cosine_is_torchs_cosine() -> None:
    """Without warm-up the cosine schedule gives CosineAnnealingLR's rates at each update."""
    config = ScheduleConfig(name=ScheduleName.cosine)
    optimizer = torch.optim.SGD(network().parameters(), lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for step in range(40):
        assert lr_factor(step, config, 4, 10) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert lr_factor(40, config, 4, 10) == pytest.approx(0.0)


def test_linear_is_interpolated_from_zero_over_the_peak_to_zero() -> None:
    """Update n of n in all has the rate at its end, as davidcpage/cifar10-fast (dawn.py) has it."""
    config = ScheduleConfig(name=ScheduleName.linear, warmup_epochs=5)
    ours = [0.4 * lr_factor(step, config, 24, 97) for step in range(24 * 97)]
    ends = np.arange(1, 24 * 97 + 1) / 97
    assert ours == pytest.approx(np.interp(ends, [0, 5, 24], [0, 0.4, 0]), abs=1e-12)
    # warmup_start is the rate of the first update, as in FFCV's train_imagenet.py
    config = ScheduleConfig(name=ScheduleName.linear, warmup_epochs=2, warmup_start=1e-4)
    ours = [lr_factor(step, config, 16, 97) for step in range(16 * 97)]
    begins = np.arange(16 * 97) / 97
    assert ours == pytest.approx(np.interp(begins, [0, 2, 16], [1e-4, 1, 0]), abs=1e-12)


@pytest.mark.parametrize("name", ["constant", "step", "cosine"])
def test_warm_up_is_linear_and_ends_at_the_peak(name: str) -> None:
    """Warm-up rises in equal steps from above zero and hands over at the peak."""
    config = ScheduleConfig(name=ScheduleName[name], warmup_epochs=0.5)
    factors = [lr_factor(step, config, 100, 20) for step in range(12)]
    rises = [b - a for a, b in itertools.pairwise(factors[:11])]
    assert factors[0] > 0
    assert rises == pytest.approx([rises[0]] * 10, rel=0.01)
    assert factors[10] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "blocks", "first", "last"),
    [
        ("small", 7, ["0.weight", "1.weight", "1.bias"], "18.weight"),
        ("resnet18", 10, ["conv1.weight", "bn1.weight", "bn1.bias"], "fc.weight"),
        ("convnext_tiny", 23, ["features.0.0.weight", "features.0.0.bias"], "classifier.2.weight"),
        ("vit_b_16", 14, ["class_token", "conv_proj.weight"], "heads.head.weight"),
        ("swin_t", 17, ["features.0.0.weight", "features.0.0.bias"], "head.weight"),
        ("densenet121", 63, ["features.conv0.weight"], "classifier.weight"),
        ("googlenet", 13, ["conv1.conv.weight"], "fc.weight"),
    ],
)
def test_blocks_are_told_apart(name: str, blocks: int, first: list[str], last: str) -> None:
    """Each block of the field's networks has a number, from the stem to the head."""
    with torch.device("meta"):
        model = models.build(ModelConfig(name=name), 7, image_size=224)
    found = depths(model)
    assert found.keys() == {*model.parameters()}
    assert sorted({*found.values()}) == [*range(1, blocks + 1)]
    assert [key for key, p in model.named_parameters() if found[p] == 1][: len(first)] == first
    assert found[model.get_parameter(last)] == blocks
    numbers = [found[p] for p in model.parameters()]
    assert numbers == sorted(numbers)


def test_layer_decay_lowers_the_rate_from_block_to_block() -> None:
    """The head has optim.lr, each block before it a share of the next one's; none is lost."""
    model = network()
    config = OptimConfig(lr=0.2, layer_decay=0.5, weight_decay=0.1)
    groups = make_optimizer(model, config).param_groups
    assert [(group["lr"], len(group["params"])) for group in groups] == [
        (0.2, 1), (0.2, 1), (0.1, 1), (0.1, 3),
    ]  # fmt: skip
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1, 0.0]
    whole = Config(optim=config, schedule=ScheduleConfig(name=ScheduleName.cosine))
    state = make_state(whole, 0, World(0, 1, 0, 1, torch.device("cpu")), 4, network=model)
    state.optimizer.step()
    for _ in range(20):
        state.schedule.step()
    rates = [group["lr"] for group in state.optimizer.param_groups]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05])


def test_the_rate_may_be_for_a_number_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    """optim.lr_per counts the images of an update, over batches and ranks, and a line says it."""
    config = Config(optim=OptimConfig(lr=0.1, lr_per=256))
    config.loader.batch_size = 64
    config.trainer.accumulate_steps = 2
    world = World(0, 4, 0, 4, torch.device("cpu"))
    nothing: Any = None
    images = Feeds(nothing, config, world).update_images()
    state = make_state(config, 3, world, 4, images=images)
    assert state.schedule.base_lrs == pytest.approx([0.2, 0.2])
    assert config.optim.lr == 0.1
    said = capsys.readouterr().out
    assert "learning rate 0.2: effective batch size 512" in said


def test_a_network_that_trains_nothing_has_empty_groups() -> None:
    """The first step refuses it, in words."""
    model = network().requires_grad_(False)
    groups = make_optimizer(model, OptimConfig()).param_groups
    assert [group["params"] for group in groups] == [[], []]
