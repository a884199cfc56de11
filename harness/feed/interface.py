"""What every form of the feed gives and takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from harness.config import LoaderConfig
from harness.feed.order import AnyOrder
from harness.runtime.errors import BadSample, LoaderError
from harness.runtime.limits import Limits
from harness.watch.stages import SAMPLE, Lap, StageMeter, Stamps

# the forms that every data set can be served by
PROCESSES = "processes"
THREADS = "threads"
# the one for images that all fit in memory
ARRAYS = "arrays"
_TORCH_PREFETCH_FACTOR = 2
# that nobody asked for
_MOST_WORKERS = 16


class HostBatch(NamedTuple):
    """One batch as a feed gives it.

    Attributes:
        images: uint8 ``[N, 3, H, W]``, 0..255, in channels_last memory, as decoders write them.
        labels: int64 ``[N]``.
        indices: int64 ``[N]``, the samples' places in the data set.
        errors: where and why, for each sample that could not be read; its pixels are undefined.
        epoch: of which pass it is: what is done to the batch further on is a function of it.
        stamps: when it came where; None for one that nobody had to make.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    errors: tuple[tuple[str, str], ...] = ()
    epoch: int = 0
    stamps: Stamps | None = None

    def pin_memory(self) -> HostBatch:
        """The same with what goes to the device in page-locked memory; torch's own loader asks for
        that.
        """
        images = self.images.pin_memory()
        labels = self.labels.pin_memory()
        return self._replace(
            images=images, labels=labels, stamps=self.stamps and self.stamps.pin_memory()
        )


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """The settings of a feed with nothing left to derive; the names are torch's.

    ``prefetch_factor`` is None and ``persistent_workers`` False where ``num_workers`` is 0;
    ``backend`` names the feed's form.
    """

    batch_size: int
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    timeout_s: float
    start_method: str
    backend: str = PROCESSES

    def __str__(self) -> str:
        text = f"num_workers={self.num_workers} pin_memory={str(self.pin_memory).lower()}"
        text += "" if self.prefetch_factor is None else f" prefetch_factor={self.prefetch_factor}"
        return text if self.backend == PROCESSES else f"{text} backend={self.backend}"


class Feed(ABC):
    """An iterable over one epoch's batches at a time; its length is that of the chosen epoch.

    A new pass ends the one before it, and no batch of a pass may be lost. A form says where they
    come from.

    Attributes:
        order: which samples make which batch.
        settings: how the batches are made.
        on_device: whether the images are on the device already, so that nothing is copied.
        meter: what its workers do; None where they make nothing, or where it cannot be had.
    """

    on_device = False
    meter: StageMeter | None = None

    def __init__(self, order: AnyOrder, settings: FeedSettings) -> None:
        self.order = order
        self.settings = settings
        self._epoch = 0
        # the epoch of a pass that was begun ahead of time
        self._primed: int | None = None
        # differs from pass to pass
        self._running: object | None = None

    def __len__(self) -> int:
        return self.order.count(self._epoch)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The live worker processes; empty where there are none."""
        return ()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter()`` gives."""
        self._epoch = epoch

    def prime(self, epoch: int) -> None:
        """Begin the pass of ``epoch`` in the background, so that the next ``iter()``, if it is of
        that epoch, finds batches.

        It never blocks, and an error in it surfaces from ``next()``. It does nothing while another
        pass runs.
        """
        if self._running is None and self._primed is None:
            self._begin(epoch)
            self._primed = epoch

    def __iter__(self) -> Iterator[HostBatch]:
        with closing(self.polled(math.inf)) as batches:
            # not a loop, whose variable would hold a batch while the next one is awaited
            yield from filter(None, batches)

    def polled(self, poll_s: float) -> Generator[HostBatch | None, None, None]:
        """One pass that gives None whenever ``poll_s`` seconds, at most 0.5 to 2, went by without a
        batch.
        """
        if self._running is not None or self._primed not in (None, self._epoch):
            self.close()
        primed = self._primed is not None
        self._primed = None
        own = self._running = object()
        given = 0
        wanted = len(self)
        try:
            for batch in self._batches(self._epoch, primed, poll_s) if wanted else ():
                if batch is not None and batch.errors:
                    raise BadSample(*batch.errors[0])
                given += batch is not None
                yield batch
                del batch
                if given == wanted:
                    break
            if given != wanted:
                raise LoaderError(
                    f"the feed ended after {given} of {wanted} batches; no batch may be lost"
                )
        finally:
            # no later pass runs, whose workers these would be
            if self._running in (None, own):
                self._running = None
                # what was asked for would come in the next pass
                if not given or given < wanted or not self.settings.persistent_workers:
                    self.close()

    def close(self) -> None:
        """End the workers, if any; the next ``iter()`` starts new ones. Safe to call twice."""
        self._primed = self._running = None
        self._end()

    @abstractmethod
    def _batches(self, epoch: int, primed: bool, poll_s: float) -> Iterator[HostBatch | None]:
        """The batches of ``epoch``, and None for each wait of ``poll_s``; where it is not
        ``primed``, begins with it.
        """

    def _begin(self, epoch: int) -> object:  # noqa: B027  # a form that makes nothing ahead has nothing to begin
        """Begin the pass of ``epoch`` without waiting for it."""

    def _end(self) -> None:  # noqa: B027  # nor to end
        """End what a pass has begun."""


class FillableDataset(Protocol):
    """What a feed needs of a data set; one that is a ``StagedDataset`` as well can tell what takes
    its time.

    Attributes:
        image_size: side of an image in pixels.
    """

    image_size: int

    def __len__(self) -> int: ...

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        """Write sample ``index`` of ``epoch`` into ``out`` (uint8 ``[3, S, S]``) and return its
        label.
        """
        ...


@runtime_checkable
class StagedDataset(FillableDataset, Protocol):
    """A data set that times what it does.

    Attributes:
        stages: the names of what ``fill`` does, in order.
    """

    stages: tuple[str, ...]

    def fill(self, epoch: int, index: int, out: np.ndarray, lap: Lap | None = None) -> int:
        """As in ``FillableDataset``; where there is a ``lap``, it is called at the end of each
        stage, with the stage's name.
        """
        ...


def too_slow(settings: FeedSettings) -> LoaderError:
    """The error for a batch that was waited for in vain."""
    return LoaderError(
        f"no batch within loader.timeout_s={settings.timeout_s:g}: a worker hangs or the storage "
        "does; raise the time, "
        f"or find the sample with {alone(settings)}"
    )


def alone(settings: FeedSettings) -> str:
    """What to set so that the trainer itself loads each sample, as overrides that can be typed."""
    return (
        f"{'loader.backend=processes ' if settings.backend == ARRAYS else ''}loader.num_workers=0"
    )


def stages_of(dataset: FillableDataset) -> tuple[str, ...]:
    """The stages that ``dataset`` names, or ``sample`` where it names none."""
    return dataset.stages if isinstance(dataset, StagedDataset) else (SAMPLE,)


def train_settings(loader: LoaderConfig, limits: Limits, pinnable: bool) -> FeedSettings:
    """The training feed's settings, derived where ``loader`` leaves them null.

    Args:
        loader: the user's settings.
        limits: what this rank may use.
        pinnable: whether page-locked memory has any use here (a CUDA device).
    """
    workers = loader.num_workers
    if workers is None:
        workers = max(1, min(_MOST_WORKERS, int(limits.cores)))
    pin = (loader.pin_memory is None or loader.pin_memory) and pinnable
    persistent = loader.persistent_workers is None or loader.persistent_workers
    return _settings(loader, loader.batch_size, workers, pin, loader.prefetch_factor, persistent)


def val_settings(loader: LoaderConfig, train: FeedSettings) -> FeedSettings:
    """The validation feed's settings: of the training feed's form, with workers that live for one
    evaluation only.
    """
    val = loader.val
    settings = _settings(
        loader,
        train.batch_size if val.batch_size is None else val.batch_size,
        train.num_workers if val.num_workers is None else val.num_workers,
        train.pin_memory,
        val.prefetch_factor,
        False,
    )
    return replace(settings, backend=train.backend)


def _settings(
    loader: LoaderConfig,
    batch_size: int,
    workers: int,
    pin: bool,
    prefetch: int | None,
    persistent: bool,
) -> FeedSettings:
    return FeedSettings(
        batch_size=batch_size,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=(prefetch or _TORCH_PREFETCH_FACTOR) if workers else None,
        persistent_workers=persistent and workers > 0,
        timeout_s=loader.timeout_s,
        start_method=loader.start_method.name,
    )
