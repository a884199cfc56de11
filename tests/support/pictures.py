"""Images: two photographs, batches that look a little like them, and trees of files."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from harness.feed.base import HostBatch

# photographs of 640 x 427 pixels that come with scikit-learn
NAMES = ("china", "flower")


def photograph(name: str) -> Image.Image:
    """One of ``NAMES``, in mode RGB; scikit-learn is not imported."""
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    images = Path(spec.origin).parent / "datasets" / "images"
    return Image.open(images / f"{name}.jpg").convert("RGB")


def write_tree(
    root: Path, size: tuple[int, int] = (40, 40), kind: str = "jpg", **splits: int
) -> Path:
    """Writes so many images of each of two classes for each split, all of one color each."""
    for split, count in splits.items():
        for name in "ab":
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", size, (9 * i % 256, 100, 200)).save(
                    root / split / name / f"{i}.{kind}"
                )
    return root


def photo(width: int = 97, height: int = 61) -> Image.Image:
    """Smooth colors with a little noise, as photographs have, and sides that no block divides."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 11)], axis=2) * 90 + 128
    return Image.fromarray(
        (waves + np.random.default_rng(0).normal(0, 5, waves.shape)).clip(0, 255).astype(np.uint8)
    )


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The bytes of a file of ``kind``."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pictures(
    count: int, height: int, width: int, layout: torch.memory_format = torch.channels_last
) -> Tensor:
    """Smooth colors with noise, the first one gray and the second one of a single color."""
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
