"""Builds the optimizer and the schedule, and sets each block's learning rate."""

from __future__ import annotations

import bisect
import inspect
import math
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import chain, groupby, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import suggestions
from ..config import ConfigError, OptimConfig, ScheduleConfig, ScheduleName, installed, shown
from ..runtime import user_code
from ..runtime.errors import CheckpointError, printable
from . import models


def make_optimizer(network: nn.Module, config: OptimConfig) -> Optimizer:
    """Returns the optimizer for ``network``'s parameters, those at the full rate first.

    Norms and biases (all parameters with fewer than two dimensions) have no weight decay unless
    ``optim.decay_norm_and_bias`` is set. sgd and adamw use the fused forms, which can skip an
    update on the device. Parameters that are frozen later have no state until they get a gradient.

    Raises:
        ConfigError: the optimizer is unknown or rejects its arguments.
    """
    depth = {p: 0 for p in network.parameters() if p.requires_grad}
    if config.layer_decay:
        depth = {p: number for p, number in depths(network).items() if p in depth}
    share = config.layer_decay or 1.0
    # empty if the network has nothing to train, which the first step rejects
    numbers = sorted({*depth.values()} or {0}, reverse=True)
    dimensions = [range(2, 99), range(2)]
    if config.decay_norm_and_bias:
        dimensions = [range(99)]
    groups = [
        {
            "params": [p for p in depth if depth[p] == number and p.ndim in counts],
            "lr": config.lr * share ** (numbers[0] - number),
            "weight_decay": config.weight_decay * (2 in counts),
        }
        for number in numbers
        for counts in dimensions
    ]
    with user_code.explained(
        f"optim.name={config.name}: failed with optim.args={shown(config.args)}:"
    ):
        return _named(groups, config)


def _named(groups: list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Returns an optimizer from torch, timm or the user, by name."""
    name, args = config.name, dict(config.args)
    if name == "sgd":
        name, args = "SGD", {"momentum": config.momentum, "nesterov": config.nesterov, **args}
    elif name == "adamw":
        name, args = "AdamW", {"betas": config.betas, "eps": config.eps, **args}
    if user_code.is_own(name):
        made = user_code.call("optim.name", name, groups, args=args)
        # the hooks are missing if __init__ does not call super().__init__
        if not (isinstance(made, Optimizer) and hasattr(made, "_optimizer_step_pre_hooks")):
            kind = type(made).__name__
            raise ConfigError(
                f"optim.name={name}: returned {kind}, not an initialized torch.optim.Optimizer"
            )
        return made
    if name in ("LBFGS", "SparseAdam"):
        raise ConfigError(
            f"optim.name={name}: needs a closure or sparse gradients, which this loop does not "
            "provide; use optim.name=Adam"
        )
    by_name: dict[str, Any] = dict(inspect.getmembers(torch.optim, inspect.isclass))
    del by_name["Optimizer"]
    if name in by_name:
        takes = inspect.signature(by_name[name]).parameters
        if "weight_decay" not in takes and config.weight_decay:
            raise ConfigError(f"optim.name={name}: has no weight decay; set optim.weight_decay=0")
        # the fused form skips an update on the device
        if "fused" in takes and not {"foreach", "differentiable"} & args.keys():
            args.setdefault("fused", True)
        fused: Optimizer = by_name[name](groups, lr=config.lr, **args)
        return fused
    known: list[str] = []
    with suppress(ConfigError):
        installed("timm", f"optim.name={name}")
        from timm import optim as timm_optim

        known = timm_optim.list_optimizers()
    if name not in known:
        hint = suggestions.nearest(name, ["sgd", "adamw", *by_name, *known])
        more = "" if known else '; timm has more: pip install -e ".[timm]" or uv sync --extra timm'
        raise ConfigError(f"optim.name={name}: unknown{hint}{more}")
    given = config.lr, config.weight_decay
    timms: Optimizer = timm_optim.create_optimizer_v2(groups, name, *given, **args)
    return timms


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` itself skips an update if ``found_inf`` is above 0."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    return is_torchs and bool(optimizer.defaults.get("fused"))


def fill_momentum(optimizer: Optimizer) -> None:
    """Creates a zero momentum buffer for each trained SGD parameter that lacks one."""
    # torch leaves the buffers uninitialized if the first update is skipped, and fails if only some
    # parameters have one
    for group in optimizer.param_groups if type(optimizer) is SGD else ():
        for parameter in group["params"] if group.get("momentum") else ():
            if parameter.requires_grad and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def adopt(
    optimizer: Optimizer, held: dict[str, Any], where: str, args: Collection[str] = ()
) -> None:
    """Restores the state ``held`` from an identical optimizer, by parameter index.

    Learning rates, weight decay and ``args`` keep their current values.

    Raises:
        CheckpointError: the state in the file ``where`` does not fit.
    """
    own = optimizer.state_dict()
    ours, theirs = (
        [(group.keys(), group["params"]) for group in each["param_groups"]] for each in (own, held)
    )
    if not skips_on_device(optimizer):
        # groups may contain counters; only the class knows its state's contents
        counts = [[len(names) for _, names in groups] for groups in (ours, theirs)]
        if counts[0] == counts[1]:
            typed = {"params", "lr", "initial_lr", "weight_decay", *args}
            groups = [
                {**theirs, **{name: ours[name] for name in ours.keys() & typed}}
                for ours, theirs in zip(own["param_groups"], held["param_groups"], strict=True)
            ]
            # includes additional entries from a user-defined state_dict
            optimizer.load_state_dict({**held, "param_groups": groups})
            return
    if ours != theirs:
        raise CheckpointError(
            f"{where}: does not match this run: it is from a different optimizer (optim), or "
            "its parameter groups differ (optim.decay_norm_and_bias, layer_decay)"
        )
    parameters = chain(*(group["params"] for group in optimizer.param_groups))
    names = {name for each in held["state"].values() for name in each}
    # the fused kernels trust shapes and strides, and crash on others
    like = {
        number: {name: torch.zeros(()) if name == "step" else parameter for name in names}
        for number, parameter in enumerate(parameters)
        # a parameter that has had no gradient so far has no state
        if number in held["state"]
    }
    found = {number: held["state"][number] for number in like}
    models.refuse_misfits(like, found, where, "this run")
    for number, name in product(like, names):
        given = found[number][name]
        like[number][name] = torch.empty_like(like[number][name], dtype=given.dtype).copy_(given)
    optimizer.load_state_dict({**own, "state": like})
    fill_momentum(optimizer)


def depths(network: nn.Module) -> dict[nn.Parameter, int]:
    """Returns each parameter's block number, in network order.

    A block is an item in a module list, or else a module with at most half of the parameters.
    A module without weight matrices, such as a norm, belongs to the preceding block. Most timm
    networks define their own blocks.
    """
    if type(network).__module__.startswith("timm.") and hasattr(network, "group_matcher"):
        from timm.models import group_parameters

        matcher: Any = network.group_matcher
        by_name = group_parameters(network, matcher(), reverse=True)
        return {network.get_parameter(name): number for name, number in by_name.items()}
    found: dict[nn.Parameter, int] = {}
    half = sum(p.numel() for p in network.parameters()) / 2
    count = 0

    def visit(module: nn.Module) -> None:
        nonlocal count
        own = [*module.parameters()]
        inside = [*module.children()]
        is_large = inside and sum(p.numel() for p in own) > half
        if is_large or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            # such as a class token
            own = [*module.parameters(recurse=False)]
        else:
            inside = []
            count += any(p.ndim > 1 for p in own)
        for parameter in own:
            found.setdefault(parameter, max(1, count))
        for child in inside:
            visit(child)

    visit(network)
    return found


def frozen_names(network: nn.Module, freeze: str, name: str) -> list[str]:
    """Returns the parameters and buffers of the network ``name`` that ``optim.freeze`` matches.

    Raises:
        ConfigError: ``freeze`` is not a regular expression, or matches none or all of the
            parameters.
    """
    where = f"optim.freeze={freeze}"
    heads = models.head_keys(network)
    parameters = {key for key, p in network.named_parameters() if p.requires_grad}
    found = parameters.union(key for key, _ in network.named_buffers()) - heads
    if freeze != "all_but_head":
        try:
            found = {key for key in found | heads if re.match(freeze, key)}
        except re.error as error:
            raise ConfigError(f"{where}: not a regular expression ({error})") from error
    if not parameters & found or parameters <= found:
        what = "every" if parameters <= found else "no"
        some = printable(", ".join(sorted(parameters))[:200])
        raise ConfigError(
            f"{where}: matches {what} parameter of model.name={name}; its parameters: {some}"
        )
    return sorted(found)


def skip_nonfinite(optimizer: Optimizer, one: Tensor) -> None:
    """Makes ``optimizer`` skip its next update on the device if a gradient is not finite.

    The optimizer must support ``found_inf``, as torch's fused optimizers do. ``one`` is the number
    1 on the device, float ``[]``.
    """
    parameters = chain(*(group["params"] for group in optimizer.param_groups))
    gradients = [p.grad for p in parameters if p.grad is not None]
    found = torch.zeros_like(one)
    for _, alike in groupby(gradients, lambda gradient: gradient.dtype):
        torch._amp_foreach_non_finite_check_and_unscale_([*alike], found, one)
    optimizer.found_inf = found  # type: ignore[attr-defined]


class Schedule:
    """Sets the learning rate of each optimizer group for the next update.

    Works like torch's ``LambdaLR`` but takes a tenth of the time.

    Attributes:
        base_lrs: the groups' peak rates.
        factor: returns the fraction of the peak rates for an update, numbered from 0.
        gamma: factor applied at each of the ``drops`` with ``schedule=plateau``.
        last_epoch: the number of the next update; the name is torch's.
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[int], float], gamma: float = 1.0
    ) -> None:
        # loading a state replaces its groups
        self._optimizer = optimizer
        self.factor = factor
        self.gamma = gamma
        self.drops = 0
        # stored in checkpoints
        groups = optimizer.param_groups
        self.base_lrs = [group.setdefault("initial_lr", group["lr"]) for group in groups]
        self.go_to(0)

    def step(self) -> None:
        """Advances to the next update."""
        self.go_to(self.last_epoch + 1)

    def go_to(self, update: int) -> None:
        """Sets the rates for update number ``update``."""
        self.last_epoch = update
        share = self.share(update)
        for group, base_lr in zip(self._optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * share

    def share(self, update: int) -> float:
        """Returns the fraction of the peak rates for update number ``update``."""
        return self.factor(update) * self.gamma**self.drops


def lr_factor(step: int, config: ScheduleConfig, epochs: int, steps_per_epoch: int) -> float:
    """Returns the fraction of ``optim.lr`` for update number ``step`` (from 0).

    Warm-up is linear and ends at the peak. ``step`` drops at whole epochs, like torch's ``StepLR``
    and ``MultiStepLR`` stepped once per epoch; ``exponential`` drops at every update, like
    ``ExponentialLR``. ``cosine`` falls from the end of the warm-up to ``final_fraction`` after the
    last update (SGDR, arXiv 1608.03983); ``linear`` reaches it at the last update. ``onecycle`` is
    ``OneCycleLR`` with constant momentum and a cosine warm-up.
    """
    epoch = step // steps_per_epoch
    total = epochs * steps_per_epoch
    warmup: float = config.warmup_steps or config.warmup_epochs * steps_per_epoch
    if config.per_epoch:
        step, total, warmup, steps_per_epoch = epoch, epochs, warmup / steps_per_epoch, 1
    if config.name is ScheduleName.onecycle:
        # torch's default
        peak = (warmup or 0.3 * total) - 1
        if step < peak:
            return _cosine(config.warmup_start, 1.0, step / peak)
        return _cosine(1.0, config.final_fraction, (step - peak) / max(1.0, total - 1 - peak))
    linear = config.name is ScheduleName.linear
    # a linear warm-up without a start value peaks at its last update
    ahead = linear and not config.warmup_start
    if step < warmup:
        if config.warmup_start:
            return config.warmup_start + (1 - config.warmup_start) * step / warmup
        return (step + 1) / (warmup + (not ahead))
    if config.name is ScheduleName.step:
        drops = epoch // config.step_epochs
        if config.milestones:
            drops = bisect.bisect(config.milestones, epoch)
        return float(config.gamma**drops)
    if config.name is ScheduleName.exponential:
        return float(config.gamma ** (step / steps_per_epoch / config.step_epochs))
    if config.name in (ScheduleName.constant, ScheduleName.plateau):
        return 1.0
    if config.warmup_overlaps:
        warmup = 0
    after = step + ahead - warmup
    done = min(1.0, after / max(1.0, total - warmup))
    if linear:
        return config.final_fraction + (1 - config.final_fraction) * (1 - done)
    return _cosine(1.0, config.final_fraction, done)


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * min(1.0, done)))
