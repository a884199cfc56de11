"""Colour and shape of uint8 batches ``[N, 3, H, W]``, each image by a parameter of its own, on any
device.

The pixels are those of torchvision's functions on tensors, which take one parameter for a whole
batch. Parameters come from the host as float64 ``[N]``; the host never waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.runtime import accelerator

# as torchvision's ColorJitter numbers them
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """``values`` on ``device``, floats as float32."""
    single = values.astype(np.float32) if values.dtype == np.float64 else values
    return accelerator.of(device).copy(torch.from_numpy(single))


def blend(images: Tensor, kinds: np.ndarray, factors: np.ndarray) -> Tensor:
    """``images`` with another brightness, contrast or saturation, as ``kinds`` says; a factor of 1
    changes nothing.

    Each of the three is a blend with a grey: with black, with the luma's mean, with the luma.
    """
    shares = to_device(
        np.stack((factors, np.where(kinds == BRIGHTNESS, 0.0, 1.0 - factors))), images.device
    )
    even = to_device(kinds == CONTRAST, images.device).view(-1, 1, 1, 1)
    pixels = images.float()
    red, green, blue = pixels.split(1, dim=1)
    luma = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()
    grey = torch.where(even, luma.mean((2, 3), keepdim=True), luma)
    own, rest = shares.view(2, -1, 1, 1, 1)
    return pixels.mul_(own).addcmul_(grey, rest).clamp_(0, 255).to(torch.uint8)


def adjust_hue(images: Tensor, turns: np.ndarray) -> Tensor:
    """``images`` with hues turned by ``turns``, 1 being the whole circle.

    The colour's place on the circle in sixths, then each channel from it (Smith 1978, "Color gamut
    transform pairs").
    """
    pixels = images.float()
    red, green, blue = pixels.split(1, dim=1)
    value = pixels.amax(1, keepdim=True)
    chroma = value - pixels.amin(1, keepdim=True)
    # a grey pixel has no hue, and needs none
    span = chroma.clamp(min=1)
    sixth = torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span)
    sixth = torch.where(value == red, (green - blue) / span, sixth) + to_device(
        6 * turns, images.device
    ).view(-1, 1, 1, 1)
    place = (sixth + torch.arange(5, 0, -2, device=images.device).view(3, 1, 1)).remainder_(6)
    lost = torch.minimum(place, 4 - place).clamp_(0, 1).mul_(chroma)
    return (value - lost).mul_(255.999 / 255).to(torch.uint8)


def adjust_sharpness(images: Tensor, factors: np.ndarray) -> Tensor:
    """``images`` blended with their blurred selves: 1 changes nothing, 0 blurs; the border of one
    pixel stays as it is.
    """
    pixels = images.float()
    around = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    around = around[..., :-2] + around[..., 1:-1] + around[..., 2:]
    inner = pixels[:, :, 1:-1, 1:-1]
    # thirteenths of integers are never half-way
    blurred = around.add_(inner, alpha=4).mul_(1 / 13).round_()
    inner.add_(blurred.sub_(inner).mul_(to_device(1.0 - factors, images.device).view(-1, 1, 1, 1)))
    return pixels.clamp_(0, 255).to(torch.uint8)


def affine(images: Tensor, matrices: np.ndarray) -> Tensor:
    """Each pixel from the nearest one to where ``matrices``, float32 ``[N, 2, 3]``, send it; from
    outside comes black.

    They act on pixel coordinates (x, y, 1) whose origin is the image's centre. The arithmetic is
    torchvision's to the last bit, or pixels half-way between two would come from the other one.
    """
    count, _, height, width = images.shape
    places = torch.ones(height, width, 3, device=images.device)
    places[..., 0] = torch.arange(width, device=images.device) - (width - 1) / 2
    places[..., 1] = (torch.arange(height, device=images.device) - (height - 1) / 2).unsqueeze(1)
    # which are at -1 and 1
    to_edges = matrices / np.array([[width / 2], [height / 2]], dtype=np.float32)
    # A product of matrices rounds as this processor's library has it, and so does torchvision's.
    grid = (places.view(-1, 3) @ to_device(to_edges, images.device).mT).view(
        count, height, width, 2
    )
    return F.grid_sample(images.float(), grid, mode="nearest", align_corners=False).to(torch.uint8)
