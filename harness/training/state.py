"""Holds the training state and converts it to a checkpoint and back."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..config import Config, ConfigError, Mode, Precision, train_sizes
from ..monitor.console import say
from ..runtime import accelerator, user_code
from ..runtime.distributed import World
from ..runtime.errors import CheckpointError
from ..runtime.files import from_json
from ..runtime.seeding import random_state, restore_random_state
from . import models
from .average import Average
from .blocks import checkpoint_blocks
from .checkpoint_read import COUNTS, Saved
from .optimizer import Schedule, adopt, frozen_names, lr_factor, make_optimizer


@dataclass(slots=True)
class TrainState:
    """State that changes during training.

    Attributes:
        config: the run's settings.
        world: this rank; the network is on its device.
        network: the bare network, not its DDP wrapper.
        scaler: scales fp16 losses; disabled for other precisions.
        epoch: completed epochs.
        step: completed optimizer steps.
        samples: number of samples taken from the current epoch, summed over all ranks.
        pending: whether the evaluation after the last step is still due.
        best_top1: best top-1 accuracy in all evaluations, 0..1.
        stale: end-of-epoch evaluations since ``best_top1`` improved.
        steps_per_epoch: optimizer steps in a full epoch, used by the schedule.
        average: the moving average of the weights, if enabled.
        frozen: names of parameters and buffers frozen for the first ``optim.freeze_epochs``.
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

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate: the average, if there is one."""
        return self.average.module if self.average else self.network

    def to_dict(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Returns the state as tensors and plain containers, with ``facts`` about the run."""
        averaged = {"ema": self.average.state_dict()} if self.average else {}
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
        """Restores the state that ``to_dict`` returned.

        The run keeps its own learning rate, weight decay and similar settings, and its loss scale
        if the precision differs.

        Raises:
            CheckpointError: either the checkpoint is from another network or optimizer, and nothing
                was changed, or its contents are invalid, and the state is unusable.
        """
        held = saved.state
        with user_code.explained(f"{saved.where}: cannot be used:", kind=CheckpointError):
            modules: dict[str, nn.Module] = {"model": self.network}
            weights = {"model": held["model"]}
            if self.average:
                modules["ema"] = self.average
                # a new average starts from the weights
                first = {f"module.{key}": value for key, value in held["model"].items()}
                weights["ema"] = held.get("ema") or {"n_averaged": torch.tensor(0), **first}
            own = {name: module.state_dict() for name, module in modules.items()}
            models.refuse_misfits(own, weights, saved.where, "this run")
            adopt(self.optimizer, held["optimizer"], saved.where, self.config.optim.args)
            for name, module in modules.items():
                module.load_state_dict(weights[name])
            update = from_json(int, held["schedule"]["last_epoch"])
            if held.get("steps_per_epoch", self.steps_per_epoch) != self.steps_per_epoch:
                # with other batches, continue the schedule at the completed fraction of epochs
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
                # raises if the device rejects them
                self.scaler.scale(torch.zeros((), device=self.world.device))
            for name in held.keys() & COUNTS:
                setattr(self, name, held[name])
            drawn = held["random"]
            # numpy accepts any position and reads out of bounds
            if not 0 <= drawn["numpy"]["position"] <= len(drawn["numpy"]["keys"]):
                raise ValueError("the position in a random state is invalid")
            restore_random_state(drawn, self.world.device)


def _placed_network(config: Config, num_classes: int, world: World, filled: bool) -> nn.Module:
    """Returns the network specified by ``config`` on this rank's device, set up for training."""
    trainer = config.trainer
    network = models.build(
        config.model,
        num_classes,
        image_size=config.data.image_size,
        filled=filled,
        train_sizes=train_sizes(config.data),
    )
    network = network.to(world.device)
    if trainer.channels_last:
        network = network.to(memory_format=torch.channels_last)
    if trainer.sync_batch_norm and world.size > 1:
        if accelerator.get(world.device).is_host:
            raise ConfigError(
                "trainer.sync_batch_norm=true: torch supports synchronized batch normalization "
                "only on GPUs; set it to false"
            )
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    if trainer.checkpoint_blocks:
        checkpoint_blocks(network)
    if trainer.compile:
        # otherwise, a second size makes torch use one slower graph for all sizes
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
    """Returns the initial training state on this rank's device.

    Args:
        config: the run's settings.
        num_classes: number of logits.
        world: this rank.
        steps_per_epoch: optimizer steps in a full epoch.
        images: effective batch size across all ranks, for ``optim.lr_per``.
        filled: whether the caller loads the weights, so none are read.
        network: used instead of the one specified by ``config``; already on the device.

    Raises:
        ConfigError: the network name, pretrained weights or ``optim.freeze`` are invalid, or the
            network cannot be copied for averaging.
        CheckpointError: the ``model.weights`` file cannot be used.
    """
    optim, trainer = config.optim, config.trainer
    name = config.model.name
    if network is None:
        network = _placed_network(config, num_classes, world, filled)
    if per := optim.lr_per:
        optim = replace(optim, lr=optim.lr * images / per)
        say(f"learning rate {optim.lr:.4g}: effective batch size {images}; optim.lr is for {per}")
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
    if optim.ema_decay and config.mode is Mode.train:
        steps = min(trainer.epochs * steps_per_epoch, trainer.max_steps or sys.maxsize)
        if (first := optim.ema_decay**steps) > 0.1:
            say(
                f"moving average: after {steps} steps, the initial weights still make up "
                f"{first:.0%}. Try: optim.ema_decay={max(0.5, 1 - 5 / steps):.4g}"
            )
        with user_code.explained(
            f"optim.ema_decay={optim.ema_decay}: model.name={name} cannot be copied:"
        ):
            state.average = Average(network, optim.ema_decay)
    if optim.freeze is not None:
        state.frozen = frozen_names(network, optim.freeze, name)
    return state
