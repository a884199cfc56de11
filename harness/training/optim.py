"""Parameter groups, the optimizer and the learning rate over time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.config import OptimConfig, OptimName, ScheduleConfig, ScheduleName


def make_optimizer(network: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimizer over ``network``'s parameters.

    Norms and biases (every parameter with fewer than two dimensions) have no weight decay unless
    ``optim.decay_norm_and_bias`` says so. The fused form is used everywhere: it can skip an update
    on the device.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    if config.decay_norm_and_bias:
        groups: list[dict[str, Any]] = [{"params": parameters}]
    else:
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
    if config.name is OptimName.adamw:
        return AdamW(
            groups,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    optimizer = SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=True,
    )
    # torch makes the buffers unfilled at the first update, and leaves them so if that one is
    # skipped
    if config.momentum:
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Schedule(LambdaLR):
    """``LambdaLR`` with one factor for all groups, at a fraction of its cost."""

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next update."""
        self.last_epoch += 1
        factor = self.lr_lambdas[0](self.last_epoch)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * factor

    def get_last_lr(self) -> list[Any]:
        """Each group's rate."""
        return [group["lr"] for group in self.optimizer.param_groups]


def make_schedule(
    optimizer: Optimizer, config: ScheduleConfig, epochs: int, steps_per_epoch: int
) -> Schedule:
    """The schedule, to be stepped once per update."""
    return Schedule(optimizer, lambda step: lr_factor(step, config, epochs, steps_per_epoch))


def lr_factor(step: int, config: ScheduleConfig, epochs: int, steps_per_epoch: int) -> float:
    """The share of ``optim.lr`` that update number ``step`` (from 0) uses.

    Warm-up is linear and ends at the peak; ``step`` drops at whole epochs as torch's ``StepLR``
    stepped once per epoch; ``cosine`` falls from the end of the warm-up to ``final_fraction`` at
    the last update (SGDR, arXiv 1608.03983).
    """
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.name is ScheduleName.step:
        return float(config.gamma ** (step // steps_per_epoch // config.step_epochs))
    if config.name is ScheduleName.cosine:
        done = min(1.0, (step - warmup) / max(1.0, epochs * steps_per_epoch - warmup))
        return (
            config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * done)) / 2
        )
    return 1.0
