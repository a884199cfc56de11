"""Networks by name, with random, published or saved weights; ``small`` is our own."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torchvision import models as zoo

from harness.config import TIMM, ConfigError, ModelConfig, check_model
from harness.runtime import parts
from harness.runtime.errors import CheckpointError, listed, printable
from harness.training import checkpoint, published
from harness.watch.console import say


def build(
    config: ModelConfig, num_classes: int, *, image_size: int, filled: bool = False
) -> nn.Module:
    """Returns the network that ``config`` names, for square images of ``image_size`` pixels.

    With ``weights=DEFAULT`` or a path, the head's weights are taken over where its shape fits, else
    they stay random. No weights are read where the caller fills the network (``filled``).

    Raises:
        ConfigError: unknown name, unpublished weights, or an image size that does not fit.
        CheckpointError: the file is missing, damaged or of another network.
    """
    check_model(config, names())
    where = f"model.name={config.name}"
    with parts.explained(f"{where}: for data.image_size={image_size} it failed with"):
        network: nn.Module = _made(config, num_classes, image_size)
        if parts.is_own(config.name) or config.name.startswith(TIMM):
            _prove(network, where, num_classes, image_size)
    if config.weights is None or filled:
        return network
    source = f"model.weights={printable(config.weights)}"
    weights = checkpoint.weights_of(held(config, image_size), source)
    misfit = f"{source}: does not fit {where} for data.image_size={image_size}"
    if take_over(network, weights, misfit, may_differ=head_keys(network)):
        say(f"{source}: the head is new, for {num_classes} classes")
    return network


def _made(config: ModelConfig, num_classes: int, image_size: int) -> Any:
    """Returns the network with random weights; what a user's function gave as it is."""
    name = config.name
    if parts.is_own(name):
        return parts.call("model.name", name, num_classes, image_size=image_size)
    if name.startswith(TIMM):
        return published.created(name, image_size, num_classes=num_classes)
    if name == "small":
        return small(num_classes)
    extra: dict[str, Any] = {}
    if name.startswith("vit_"):
        extra = {"image_size": image_size}
    elif name in ("googlenet", "inception_v3"):
        # no auxiliary heads, for a classifier here gives one tensor; the published weights come
        # from TensorFlow, where images were normalised in another way
        extra = {
            "aux_logits": False,
            "init_weights": True,
            "transform_input": config.weights == "DEFAULT",
        }
    return zoo.get_model(name, weights=None, num_classes=num_classes, **extra)


def names() -> list[str]:
    """Returns every name that ``model.name`` takes: ours and torchvision's classifiers."""
    return ["small", *zoo.list_models(module=zoo)]


def _prove(network: Any, where: str, num_classes: int, image_size: int) -> None:
    """Refuses what cannot be trained or saved; a pass of two images sizes lazy layers.

    Raises:
        ConfigError: it is no network, or gives anything but a number for each class.
    """
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{where}: returned {type(network).__name__}, not a torch.nn.Module")
    first = next(network.parameters(), None)
    if first is None:
        raise ConfigError(f"{where}: the network has no parameters to train")
    with torch.no_grad():
        given = network.eval()(torch.zeros(2, 3, image_size, image_size, device=first.device))
    network.train()
    found: object = type(given).__name__
    if isinstance(given, torch.Tensor):
        found = list(given.shape)
    if found != [2, num_classes]:
        raise ConfigError(
            f"{where}: the network gives {found} for 2 images; it must give [2, {num_classes}], "
            "one a class"
        )
    for key, value in network.state_dict().items():
        kept = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not kept or is_lazy(value) or value.is_meta:
            raise ConfigError(
                f"{where}: {printable(key)} of its state_dict is no dense tensor, and a checkpoint "
                "holds nothing else; make it one, or keep it out (persistent=False)"
            )


def held(config: ModelConfig, image_size: int) -> dict[str, Any]:
    """Returns what ``model.weights`` names: published weights of a network, or a file's content.

    Raises:
        ConfigError: the published weights cannot be fetched.
        CheckpointError: the file is missing or damaged.
    """
    if published.are_meant(config):
        return {"model": published.weights(config, image_size)}
    return checkpoint.read_any(Path(str(config.weights)))


def take_over(
    network: nn.Module,
    weights: dict[str, torch.Tensor],
    text: str,
    may_differ: Collection[str] = (),
) -> bool:
    """Loads ``weights`` into ``network``; returns whether the keys ``may_differ`` were left out.

    They are left out where any of them is missing from ``weights`` or has another shape.

    Raises:
        CheckpointError: another key differs; ``text`` and the first differences. The network is
            unchanged.
    """
    own = network.state_dict()
    # all of the head or nothing of it
    left = any(key not in weights or weights[key].shape != own[key].shape for key in may_differ)
    if left:
        weights = weights | {key: own[key] for key in may_differ}
    refuse(differences(own, weights), text)
    # in place: a new dict would lack _metadata, without which the mnasnets load nothing
    own.update(weights)
    network.load_state_dict(own)
    return left


def differences(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns what keeps ``saved`` from loading into a network with ``own``, by key."""
    found = [f"{key} is missing" for key in own if key not in saved]
    found += [f"{key} is not expected" for key in saved if key not in own]
    for key, theirs in saved.items():
        ours = own.get(key, theirs)
        if theirs.shape != ours.shape:
            found.append(f"{key} is {list(theirs.shape)}, not {list(ours.shape)}")
        elif theirs.is_floating_point() != ours.is_floating_point():
            found.append(f"{key} is {theirs.dtype}, not {ours.dtype}")
    return found


def refuse(problems: list[str], text: str) -> None:
    """Raises ``CheckpointError`` with ``text`` and the first of ``problems``, if there are any."""
    if problems:
        raise CheckpointError(f"{text}: {listed(problems, '; ')}")


def head_keys(network: nn.Module) -> set[str]:
    """Returns the parameters of the classifier's head: the last layer, or those that timm names.

    A network of the user's may have none.
    """
    # timm's; anything may have that name in a user's
    facts = getattr(network, "default_cfg", None)
    layers = (isinstance(facts, dict) and facts.get("classifier")) or ()
    starts = tuple(f"{name}." for name in ([layers] if isinstance(layers, str) else layers))
    if found := {key for key, _ in network.named_parameters() if key.startswith(starts)}:
        return found
    heads = [item for item in network.named_modules() if isinstance(item[1], nn.Linear | nn.Conv2d)]
    return {f"{name}.{key}" for name, head in heads[-1:] for key, _ in head.named_parameters()}


def small(num_classes: int) -> nn.Module:
    """Returns a network from float ``[N, 3, H, W]`` to logits ``[N, num_classes]``.

    Fast on two CPU cores for H and W of 32 to 96 pixels; 16 at least. 0.4 million parameters, 20
    million multiply-adds for 64x64 pixels. A convolution of stride 2, three that each end in a
    pooling by 2, a residual block (He et al. 2015, https://arxiv.org/abs/1512.03385), the mean over
    what is left.
    """
    stages: list[nn.Module] = []
    # few channels where there are many pixels, which is where a CPU's time goes
    for before, after in itertools.pairwise((16, 32, 64, 128)):
        stages += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            # before the norm, which then has a quarter of the work (Jordan 2024,
            # https://arxiv.org/abs/2404.00498)
            nn.MaxPool2d(2),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        *stages,
        _Residual(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


class _Residual(nn.Module):
    """Adds the result of two convolutions to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x + self.branch(x))
