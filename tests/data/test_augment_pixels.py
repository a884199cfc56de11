"""Colours and shapes with a parameter for each image: torchvision's pixels."""

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
    affine,
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


def test_each_image_has_a_kind_of_its_own() -> None:
    """Three kinds of blend in one call give what three calls give."""
    images = pictures(6, 16, 16)
    kinds = np.array([2, 0, 1, 1, 0, 2])
    expected = [
        BLENDS[kind](image, value)
        for image, kind, value in zip(images, kinds, FACTORS, strict=True)
    ]
    assert torch.equal(blend(images, kinds, FACTORS), torch.stack(expected))


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_hues_are_torchvisions(layout: torch.memory_format, height: int, width: int) -> None:
    """Hues are torchvision's but for one grey level in one value of ten thousand."""
    turns = np.array([-0.5, -0.21, 0.0, 0.1, 1 / 3, 0.5])
    images = pictures(len(turns), height, width, layout)
    off = (
        adjust_hue(images, turns).int() - one_by_one(functional.adjust_hue, images, turns).int()
    ).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 1e-4


def test_a_hue_turned_by_a_third_exchanges_the_channels() -> None:
    """Red becomes green, green blue and blue red; greys stay."""
    images = pictures(4, 16, 16)
    assert torch.equal(adjust_hue(images, np.full(4, 1 / 3)), images.roll(1, dims=1))


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sharpness_is_torchvisions(layout: torch.memory_format, height: int, width: int) -> None:
    """Sharpened and blurred images equal torchvision's bit for bit."""
    images = pictures(len(FACTORS), height, width, layout)
    assert torch.equal(
        adjust_sharpness(images, FACTORS), one_by_one(functional.adjust_sharpness, images, FACTORS)
    )


def test_a_shift_moves_whole_pixels_and_leaves_black() -> None:
    """Pixels from outside the image are black, the others are the image's own."""
    images = pictures(2, 9, 12)
    there = np.array([[[1, 0, 3], [0, 1, 0]], [[1, 0, 0], [0, 1, -2]]], dtype=np.float32)
    moved = affine(images, there)
    assert torch.equal(moved[0, :, :, :-3], images[0, :, :, 3:]) and not moved[0, :, :, -3:].any()
    assert torch.equal(moved[1, :, 2:], images[1, :, :-2]) and not moved[1, :, :2].any()


@pytest.mark.parametrize(
    "change",
    [
        lambda images: blend(images, np.array([0, 1, 2]), np.full(3, 0.5)),
        lambda images: adjust_hue(images, np.full(3, 0.2)),
        lambda images: adjust_sharpness(images, np.full(3, 0.5)),
        lambda images: affine(images, np.repeat(np.eye(2, 3, dtype=np.float32)[None], 3, axis=0)),
    ],
    ids=["blend", "hue", "sharpness", "affine"],
)
def test_what_is_given_stays_as_it_is(change: Callable[[Tensor], Tensor]) -> None:
    """The result is in memory of its own, for a batch may be used again."""
    images = pictures(3, 12, 12)
    before = images.clone()
    change(images)[:] = 0
    assert torch.equal(images, before)


def test_neutral_parameters_change_nothing() -> None:
    """A factor of 1, no turn and no motion leave all 256 values as they are."""
    images = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
    images = torch.cat((images, images.flip(1), images.roll(5, dims=3)))
    one = np.ones(3)
    assert torch.equal(blend(images, np.array([0, 1, 2]), one), images)
    assert torch.equal(adjust_hue(images, 0 * one), images)
    assert torch.equal(adjust_sharpness(images, one), images)
    assert torch.equal(
        affine(images, np.repeat(np.eye(2, 3, dtype=np.float32)[None], 3, axis=0)), images
    )
