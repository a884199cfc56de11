"""``tune`` for a training loop of one's own: any map-style data set, any step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_all_start_methods, get_start_method
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset, default_collate

from harness.config import TunerConfig
from harness.feed.gauge import Gauge, Gauged
from harness.feed.interface import Feed, FeedSettings, HostBatch
from harness.feed.order import AnyOrder, Cursor, Order, ProbeOrder
from harness.feed.prefetcher import Lead
from harness.feed.processes import ProcessFeed, enter_worker
from harness.runtime import accelerator, limits, signals
from harness.runtime.distributed import World
from harness.runtime.errors import BadSample, LoaderError
from harness.runtime.snapshot import Snapshot
from harness.tuning.report import TuningReport
from harness.tuning.tuner import tune as tune_probes
from harness.watch.clock import StepClock
from harness.watch.figures import StepRun, steps_of_group

Step = Callable[[Any], object]
_WARM_UP_STEPS = 3
_GROUPS = 20
_COPIES = 16
_NO_ROOM = (
    "No space left",
    "Too many open files",
    "Cannot allocate memory",
    "unable to open shared memory",
    "MemoryError",
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
    """The settings with the fewest workers that feed ``step``, for ``DataLoader(dataset,
    **report.loader_arguments)``.

    Takes some five seconds besides the first step, in one process, before training. Samples come in
    a random order. Whatever ``state`` names is put back afterwards, and so are the global random
    states; while it measures, learning rates are 0.

    Args:
        dataset: with ``__len__`` and ``__getitem__`` or ``__getitems__``.
        step: takes one batch as the loader gives it, and trains on it.
        batch_size: samples in a batch.
        state: what ``step`` changes: networks, optimizers, and other objects with ``state_dict``
            and ``load_state_dict``.
        device: where the step computes; None: where the first network or optimizer of ``state`` has
            its parameters, or the CPU.
        collate_fn: as the loader's.
        worker_init_fn: as the loader's.
        num_workers: what the loop uses now: the choice is not slower than that.
        start_method: how workers start; None: as Python does it here.
        config: budget and most workers; None: the defaults.

    Raises:
        BadSample: the data set raised an error.
        RuntimeError: several ranks have been started.
        TypeError: the data set is not map-style, or a part of ``state`` cannot be put back.
        ValueError: there are fewer samples than one batch takes.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"dataset: {type(dataset).__name__} is not map-style; tune() needs __len__ and "
            "__getitem__"
        )
    if len(dataset) < batch_size:
        raise ValueError(f"batch_size={batch_size}: the data set has only {len(dataset)} samples")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise RuntimeError(
            "tune() works in one process; call it in a run of its own, and give its answer to all "
            "ranks"
        )
    method = start_method or get_start_method(allow_none=True) or get_all_start_methods()[0]
    own = FeedSettings(
        batch_size=batch_size,
        num_workers=num_workers,
        pin_memory=False,
        prefetch_factor=2 if num_workers else None,
        persistent_workers=num_workers > 0,
        timeout_s=0.0,
        start_method=method,
    )
    probes = _Probes(dataset, collate_fn, worker_init_fn)
    trainee = _Trainee(
        probes, step, state, _device_of(state) if device is None else torch.device(device)
    )
    return tune_probes(
        probes,
        trainee,
        own,
        config or TunerConfig(),
        limits.measure(),
        World(0, 1, 0, 1, trainee.device),
    )


class _Probes:
    """Feeds over a data set of the caller's; ``last`` is the batch that came last, as its
    ``collate_fn`` made it.
    """

    forms = ("processes",)

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[list[Any]], Any],
        worker_init_fn: Callable[[int], None] | None,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.enter = _Enter(worker_init_fn)
        self.last: Any = None
        self._cursor = Cursor()
        self._length = len(dataset)  # type: ignore[arg-type]  # map-style, as was asked
        self._batches = 1

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        return None if self.last is None else sum(tensor.nbytes for tensor in _tensors(self.last))

    def held_bytes(self, settings: FeedSettings) -> int:
        return 0

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        return train

    def probe(
        self, settings: FeedSettings, gauge: Gauge | None = None, *, again: bool = False
    ) -> Feed:
        order = Order(self._length, settings.batch_size, drop_last=True)
        self._batches = len(order)
        if not again:
            self._cursor.begin = self._cursor.asked
        return _Feed(self, ProbeOrder(order, self._cursor, again), settings, gauge)

    def saw(self, batches: int) -> None:
        self._cursor.seen = range(self._cursor.begin, self._cursor.begin + batches)

    def probed(self) -> float:
        return self._cursor.asked / self._batches


class _Feed(ProcessFeed):
    """The ``processes`` form with the caller's samples; gives the first tensor of each batch as its
    images.
    """

    def __init__(
        self, probes: _Probes, order: ProbeOrder, settings: FeedSettings, gauge: Gauge | None
    ) -> None:
        super().__init__(probes.dataset, order, settings)  # type: ignore[arg-type]  # never filled from
        self._probes = probes
        self.gauge = gauge
        self.meter = None

    def polls(self, batches: Iterator[Any]) -> Iterator[HostBatch | None]:
        size = self.settings.batch_size
        try:
            for batch in super().polls(batches):
                if batch is not None:
                    self._probes.last = batch
                    first = next(_tensors(batch), torch.empty(size, 0))
                    batch = HostBatch(
                        first,
                        torch.zeros(size, dtype=torch.int64),
                        torch.zeros(size, dtype=torch.int64),
                    )
                yield batch
        except Exception as error:
            text = f"{error}".strip()
            if self.settings.num_workers == 0:
                raise BadSample("the data set", f"{type(error).__name__}: {text}") from error
            if not text.startswith(
                "Caught "
            ):  # torch's own: a worker died, or no batch came in time
                raise
            if any(symptom in text for symptom in _NO_ROOM):
                raise LoaderError(text.splitlines()[-1]) from error
            raise BadSample("the data set", text.splitlines()[-1]) from error

    def parts(self) -> dict[str, Any]:
        probes = self._probes
        dataset = probes.dataset
        if self.gauge is not None:
            dataset = Gauged(dataset, self.gauge)
        return {
            "dataset": dataset,
            "batch_sampler": _Indices(self.order),
            "collate_fn": probes.collate_fn,
            "worker_init_fn": probes.enter,
        }


class _Enter:
    """What a worker does first: what keeps it from outliving this process, then what the caller
    wants.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        enter_worker(worker)
        if self.then is not None:
            self.then(worker)


class _Indices:
    """The batch sampler that torch knows: lists of indices."""

    def __init__(self, order: AnyOrder) -> None:
        self.order = order

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.order.batches(0))


class _Trainee:
    """The caller's step."""

    def __init__(
        self, probes: _Probes, step: Step, state: Sequence[Any], device: torch.device
    ) -> None:
        self._probes = probes
        self._step = step
        self._state = state
        self.device = device
        self._own = accelerator.of(device)
        self._now = self._own.now
        self._lead = Lead(self._own, self._now) if self._own.has_streams else None
        self.overlaps = (
            self._own.has_streams
        )  # a plain loop on a CPU loads while its step does not run

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        snapshot = Snapshot(self._state, self.device)
        try:
            for part in self._state:
                for group in part.param_groups if isinstance(part, Optimizer) else ():
                    group["lr"] = (
                        torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
                    )
            yield
        finally:
            snapshot.restore()

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        first_s, _ = self._group(1)
        begin = self._now()
        for _ in range(_WARM_UP_STEPS - 1):
            step_s, _ = self._group(1)
        steps = min(_COPIES, steps_of_group(step_s, limit_s, self.overlaps))
        cpu = time.process_time()
        groups = list[tuple[float, float]]()
        while len(groups) < 2 or (len(groups) < _GROUPS and self._now() - begin < limit_s):
            groups.append(self._group(steps))
        cpu_s = time.process_time() - cpu
        images = len(batch.labels) * steps
        return StepRun(
            images=(images,) * len(groups),
            seconds=tuple(seconds for seconds, _ in groups),
            cpu_s=cpu_s,
            first_s=max(0.0, first_s - step_s),
            launch_s=min(launch_s for _, launch_s in groups) / len(batch.labels),
        )

    def _group(self, steps: int) -> tuple[float, float]:
        """The seconds of so many steps on one batch, and the host's of the first.

        Each has a copy of its own: a step may change what it is given.
        """
        copies = [_copy(self._probes.last, self._own.pin) for _ in range(steps)]
        launch_s = 0.0
        begin = self._now()
        for batch in copies:
            signals.check()
            self._step(batch)
            # of the first step alone: the device's queue may be full at later ones
            launch_s = launch_s or self._now() - begin
        self._own.synchronize()
        return self._now() - begin, launch_s

    def deliver(self, feed: Feed, skip: int, limit_s: float) -> StepRun:
        clock = StepClock(self.device, keep_steps=True)
        with contextlib.closing(iter(feed)) as batches:  # type: ignore[type-var]
            self._stretch(batches, clock, 1, 1, 0.0)
            self._stretch(batches, clock, 0, skip, limit_s / 3)
            clock.close_window()
            cpu = time.process_time()
            done = self._stretch(batches, clock, 2, None, limit_s)
            cpu_s = time.process_time() - cpu
            clock.settle()
        window = clock.close_window()
        images, seconds = zip(*done, strict=True)
        seconds = clock.device_steps(len(done)) or seconds
        return StepRun(images, seconds, (window.stall_fraction or 0.0) if window else 0.0, cpu_s)

    def _stretch(
        self,
        batches: Iterator[HostBatch],
        clock: StepClock,
        least: int,
        most: int | None,
        limit_s: float,
    ) -> list[tuple[int, float]]:
        done: list[tuple[int, float]] = []
        begin = end = self._now()
        while len(done) < least or ((most is None or len(done) < most) and end - begin < limit_s):
            signals.check()
            if self._lead is not None:  # or the time would be over before the device has begun
                self._lead.hold()
            with clock.waiting():
                count = len(next(batches).labels)
            with clock.computing():
                self._step(self._probes.last)
            clock.step(count)
            done.append((count, self._now() - end))
            end += done[-1][1]
        if not self.overlaps:
            self._own.synchronize()
            if done:
                count, seconds = done[-1]
                done[-1] = count, seconds + self._now() - end
        return done


def _device_of(state: Sequence[Any]) -> torch.device:
    for part in state:
        if isinstance(part, nn.Module):
            groups: list[Any] = [list(part.parameters())]
        else:
            groups = (
                [group["params"] for group in part.param_groups]
                if isinstance(part, Optimizer)
                else []
            )
        for parameter in (parameter for group in groups for parameter in group):
            return torch.device(parameter.device)
    return torch.device("cpu")


def _copy(batch: Any, pin: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested containers and tensors, page-locked where that pays; everything else as it
    is.
    """
    if isinstance(batch, Tensor):
        return pin(batch.clone())
    if isinstance(batch, dict):
        return type(batch)({key: _copy(part, pin) for key, part in batch.items()})
    if isinstance(batch, tuple | list):
        parts = [_copy(part, pin) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict | tuple | list):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)
