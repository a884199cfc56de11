"""Small batches that look a little like photographs, and their indices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from harness.feed.interface import HostBatch


def pictures(
    count: int, height: int, width: int, layout: torch.memory_format = torch.channels_last
) -> Tensor:
    """Smooth colours with noise, the first one grey and the second one of a single colour."""
    generator = torch.Generator().manual_seed(height)
    coarse = 255 * torch.rand(count, 3, 5, 5, generator=generator)
    images = functional.resize(coarse, [height, width]) + 9 * torch.randn(
        count, 3, height, width, generator=generator
    )
    images[:1] = images[:1, :1]
    images[1:2] = 77.0
    return images.clamp(0, 255).to(torch.uint8).contiguous(memory_format=layout)


def noise(width: int, height: int) -> np.ndarray:
    """An image of noise ``[height, width, 3]``, always the same of one size."""
    return np.random.default_rng(width * height).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )


def numbered(indices: Tensor, epoch: int = 0) -> HostBatch:
    """A batch that holds its samples' ``indices`` and ``epoch`` alone."""
    return HostBatch(torch.empty(0), torch.empty(0), indices, epoch=epoch)
