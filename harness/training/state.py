"""What a checkpoint holds, and how it goes back into a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.config import Config, Precision
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError
from harness.runtime.seeding import random_state, restore_random_state
from harness.training import contents, models
from harness.training.optim import make_optimizer, make_schedule


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
        steps_per_epoch: optimizer updates in a whole epoch; the schedule counts by them.
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
    steps_per_epoch: int = 1

    def to_dict(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The state as tensors and plain containers, with ``facts`` about the run beside it."""
        return {
            **facts,
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "samples": self.samples,
            "pending": self.pending,
            "best_top1": self.best_top1,
            "steps_per_epoch": self.steps_per_epoch,
            "random": random_state(self.device),
            "num_threads": torch.get_num_threads(),
        }

    def load_dict(self, saved: dict[str, Any], where: str, precision: Precision) -> None:
        """Take over what ``to_dict`` gave; all of it or, on an error, nothing.

        Learning rate, weight decay and the like stay this run's own, and the loss scale starts anew
        in another precision.

        Raises:
            CheckpointError: the checkpoint is of another network or optimizer; names the first
                differences.
        """
        needed = {"model", "optimizer", "schedule", "scaler", "epoch", "step", "random", "settings"}
        if missing := needed - saved.keys():
            raise CheckpointError(
                f"{where}: cannot be resumed: holds no {', '.join(sorted(missing))}"
            )
        contents.check(saved, where, self)
        problems = models.differences(self.network.state_dict(), saved["model"])
        ours = self.optimizer.state_dict()["param_groups"]
        theirs = saved["optimizer"]["param_groups"]
        if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
            problems.append("the optimizer's parameter groups differ (optim.decay_norm_and_bias)")
        elif {key for group in ours for key in group} != {key for group in theirs for key in group}:
            problems.append("the optimizer is of another kind (optim)")
        models.refuse(problems, f"{where}: does not fit this run")
        self.network.load_state_dict(saved["model"])
        self._load_optimizer(saved)
        if saved["settings"]["trainer"]["precision"] == precision.name:
            self.scaler.load_state_dict(saved["scaler"])
        self.epoch = int(saved["epoch"])
        self.step = int(saved["step"])
        self.samples = int(saved.get("samples", 0))
        self.pending = bool(saved.get("pending", False))
        self.best_top1 = saved.get("best_top1")
        restore_random_state(saved["random"], self.device)

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return next(self.network.parameters()).device

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        own = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        base_lrs = self.schedule.base_lrs
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        if saved.get("steps_per_epoch", self.steps_per_epoch) != self.steps_per_epoch:
            # other batches: by the share of the epochs that is done
            share = saved["samples"] / saved["stop"]
            self.schedule.last_epoch = round((saved["epoch"] + share) * self.steps_per_epoch)
        self.schedule.base_lrs = base_lrs
        factor = self.schedule.lr_lambdas[0](self.schedule.last_epoch)
        for group, settings, base_lr in zip(
            self.optimizer.param_groups, own, base_lrs, strict=True
        ):
            group.update(settings, lr=base_lr * factor)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                # the fused kernels want equal strides
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def make_state(
    config: Config, num_classes: int, world: World, steps_per_epoch: int, *, filled: bool = False
) -> TrainState:
    """A fresh network on this rank's device, and what trains it; no weights are read if the caller
    fills it (``filled``).

    Raises:
        ConfigError: the network's name or its published weights.
        CheckpointError: the file that ``model.weights`` names.
    """
    network = models.build(
        config.model, num_classes, image_size=config.data.image_size, filled=filled
    ).to(world.device)
    if config.trainer.channels_last:
        network = network.to(memory_format=torch.channels_last)
    if config.trainer.compile:
        # else a second size would make torch serve all sizes by one slower graph
        network.compile(dynamic=False)
    optimizer = make_optimizer(network, config.optim)
    schedule = make_schedule(optimizer, config.schedule, config.trainer.epochs, steps_per_epoch)
    scaler = make_scaler(config.trainer.precision, world.device)
    return TrainState(network, optimizer, schedule, scaler, steps_per_epoch=steps_per_epoch)


class FiniteCheck(GradScaler):
    """Leaves out non-finite updates on the device, as a scaler whose scale is 1 does, and
    multiplies nothing by that 1.

    For an optimizer that takes ``found_inf``, as torch's fused ones do.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type, init_scale=1.0)
        self._one = torch.ones((), device=device)

    def scale(self, outputs: Any) -> Any:
        """``outputs`` as they are."""
        return outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Note whether a gradient is not finite."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    by_dtype.setdefault(gradient.dtype, []).append(gradient)
        self._found = torch.zeros_like(self._one)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)

    def step(self, optimizer: Any) -> None:
        """Update, where all gradients that ``unscale_`` has seen were finite."""
        optimizer.found_inf = self._found
        optimizer.step()
        del optimizer.found_inf

    def update(self, new_scale: Any = None) -> None:
        """The scale stays 1."""


def make_scaler(precision: Precision, device: torch.device) -> GradScaler:
    """The gradient scaler; outside fp16 it only leaves out non-finite updates."""
    return GradScaler(device.type) if precision is Precision.fp16 else FiniteCheck(device)
