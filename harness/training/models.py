"""Networks by name, with random, published or saved weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models as zoo

from harness.config import ConfigError, ModelConfig, check_model
from harness.runtime import parts
from harness.runtime.errors import CheckpointError, printable
from harness.training import checkpoint
from harness.training.small import small
from harness.watch.console import say


def build(
    config: ModelConfig, num_classes: int, *, image_size: int, filled: bool = False
) -> nn.Module:
    """The network that ``config`` names, for images of ``image_size`` pixels a side, with a head
    for ``num_classes``.

    With ``weights=DEFAULT`` or a path, the head's weights are taken over where its shape fits, else
    they stay random. No weights are read where the caller fills the network (``filled``).

    Raises:
        ConfigError: the name is unknown, the published weights cannot be had, or the network cannot
            take the image size.
        CheckpointError: the file is missing, damaged or of another network.
    """
    check(config, image_size)
    if parts.is_own(config.name):
        network = _own(config.name, num_classes, image_size)
    else:
        network = (
            small(num_classes)
            if config.name == "small"
            else _random(config, num_classes, image_size)
        )
    if config.weights is None or filled:
        return network
    weights = (
        published(config.name)
        if config.weights == "DEFAULT"
        else checkpoint.read_weights(Path(config.weights))
    )
    where = f"model.weights={printable(config.weights)}"
    if take_over(
        network,
        weights,
        f"{where}: does not fit model.name={config.name}",
        may_differ=_head_keys(network),
    ):
        say(f"{where}: the head is new, for {num_classes} classes")
    return network


def names() -> list[str]:
    """Every name that ``model.name`` takes: ours and torchvision's classifiers."""
    return ["small", *zoo.list_models(module=zoo)]


def check(config: ModelConfig, image_size: int) -> None:
    """Refuses a network that cannot be built, or that cannot take images of ``image_size`` pixels a
    side.

    Raises:
        ConfigError: names the setting and the way out.
    """
    name = config.name
    check_model(config, names())
    if not name.startswith("vit_"):
        return
    patch = int(name.rpartition("_")[2])
    if image_size % patch:
        raise ConfigError(
            f"data.image_size={image_size}: {name} cuts images into squares of {patch}; use a "
            "multiple of that"
        )
    if config.weights == "DEFAULT":
        published = zoo.get_model_weights(name).DEFAULT.meta["min_size"][0]
        if image_size != published:
            raise ConfigError(
                f"data.image_size={image_size}: the published weights of {name} are for "
                f"{published}; use that, or "
                "model.weights=null"
            )


def _own(name: str, num_classes: int, image_size: int) -> nn.Module:
    """The network that the user's function returns; two images have been through it, by which lazy
    layers know their sizes.

    Raises:
        ConfigError: it is none, failed, or gives anything but a number for each class.
    """
    where = f"model.name={name}"
    network = parts.call("model.name", name, num_classes, image_size=image_size)
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{where}: returned {type(network).__name__}, not a torch.nn.Module")
    first = next(network.parameters(), None)
    if first is None:
        raise ConfigError(f"{where}: the network has no parameters to train")
    images = torch.zeros(2, 3, image_size, image_size, device=first.device)
    try:
        with torch.no_grad():
            given = network.eval()(images)
    except Exception as error:
        raise ConfigError(
            f"{where}: the network failed on images {list(images.shape)} with {parts.told(error)}"
        ) from error
    found = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
    if found != [2, num_classes]:
        raise ConfigError(
            f"{where}: the network gives {found} for 2 images; it must give [2, {num_classes}], "
            "one a class"
        )
    return network.train()


def _random(config: ModelConfig, num_classes: int, image_size: int) -> nn.Module:
    extra: dict[str, Any] = {}
    if config.name.startswith("vit_"):
        extra = {"image_size": image_size}
    elif config.name in (
        "googlenet",
        "inception_v3",
    ):  # no auxiliary heads: a classifier here gives one tensor
        # Their published weights come from TensorFlow, where images were normalised in another way.
        extra = {
            "aux_logits": False,
            "init_weights": True,
            "transform_input": config.weights == "DEFAULT",
        }
    network: nn.Module = zoo.get_model(config.name, weights=None, num_classes=num_classes, **extra)
    return network


def published(name: str) -> dict[str, torch.Tensor]:
    """The published weights under today's keys: only torchvision's builder renames those of the
    densenets.

    Raises:
        ConfigError: they cannot be fetched.
    """
    try:
        weights: dict[str, torch.Tensor] = zoo.get_model(name, weights="DEFAULT").state_dict()
    except (OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]  # torch lists every key that does not fit after it
        raise ConfigError(
            f"model.weights=DEFAULT: the weights of {name} cannot be fetched ({why}); use "
            "model.weights=null, or put "
            f"{zoo.get_model_weights(name).DEFAULT.url} into {torch.hub.get_dir()}/checkpoints"
        ) from error
    return {key: value for key, value in weights.items() if not key.startswith("AuxLogits.")}


def take_over(
    network: nn.Module,
    weights: dict[str, torch.Tensor],
    text: str,
    may_differ: Collection[str] = (),
) -> bool:
    """Loads ``weights`` into ``network``; returns whether the keys ``may_differ`` were left as they
    are.

    They are left where any of them is missing from ``weights`` or has another shape.

    Raises:
        CheckpointError: another key differs; ``text`` and the first differences. The network is
            unchanged.
    """
    own = network.state_dict()
    left = any(key not in weights or weights[key].shape != own[key].shape for key in may_differ)
    skipped = set(may_differ) if left else set()
    fitting = {key: value for key, value in weights.items() if key not in skipped}
    refuse(differences({key: own[key] for key in own if key not in skipped}, fitting), text)
    # In place: a new dict would lack _metadata, without which the mnasnets load nothing.
    own.update(fitting)
    network.load_state_dict(own)
    return left


def differences(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> list[str]:
    """What keeps ``saved`` from being loaded into a network that has ``own``, one text a key."""
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
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{text}: {'; '.join(problems[:5])}{more}")


def _head_keys(network: nn.Module) -> set[str]:
    """The parameters of the last layer that has any: the classifier's head in every network here."""
    layers = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    # A network of the user's may have none of either.
    return {
        f"{last}.{name}"
        for last in layers[-1:]
        for name, _ in network.get_submodule(last).named_parameters()
    }
