"""One optimizer update, without a word from the device to the host."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.config import Config, ConfigError, Precision
from harness.data.augment import BatchAugment
from harness.data.mix import Mix
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator
from harness.runtime.distributed import World
from harness.training.state import TrainState
from harness.watch.clock import StepClock
from harness.watch.spans import named

DTYPES = {
    Precision.fp32: torch.float32,
    Precision.fp16: torch.float16,
    Precision.bf16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What the steps since the last reading did.

    Attributes:
        loss: mean of the finite losses, or None if there was none.
        skipped: updates left out because a gradient was not finite.
        worst_streak: most updates left out in a row, counted over the readings.
    """

    loss: float | None
    skipped: int
    worst_streak: int


class Step:
    """Forward, backward and update on batches that are on the device.

    Args:
        state: the network and what trains it; ``state.step`` counts the updates.
        config: precision, accumulation, clipping, label smoothing, and what is done to its batches.
        world: wraps the network in DDP where there are several ranks.
        classes: how many there are; needed where mixup or CutMix is wanted.
        class_weights: a weight for each class in the loss; None: all are 1.
    """

    def __init__(
        self,
        state: TrainState,
        config: Config,
        world: World,
        classes: int | None = None,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        self.state = state
        self._config = config
        self._device = world.device
        self._classes = classes
        self._weights = None
        if class_weights is not None:
            self._weights = torch.tensor(class_weights, device=world.device)
        self._augment = BatchAugment.from_config(config.augment, config.seed)
        self._mix = Mix.from_config(config.augment, classes, config.seed)
        self.autocast = autocast_of(config.trainer.precision, world.device)
        self._world = world
        self.model: nn.Module = state.network
        self.begin_epoch()
        self._forward: _ForwardTimer | None = None
        is_cpu = accelerator.of(world.device).kind == "cpu"
        if world.size > 1 and is_cpu and not config.trainer.compile:
            self._forward = _ForwardTimer(state.network)
        # on the device, until they are read together
        self._losses: list[Tensor] = []
        self._found_inf: list[Tensor] = []
        self._streak = 0
        # the scaler sets it for the time of the update: 0.0 or 1.0
        state.optimizer.register_step_pre_hook(
            lambda optimizer, *_: self._found_inf.append(optimizer.found_inf)
        )

    def begin_epoch(self) -> None:
        """Has the network train what its epoch wants; several ranks must do it together."""
        network = self.state.network
        if self.state.train():
            # DDP's hooks are on what was trained when it was made; the former one goes first
            self.model = network
        if self._world.size > 1 and self.model is network:
            place = accelerator.of(self._device).place
            places = None if place is None else [place]
            self.model = DistributedDataParallel(network, device_ids=places)

    def __call__(self, images: Tensor, labels: Tensor, *, part: int = 0, parts: int = 1) -> None:
        """Trains on one of the ``parts`` batches of an update; the last makes it.

        Labels are int64 ``[N]``, or float ``[N, classes]`` where they were mixed.
        """
        state = self.state
        last = part == parts - 1
        sync: AbstractContextManager[None] = nullcontext()
        # gradients meet with the last batch of an update
        if not last and isinstance(self.model, DistributedDataParallel):
            sync = self.model.no_sync()
        with sync:
            with self.autocast(), named("forward"):
                logits = self.model(images)
                self._check(logits, len(images))
                if self._weights is not None and labels.ndim == 1:
                    # Of weighted labels torch's mean is over the batch's weights, so that an image
                    # counts differently on other ranks. That of shares of classes is over images.
                    labels = F.one_hot(labels, len(self._weights)).float()
                smoothing = self._config.optim.label_smoothing
                loss = F.cross_entropy(logits, labels, self._weights, label_smoothing=smoothing)
            with named("backward"):
                share = loss
                if parts > 1:
                    share = loss / parts
                state.scaler.scale(share).backward()
        self._losses.append(loss.detach())
        if not last:
            return
        with named("update"):
            state.scaler.unscale_(state.optimizer)
            if self._config.optim.clip_norm is not None:
                nn.utils.clip_grad_norm_(state.network.parameters(), self._config.optim.clip_norm)
            # fused optimizers leave the update out on the device where a gradient is not finite
            state.scaler.step(state.optimizer)
            state.scaler.update()
            if state.average is not None:
                state.average.update(state.network, self._found_inf[-1])
            state.optimizer.zero_grad(set_to_none=True)
            state.schedule.step()
            state.step += 1

    def _check(self, logits: Any, count: int) -> None:
        """Refuses what no loss can be made of: a network's modes may give other things."""
        kind = type(logits).__name__
        if isinstance(logits, Tensor):
            plain = logits.is_floating_point() and logits.layout is torch.strided
            wanted = (count, self._classes or logits.shape[-1])
            if plain and logits.requires_grad and logits.shape == wanted:
                return
            kind = f"{logits.dtype} {list(logits.shape)}"
        raise ConfigError(
            f"model.name={self._config.model.name}: while it trains the network gives {kind} for "
            f"{count} images; it must give a floating-point tensor [images, classes] with a "
            "gradient, as in evaluation"
        )

    def batches(self, feed: Iterable[Any], clock: StepClock | None = None) -> DataPrefetcher:
        """Returns the batches of ``feed`` as trained on: augmented, normalised, mixed."""
        return device_batches(
            feed, self._config, self._device, clock, augment=self._augment, mix=self._mix
        )

    @property
    def forward_ms(self) -> float | None:
        """Mean time per update of the network's own forward passes.

        None: unknown, but where several ranks train on CPUs.
        """
        timer = self._forward
        if timer is None or timer.passes < 1:
            return None
        return 1e3 * timer.seconds * self._config.trainer.accumulate_steps / timer.passes

    def read(self) -> StepFigures:
        """Returns the figures since the last call.

        The host waits here for the device: call it once a window, not once a step.
        """
        count = len(self._losses)
        values: list[float] = []
        if count:
            values = torch.stack([*self._losses, *self._found_inf]).tolist()
        self._losses = []
        self._found_inf = []
        finite = [loss for loss in values[:count] if math.isfinite(loss)]
        loss = sum(finite) / len(finite) if finite else None
        skipped = 0
        worst = 0
        for found in values[count:]:
            skipped += bool(found)
            self._streak = (self._streak + 1) * bool(found)
            worst = max(worst, self._streak)
        return StepFigures(loss, skipped, worst)

    def forget(self) -> None:
        """Drops all unread figures; the host does not wait for the device."""
        self._losses = []
        self._found_inf = []
        if self._forward is not None:
            self._forward.forget()


class _ForwardTimer:
    """Times ``network`` inside DDP, without the ranks' waits for each other.

    That tells a slow rank. The first pass, in which memory is taken and kernels are chosen, does
    not count.
    """

    def __init__(self, network: nn.Module) -> None:
        self.forget()
        network.register_forward_pre_hook(self.begin)
        network.register_forward_hook(self.end)

    def forget(self) -> None:
        self.seconds = 0.0
        self.passes = -1

    def begin(self, network: nn.Module, images: Any) -> None:
        self._began_s = time.perf_counter()

    def end(self, network: nn.Module, images: Any, logits: Any) -> None:
        if network.training:
            self.passes += 1
            if self.passes:
                self.seconds += time.perf_counter() - self._began_s


def autocast_of(
    precision: Precision, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what opens a block whose forward passes are of ``precision``."""
    if precision is Precision.fp32:
        return nullcontext
    return functools.partial(torch.autocast, device.type, DTYPES[precision])


def device_batches(
    feed: Iterable[Any],
    config: Config,
    device: torch.device,
    clock: StepClock | None = None,
    *,
    augment: BatchAugment | None = None,
    mix: Mix | None = None,
) -> DataPrefetcher:
    """Returns the batches of ``feed`` on ``device``; ``clock`` is told of their copies.

    Training has ``augment`` done to them before they are normalised, and ``mix`` after it.
    Evaluation has them normalised alone.
    """
    return DataPrefetcher(
        feed,
        device,
        mean=config.data.mean,
        std=config.data.std,
        dtype=DTYPES[config.trainer.precision],
        channels_last=config.trainer.channels_last,
        clock=clock,
        ahead=None if config.loader.device_prefetch else False,
        augment=augment,
        mix=mix,
    )
