"""Published weights, torchvision's and timm's, what they expect of images, and timm's networks."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import nn
from torchvision import models as zoo

from harness import answers
from harness.config import (
    TIMM,
    Config,
    ConfigError,
    Mode,
    ModelConfig,
    adopted,
)
from harness.runtime import launch, parts
from harness.runtime.errors import CheckpointError, printable
from harness.runtime.files import open_regular
from harness.watch.console import say

# of data.*, what they say of images
EXPECTED = (
    "data.image_size",
    "data.eval_resize",
    "data.eval_squash",
    "data.interpolation",
    "data.mean",
    "data.std",
)


def are_meant(model: ModelConfig) -> bool:
    """Whether ``model.weights`` are published ones, fetched or in a file of timm's."""
    weights = str(model.weights)
    from_file = model.name.startswith(TIMM) and weights.endswith(".safetensors")
    return weights == "DEFAULT" or from_file


def settings(config: Config, typed: tuple[str, ...]) -> Config:
    """Returns ``config`` with what its published weights expect of images.

    What the command line set (``typed``) stays, and without such weights all of it. Every
    difference is printed.

    Raises:
        ConfigError: there are no such weights, or what was typed does not go with them.
    """
    # a checkpoint that is evaluated has settings of its own
    if (config.resume and config.mode is not Mode.train) or not are_meant(config.model):
        return config
    kept = set(map(launch.setting, typed))
    name = config.model.name
    size = config.data.image_size if "data.image_size" in kept else None
    expected = _timms(name, size) if name.startswith(TIMM) else _torchvisions(name, size)
    theirs = dict(zip(EXPECTED, expected, strict=True))
    return adopted(config, theirs, kept, f"the weights of {name}", say)


def _torchvisions(name: str, size: int | None) -> tuple[Any, ...]:
    """Returns what is ``EXPECTED``, for images of ``size`` pixels or of the weights' own."""
    made = zoo.get_model_weights(name).DEFAULT.transforms()
    own = made.crop_size[0]
    size = size or own
    short = round(size * made.resize_size[0] / own)
    return size, short, False, made.interpolation.value, tuple(made.mean), tuple(made.std)


def _timms(name: str, size: int | None) -> tuple[Any, ...]:
    """As ``_torchvisions``, by timm's data config."""
    facts = _facts(name)
    if not facts.has_weights:
        raise ConfigError(f"model.weights=DEFAULT: there are none for model.name={name}; use null")
    from timm.data import resolve_data_config

    found = resolve_data_config(pretrained_cfg=facts.to_dict())
    size = size or found["input_size"][-1]
    return (
        size,
        # down, as timm does; borders are for none
        max(size, math.floor(size / found["crop_pct"])),
        # or within borders, where nothing is cut off either
        found["crop_mode"] != "center",
        found["interpolation"],
        tuple(found["mean"]),
        tuple(found["std"]),
    )


def _facts(name: str) -> Any:
    """Returns timm's ``PretrainedCfg`` for its network ``name``.

    Raises:
        ConfigError: the network has no weights of that name.
    """
    import timm

    try:
        return timm.get_pretrained_cfg(name.removeprefix(TIMM))
    except RuntimeError as error:
        hint = answers.nearest(name, [TIMM + each for each in timm.list_pretrained()])
        raise ConfigError(f"model.name={name}: no such weights{hint}") from error


def created(name: str, image_size: int, **how: Any) -> nn.Module:
    """Returns timm's network ``name`` for images of ``image_size`` pixels."""
    import timm

    # the others take images of many sizes as they are
    if _facts(name).fixed_input_size:
        how["img_size"] = image_size
    made: nn.Module = timm.create_model(name.removeprefix(TIMM), **how)
    return made


def weights(model: ModelConfig, image_size: int) -> dict[str, torch.Tensor]:
    """Returns the published weights that are meant, under today's keys.

    Only torchvision's own builder renames the keys of the densenets. timm's loader does so for many
    networks, and brings positions to ``image_size``.

    Raises:
        ConfigError: they cannot be fetched.
        CheckpointError: timm's file is missing, or does not fit.
    """
    name = model.name
    source = str(model.weights)
    how: dict[str, Any] = {"pretrained": True}
    try:
        if source != "DEFAULT":
            # never a wait for a pipe
            os.close(open_regular(source))
            how["pretrained_cfg_overlay"] = {"file": source}
        if name.startswith(TIMM):
            # with as many classes as the weights: else the loader lets keys be missing
            network = created(name, image_size, **how)
        else:
            network = zoo.get_model(name, weights="DEFAULT")
    # fetching and loading raise anything
    except Exception as error:
        kind = ConfigError if source == "DEFAULT" else CheckpointError
        raise kind(
            f"model.weights={printable(source)}: cannot be loaded for {name} "
            f"({parts.told(error)}); use null, or {_way_out(name)}"
        ) from error
    found: dict[str, torch.Tensor] = network.state_dict()
    return {key: value for key, value in found.items() if not key.startswith("AuxLogits.")}


def _way_out(name: str) -> str:
    """Returns what to do where the weights of ``name`` cannot be fetched."""
    if not name.startswith(TIMM):
        url = zoo.get_model_weights(name).DEFAULT.url
        return f"put {url} into {torch.hub.get_dir()}/checkpoints"
    facts = _facts(name)
    url = facts.url
    if facts.hf_hub_id:
        url = f"https://huggingface.co/{facts.hf_hub_id}/resolve/main/model.safetensors"
    return f"fetch {url} and name that file"
