"""Networks by name, with random, published or saved weights."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models as zoo

from harness.config import ConfigError, ModelConfig
from harness.runtime.errors import CheckpointError, printable
from harness.training.checkpoint import read_weights
from harness.training.small import small


def build(config: ModelConfig, num_classes: int) -> nn.Module:
    """The network that ``config`` names, with a head for ``num_classes``.

    With ``weights=DEFAULT`` or a path, the head's weights are taken over where its shape fits, else they stay random.

    Raises:
        ConfigError: the name is unknown, or the published weights cannot be had.
        CheckpointError: the file is missing, damaged or of another network.
    """
    if config.weights == "DEFAULT":
        return _published(config.name, num_classes)
    network = _random(config.name, num_classes)
    if config.weights is not None:
        _take_over(network, read_weights(Path(config.weights)), config)
    return network


def names() -> list[str]:
    """Every name that ``model.name`` takes: ours and torchvision's classifiers."""
    return ["small", *zoo.list_models(module=zoo)]


def _random(name: str, num_classes: int) -> nn.Module:
    if name == "small":
        return small(num_classes)
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=3)
        raise ConfigError(f"model.name={name}: unknown" + (f"; did you mean {', '.join(near)}?" if near else ""))
    network: nn.Module = zoo.get_model(name, weights=None, num_classes=num_classes, **_plain_form(name, True))
    return network


def _plain_form(name: str, random: bool) -> dict[str, Any]:
    """Without auxiliary heads: a classifier here gives one tensor."""
    if name not in ("googlenet", "inception_v3"):
        return {}
    return {"aux_logits": False, "init_weights": True} if random else {}


def _published(name: str, num_classes: int) -> nn.Module:
    if name == "small":
        raise ConfigError("model.weights=DEFAULT: there are none for model.name=small; use null or a path")
    network = _random(name, num_classes)  # refuses an unknown name first
    try:
        weights = zoo.get_model_weights(name).DEFAULT.get_state_dict(check_hash=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"model.weights=DEFAULT: the weights of {name} cannot be fetched ({error}); use model.weights=null, or the path "
            "of a file with them"
        ) from error
    _load_but_head(network, {key: value for key, value in weights.items() if not _auxiliary(key)})
    return network


def _auxiliary(key: str) -> bool:
    return key.startswith(("aux1.", "aux2.", "AuxLogits."))


def _take_over(network: nn.Module, weights: dict[str, torch.Tensor], config: ModelConfig) -> None:
    problems = _load_but_head(network, weights)
    if problems:
        raise CheckpointError(
            f"model.weights={printable(str(config.weights))}: does not fit model.name={config.name}: "
            f"{'; '.join(problems[:5])}" + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
        )


def _load_but_head(network: nn.Module, weights: dict[str, torch.Tensor]) -> list[str]:
    """Load ``weights``, leaving the head random where its shape differs; what does not fit, with nothing changed then."""
    own = network.state_dict()
    head = _head_keys(network)
    fitting = {key: value for key, value in weights.items() if not (key in head and value.shape != own[key].shape)}
    problems = [f"{key} is missing" for key in own if key not in weights and key not in head]
    problems += [f"{key} is not expected" for key in weights if key not in own]
    problems += [
        f"{key} is {list(value.shape)}, not {list(own[key].shape)}"
        for key, value in fitting.items()
        if key in own and value.shape != own[key].shape
    ]
    if not problems:
        network.load_state_dict({**own, **fitting})
    return problems


def _head_keys(network: nn.Module) -> set[str]:
    """The parameters of the last layer that has any: the classifier's head in every network here."""
    last = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)][-1]
    return {f"{last}.{name}" for name, _ in network.get_submodule(last).named_parameters()}
