"""Holds the state of training, and converts it to a checkpoint and back."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..config import Config, Mode, Precision, train_sizes
from ..monitor.console import say
from ..runtime import user_code
from ..runtime.distributed import World
from ..runtime.errors import CheckpointError
from ..runtime.files import from_json
from ..runtime.seeding import random_state, restore_random_state
from . import models
from .average import Average
from .blocks import checkpoint_blocks, with_synced_norms
from .checkpoint_read import COUNTS, Saved
from .optimizer import Schedule, adopt, frozen_names, lr_factor, make_optimizer


@dataclass(slots=True)
class TrainState:
    """All that changes while a run trains.

    Attributes:
        config: the run's settings.
        world: this rank, on whose device the network lives.
        network: the bare one, not its DDP wrapper.
        scaler: scales fp16 losses; disabled in the other precisions.
        epoch: epochs done.
        step: optimizer updates done.
        samples: the position in the epoch that was begun: taken by all ranks together.
        pending: whether the evaluation that follows the last step is still to be made.
        best_top1: of all evaluations, 0..1.
        stale: evaluations at an epoch's end since ``best_top1`` rose.
        steps_per_epoch: optimizer updates in a whole epoch; the schedule counts by them.
        average: of the weights, if one is wanted.
        frozen: names of parameters and buffers that do not change in the first ``freeze_epochs``.
    """

    config: Config
    world: World
    network: nn.Module
    optimizer: Optimizer
    schedule: Schedule
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

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated: the average, if there is one."""
        return self.network if self.average is None else self.average.module

    def to_dict(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Returns the state as tensors and plain containers, with ``facts`` about the run."""
        averaged = {} if self.average is None else {"ema": self.average.state_dict()}
        return {
            **facts,
            **averaged,
            **{name: getattr(self, name) for name in (*COUNTS, "steps_per_epoch")},
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": {"last_epoch": self.schedule.last_epoch, "drops": self.schedule.drops},
            "scaler": self.scaler.state_dict(),
            "random": random_state(self.world.device),
            "num_threads": torch.get_num_threads(),
        }

    def load(self, saved: Saved) -> None:
        """Takes over what ``to_dict`` gave.

        Learning rate, weight decay and the like stay this run's own, and so does the loss scale
        where the precision is another one.

        Raises:
            CheckpointError: the checkpoint is of another network or optimizer, and nothing was
                changed; or no run saves such contents, and the state is useless.
        """
        held = saved.state
        with user_code.explained(f"{saved.where}: cannot be used:", kind=CheckpointError):
            modules: dict[str, nn.Module] = {"model": self.network}
            weights = {"model": held["model"]}
            if self.average is not None:
                modules["ema"] = self.average
                # one that begins here begins with the weights
                first = {f"module.{key}": value for key, value in held["model"].items()}
                weights["ema"] = held.get("ema") or {"n_averaged": torch.tensor(0), **first}
            own = {name: module.state_dict() for name, module in modules.items()}
            models.refuse_misfits(own, weights, saved.where, "this run")
            adopt(self.optimizer, held["optimizer"], saved.where, self.config.optim.args)
            for name, module in modules.items():
                module.load_state_dict(weights[name])
            update = from_json(int, held["schedule"]["last_epoch"])
            if held.get("steps_per_epoch", self.steps_per_epoch) != self.steps_per_epoch:
                # with other batches the schedule goes on by the share of the epochs that is done
                share = held["samples"] / held["stop"]
                update = round((held["epoch"] + share) * self.steps_per_epoch)
            self.schedule.drops = from_json(int, held["schedule"].get("drops", 0))
            self.schedule.go_to(update)
            trained = saved.trained
            if self.scaler.is_enabled() and trained and trained.trainer.precision is Precision.fp16:
                numbers = self.scaler.state_dict()
                for name, fresh in numbers.items():
                    numbers[name] = from_json(type(fresh), held["scaler"][name])
                self.scaler.load_state_dict(numbers)
                # the device takes them, or refuses
                self.scaler.scale(torch.zeros((), device=self.world.device))
            for name in held.keys() & COUNTS:
                setattr(self, name, held[name])
            drawn = held["random"]
            # numpy takes any position, and reads beyond its numbers
            if not 0 <= drawn["numpy"]["position"] <= len(drawn["numpy"]["keys"]):
                raise ValueError("odd position")
            restore_random_state(drawn, self.world.device)


def _placed_network(config: Config, num_classes: int, world: World, filled: bool) -> nn.Module:
    """Returns the network that ``config`` names on this rank's device, as the trainer runs it."""
    trainer = config.trainer
    size = config.data.image_size
    network = models.build(
        config.model,
        num_classes,
        image_size=size,
        filled=filled,
        train_sizes=train_sizes(config.data),
    )
    network = network.to(world.device)
    if trainer.channels_last:
        network = network.to(memory_format=torch.channels_last)
    if trainer.sync_batch_norm and world.size > 1:
        network = with_synced_norms(network, world.device)
    if trainer.checkpoint_blocks:
        checkpoint_blocks(network)
    if trainer.compile:
        # else a second size would make torch serve all sizes by one slower graph
        network.compile(dynamic=False, mode=trainer.compile_mode)
    return network


def make_state(
    config: Config,
    num_classes: int,
    world: World,
    steps_per_epoch: int,
    images: int = 0,
    *,
    filled: bool = False,
    network: nn.Module | None = None,
) -> TrainState:
    """Returns a fresh network on this rank's device, with what trains it.

    Args:
        config: the run's settings.
        num_classes: how many logits the network is to give.
        world: this rank.
        steps_per_epoch: optimizer updates in a whole epoch.
        images: of an update, of all ranks, for ``optim.lr_per``.
        filled: the caller fills the network, so that no weights are read.
        network: one that lies on the device, in place of the one that ``config`` names.

    Raises:
        ConfigError: the network's name or its published weights, what is to be frozen, or a network
            that cannot be copied to be averaged.
        CheckpointError: the file that ``model.weights`` names.
    """
    optim, trainer = config.optim, config.trainer
    name = config.model.name
    if network is None:
        network = _placed_network(config, num_classes, world, filled)
    if (per := optim.lr_per) is not None:
        optim = replace(optim, lr=optim.lr * images / per)
        say(f"learning rate {optim.lr:.4g}: an update has {images} images, optim.lr is for {per}")
    optimizer = make_optimizer(network, optim)
    scaler = GradScaler(world.device.type, enabled=trainer.precision is Precision.fp16)
    schedule = Schedule(
        optimizer,
        lambda step: lr_factor(step, config.schedule, trainer.epochs, steps_per_epoch),
        config.schedule.gamma,
    )
    state = TrainState(
        config, world, network, optimizer, schedule, scaler, steps_per_epoch=steps_per_epoch
    )
    if optim.ema_decay is not None and config.mode is Mode.train:
        with user_code.explained(
            f"optim.ema_decay={optim.ema_decay}: model.name={name} cannot be copied:"
        ):
            state.average = Average(network, optim.ema_decay)
    if optim.freeze is not None:
        state.frozen = frozen_names(network, optim.freeze, name)
        state.freeze_epochs = optim.freeze_epochs or math.inf
    return state
