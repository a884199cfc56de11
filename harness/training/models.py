"""Builds networks by name, with random, published or saved weights."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
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

# of data.*, what published weights say of images
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
    """Returns the network that ``config`` names, for square images of ``image_size`` pixels.

    It must take those of ``train_sizes`` too.

    With ``weights=DEFAULT`` or a path, the head's weights are taken over where its shape fits, else
    they stay random. No weights are read where the caller fills the network (``filled``).

    Raises:
        ConfigError: unknown name, unpublished weights, or an image size that does not fit.
        CheckpointError: the file is missing, damaged or of another network.
    """
    check_model(config, names())
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
        say(f"{found.where}: the head is new, for {num_classes} classes")
    return network


def _made(config: ModelConfig, num_classes: int, image_size: int) -> Any:
    """Returns the network with random weights; what a user's function gave as it is."""
    name = config.name
    if user_code.is_own(name):
        return user_code.call(
            "model.name", name, num_classes, image_size=image_size, args=config.args
        )
    if name.startswith(TIMM):
        return _timm(name, image_size, num_classes=num_classes, **config.args)
    if name in OURS and config.args:
        raise ConfigError(f"model.args={shown(config.args)}: {name} takes none")
    if name == "small":
        return small(num_classes)
    if name in OURS:
        return getattr(cifar_networks, name)(num_classes)
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
    return zoo.get_model(name, weights=None, num_classes=num_classes, **extra, **config.args)


def names() -> list[str]:
    """Returns every name that ``model.name`` takes, those of torchvision too."""
    return [*OURS, *zoo.list_models(module=zoo)]


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
        refuse_logits(given, (2, num_classes), where)
    network.train()
    for key, value in network.state_dict().items():
        kept = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not kept or is_lazy(value) or value.is_meta:
            raise ConfigError(
                f"{where}: {printable(key)} of its state_dict is no dense tensor, and a checkpoint "
                "holds nothing else; make it one, or keep it out (persistent=False)"
            )


def refuse_logits(given: Any, shape: tuple[int, int], where: str) -> None:
    """Refuses what no loss can be made of.

    Raises:
        ConfigError: ``given`` is no floating-point tensor of that ``shape``, or has no gradient.
    """
    found = type(given).__name__
    if isinstance(given, torch.Tensor):
        plain = given.is_floating_point() and given.layout is torch.strided
        if plain and given.shape == shape and given.requires_grad is torch.is_grad_enabled():
            return
        found = f"{given.dtype} {list(given.shape)}"
    raise ConfigError(
        f"{where}: the network gives {found} for {shape[0]} images; it must give a floating-point "
        f"tensor {list(shape)}, one number a class, with a gradient while it trains"
    )


def saved(config: ModelConfig, image_size: int) -> Saved:
    """Returns what ``model.weights`` names: published weights of a network, or a file's content.

    Raises:
        ConfigError: the published weights cannot be fetched.
        CheckpointError: the file is missing or damaged.
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

    ``tell`` gets a line on their origin. Its keys ``may_differ`` are left out where any of them is
    missing or has another shape.

    Raises:
        CheckpointError: another key differs; names ``target`` and the first differences. The
            network is unchanged.
    """
    own = network.state_dict()
    given, line = weights.find(found.state, network, found.where, may_differ)
    # all of the head or nothing of it
    left = any(key not in given or given[key].shape != own[key].shape for key in may_differ)
    if left:
        given |= {key: own[key] for key in may_differ}
    refuse_misfits(own, given, found.where, target)
    # in place: a new dict would lack _metadata, without which the mnasnets load nothing
    own.update(given)
    network.load_state_dict(own)
    if line:
        tell(line)
    return left


def refuse_misfits(
    own: Mapping[Any, Any], saved: Mapping[Any, Any], where: str, target: str
) -> None:
    """Refuses tensors that cannot be loaded in the place of their ``own``; both may be nested.

    Warns of NaN and infinity.

    Raises:
        CheckpointError: names the file ``where``, the ``target`` and the first differences.
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
            not isinstance(value, torch.Tensor)
            or value.layout is not torch.strided
            or value.device.type != "cpu"
            # beyond its storage
            or value.nbytes > value.untyped_storage().nbytes()
        ):
            found.append(f"{key} is no dense tensor in memory")
        elif value.shape != like.shape:
            found.append(f"{key} is {list(value.shape)}, not {list(like.shape)}")
        elif value.is_floating_point() != like.is_floating_point():
            found.append(f"{key} is {value.dtype}, not {like.dtype}")
    if missing or found:
        # some of each are shown
        pairs = itertools.zip_longest(missing, found)
        texts = [text for pair in pairs for text in pair if text]
        raise CheckpointError(f"{where}: does not fit {target}: {listed(texts, '; ')}")
    for key, value in theirs.items():
        if value.is_floating_point() and not value.isfinite().all():
            log.warning("%s: %s holds NaN or infinity", where, printable(key))
            break


def head_keys(network: nn.Module) -> set[str]:
    """Returns the parameters of the classifier's head: the last layer, or those that timm names.

    A network of the user's may have none.
    """
    # timm's; anything may have that name in a user's
    facts = getattr(network, "default_cfg", None)
    named = (isinstance(facts, dict) and facts.get("classifier")) or ()
    layers = [name for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for names in ([named] if isinstance(named, str) else named, layers[-1:]):
        starts = tuple(f"{name}." for name in names)
        if found := {key for key, _ in network.named_parameters() if key.startswith(starts)}:
            return found
    return set()


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
        # before the norm, which then has a quarter of the work (Jordan 2024,
        # https://arxiv.org/abs/2404.00498)
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
    """Adds the result of two convolutions to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*_layers(width, width), *_layers(width, width)[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x + self.branch(x))


def are_published(model: ModelConfig) -> bool:
    """Whether ``model.weights`` are published ones, fetched or in a timm file."""
    source = str(model.weights)
    from_file = model.name.startswith(TIMM) and source.endswith(".safetensors")
    return source == "DEFAULT" or from_file


def expected(name: str, size: int | None) -> dict[str, Any]:
    """Returns by path what the published weights of the network ``name`` expect of images.

    The images are of ``size`` pixels or, by None, of the weights' own.

    Raises:
        ConfigError: there are no such weights.
    """
    if name.startswith(TIMM):
        facts = _facts(name)
        if not facts.has_weights:
            raise ConfigError(
                f"model.weights=DEFAULT: there are none for model.name={name}; use null"
            )
        from timm.data import resolve_data_config

        found = resolve_data_config(pretrained_cfg=facts.to_dict())
        size = size or found["input_size"][-1]
        # down, as timm does; borders are for none
        short = max(size, math.floor(size / found["crop_pct"]))
        # or within borders, where nothing is cut off either
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
        ConfigError: the network has no weights of that name.
    """
    import timm

    with user_code.explained(f"model.name={name}: no such weights:"):
        return timm.get_pretrained_cfg(name.removeprefix(TIMM))


def _timm(name: str, image_size: int, **how: Any) -> nn.Module:
    """Returns timm's network ``name`` for images of ``image_size`` pixels."""
    import timm

    how = {**size_args(name, image_size), **how}
    made: nn.Module = timm.create_model(name.removeprefix(TIMM), **how)
    return made


def size_args(name: str, image_size: int) -> dict[str, Any]:
    """Returns the arguments that timm's network ``name`` needs for images of ``image_size``."""
    # the others take images of many sizes as they are
    return {"img_size": image_size} if _facts(name).fixed_input_size else {}


def _published(model: ModelConfig, image_size: int) -> dict[str, torch.Tensor]:
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
    if name.startswith(TIMM):
        facts = _facts(name)
        url = facts.url
        if facts.hf_hub_id:
            url = f"https://huggingface.co/{facts.hf_hub_id}/resolve/main/model.safetensors"
        way_out = f"; use null, or fetch {url} and name that file"
    else:
        url = zoo.get_model_weights(name).DEFAULT.url
        way_out = f"; use null, or put {url} into {torch.hub.get_dir()}/checkpoints"
    begin = f"model.weights={printable(source)}: cannot be loaded for {name}:"
    kind = ConfigError if source == "DEFAULT" else CheckpointError
    with user_code.explained(begin, way_out, kind):
        if source != "DEFAULT":
            # never a wait for a pipe
            os.close(open_regular(source))
            how["pretrained_cfg_overlay"] = {"file": source}
        if name.startswith(TIMM):
            # with as many classes as the weights: else the loader lets keys be missing
            network = _timm(name, image_size, **how)
        else:
            network = zoo.get_model(name, weights="DEFAULT")
    found: dict[str, torch.Tensor] = network.state_dict()
    return {key: value for key, value in found.items() if not key.startswith("AuxLogits.")}
