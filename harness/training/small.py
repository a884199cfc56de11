"""A small network for images of 32 to 96 pixels, fast on two CPU cores."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

_WIDTHS = (16, 32, 64, 128)


def small(num_classes: int) -> nn.Module:
    """A network from float ``[N, 3, H, W]`` to logits ``[N, num_classes]``; H and W of at least 16.

    0.4 million parameters, 20 million multiply-adds for 64x64 pixels. A convolution of stride 2,
    three that each end in a pooling by 2, a residual block (He et al. 2015,
    https://arxiv.org/abs/1512.03385), the mean over what is left. Channels are few where pixels are
    many, for that is where a CPU's time goes; pooling comes before the norm (as in Jordan 2024,
    https://arxiv.org/abs/2404.00498), which then has a quarter of the work.
    """
    stages = itertools.chain(
        *(_stage(before, after) for before, after in itertools.pairwise(_WIDTHS))
    )
    return nn.Sequential(
        nn.Conv2d(3, _WIDTHS[0], 5, stride=2, padding=2, bias=False),
        nn.BatchNorm2d(_WIDTHS[0]),
        nn.ReLU(inplace=True),
        *stages,
        _Residual(_WIDTHS[-1]),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(_WIDTHS[-1], num_classes),
    )


def _stage(before: int, after: int) -> tuple[nn.Module, ...]:
    """Layers after which the resolution is half."""
    return (
        _convolution(before, after),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


def _convolution(before: int, after: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, padding=1, bias=False)


class _Residual(nn.Module):
    """Two convolutions whose result is added to what goes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _convolution(width, width),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _convolution(width, width),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.branch(x))
