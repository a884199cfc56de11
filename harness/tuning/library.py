"""``tune`` for a training loop of one's own: any map-style data set, any step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate, get_worker_info

from harness.config import TunerConfig
from harness.feed.gauge import Gauge
from harness.feed.interface import Feed, FeedSettings, HostBatch
from harness.feed.order import Cursor, Order, ProbeOrder
from harness.feed.processes import Loader, ProcessFeed, enter_worker
from harness.runtime import limits, signals
from harness.runtime.errors import BadSample
from harness.runtime.snapshot import Snapshot
from harness.tuning.report import TuningReport
from harness.tuning.tuner import tune as tune_probes
from harness.watch.figures import StepRun

Step = Callable[[Any], object]
_WARM_UP_STEPS, _DEMAND_STEPS = 3, 40


def tune(
    dataset: Dataset[Any],
    step: Step,
    *,
    batch_size: int,
    state: Sequence[Any] = (),
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    num_workers: int = 0,
    start_method: str | None = None,
    config: TunerConfig | None = None,
) -> TuningReport:
    """The settings with the fewest workers that feed ``step``, for ``DataLoader(dataset, **report.loader_arguments)``.

    Takes a few seconds to half a minute, in one process, before training. Samples come in a random order. Whatever ``state``
    names is put back afterwards, and so are the global random states; while it measures, learning rates are 0.

    Args:
        dataset: with ``__len__`` and ``__getitem__`` or ``__getitems__``.
        step: takes one batch as the loader gives it, and trains on it.
        batch_size: samples in a batch.
        state: what ``step`` changes: networks, optimizers, and other objects with ``state_dict`` and ``load_state_dict``.
        collate_fn: as the loader's.
        num_workers: what the loop uses now: the choice is not slower than that.
        start_method: how workers start; None: as Python does it here.
        config: budget and most workers; None: the defaults.

    Raises:
        BadSample: the data set raised an error.
        RuntimeError: several ranks have been started.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise RuntimeError("tune() works in one process; call it in a run of its own, and give its answer to all ranks")
    start_method = start_method or torch.multiprocessing.get_start_method()
    own = FeedSettings(
        batch_size=batch_size,
        num_workers=num_workers,
        pin_memory=False,
        prefetch_factor=2 if num_workers else None,
        persistent_workers=num_workers > 0,
        timeout_s=0.0,
        start_method=start_method,
    )
    probes = _Probes(dataset, collate_fn)
    trainee = _Trainee(probes, step, state)
    return tune_probes(probes, trainee, own, config or TunerConfig(), limits.measure(), _OneRank())


class _OneRank:
    """The only rank."""

    def smallest(self, value: float) -> float:
        return value

    def agreed(self, value: Any) -> Any:
        return value

    def gathered(self, value: Any) -> list[Any]:
        return [value]


class _Probes:
    """Feeds over a data set of the caller's; ``last`` is the batch that came last, as its ``collate_fn`` made it."""

    forms = ("processes",)

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self.last: Any = None
        self._cursor, self._length = Cursor(), len(dataset)  # type: ignore[arg-type]
        self._batches = 1

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        return None if self.last is None else sum(tensor.nbytes for tensor in _tensors(self.last))

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        return train

    def probe(self, settings: FeedSettings, gauge: Gauge | None = None, *, again: bool = False) -> Feed:
        order = Order(self._length, min(settings.batch_size, self._length), drop_last=True)
        self._batches = len(order)
        return _Feed(self, ProbeOrder(order, self._cursor, again), settings, gauge)

    def probed(self) -> float:
        return self._cursor.asked / self._batches


class _Feed(ProcessFeed):
    """The ``processes`` form with the caller's samples; gives the first tensor of each batch as its images."""

    def __init__(self, probes: _Probes, order: ProbeOrder, settings: FeedSettings, gauge: Gauge | None) -> None:
        super().__init__(probes.dataset, order, settings)  # type: ignore[arg-type]  # never filled from
        self._probes, self._gauge = probes, gauge

    def _polls(self, batches: Iterator[Any]) -> Iterator[HostBatch | None]:
        size = self.settings.batch_size
        try:
            for batch in super()._polls(batches):
                if batch is not None:
                    self._probes.last = batch
                    first = next(_tensors(batch), torch.empty(size, 0))
                    batch = HostBatch(first, torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64))
                yield batch
        except Exception as error:
            if not (str(error).startswith("Caught ") or self.settings.num_workers == 0):
                raise
            raise BadSample("the data set", str(error).strip().splitlines()[-1]) from error

    def _make_loader(self, wait_s: float) -> Loader:
        s, dataset = self.settings, self._probes.dataset
        if self._gauge is not None:
            dataset = (_GaugedBatches if hasattr(dataset, "__getitems__") else _Gauged)(dataset, self._gauge)
        return Loader(
            dataset,
            batch_sampler=_Indices(self.order),
            num_workers=s.num_workers,
            collate_fn=self._probes.collate_fn,
            pin_memory=s.pin_memory,
            prefetch_factor=s.prefetch_factor,
            persistent_workers=s.persistent_workers,
            timeout=wait_s,
            worker_init_fn=enter_worker if s.num_workers else None,
            multiprocessing_context=s.start_method if s.num_workers else None,
            generator=torch.Generator(),
        )


class _Indices:
    """The batch sampler that torch knows: lists of indices."""

    def __init__(self, order: Order | ProbeOrder) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.order.batches(0))


class _Gauged(Dataset[Any]):
    """A data set that tells ``gauge`` what each of its samples took."""

    def __init__(self, dataset: Any, gauge: Gauge) -> None:
        self.dataset, self.gauge = dataset, gauge

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._timed(lambda: self.dataset[index], 1)

    def _timed(self, load: Callable[[], Any], samples: int) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        loaded = load()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        worker = get_worker_info()
        for _ in range(samples):
            self.gauge.add(worker.id if worker else 0, wall_s / samples, cpu_s / samples)
        return loaded


class _GaugedBatches(_Gauged):
    def __getitems__(self, indices: list[int]) -> Any:
        return self._timed(lambda: self.dataset.__getitems__(indices), len(indices))


class _Trainee:
    """The caller's step."""

    def __init__(self, probes: _Probes, step: Step, state: Sequence[Any]) -> None:
        self._probes, self._step, self._state = probes, step, state

    @property
    def device(self) -> torch.device:
        networks = (part for part in self._state if isinstance(part, nn.Module))
        return next((tensor.device for network in networks for tensor in network.parameters()), torch.device("cpu"))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        snapshot = Snapshot(self._state, self.device)
        try:
            for part in self._state:
                for group in part.param_groups if isinstance(part, Optimizer) else ():
                    group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            yield
        finally:
            snapshot.restore()

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        for _ in range(_WARM_UP_STEPS):
            self._timed(self._probes.last)
        begin, cpu, seconds = time.perf_counter(), time.process_time(), list[float]()
        while len(seconds) < 2 or (len(seconds) < _DEMAND_STEPS and time.perf_counter() - begin < limit_s):
            seconds.append(self._timed(self._probes.last))
        steps = len(seconds)
        return StepRun((len(batch.labels),) * steps, tuple(seconds), (0.0,) * steps, time.process_time() - cpu)

    def deliver(self, feed: Feed, skip: int, limit_s: float) -> StepRun:
        with contextlib.closing(iter(feed)) as batches:  # type: ignore[type-var]
            self._stretch(batches, 1, 1, 0.0)
            self._stretch(batches, 0, skip, limit_s / 3)
            cpu = time.process_time()
            done = self._stretch(batches, 2, None, limit_s)
            cpu_s = time.process_time() - cpu
        images, seconds, waits = zip(*done, strict=True)
        return StepRun(images, seconds, waits, cpu_s)

    def _stretch(
        self, batches: Iterator[HostBatch], least: int, most: int | None, limit_s: float
    ) -> list[tuple[int, float, float]]:
        done: list[tuple[int, float, float]] = []
        begin = end = time.perf_counter()
        while len(done) < least or ((most is None or len(done) < most) and end - begin < limit_s):
            batch = next(batches)
            wait_s = time.perf_counter() - end
            self._timed(self._probes.last)
            done.append((len(batch.labels), time.perf_counter() - end, wait_s))
            end += done[-1][1]
        return done

    def _timed(self, batch: Any) -> float:
        """The seconds of one step, to its end on the device."""
        signals.check()
        begin = time.perf_counter()
        self._step(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin


def _tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict | tuple | list):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)
