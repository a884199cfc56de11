"""What a checkpoint holds, and how it goes back into a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.config import Config, Precision
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError
from harness.runtime.folder import LOGGER
from harness.runtime.seeding import random_state, restore_random_state
from harness.training import checkpoint, models
from harness.training.optim import make_optimizer, make_schedule
from harness.watch.console import say

_log = logging.getLogger(LOGGER)


@dataclass(slots=True)
class TrainState:
    """All that changes while a run trains.

    Attributes:
        network: the bare network, not its DDP wrapper.
        scaler: scales fp16 losses; in the other precisions its scale is 1 and it only finds non-finite gradients.
        epoch: epochs done.
        step: optimizer updates done.
    """

    network: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    scaler: GradScaler
    epoch: int = 0
    step: int = 0

    def to_dict(self, settings: dict[str, Any], classes: tuple[str, ...]) -> dict[str, Any]:
        """The state as tensors and plain containers, with the run's ``settings`` and ``classes`` beside it."""
        return {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "random": random_state(self.device),
            "num_threads": torch.get_num_threads(),
            "settings": settings,
            "classes": list(classes),
        }

    def load_dict(self, saved: dict[str, Any], where: str, precision: Precision) -> None:
        """Take over what ``to_dict`` gave; all of it or, on an error, nothing.

        Learning rate, weight decay and the like stay this run's own, and the loss scale starts anew in another precision.

        Raises:
            CheckpointError: the checkpoint is of another network or optimizer; names the first differences.
        """
        needed = {"model", "optimizer", "schedule", "scaler", "epoch", "step", "random", "settings"}
        if missing := needed - saved.keys():
            raise CheckpointError(f"{where}: cannot be resumed: holds no {', '.join(sorted(missing))}")
        problems = _differences(self.network.state_dict(), saved["model"])
        problems += _optimizer_differences(self.optimizer.state_dict(), saved["optimizer"])
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise CheckpointError(f"{where}: does not fit this run: {'; '.join(problems[:5])}{more}")
        self.network.load_state_dict(saved["model"])
        self._load_optimizer(saved)
        if saved["settings"]["trainer"]["precision"] == precision.name:
            self.scaler.load_state_dict(saved["scaler"])
        self.epoch, self.step = int(saved["epoch"]), int(saved["step"])
        restore_random_state(saved["random"], self.device)

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return next(self.network.parameters()).device

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        base_lrs = self.schedule.base_lrs
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.schedule.base_lrs = base_lrs
        factor = self.schedule.lr_lambdas[0](self.schedule.last_epoch)
        for group, settings, base_lr in zip(self.optimizer.param_groups, own, base_lrs, strict=True):
            group.update(settings, lr=base_lr * factor)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:  # the fused kernels want equal strides
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def make_state(config: Config, num_classes: int, world: World, steps_per_epoch: int) -> TrainState:
    """A fresh network on this rank's device, and what trains it.

    Raises:
        ConfigError: the network's name or its published weights.
        CheckpointError: the file that ``model.weights`` names.
    """
    network = models.build(config.model, num_classes, image_size=config.data.image_size).to(world.device)
    if config.trainer.channels_last:
        network = network.to(memory_format=torch.channels_last)
    if config.trainer.compile:
        network.compile()
    optimizer = make_optimizer(network, config.optim)
    schedule = make_schedule(optimizer, config.schedule, config.trainer.epochs, steps_per_epoch)
    return TrainState(network, optimizer, schedule, make_scaler(config.trainer.precision, world.device))


def make_scaler(precision: Precision, device: torch.device) -> GradScaler:
    """The gradient scaler; outside fp16 its scale is 1 and it serves to leave out non-finite updates on the device."""
    return GradScaler(device.type) if precision is Precision.fp16 else GradScaler(device.type, init_scale=1.0)


def resume(state: TrainState, config: Config, world: World, folder: Path, classes: tuple[str, ...]) -> int | None:
    """Take over the checkpoint that ``resume=`` names; its step, or None where training starts anew.

    Raises:
        CheckpointError: it is missing, damaged, does not fit, or the ranks do not see the same. Training never starts anew
            in its place.
    """
    if config.resume is not None:
        _take_over(state, config, folder, classes)
    if world.smallest(state.step) != world.largest(state.step):
        raise CheckpointError(f"{folder}: the ranks see different checkpoints; the run folder must be shared by all nodes")
    return state.step if state.step else None


def _take_over(state: TrainState, config: Config, folder: Path, classes: tuple[str, ...]) -> None:
    assert config.resume is not None
    if config.resume == "auto":
        found = checkpoint.newest(folder / "checkpoints")
        if found is None:
            say("resume=auto: no checkpoint yet, starting at epoch 1")
            return
        record, saved, damaged = found
        for text in damaged:
            _log.warning("%s; falling back to %s", text, record.path.name)
    else:
        record, saved = checkpoint.read(Path(config.resume))
    if tuple(saved.get("classes", classes)) != classes:
        raise CheckpointError(f"{record.path}: its classes are not this data set's: {', '.join(saved['classes'][:5])} ...")
    state.load_dict(saved, str(record.path), config.trainer.precision)
    threads = saved.get("num_threads")
    if threads != torch.get_num_threads():
        _log.warning("saved with %s torch threads, now %d: not bitwise the same", threads, torch.get_num_threads())
    say(f"resumed {record.path}: {state.epoch} epochs and {state.step} steps are done")


def _differences(own: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    found = [f"{key} is missing" for key in own if key not in saved]
    found += [f"{key} is not expected" for key in saved if key not in own]
    found += [
        f"{key} is {list(saved[key].shape)}, not {list(own[key].shape)}"
        for key in own
        if key in saved and saved[key].shape != own[key].shape
    ]
    return found


def _optimizer_differences(own: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    mine, theirs = own["param_groups"], saved["param_groups"]
    found = []
    if [len(group["params"]) for group in mine] != [len(group["params"]) for group in theirs]:
        found.append("the optimizer's parameter groups differ (optim.decay_norm_and_bias)")
    elif {key for group in mine for key in group} != {key for group in theirs for key in group}:
        found.append("the optimizer is of another kind (optim)")
    return found
