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

from harness.config import Config, Mode, Precision, TrainerConfig
from harness.runtime import parts
from harness.runtime.distributed import World
from harness.runtime.files import typed
from harness.runtime.seeding import random_state, restore_random_state
from harness.training import models
from harness.training.average import Average
from harness.training.checkpoint import COUNTS, Saved, is_plain, weights_of
from harness.training.optimizer import (
    fill_momentum,
    frozen_names,
    lr_factor,
    make_optimizer,
)
from harness.watch.console import say


@dataclass(slots=True)
class TrainState:
    """All that changes while a run trains.

    Attributes:
        network: the bare network, not its DDP wrapper.
        scaler: scales fp16 losses; disabled in the other precisions.
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
            **{name: getattr(self, name) for name in (*COUNTS, "steps_per_epoch")},
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": {"last_epoch": self.schedule.last_epoch},
            "scaler": self.scaler.state_dict(),
            "random": random_state(self.device),
            "num_threads": torch.get_num_threads(),
        }

    def load(self, saved: Saved) -> None:
        """Takes over what ``to_dict`` gave.

        Learning rate, weight decay and the like stay this run's own, and so does the loss scale
        where the precision is another one.

        Raises:
            CheckpointError: the checkpoint is of another network or optimizer, and nothing was
                changed; or no run saves such contents, and the state is of no use any more.
        """
        held = saved.state
        with saved.in_use():
            weights_of({"model": held["model"]}, saved.where)
            modules = [(self.network, held["model"])]
            if self.average is not None:
                # one that begins here begins with the weights
                first = {f"module.{key}": value for key, value in held["model"].items()}
                averaged = held.get("ema") or {"n_averaged": torch.tensor(0), **first}
                modules.append((self.average, averaged))
            self._refuse_misfits(saved, modules)
            for module, weights in modules:
                module.load_state_dict(weights)
            self._load_optimizer(held["optimizer"]["state"])
            schedule = self.schedule
            schedule.last_epoch = typed(int, held["schedule"]["last_epoch"])
            if held.get("steps_per_epoch", self.steps_per_epoch) != self.steps_per_epoch:
                # with other batches the schedule goes on by the share of the epochs that is done
                share = held["samples"] / held["stop"]
                schedule.last_epoch = round((held["epoch"] + share) * self.steps_per_epoch)
            factor = schedule.lr_lambdas[0](schedule.last_epoch)
            for group, base_lr in zip(self.optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = base_lr * factor
            trained = saved.trained
            if self.scaler.is_enabled() and trained and trained.trainer.precision is Precision.fp16:
                numbers = self.scaler.state_dict()
                for name, fresh in numbers.items():
                    numbers[name] = typed(type(fresh), held["scaler"][name])
                self.scaler.load_state_dict(numbers)
                # the device takes them, or refuses
                self.scaler.scale(torch.zeros((), device=self.device))
            for name in held.keys() & COUNTS:
                setattr(self, name, held[name])
            drawn = held["random"]
            # numpy takes any position, and reads beyond its numbers
            if not 0 <= drawn["numpy"]["position"] <= len(drawn["numpy"]["keys"]):
                raise ValueError("odd position")
            restore_random_state(drawn, self.device)

    def _refuse_misfits(
        self, saved: Saved, modules: list[tuple[nn.Module, dict[str, Any]]]
    ) -> None:
        """Refuses, before any change, another network, its average or another optimizer."""
        problems = []
        for module, weights in modules:
            problems += models.differences(module.state_dict(), weights)
        ours = self.optimizer.state_dict()["param_groups"]
        theirs = saved.state["optimizer"]["param_groups"]
        if [group["params"] for group in ours] != [group["params"] for group in theirs]:
            problems.append(
                "the optimizer's parameter groups differ (optim.decay_norm_and_bias, layer_decay)"
            )
        elif ours[0].keys() != theirs[0].keys():
            problems.append("the optimizer is of another kind (optim)")
        models.refuse(problems, f"{saved.where}: does not fit this run")

    def _load_optimizer(self, held: dict[int, dict[str, Any]]) -> None:
        """Takes over what the optimizer ``held`` for each parameter, by the parameter's number."""
        own = [item for group in self.optimizer.param_groups for item in group["params"]]
        names = {name for each in held.values() for name in each}
        # a parameter that has had no gradient has no state
        kept: dict[int, dict[str, Any]] = {n: {} for n in range(len(own)) if n in held}
        for number, name in itertools.product(kept, names):
            tensor = held[number][name]
            # the fused kernels trust shapes and strides: others are a crash
            like = tensor if name == "step" else own[number]
            wanted = torch.Size() if name == "step" else like.shape
            if not (is_plain(tensor) and tensor.is_floating_point() and tensor.shape == wanted):
                raise ValueError(f"{name} of parameter {number} does not fit")
            kept[number][name] = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": kept})
        fill_momentum(self.optimizer)

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return next(self.network.parameters()).device


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
    scaler = GradScaler(device.type, enabled=config.trainer.precision is Precision.fp16)
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
