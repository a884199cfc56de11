"""Accuracy and loss, exact to the sample."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from harness.runtime.distributed import World
from harness.training.evaluate import evaluate

CPU = World(0, 1, 0, 1, torch.device("cpu"))


def test_sums_are_those_of_the_whole_set() -> None:
    """Batches of any sizes give the accuracy and the loss of all samples at once."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.5))
    images = torch.randn(101, 3, 2, 2)
    labels = torch.randint(0, 8, (101,))
    found = evaluate(
        network, zip(images.split(16), labels.split(16), strict=True), CPU, contextlib.nullcontext
    )
    logits = network.eval()(images)
    best = logits.topk(5).indices == labels[:, None]
    assert found.images == 101
    assert found.top1 == pytest.approx(best[:, 0].float().mean().item())
    assert found.top5 == pytest.approx(best.any(1).float().mean().item())
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


def test_statistics_stay_as_they_were() -> None:
    """A network in training is evaluated as it is."""
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)).train()
    before = network[0].running_mean.clone()  # type: ignore[union-attr, operator]
    found = evaluate(
        network,
        [(torch.randn(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64))],
        CPU,
        contextlib.nullcontext,
    )
    assert torch.equal(network[0].running_mean, before)  # type: ignore[arg-type]
    # there are only three classes
    assert found.top5 == 1.0
