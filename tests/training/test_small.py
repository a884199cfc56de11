"""The small network."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from harness.training.models import small


@pytest.fixture(autouse=True)
def _same_weights_each_time() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size", [(16, 16), (28, 28), (32, 32), (48, 64), (96, 96)], ids=str)
def test_any_size_gives_logits(size: tuple[int, int]) -> None:
    """Images of any size from 16 pixels on give one logit a class."""
    assert small(7)(torch.randn(2, 3, *size)).shape == (2, 7)


def test_it_is_small() -> None:
    """It has fewer than half a million parameters."""
    assert sum(parameter.numel() for parameter in small(10).parameters()) < 500_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_parameter_learns_in_every_precision(dtype: torch.dtype) -> None:
    """Under autocast, each parameter has a finite gradient that is not zero."""
    network = small(10)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = functional.cross_entropy(network(torch.randn(8, 3, 32, 32)), torch.arange(8))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    assert [
        name for name, g in gradients.items() if g is None or not (g.isfinite().all() and g.any())
    ] == []


def test_layout_does_not_matter() -> None:
    """With channels_last the logits are the same, and the layout stays up to the mean."""
    network = small(10).eval()
    images = torch.randn(4, 3, 64, 64)
    expected = network(images)
    network = network.to(memory_format=torch.channels_last)
    assert isinstance(network, nn.Sequential)
    features = network[:-3](images.to(memory_format=torch.channels_last))
    assert features.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(network[-3:](features), expected, rtol=1e-4, atol=1e-4)


def test_it_compiles_to_one_graph() -> None:
    """torch.compile finds nothing that breaks the graph."""
    network = small(10).eval()
    images = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), network(images))


def test_it_fits_one_batch() -> None:
    """Thirty updates on one batch bring the loss near zero."""
    network = small(10).train()
    images = torch.randn(16, 3, 32, 32)
    labels = torch.arange(16) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
