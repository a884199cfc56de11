"""Builds networks for 32-pixel images, with the original layers and initialization."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, conv3x3, resnet18
from torchvision.ops import Conv2dNormActivation as Layer


class _Add(nn.Sequential):
    """A residual connection around its layers."""

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return x + added


def resnet18_cifar(num_classes: int) -> nn.Module:
    """Returns ResNet-18 with a 3x3 stem and no max pooling, as in kuangliu/pytorch-cifar."""
    network: nn.Module = resnet18(num_classes=num_classes)
    network.conv1 = conv3x3(3, 64)
    network.maxpool = nn.Identity()
    for module in network.modules():
        # torchvision's initialization differs from PyTorch's default
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return network


def resnet20_cifar(num_classes: int) -> nn.Module:
    """Returns ResNet-20 with option-A shortcuts (He et al., arXiv:1512.03385, section 4.2).

    State keys and initial weights match akamaster/pytorch_resnet_cifar10.
    """
    layers = OrderedDict(conv1=conv3x3(3, 16), bn1=nn.BatchNorm2d(16), relu=nn.ReLU())
    before = 16
    for number, after in enumerate((16, 32, 64), 1):
        half = before // 2
        # takes every second pixel and zero-pads the channels
        shortcut = nn.Sequential(nn.AvgPool2d(1, 2), nn.ZeroPad3d((0, 0, 0, 0, half, half)))
        layers[f"layer{number}"] = nn.Sequential(
            BasicBlock(before, after, after // before, None if number == 1 else shortcut),
            BasicBlock(after, after),
            BasicBlock(after, after),
        )
        before = after
    layers |= {
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "linear": nn.Linear(before, num_classes),
    }
    network = nn.Sequential(layers)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.kaiming_normal_(parameter)
    return network


def resnet9_cifar(num_classes: int) -> nn.Module:
    """Returns ResNet-9 from Page's DAWNBench entry, davidcpage/cifar10-fast."""
    pool = nn.MaxPool2d(2)
    return nn.Sequential(
        Layer(3, 64),
        Layer(64, 128),
        pool,
        _Add(Layer(128, 128), Layer(128, 128)),
        Layer(128, 256),
        pool,
        Layer(256, 512),
        pool,
        _Add(Layer(512, 512), Layer(512, 512)),
        nn.AdaptiveMaxPool2d(1),
        # divides by 8; the source scales the logits instead
        nn.AvgPool2d(1, divisor_override=8),
        nn.Flatten(),
        nn.Linear(512, num_classes, bias=False),
    )
