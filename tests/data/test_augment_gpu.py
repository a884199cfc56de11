"""Augmentation on CUDA: the CPU's values, and the host never waits for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pictures import numbered, pictures

from harness.config import AugmentConfig, Policies
from harness.data.augment import BatchAugment, Mix
from harness.runtime import accelerator

COLORS = {
    "jitter": AugmentConfig(color_jitter=(0.4, 0.4, 0.4, 0.1)),
    "rotation": AugmentConfig(rotate=30.0),
} | {auto.name: AugmentConfig(auto=auto) for auto in Policies if auto is not Policies.none}
MIXED = {"mixup": AugmentConfig(mixup=0.2, random_erasing=0.5), "cutmix": AugmentConfig(cutmix=1.0)}


@pytest.fixture
def unsynchronized() -> Iterator[None]:
    """Makes every wait of the host for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda_values
@pytest.mark.parametrize("config", COLORS.values(), ids=COLORS)
def test_pixels_are_the_cpus(config: AugmentConfig) -> None:
    """All but one value of two hundred are within a gray level of the CPU's."""
    augment = BatchAugment.from_config(config, 0)
    images = pictures(64, 48, 40)
    batch = numbered(torch.arange(64))
    assert augment is not None
    made = augment(images.cuda(), batch)
    off = (made.cpu().int() - augment(images, batch).int()).abs()
    assert (off > 1).float().mean() < 0.005
    assert made.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.cuda_values
@pytest.mark.parametrize("config", MIXED.values(), ids=MIXED)
def test_mixed_values_are_the_cpus(config: AugmentConfig) -> None:
    """Erased and mixed images and labels are the CPU's but for rounding."""
    mix = Mix.from_config(config, 5, 0)
    images = torch.rand(16, 3, 24, 20)
    labels = torch.arange(16) % 5
    assert mix is not None
    batch = numbered(torch.arange(16))
    for ours, expected in zip(
        mix(images.cuda(), labels.cuda(), batch), mix(images, labels, batch), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), expected)


@pytest.mark.cuda_order
@pytest.mark.parametrize("config", (COLORS | MIXED).values(), ids=COLORS | MIXED)
def test_the_host_never_waits(config: AugmentConfig, unsynchronized: None) -> None:
    """Augmenting and mixing a batch has no synchronizing call in it."""
    augment = BatchAugment.from_config(config, 0)
    mix = Mix.from_config(config, 5, 0)
    device = accelerator.get("cuda").device
    images = torch.zeros(64, 3, 32, 32, dtype=torch.uint8, device=device)
    labels = torch.zeros(64, dtype=torch.int64, device=device)
    if augment is not None:
        augment(images, numbered(torch.arange(64)))
    if mix is not None:
        mix(images.float(), labels, numbered(torch.arange(64)))
