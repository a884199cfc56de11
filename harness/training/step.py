"""One optimizer update, without a word from the device to the host."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness.config import Config, Precision
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
_AS_IT_IS = contextlib.nullcontext()


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
    """

    def __init__(
        self, state: TrainState, config: Config, world: World, classes: int | None = None
    ) -> None:
        self.state = state
        self._config = config
        self._device = world.device
        self._augment = BatchAugment.from_config(config.augment, config.seed)
        self._mix = Mix.from_config(config.augment, classes, config.seed)
        self._clip_norm = config.optim.clip_norm
        self._smoothing = config.optim.label_smoothing
        self.autocast = autocast_of(world.device, config.trainer.precision)
        self.model: nn.Module = state.network
        own = accelerator.of(world.device)
        self._on_host = own.kind == "cpu"
        if world.size > 1:
            self.model = DistributedDataParallel(
                state.network, device_ids=None if own.place is None else [own.place]
            )
        # on the device, until they are read together
        self._losses: list[Tensor] = []
        self._found_inf: list[Tensor] = []
        self._streak = 0
        state.optimizer.register_step_pre_hook(self._note_found_inf)
        alone = world.size == 1 or own.kind != "cpu" or config.trainer.compile
        self._forward = (
            None if alone else _ForwardTimer(state.network, config.trainer.accumulate_steps)
        )

    def __call__(self, images: Tensor, labels: Tensor, *, part: int = 0, parts: int = 1) -> None:
        """Train on one of the ``parts`` batches of an update; the last one makes the update.

        Labels are int64 ``[N]``, or float ``[N, classes]`` where they were mixed.
        """
        last = part == parts - 1
        quiet = isinstance(self.model, DistributedDataParallel) and not last
        with self.model.no_sync() if quiet else _AS_IT_IS:  # type: ignore[operator]
            with self.autocast(), named("forward"):
                loss = F.cross_entropy(self.model(images), labels, label_smoothing=self._smoothing)
            with named("backward"):
                self.state.scaler.scale(loss / parts if parts > 1 else loss).backward()
        self._losses.append(loss.detach())
        if last:
            with named("update"):
                self._update()

    def batches(self, feed: Iterable[Any], clock: StepClock | None = None) -> DataPrefetcher:
        """The batches of ``feed`` as the step trains on them: augmented, normalised, mixed."""
        return device_batches(
            feed, self._config, self._device, clock, augment=self._augment, mix=self._mix
        )

    @property
    def forward_ms(self) -> float | None:
        """Mean time per update of the network's own forward passes, where several ranks train on
        CPUs; else None.
        """
        return None if self._forward is None else self._forward.mean_ms()

    def read(self) -> StepFigures:
        """The figures since the last call.

        The host waits here for the device: call it once a window, not once a step.
        """
        noted = [*self._losses, *self._found_inf]
        count = len(self._losses)
        # a host's values are there; a device's are fetched at once
        together = torch.stack(noted).tolist() if noted and not self._on_host else None
        values = [value.item() for value in noted] if together is None else together
        self._losses = []
        self._found_inf = []
        finite = [loss for loss in values[:count] if math.isfinite(loss)]
        skipped = worst = 0
        for found in values[count:]:
            self._streak = self._streak + 1 if found else 0
            skipped += bool(found)
            worst = max(worst, self._streak)
        return StepFigures(sum(finite) / len(finite) if finite else None, skipped, worst)

    def forget(self) -> None:
        """Drop the figures since the last reading, unread; the host does not wait for the device."""
        self._losses = []
        self._found_inf = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block at whose end the figures not read yet, and the streak, are as before."""
        before = self._losses, self._found_inf, self._streak
        self.forget()
        try:
            yield
        finally:
            self._losses, self._found_inf, self._streak = before
            if self._forward is not None:
                self._forward.forget()

    def _update(self) -> None:
        state = self.state
        scaler = self.state.scaler
        scaler.unscale_(state.optimizer)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(state.network.parameters(), self._clip_norm)
        # fused optimizers leave the update out on the device where a gradient is not finite
        scaler.step(state.optimizer)
        scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.schedule.step()
        state.step += 1

    def _note_found_inf(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # set by the scaler for the time of the step: 0.0 or 1.0
        found = getattr(optimizer, "found_inf", None)
        if found is not None:
            self._found_inf.append(found)


class _ForwardTimer:
    """Times ``network`` inside DDP: without what the ranks wait for each other, so that a slow one
    stands out.

    The first pass, in which memory is taken and kernels are chosen, does not count; an update has
    ``parts`` passes.
    """

    def __init__(self, network: nn.Module, parts: int) -> None:
        self._parts = parts
        self._began_s = 0.0
        self.forget()
        network.register_forward_pre_hook(self._begin)
        network.register_forward_hook(self._end)

    def forget(self) -> None:
        self._seconds = 0.0
        self._passes = -1

    def mean_ms(self) -> float | None:
        return 1e3 * self._seconds * self._parts / self._passes if self._passes > 0 else None

    def _begin(self, network: nn.Module, images: Any) -> None:
        self._began_s = time.perf_counter()

    def _end(self, network: nn.Module, images: Any, logits: Any) -> None:
        if network.training:
            self._passes += 1
            self._seconds += time.perf_counter() - self._began_s if self._passes else 0.0


def device_batches(
    feed: Iterable[Any],
    config: Config,
    device: torch.device,
    clock: StepClock | None = None,
    *,
    augment: BatchAugment | None = None,
    mix: Mix | None = None,
) -> DataPrefetcher:
    """The batches of ``feed`` on ``device``, normalised; ``clock`` is told of their copies.

    Evaluation takes them so; for training, ``augment`` is done to them before they are normalised,
    and ``mix`` after it.
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
        reuse=True,
    )


def autocast_of(
    device: torch.device, precision: Precision
) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what makes the autocast context of a precision for one block; a plain context in
    fp32.
    """
    if precision is Precision.fp32:
        return lambda: _AS_IT_IS
    return functools.partial(torch.autocast, device.type, DTYPES[precision])
