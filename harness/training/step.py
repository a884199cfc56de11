"""Runs the training step, and iterates over device batches."""

from __future__ import annotations

import functools
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    """What the steps since the last reading did.

    Attributes:
        loss: mean of the finite losses, or None if there was none.
        skipped: updates left out because a gradient was not finite.
        worst_streak: most updates left out in a row, counted over the readings.
    """

    loss: float | None
    skipped: int
    worst_streak: int


@dataclass(eq=False)
class Step:
    """Forward, backward and update on batches that are on the device.

    Args:
        state: the network and what trains it; ``state.step`` counts the updates.
        classes: how many there are; needed where mixup or CutMix is wanted.
        class_weights: a weight for each class in the loss; None: all are 1.
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
        # of the latest forward passes of the network inside DDP: the ranks' waits are not in them
        self._passes_s: deque[float] = deque(maxlen=1000)
        own = accelerator.get(world.device)
        if world.size > 1 and own.is_host and not config.trainer.compile:
            state.network.register_forward_pre_hook(self._begin_pass)
            state.network.register_forward_hook(self._end_pass)
        # on the device, until they are read together
        self._losses: list[Tensor] = []
        self._found_inf: list[Tensor] = []
        self._streak = 0
        self._one = torch.ones((), device=world.device)
        # set for the update by the scaler, or without one by ``skip_nonfinite``: 0.0 or 1.0
        state.optimizer.register_step_pre_hook(self._before_update)
        # errors of the user's code in an update are reported in one line
        name = self.config.optim.name
        self._explained: Callable[[], AbstractContextManager[None]] = nullcontext
        if user_code.is_own(name) or self.config.callbacks:
            begin = f"optim.name={name}: step, or a hook of it, failed with"
            self._explained = functools.partial(user_code.explained, begin)
        self._asks = not (own.skips_updates and skips_on_device(state.optimizer))
        # or the scaler would decide before the hook is called
        state.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def begin_epoch(self) -> None:
        """Has the network train what its epoch wants; several ranks must do it together.

        Frozen parameters get no gradient; norms with frozen statistics work as in evaluation.
        """
        state = self.state
        network = state.network
        network.train()
        freezes = state.epoch < state.freeze_epochs
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
            # DDP's hooks are on what was trained when it was made; the former one goes first
            self.model = network
        if self.world.size > 1 and self.model is network:
            unused = self.config.dist.find_unused_parameters
            # without its device: batches are there
            self.model = DistributedDataParallel(network, find_unused_parameters=unused)

    def check_last_batch(self, length: int) -> None:
        """Raises what a batch norm would on the last batch, of one image, of ``length`` images."""
        config = self.config
        if config.loader.drop_last or length % config.loader.batch_size != 1:
            return
        network = self.state.network
        # Shapes alone: neither statistics nor random numbers change.
        meta = {
            name: tensor.to("meta")
            for name, tensor in chain(network.named_parameters(), network.named_buffers())
        }
        side = min(train_sizes(config.data))
        with seeded(0, 0, 0):
            try:
                functional_call(network, meta, torch.empty(1, 3, side, side, device="meta"))
            except Exception as error:
                # of a network that needs values, the step will tell
                if "more than 1 value per channel" in words(error):
                    raise

    def __call__(self, images: Tensor, labels: Tensor, *, part: int = 0, parts: int = 1) -> None:
        """Trains on one of the ``parts`` batches of an update; the last makes it.

        Labels are int64 ``[N]``, or float ``[N, classes]`` where they were mixed.
        """
        state = self.state
        last = part == parts - 1
        if isinstance(self.model, DistributedDataParallel):
            # gradients meet with the last batch of an update
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
            if self.config.optim.clip_norm is not None:
                nn.utils.clip_grad_norm_(state.network.parameters(), self.config.optim.clip_norm)
            # fused optimizers leave the update out on the device where a gradient is not finite
            with self._explained():
                state.scaler.step(state.optimizer)
            state.scaler.update()
            if state.average is not None:
                state.average.update(state.network, self._found_inf[-1])
            state.optimizer.zero_grad(set_to_none=True)
            state.schedule.step()
            state.step += 1

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        found = optimizer.found_inf
        self._found_inf.append(found)
        # the host waits for the device; without gradients nothing changes
        if self._asks:
            # optimizers of torch that are not fused refuse it
            optimizer.found_inf = None
            if found:
                optimizer.zero_grad()

    def _refuse_unused(self, error: RuntimeError, where: str) -> None:
        """Names the parameters whose gradients DDP misses, which its ``error`` numbers.

        Raises:
            ConfigError: there are such parameters.
        """
        if found := re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error)):
            trained = [n for n, p in self.state.network.named_parameters() if p.requires_grad]
            unused = [trained[int(i)] for i in found[1].split()]
            raise ConfigError(
                f"{where}: parameters without a part in the loss: {listed(unused)}; use them, "
                "delete them, or set dist.find_unused_parameters=true"
            ) from error

    def batches(self, feed: Iterable[Any], clock: StepClock | None = None) -> DataPrefetcher:
        """Returns the batches of ``feed`` as trained on: augmented, normalised, mixed."""
        return device_batches(
            feed, self.config, self.world.device, clock, augment=self._augment, mix=self._mix
        )

    @property
    def forward_ms(self) -> float | None:
        """Median time of the network's own forward passes of an update; tells a slow rank.

        None: unknown, but where several ranks train on CPUs.
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
        """Returns the figures since the last call.

        The host waits here for the device: call it once a window, not once a step.
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
        if self.state.average is not None:
            self.state.average.has_begun |= skipped < len(values) - count
        return StepFigures(statistics.fmean(finite) if finite else None, skipped, worst)

    def forget(self) -> None:
        """Drops all unread figures; the host does not wait for the device."""
        self._losses = []
        self._found_inf = []
        self._passes_s.clear()


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
