"""Runs the training step and iterates over device batches."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from ..clock.clock import StepClock
from ..clock.spans import named
from ..config import Config, ConfigError, Precision, train_sizes
from ..data.augment import BatchAugment, Mix
from ..feed.prefetcher import DataPrefetcher
from ..runtime import accelerator, user_code
from ..runtime.errors import listed, words
from ..runtime.seeding import seeded
from .losses import make_loss
from .models import refuse_logits
from .optimizer import fill_momentum, skip_nonfinite, skips_on_device
from .state import TrainState

DTYPES = {
    Precision.fp32: torch.float32,
    Precision.fp16: torch.float16,
    Precision.bf16: torch.bfloat16,
}


class StepFigures(NamedTuple):
    """Metrics for the steps since the last reading.

    Attributes:
        loss: mean of the finite losses, or None if there were none.
        skipped: updates skipped due to a non-finite gradient.
        worst_streak: most updates skipped in a row, counted across readings.
    """

    loss: float | None
    skipped: int
    worst_streak: int


@dataclass(eq=False)
class Step:
    """Runs the forward pass, backward pass and update on device batches.

    Args:
        state: network, optimizer and schedule; ``state.step`` counts updates.
        classes: number of classes; required for mixup and CutMix.
        class_weights: loss weight per class; None means 1 for all.
    """

    state: TrainState
    classes: int | None = None
    class_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        state = self.state
        self.config = config = state.config
        self.world = world = state.world
        weights = None
        if self.class_weights is not None:
            weights = torch.tensor(self.class_weights, device=world.device)
        self._loss = make_loss(config.optim, weights)
        self._augment = BatchAugment.from_config(config.augment, config.seed)
        self._mix = Mix.from_config(config.augment, self.classes, config.seed)
        self.autocast = autocast_of(config.trainer.precision, world.device)
        self.model: Any = state.network
        self.begin_epoch()
        # seconds of the latest forward passes of the network inside DDP, without waiting for other
        # ranks
        self._passes_s: deque[float] = deque(maxlen=1000)
        own = accelerator.get(world.device)
        if world.size > 1 and own.is_host and not config.trainer.compile:
            state.network.register_forward_pre_hook(self._begin_pass)
            state.network.register_forward_hook(self._end_pass)
        # kept on the device until all are read together
        self._losses: list[Tensor] = []
        self._found_inf: list[Tensor] = []
        self._streak = 0
        self._one = torch.ones((), device=world.device)
        # reads found_inf, 0.0 or 1.0, which is set by the scaler or else by ``skip_nonfinite``
        state.optimizer.register_step_pre_hook(self._before_update)
        # errors from user code in an update are reported in one line
        name = config.optim.name
        self._explained: Callable[[], AbstractContextManager[None]] = nullcontext
        if user_code.is_own(name) or config.callbacks:
            begin = f"optim.name={name}: step or one of its hooks failed with"
            self._explained = partial(user_code.explained, begin)
        self._asks = not (own.skips_updates and skips_on_device(state.optimizer))
        # otherwise, the scaler decides before the hook is called
        state.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def begin_epoch(self) -> None:
        """Freezes or unfreezes layers for the epoch; all ranks must call this together.

        Frozen parameters get no gradients; norms with frozen statistics run in eval mode.
        """
        state = self.state
        network = state.network
        network.train()
        freezes = state.epoch < (self.config.optim.freeze_epochs or math.inf)
        changed = False
        for name in state.frozen:
            path, _, key = name.rpartition(".")
            module = network.get_submodule(path)
            tensor = getattr(module, key)
            if isinstance(tensor, nn.Parameter):
                changed |= tensor.requires_grad is freezes
                tensor.requires_grad_(not freezes)
            elif freezes:
                module.training = False
        fill_momentum(state.optimizer)
        if changed:
            # DDP only hooks parameters that are trainable when it is built; drop the old wrapper
            # first
            self.model = network
        if self.world.size > 1 and self.model is network:
            # keeps DDP from reordering its buckets after the first step, which would change the
            # sums across more than two ranks, so a resumed run would differ
            keeps_order = self.world.device.type == "cpu" and self.world.size > 2
            unused = self.config.dist.find_unused_parameters or keeps_order
            # no device_ids: batches are already on the device
            self.model = DistributedDataParallel(network, find_unused_parameters=unused)

    def check_last_batch(self, length: int) -> None:
        """Raises batch norm's error if the last batch of ``length`` images has only one image."""
        config = self.config
        if config.loader.drop_last or length % config.loader.batch_size != 1:
            return
        network = self.state.network
        # shapes only: neither statistics nor random states change
        meta = {
            name: tensor.to("meta")
            for name, tensor in chain(network.named_parameters(), network.named_buffers())
        }
        side = min(train_sizes(config.data))
        with seeded(0, 0, 0):
            try:
                functional_call(network, meta, torch.empty(1, 3, side, side, device="meta"))
            except Exception as error:
                # networks that need values are checked by the step itself
                if "more than 1 value per channel" in words(error):
                    raise

    def __call__(self, images: Tensor, labels: Tensor, *, part: int = 0, parts: int = 1) -> None:
        """Trains on one of the ``parts`` batches in an update; the last one applies the update.

        Labels are int64 ``[N]``, or float ``[N, classes]`` if mixed.
        """
        state = self.state
        last = part == parts - 1
        if isinstance(self.model, DistributedDataParallel):
            # gradients are reduced only on the last batch of an update
            self.model.require_backward_grad_sync = last
        with self.autocast(), named("forward"):
            where = f"model.name={self.config.model.name}"
            try:
                logits = self.model(images)
            except RuntimeError as error:
                self._refuse_unused(error, where)
                raise
            refuse_logits(logits, (len(images), self.classes or logits.shape[-1]), where)
            loss = self._loss(logits, labels)
        with named("backward"):
            state.scaler.scale(loss / parts if parts > 1 else loss).backward()
        self._losses.append(loss.detach())
        if not last:
            return
        with named("update"):
            state.scaler.unscale_(state.optimizer)
            if not state.scaler.is_enabled():
                skip_nonfinite(state.optimizer, self._one)
            if self.config.optim.clip_norm:
                nn.utils.clip_grad_norm_(state.network.parameters(), self.config.optim.clip_norm)
            # fused optimizers skip the update on the device if a gradient is not finite
            with self._explained():
                state.scaler.step(state.optimizer)
            state.scaler.update()
            if state.average:
                state.average.update(state.network, self._found_inf[-1])
            state.optimizer.zero_grad(set_to_none=True)
            state.schedule.step()
            state.step += 1

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        found = optimizer.found_inf
        self._found_inf.append(found)
        # syncs with the device; without gradients, nothing changes
        if self._asks:
            # torch's non-fused optimizers reject it
            optimizer.found_inf = None
            if found:
                optimizer.zero_grad()

    def _refuse_unused(self, error: RuntimeError, where: str) -> None:
        """Lists the names of parameters without gradients, which DDP's ``error`` lists by index.

        Raises:
            ConfigError: there are such parameters.
        """
        if found := re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error)):
            trained = [n for n, p in self.state.network.named_parameters() if p.requires_grad]
            unused = [trained[int(i)] for i in found[1].split()]
            raise ConfigError(
                f"{where}: parameters are not used in the loss: {listed(unused)}; use them, "
                "delete them, or set dist.find_unused_parameters=true"
            ) from error

    def batches(self, feed: Iterable[Any], clock: StepClock | None = None) -> DataPrefetcher:
        """Returns the training batches from ``feed``, augmented, normalized and mixed."""
        return device_batches(
            feed, self.config, self.world.device, clock, augment=self._augment, mix=self._mix
        )

    @property
    def forward_ms(self) -> float | None:
        """Median forward time per update in ms, without waiting; reveals a slow rank.

        None unless several ranks train on CPUs without compilation.
        """
        if not self._passes_s:
            return None
        return 1e3 * statistics.median(self._passes_s) * self.config.trainer.accumulate_steps

    def _begin_pass(self, *_: Any) -> None:
        self._began_s = time.perf_counter()

    def _end_pass(self, network: nn.Module, *_: Any) -> None:
        if network.training:
            self._passes_s.append(time.perf_counter() - self._began_s)

    def read(self) -> StepFigures:
        """Returns the metrics since the last call.

        Syncs with the device: call this once per window, not per step.
        """
        count = len(self._losses)
        values = torch.stack([*self._losses, *self._found_inf]).tolist() if count else []
        self._losses = []
        self._found_inf = []
        finite = [loss for loss in values[:count] if math.isfinite(loss)]
        skipped = worst = 0
        for found in values[count:]:
            skipped += bool(found)
            self._streak = (self._streak + 1) * bool(found)
            worst = max(worst, self._streak)
        if self.state.average:
            self.state.average.has_begun |= skipped < len(values) - count
        return StepFigures(statistics.fmean(finite) if finite else None, skipped, worst)

    def forget(self) -> None:
        """Drops all unread metrics without a device sync."""
        self._losses = []
        self._found_inf = []
        self._passes_s.clear()


def autocast_of(
    precision: Precision, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a context-manager factory for forward passes in ``precision``."""
    if precision is Precision.fp32:
        return nullcontext
    return partial(torch.autocast, device.type, DTYPES[precision])


def device_batches(
    feed: Iterable[Any],
    config: Config,
    device: torch.device,
    clock: StepClock | None = None,
    *,
    augment: BatchAugment | None = None,
    mix: Mix | None = None,
) -> DataPrefetcher:
    """Returns the batches from ``feed`` on ``device``; ``clock`` records their copies.

    Training applies ``augment`` before normalization and ``mix`` after it. Evaluation only
    normalizes.
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
