"""What training changes: network, optimizer, learning rate, counts; to a checkpoint and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.config import (
    Config,
    Mode,
    Precision,
    TrainerConfig,
)
from harness.runtime import parts
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError, printable
from harness.runtime.files import typed
from harness.runtime.seeding import random_state, restore_random_state
from harness.training import models
from harness.training.average import Average
from harness.training.checkpoint import is_plain, weights_of
from harness.training.optimizer import (
    FiniteCheck,
    fill_momentum,
    frozen_names,
    lr_factor,
    make_optimizer,
)
from harness.watch.console import say

# what a run goes on with
_NEEDED = {"model", "optimizer", "schedule", "scaler", "epoch", "step", "random", "settings"}
# what a resumed run counts on from
_COUNTS = {
    "epoch": int,
    "step": int,
    "samples": int,
    "pending": bool,
    "best_top1": float | None,
    "stale": int,
}
_TYPES = _COUNTS | {"length": int, "ranks": int, "stop": int, "steps_per_epoch": int}
# where a run stands within an epoch; checkpoints of schema 1 have none of these
_POSITION = _TYPES.keys() - {"epoch", "step", "stale"}


@dataclass(slots=True)
class TrainState:
    """All that changes while a run trains.

    Attributes:
        network: the bare network, not its DDP wrapper.
        scaler: scales fp16 losses; in the other precisions its scale is 1 and it only finds
            non-finite gradients.
        epoch: epochs done.
        step: optimizer updates done.
        samples: of the epoch that was begun, taken by all ranks together.
        pending: whether the evaluation that follows the last step is still to be made.
        best_top1: of all evaluations, 0..1.
        stale: evaluations at an epoch's end since ``best_top1`` rose.
        steps_per_epoch: optimizer updates in a whole epoch; the schedule counts by them.
        average: of the weights, if one is wanted.
        frozen: names of parameters and buffers that do not change in the first ``freeze_epochs``.
    """

    network: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    scaler: GradScaler
    epoch: int = 0
    step: int = 0
    samples: int = 0
    pending: bool = False
    best_top1: float | None = None
    stale: int = 0
    steps_per_epoch: int = 1
    average: Average | None = None
    frozen: Collection[str] = ()
    freeze_epochs: float = math.inf

    def is_done(self, config: TrainerConfig) -> bool:
        """Whether the last epoch or step, or trainer.patience_epochs, ends the run here."""
        return (
            self.epoch >= config.epochs
            or self.step >= (config.max_steps or math.inf)
            or self.stale >= (config.patience_epochs or math.inf)
        )

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated: the average, if there is one."""
        return self.network if self.average is None else self.average.module

    def train(self) -> bool:
        """Has the network train as its epoch wants; returns whether that changes what is trained.

        Frozen parameters get no gradient; norms with frozen statistics work as in evaluation.
        """
        self.network.train()
        freezes = self.epoch < self.freeze_epochs
        changed = False
        for name in self.frozen:
            path, _, key = name.rpartition(".")
            module = self.network.get_submodule(path)
            tensor = getattr(module, key)
            if isinstance(tensor, nn.Parameter):
                changed |= tensor.requires_grad is freezes
                tensor.requires_grad_(not freezes)
            elif freezes:
                module.training = False
        fill_momentum(self.optimizer)
        return changed

    def to_dict(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Returns the state as tensors and plain containers, with ``facts`` about the run."""
        averaged = {} if self.average is None else {"ema": self.average.state_dict()}
        return {
            **facts,
            **averaged,
            **{name: getattr(self, name) for name in (*_COUNTS, "steps_per_epoch")},
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": {"last_epoch": self.schedule.last_epoch},
            "scaler": self.scaler.state_dict(),
            "random": random_state(self.device),
            "num_threads": torch.get_num_threads(),
        }

    def load_dict(self, saved: dict[str, Any], where: str, precision: Precision) -> None:
        """Takes over what ``to_dict`` gave; all of it or, on an error, nothing.

        Learning rate, weight decay and the like stay this run's own, and so does the loss scale
        where the precision is another one.

        Raises:
            CheckpointError: the checkpoint is of another network or optimizer; names the first
                differences.
        """
        check_saved(saved, where, self)
        problems = models.differences(self.network.state_dict(), saved["model"])
        averaged = saved.get("ema", {})
        if self.average is not None:
            # one that begins here begins with the weights
            first = {f"module.{key}": value for key, value in saved["model"].items()}
            averaged = averaged or {"n_averaged": torch.tensor(0), **first}
            problems += models.differences(self.average.state_dict(), averaged)
        ours = self.optimizer.state_dict()["param_groups"]
        theirs = saved["optimizer"]["param_groups"]
        if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
            problems.append(
                "the optimizer's parameter groups differ (optim.decay_norm_and_bias, layer_decay)"
            )
        elif {*itertools.chain(*ours)} != {*itertools.chain(*theirs)}:
            problems.append("the optimizer is of another kind (optim)")
        models.refuse(problems, f"{where}: does not fit this run")

        # nothing below refuses what was checked
        self.network.load_state_dict(saved["model"])
        if self.average is not None:
            self.average.load_state_dict(averaged)
        self.optimizer.load_state_dict({**saved["optimizer"], "param_groups": ours})
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                # the fused kernels want equal strides
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        fill_momentum(self.optimizer)
        schedule = self.schedule
        schedule.last_epoch = saved["schedule"]["last_epoch"]
        if saved.get("steps_per_epoch", self.steps_per_epoch) != self.steps_per_epoch:
            # with other batches the schedule goes on by the share of the epochs that is done
            share = saved["samples"] / saved["stop"]
            schedule.last_epoch = round((saved["epoch"] + share) * self.steps_per_epoch)
        factor = schedule.lr_lambdas[0](schedule.last_epoch)
        for group, base_lr in zip(self.optimizer.param_groups, schedule.base_lrs, strict=True):
            group["lr"] = base_lr * factor
        if saved["settings"]["trainer"]["precision"] == precision.name:
            self.scaler.load_state_dict(saved["scaler"])
        # schema 1 has epoch and step alone
        for name in saved.keys() & _COUNTS:
            setattr(self, name, saved[name])
        restore_random_state(saved["random"], self.device)

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return next(self.network.parameters()).device


def check_saved(saved: dict[str, Any], where: str, state: TrainState | None = None) -> None:
    """Refuses contents that no run saves, before any of them is used.

    Args:
        saved: what a file holds.
        where: names the file.
        state: the ``TrainState`` that is to take over all of them, and stays as it is; None: the
            network alone is used.

    Raises:
        CheckpointError: names the part. What another network or optimizer has saved passes.
    """
    needed = set[str]()
    if not saved.keys().isdisjoint(_POSITION):
        needed |= _POSITION
    if state is not None:
        needed |= _NEEDED
    if missing := needed - saved.keys():
        raise CheckpointError(
            f"{where}: holds no {', '.join(sorted(missing))}; resume from another checkpoint"
        )
    if state is not None:
        weights_of({"model": saved["model"]}, where)
    for key, value in saved.items():
        try:
            if key in _TYPES:
                number = typed(_TYPES[key], value)
                if not number and key in ("ranks", "stop", "steps_per_epoch"):
                    raise ValueError("is 0")
            elif key == "classes":
                # text that a file can hold
                "".join(list.copy(value)).encode("utf-8", "surrogateescape")
            elif state is not None:
                _check_part(key, value, state)
        # odd contents may raise anything
        except Exception as error:
            why = printable(f"{type(error).__name__}: {error}"[:200])
            raise CheckpointError(
                f"{where}: its part {key} cannot be used ({why}); resume from another checkpoint"
            ) from error


def _check_part(key: str, value: Any, state: TrainState) -> None:
    """Raises any error if ``state``, which stays as it is, cannot take over a part."""
    if key == "schedule":
        typed(int, value["last_epoch"])
    elif key == "scaler":
        for name, fresh in state.scaler.state_dict().items():
            number = typed(type(fresh), value[name])
            # torch keeps whole numbers in 32 bits
            if number != fresh and not 0 < number < (2**31 if type(fresh) is int else math.inf):
                raise ValueError(f"odd {name}")
    elif key == "ema":
        if not all(map(is_plain, value.values())):
            raise ValueError("holds no weights of a network")
    elif key == "settings":
        typed(str, value["trainer"]["precision"])
    elif key == "random":
        # numpy takes any position, and reads beyond its numbers
        if not 0 <= value["numpy"]["position"] <= len(value["numpy"]["keys"]):
            raise ValueError("odd position")
        former = random_state(state.device)
        try:
            restore_random_state(value, state.device)
        finally:
            restore_random_state(former, state.device)
    elif key == "optimizer":
        own = [item for group in state.optimizer.param_groups for item in group["params"]]
        numbers = [number for group in value["param_groups"] for number in group["params"]]
        if numbers != list(range(len(numbers))) or value["state"].keys() - numbers:
            raise ValueError("odd parameters")
        # other parameters belong to another network, which loading refuses by name
        if len(numbers) != len(own):
            return
        held = value["state"]
        names = {name for each in held.values() for name in each}
        # a parameter that has had no gradient has no state
        for number, name in itertools.product(held, names):
            tensor = held[number][name]
            fits = is_plain(tensor) and tensor.is_floating_point()
            # the fused kernels trust the shapes: another one is a crash
            if not fits or tensor.shape != (() if name == "step" else own[number].shape):
                raise ValueError(f"{name} of parameter {number} does not fit")


def make_state(
    config: Config, num_classes: int, world: World, steps_per_epoch: int, *, filled: bool = False
) -> TrainState:
    """Returns a fresh network on this rank's device, with what trains it.

    No weights are read if the caller fills the network (``filled``).

    Raises:
        ConfigError: the network's name or its published weights, or what is to be frozen.
        CheckpointError: the file that ``model.weights`` names.
    """
    size = config.data.image_size
    network = models.build(config.model, num_classes, image_size=size, filled=filled)
    network = network.to(world.device)
    if config.trainer.channels_last:
        network = network.to(memory_format=torch.channels_last)
    if config.trainer.compile:
        # else a second size would make torch serve all sizes by one slower graph
        network.compile(dynamic=False)
    if (per := config.optim.lr_per) is not None:
        images = config.loader.batch_size * config.trainer.accumulate_steps * world.size
        lr = config.optim.lr * images / per
        say(f"learning rate {lr:.4g}: an update has {images} images, and optim.lr is for {per}")
        config = replace(config, optim=replace(config.optim, lr=lr))
    return state_of(network, config, world.device, steps_per_epoch)


def state_of(
    network: nn.Module, config: Config, device: torch.device, steps_per_epoch: int
) -> TrainState:
    """Returns the state of a run that trains ``network``, which lies on ``device``.

    Raises:
        ConfigError: what is to be frozen, or a network that cannot be copied to be averaged.
    """
    optim = config.optim
    optimizer = make_optimizer(network, optim)
    schedule = LambdaLR(
        optimizer,
        lambda step: lr_factor(step, config.schedule, config.trainer.epochs, steps_per_epoch),
    )
    # outside fp16 it only leaves out non-finite updates
    scaler: GradScaler = FiniteCheck(device)
    if config.trainer.precision is Precision.fp16:
        scaler = GradScaler(device.type)
    state = TrainState(network, optimizer, schedule, scaler, steps_per_epoch=steps_per_epoch)
    if optim.ema_decay is not None and config.mode is Mode.train:
        name = f"model.name={config.model.name}"
        with parts.explained(f"optim.ema_decay={optim.ema_decay}: {name} cannot be copied:"):
            state.average = Average(network, optim.ema_decay)
    if optim.freeze is not None:
        state.frozen = frozen_names(network, optim.freeze, config.model.name)
        state.freeze_epochs = optim.freeze_epochs or math.inf
    state.train()
    return state
