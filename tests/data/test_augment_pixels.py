"""Colors and shapes with a parameter for each image: torchvision's pixels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pictures import pictures
from torch import Tensor
from torchvision.transforms.v2 import functional

from harness.data.augment import (
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    adjust_hue,
    adjust_sharpness,
    blend,
)

SIZES = [(8, 8), (33, 20), (64, 64)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
FACTORS = np.array([0.0, 0.3, 0.7310585, 1.0, 1.4, 1.9])
BLENDS = {
    BRIGHTNESS: functional.adjust_brightness,
    CONTRAST: functional.adjust_contrast,
    SATURATION: functional.adjust_saturation,
}


pytestmark = pytest.mark.usefixtures("one_thread")


def one_by_one(
    function: Callable[[Tensor, float], Tensor], images: Tensor, parameters: np.ndarray
) -> Tensor:
    """``function`` on each image with its own parameter."""
    return torch.stack(
        [function(image, float(value)) for image, value in zip(images, parameters, strict=True)]
    )


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", BLENDS, ids=["brightness", "contrast", "saturation"])
def test_blends_are_torchvisions(
    kind: int, layout: torch.memory_format, height: int, width: int
) -> None:
    """Brightness, contrast and saturation equal torchvision's bit for bit."""
    images = pictures(len(FACTORS), height, width, layout)
    expected = one_by_one(BLENDS[kind], images, FACTORS)
    assert torch.equal(blend(images, np.full(len(FACTORS), kind), FACTORS), expected)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_hues_are_torchvisions(layout: torch.memory_format, height: int, width: int) -> None:
    """Hues are torchvision's but for one gray level in one value of ten thousand."""
    turns = np.array([-0.5, -0.21, 0.0, 0.1, 1 / 3, 0.5])
    images = pictures(len(turns), height, width, layout)
    off = (
        adjust_hue(images, turns).int() - one_by_one(functional.adjust_hue, images, turns).int()
    ).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 1e-4


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sharpness_is_torchvisions(layout: torch.memory_format, height: int, width: int) -> None:
    """Sharpened and blurred images equal torchvision's bit for bit."""
    images = pictures(len(FACTORS), height, width, layout)
    assert torch.equal(
        adjust_sharpness(images, FACTORS), one_by_one(functional.adjust_sharpness, images, FACTORS)
    )
