"""Builds networks by name, with random, pretrained or saved weights."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchvision import models as zoo

from ..config import OURS, TIMM, ConfigError, ModelConfig, check_model, leaves, shown
from ..monitor.console import say
from ..runtime import user_code
from ..runtime.errors import CheckpointError, listed, printable
from ..runtime.files import open_regular
from ..runtime.folder import log
from . import checkpoint_read, cifar_networks, weights
from .checkpoint_read import Saved

# data.* settings that pretrained weights determine
EXPECTED = (
    "data.image_size",
    "data.eval_resize",
    "data.eval_squash",
    "data.interpolation",
    "data.mean",
    "data.std",
)


def build(
    config: ModelConfig,
    num_classes: int,
    *,
    image_size: int,
    filled: bool = False,
    train_sizes: Collection[int] = (),
) -> nn.Module:
    """Returns the network specified by ``config``, for square images of ``image_size`` pixels.

    It must also accept images of ``train_sizes`` pixels.

    With ``weights=DEFAULT`` or a path, the head is loaded if its shape fits; otherwise, it stays
    random. If ``filled``, the caller loads the weights and none are read here.

    Raises:
        ConfigError: the name is unknown, there are no pretrained weights, or the image size is not
            supported.
        CheckpointError: the file is missing, corrupt or from another network.
    """
    check_model(config)
    where = f"model.name={config.name}"
    with user_code.explained(f"{where}: for data.image_size={image_size} it failed with"):
        network: nn.Module = _made(config, num_classes, image_size)
        if user_code.is_own(config.name) or config.name.startswith(TIMM):
            _prove(network, where, num_classes, image_size)
    for size in {*train_sizes} - {image_size}:
        end = "; set data.train_size=null"
        with user_code.explained(f"{where}: for data.train_size={size} it failed with", end):
            _prove(network, where, num_classes, size)
    if config.weights is None or filled:
        return network
    found = saved(config, image_size)
    target = f"{where} for data.image_size={image_size}"
    if take_over(network, found, target, may_differ=head_keys(network)):
        say(f"{found.where}: using a new head for {num_classes} classes")
    return network


def _made(config: ModelConfig, num_classes: int, image_size: int) -> Any:
    """Returns the network with random weights; a user function's result is not checked."""
    name = config.name
    if user_code.is_own(name):
        return user_code.call(
            "model.name", name, num_classes, image_size=image_size, args=config.args
        )
    if name.startswith(TIMM):
        return _timm(name, image_size, num_classes=num_classes, **config.args)
    if name in OURS and config.args:
        raise ConfigError(f"model.args={shown(config.args)}: {name} takes no arguments")
    if name == "small":
        return small(num_classes)
    if name in OURS:
        return getattr(cifar_networks, name)(num_classes)
    extra = {}
    if name.startswith("vit_"):
        extra = {"image_size": image_size}
    elif name in ("googlenet", "inception_v3"):
        # no auxiliary heads: a classifier here returns one tensor. The pretrained weights come from
        # TensorFlow, which normalizes images differently
        extra = {
            "aux_logits": False,
            "init_weights": True,
            "transform_input": config.weights == "DEFAULT",
        }
    return zoo.get_model(name, weights=None, num_classes=num_classes, **extra, **config.args)


def _prove(network: Any, where: str, num_classes: int, image_size: int) -> None:
    """Rejects networks that cannot be trained or saved; a two-image pass sizes lazy layers.

    Raises:
        ConfigError: it is not a module, or has no parameters, the wrong output shape, or a state
            that cannot be saved.
    """
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{where}: returned {type(network).__name__}, not a torch.nn.Module")
    first = next(network.parameters(), None)
    if first is None:
        raise ConfigError(f"{where}: the network has no parameters to train")
    with torch.no_grad():
        given = network.eval()(torch.zeros(2, 3, image_size, image_size, device=first.device))
        refuse_logits(given, (2, num_classes), where)
    network.train()
    for key, value in network.state_dict().items():
        kept = isinstance(value, Tensor) and value.layout is torch.strided
        if not kept or is_lazy(value) or value.is_meta:
            raise ConfigError(
                f"{where}: {printable(key)} in its state_dict is not a dense tensor, so it cannot "
                "be saved; make it one, or exclude it (persistent=False)"
            )


def refuse_logits(given: Any, shape: tuple[int, int], where: str) -> None:
    """Rejects logits that cannot be used for the loss.

    Raises:
        ConfigError: ``given`` is not a floating-point tensor with ``shape``, or has no gradient.
    """
    found = type(given).__name__
    if isinstance(given, Tensor):
        plain = given.is_floating_point() and given.layout is torch.strided
        if plain and given.shape == shape and given.requires_grad is torch.is_grad_enabled():
            return
        found = f"{given.dtype} {list(given.shape)}"
    raise ConfigError(
        f"{where}: the network returns {found} for {shape[0]} images; it must return a "
        f"floating-point tensor {list(shape)}, one value per class, with gradients in training"
    )


def saved(config: ModelConfig, image_size: int) -> Saved:
    """Returns the weights specified by ``model.weights``, pretrained or from a file.

    Raises:
        ConfigError: the pretrained weights cannot be downloaded.
        CheckpointError: the file is missing or corrupt.
    """
    if are_published(config):
        where = f"model.weights={printable(str(config.weights))}"
        return Saved(where, {"model": _published(config, image_size)})
    return checkpoint_read.read(Path(str(config.weights)), foreign=True)


def take_over(
    network: nn.Module,
    found: Saved,
    target: str,
    may_differ: Collection[str] = (),
    tell: Callable[[str], None] = say,
) -> bool:
    """Loads the weights in ``found`` into ``network``; returns whether its head was left out.

    ``tell`` receives a line about their origin. The head's keys, ``may_differ``, are left out if
    any of them is missing or has another shape.

    Raises:
        CheckpointError: another key differs; the error lists ``target`` and the first differences.
            The network is unchanged.
    """
    own = network.state_dict()
    given, line = weights.find(found.state, network, found.where, may_differ)
    # the whole head or none of it
    left = any(key not in given or given[key].shape != own[key].shape for key in may_differ)
    if left:
        given |= {key: own[key] for key in may_differ}
    refuse_misfits(own, given, found.where, target)
    # in place: a new dict would lack _metadata, without which the MNASNets load nothing
    own.update(given)
    network.load_state_dict(own)
    if line:
        tell(line)
    return left


def refuse_misfits(
    own: Mapping[Any, Any], saved: Mapping[Any, Any], where: str, target: str
) -> None:
    """Rejects ``saved`` tensors that cannot replace those in ``own``; both may be nested.

    Warns about NaN and infinity.

    Raises:
        CheckpointError: a tensor does not fit; the error lists the file ``where``, the ``target``
            and the first differences.
    """
    ours = dict(leaves(own))
    theirs = dict(leaves(saved))
    missing = [f"{key} is missing" for key in ours if key not in theirs]
    found = []
    for key, value in theirs.items():
        like = ours.get(key)
        if like is None:
            found.append(f"{key} is not expected")
        elif (
            not isinstance(value, Tensor)
            or value.layout is not torch.strided
            or value.device.type != "cpu"
            # extends beyond its storage
            or value.nbytes > value.untyped_storage().nbytes()
        ):
            found.append(f"{key} is not a dense CPU tensor")
        elif value.shape != like.shape:
            found.append(f"{key} is {list(value.shape)}, not {list(like.shape)}")
        elif value.is_floating_point() != like.is_floating_point():
            found.append(f"{key} is {value.dtype}, not {like.dtype}")
    if missing or found:
        # show some of each
        pairs = itertools.zip_longest(missing, found)
        texts = [text for pair in pairs for text in pair if text]
        raise CheckpointError(f"{where}: does not fit {target}: {listed(texts, '; ')}")
    for key, value in theirs.items():
        if value.is_floating_point() and not value.isfinite().all():
            log.warning("%s: %s contains NaN or infinity", where, printable(key))
            break


def head_keys(network: nn.Module) -> set[str]:
    """Returns the head's parameter names: those that timm declares, or else the last layer's.

    A user's network may not have any.
    """
    # set by timm; in a user's network it may be anything
    facts = getattr(network, "default_cfg", None)
    named = (isinstance(facts, dict) and facts.get("classifier")) or ()
    layers = [name for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for names in ([named] if isinstance(named, str) else named, layers[-1:]):
        starts = tuple(f"{name}." for name in names)
        if found := {key for key, _ in network.named_parameters() if key.startswith(starts)}:
            return found
    return set()


def small(num_classes: int) -> nn.Module:
    """Returns a network that maps float ``[N, 3, H, W]`` to logits ``[N, num_classes]``.

    It is fast on two CPU cores for H and W of 32 to 96 pixels; they must be at least 16. It has 0.4
    million parameters, and 20 million multiply-adds for 64x64 pixels. It consists of a stride-2
    convolution, three convolutions with 2x2 max pooling, a residual block (He et al. 2015,
    https://arxiv.org/abs/1512.03385), and global average pooling.
    """
    stages = []
    # few channels at high resolution, where a CPU spends most of its time
    for before, after in itertools.pairwise((16, 32, 64, 128)):
        # pooling first quarters the norm's work (Jordan 2024, https://arxiv.org/abs/2404.00498)
        stages += _layers(before, after, nn.MaxPool2d(2))
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


def _layers(before: int, after: int, *pooling: nn.Module) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return [convolution, *pooling, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]


class _Residual(nn.Module):
    """Adds the output of two convolutions to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*_layers(width, width), *_layers(width, width)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x + self.branch(x))


def are_published(model: ModelConfig) -> bool:
    """Whether ``model.weights`` are pretrained weights, downloaded or in a timm file."""
    source = str(model.weights)
    from_file = model.name.startswith(TIMM) and source.endswith(".safetensors")
    return source == "DEFAULT" or from_file


def expected(name: str, size: int | None) -> dict[str, Any]:
    """Returns the image settings for the pretrained weights of the network ``name``, by path.

    ``size`` is the image side length in pixels; None means the weights' own.

    Raises:
        ConfigError: there are no such weights.
    """
    if name.startswith(TIMM):
        facts = _facts(name)
        if not facts.has_weights:
            raise ConfigError(
                f"model.weights=DEFAULT: model.name={name} has no pretrained weights; use null"
            )
        from timm.data import resolve_data_config

        found = resolve_data_config(pretrained_cfg=facts.to_dict())
        size = size or found["input_size"][-1]
        # rounded down, as in timm; at least the crop size, so nothing is padded
        short = max(size, math.floor(size / found["crop_pct"]))
        # also for "border", which does not crop either
        squash = found["crop_mode"] != "center"
        interpolation, mean, std = (found[key] for key in ("interpolation", "mean", "std"))
    else:
        made = zoo.get_model_weights(name).DEFAULT.transforms()
        own = made.crop_size[0]
        size = size or own
        short = round(size * made.resize_size[0] / own)
        squash = False
        interpolation, mean, std = made.interpolation.value, made.mean, made.std
    values = (size, short, squash, interpolation, tuple(mean), tuple(std))
    return dict(zip(EXPECTED, values, strict=True))


def _facts(name: str) -> Any:
    """Returns timm's ``PretrainedCfg`` for its network ``name``.

    Raises:
        ConfigError: the network has no weights with that name.
    """
    import timm

    with user_code.explained(f"model.name={name}: no such weights:"):
        return timm.get_pretrained_cfg(name.removeprefix(TIMM))


def _timm(name: str, image_size: int, **how: Any) -> Any:
    """Returns timm's network ``name`` for images with ``image_size`` pixels per side."""
    import timm

    how = {**size_args(name, image_size), **how}
    return timm.create_model(name.removeprefix(TIMM), **how)


def size_args(name: str, image_size: int) -> dict[str, Any]:
    """Returns the arguments that timm's network ``name`` needs for images of ``image_size``."""
    # other networks accept many sizes without this argument
    return {"img_size": image_size} if _facts(name).fixed_input_size else {}


def _published(model: ModelConfig, image_size: int) -> dict[str, Tensor]:
    """Returns the pretrained weights under their current keys.

    Only torchvision's own builder renames the DenseNet keys. timm's loader renames the keys of many
    networks, and resizes position embeddings to ``image_size``.

    Raises:
        ConfigError: the weights cannot be downloaded.
        CheckpointError: timm's file is missing or does not fit.
    """
    name = model.name
    source = str(model.weights)
    how: dict[str, Any] = {"pretrained": True}
    if name.startswith(TIMM):
        facts = _facts(name)
        url = facts.url
        if facts.hf_hub_id:
            url = f"https://huggingface.co/{facts.hf_hub_id}/resolve/main/model.safetensors"
        way_out = f"; use null, or fetch {url} and pass that file"
    else:
        url = zoo.get_model_weights(name).DEFAULT.url
        way_out = f"; use null, or download {url} to {torch.hub.get_dir()}/checkpoints"
    begin = f"model.weights={printable(source)}: cannot be loaded for {name}:"
    kind = ConfigError if source == "DEFAULT" else CheckpointError
    with user_code.explained(begin, way_out, kind):
        if source != "DEFAULT":
            # a named pipe would block
            os.close(open_regular(source))
            how["pretrained_cfg_overlay"] = {"file": source}
        if name.startswith(TIMM):
            # keep the weights' number of classes; otherwise, the loader ignores missing keys
            network = _timm(name, image_size, **how)
        else:
            network = zoo.get_model(name, weights="DEFAULT")
    found: dict[str, Tensor] = network.state_dict()
    return {key: value for key, value in found.items() if not key.startswith("AuxLogits.")}
