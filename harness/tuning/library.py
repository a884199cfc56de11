"""Tunes the ``DataLoader`` in the user's own training loop: ``wellfed.tune``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_all_start_methods, get_start_method
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from ..clock.clock import StepClock
from ..clock.stages import StageMeter
from ..config import TunerConfig
from ..feed.base import Backend, FeedSettings, HostBatch
from ..feed.order import Cursor, Order, ProbeOrder
from ..feed.prefetcher import HostLeadLimiter
from ..feed.processes import ProcessFeed
from ..runtime import limits, workers
from ..runtime.distributed import World
from ..runtime.errors import BadSample, LoaderError, words
from .measures import Probes, TuningReport
from .snapshot import Snapshot
from .steps import Batches, StepBenchmark
from .tuner import tune as tune_probes

Step = Callable[[Any], object]
_NO_ROOM = (
    "No space left|Too many open files|Cannot allocate memory|unable to open shared|MemoryError"
)


def tune(
    dataset: Dataset[Any],
    step: Step,
    *,
    batch_size: int,
    state: Sequence[Any] = (),
    device: torch.device | str | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    worker_init_fn: Callable[[int], None] | None = None,
    num_workers: int = 0,
    start_method: str | None = None,
    config: TunerConfig | None = None,
) -> TuningReport:
    """Chooses the fewest workers that keep up; use ``DataLoader(**report.loader_arguments)``.

    This takes about five seconds before training. Learning rates are 0 during this time. Everything
    in ``state`` and the random states are restored afterward.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` or ``__getitems__``.
        step: trains on one batch as returned by the loader.
        batch_size: samples per batch.
        state: networks, optimizers, and other objects with ``state_dict`` and ``load_state_dict``.
        device: the step's device; None means that of the first network in ``state``.
        collate_fn: as in ``DataLoader``.
        worker_init_fn: as in ``DataLoader``.
        num_workers: the loop's current setting; the choice is not slower.
        start_method: how workers start; None means Python's default.
        config: the budget and the maximum number of workers; None means the defaults.

    Raises:
        BadSample: the dataset raised an error.
        RuntimeError: multiple ranks are running.
        TypeError: the dataset is not map-style, or a part of ``state`` cannot be restored.
        ValueError: the dataset has fewer than ``batch_size`` samples, or steps on ``device``
            cannot be timed.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError("dataset is not map-style; tune() needs __len__ and __getitem__")
    if not 1 <= batch_size <= len(dataset):
        raise ValueError(f"batch_size={batch_size}: choose 1 to {len(dataset)} (all samples)")
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError("tune() works in one process; broadcast its result to all ranks")
    if device is None:
        weights = (w for part in state if isinstance(part, nn.Module) for w in part.parameters())
        device = next((weight.device for weight in weights), "cpu")
    method = start_method or get_start_method(allow_none=True) or get_all_start_methods()[0]
    own = FeedSettings(batch_size, num_workers, False, None, None, 300.0, method)
    probes = _Probes(dataset, collate_fn, worker_init_fn)
    trainee = _LoopBenchmark(probes, step, state, torch.device(device))
    config = config or TunerConfig()
    return tune_probes(probes, trainee, own, config, limits.measure(), trainee.world)


@dataclass
class _Probes(Probes):
    """Makes feeds over the caller's dataset.

    ``last`` is the latest batch, as returned by ``collate_fn``.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    worker_init_fn: Callable[[int], None] | None
    last: Any = None
    cursor: Cursor = field(default_factory=Cursor)

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        return sum(tensor.nbytes for tensor in _tensors(self.last)) or None

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Backend:
        order = Order(len(self.dataset), settings.batch_size, drop_last=True)
        feed = _Feed(self.dataset, ProbeOrder(order, self.cursor, again), settings)
        feed.probes = self
        return feed


class _Feed(ProcessFeed):
    """The ``processes`` backend with the caller's samples.

    Its images are the first tensor of each batch.
    """

    probes: _Probes

    def fetch(self) -> HostBatch | None:
        none = torch.zeros(self.settings.batch_size, dtype=torch.int64)
        try:
            batch = super().fetch()
            if batch is None:
                return None
            self.probes.last = batch
            return HostBatch(next(iter(_tensors(batch)), none), none, none)
        except StopIteration:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {words(error)}".strip()
            if self.settings.num_workers:
                # without the prefix, it is PyTorch's own error: a worker died or timed out
                if not words(error).startswith("Caught "):
                    raise
                # the dataset's message follows its traceback
                text = words(error).strip().splitlines()[-1]
            if re.search(_NO_ROOM, text):
                raise LoaderError(text) from error
            raise BadSample("the dataset", text) from error

    def parts(self) -> dict[str, Any]:
        probes = self.probes
        dataset = probes.dataset
        if self.times_samples and self.meter is not None:
            dataset = _Timed(dataset, self.meter)
        return {
            "dataset": dataset,
            "batch_sampler": (indices.tolist() for indices in self.order.batches(0)),
            "collate_fn": probes.collate_fn,
            "worker_init_fn": partial(_enter, probes.worker_init_fn),
        }


@dataclass(eq=False)
class _Timed(Dataset[Any]):
    """The caller's dataset, whose samples are timed by ``meter``."""

    dataset: Any
    meter: StageMeter

    def __getitems__(self, indices: list[int]) -> Any:
        worker = get_worker_info()
        slot = worker.id if worker else 0
        # a dataset that returns whole batches can only be timed per batch
        whole = getattr(self.dataset, "__getitems__", None)
        if whole is not None:
            return self.meter.timed(slot, whole, len(indices))(indices)
        return [*map(self.meter.timed(slot, self.dataset.__getitem__), indices)]


class _LoopBenchmark(StepBenchmark):
    """The caller's step, which may modify its batch."""

    copies = True

    def __init__(
        self, probes: _Probes, step: Step, state: Sequence[Any], device: torch.device
    ) -> None:
        super().__init__(World(0, 1, 0, 1, device))
        self._probes = probes
        self._step = step
        self._state = state

    @contextlib.contextmanager
    def preserved_state(self) -> Iterator[None]:
        snapshot = Snapshot(self._state, self.device)
        try:
            for part in self._state:
                if isinstance(part, Optimizer):
                    for group in part.param_groups:
                        group["lr"] = 0 * group["lr"]
            yield
        finally:
            snapshot.restore()

    def repeated(self, batch: HostBatch) -> Batches:
        own = self._own
        while True:
            # pinned if the device can use pinned memory
            copied = tree_map_only(
                Tensor, lambda tensor: own.pin(tensor.clone()), self._probes.last
            )
            yield copied, batch.labels

    def fed(self, feed: Backend, clock: StepClock) -> Batches:
        lead = HostLeadLimiter(self._own, clock) if self.overlaps else None
        with contextlib.closing(iter(feed)) as batches:  # type: ignore[type-var]
            while True:
                # otherwise, the budget would end before the device has begun
                if lead:
                    lead.hold()
                labels = next(batches).labels
                yield self._probes.last, labels

    def train(self, batch: Any, labels: Tensor, *, part: int, parts: int) -> None:
        self._step(batch)


def _enter(then: Callable[[int], None] | None, worker: int) -> None:
    """Prepares a worker, which must not outlive this process, then calls ``then``."""
    workers.enter_worker()
    if then is not None:
        then(worker)


def _tensors(batch: Any) -> list[Tensor]:
    return [part for part in tree_leaves(batch) if isinstance(part, Tensor)]
