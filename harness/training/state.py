"""What training changes: network, optimizer, learning rate, counts; to a checkpoint and back."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.config import (
    Config,
    OptimConfig,
    OptimName,
    Precision,
    ScheduleConfig,
    ScheduleName,
    TrainerConfig,
)
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError, printable
from harness.runtime.files import typed
from harness.runtime.seeding import random_state, restore_random_state
from harness.training import models
from harness.training.checkpoint import is_plain, weights_of

# what a run goes on with
_NEEDED = {"model", "optimizer", "schedule", "scaler", "epoch", "step", "random", "settings"}
# what a resumed run counts on from
_COUNTS = {
    "epoch": int,
    "step": int,
    "samples": int,
    "pending": bool,
    "best_top1": float | None,
}
_TYPES = _COUNTS | {"length": int, "ranks": int, "stop": int, "steps_per_epoch": int}
# where a run stands within an epoch; checkpoints of schema 1 have none of these
_POSITION = _TYPES.keys() - {"epoch", "step"}


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

    def is_done(self, config: TrainerConfig) -> bool:
        """Whether trainer.epochs or trainer.max_steps ends the run here."""
        return self.epoch >= config.epochs or self.step >= (config.max_steps or math.inf)

    def to_dict(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Returns the state as tensors and plain containers, with ``facts`` about the run."""
        return {
            **facts,
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
        ours = self.optimizer.state_dict()["param_groups"]
        theirs = saved["optimizer"]["param_groups"]
        if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
            problems.append("the optimizer's parameter groups differ (optim.decay_norm_and_bias)")
        elif {*itertools.chain(*ours)} != {*itertools.chain(*theirs)}:
            problems.append("the optimizer is of another kind (optim)")
        models.refuse(problems, f"{where}: does not fit this run")

        # nothing below refuses what was checked
        self.network.load_state_dict(saved["model"])
        self.optimizer.load_state_dict({**saved["optimizer"], "param_groups": ours})
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                # the fused kernels want equal strides
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        _fill_momentum(self.optimizer)
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
        ConfigError: the network's name or its published weights.
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
    return state_of(network, config, world.device, steps_per_epoch)


def state_of(
    network: nn.Module, config: Config, device: torch.device, steps_per_epoch: int
) -> TrainState:
    """Returns the state of a run that trains ``network``, which lies on ``device``."""
    optimizer = make_optimizer(network, config.optim)
    schedule = LambdaLR(
        optimizer,
        lambda step: lr_factor(step, config.schedule, config.trainer.epochs, steps_per_epoch),
    )
    # outside fp16 it only leaves out non-finite updates
    scaler: GradScaler = FiniteCheck(device)
    if config.trainer.precision is Precision.fp16:
        scaler = GradScaler(device.type)
    return TrainState(network, optimizer, schedule, scaler, steps_per_epoch=steps_per_epoch)


class FiniteCheck(GradScaler):
    """Leaves out non-finite updates on the device, cheaper than a scaler of scale 1.

    The optimizer must take ``found_inf``, as torch's fused ones do.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type, init_scale=1.0)
        self._one = torch.ones((), device=device)

    def scale(self, outputs: Any) -> Any:
        """Returns ``outputs`` as they are."""
        return outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Notes whether a gradient is not finite."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    by_dtype.setdefault(gradient.dtype, []).append(gradient)
        self._found = torch.zeros_like(self._one)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)

    def step(self, optimizer: Any) -> None:
        """Updates, if all gradients that ``unscale_`` has seen were finite."""
        optimizer.found_inf = self._found
        optimizer.step()
        del optimizer.found_inf

    def update(self, new_scale: Any = None) -> None:
        """The scale stays 1."""


def make_optimizer(network: nn.Module, config: OptimConfig) -> Optimizer:
    """Returns the optimizer over ``network``'s parameters.

    Norms and biases (every parameter with fewer than two dimensions) have no weight decay unless
    ``optim.decay_norm_and_bias`` says so. The optimizer is always the fused form, which can skip an
    update on the device.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if not config.decay_norm_and_bias:
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.name is OptimName.adamw:
        return AdamW(groups, betas=config.betas, eps=config.eps, **common)
    optimizer = SGD(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
    _fill_momentum(optimizer)
    return optimizer


def _fill_momentum(optimizer: Optimizer) -> None:
    """Gives each parameter of SGD that has no momentum yet one of zeros."""
    # torch makes the buffers unfilled at the first update, and leaves them so if that is skipped;
    # where some parameters have one and others none, the update ends with an error
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            state = optimizer.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def lr_factor(step: int, config: ScheduleConfig, epochs: int, steps_per_epoch: int) -> float:
    """Returns the share of ``optim.lr`` that update number ``step`` (from 0) uses.

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
        fall = 1 - config.final_fraction
        return config.final_fraction + fall * (1 + math.cos(math.pi * done)) / 2
    return 1.0
