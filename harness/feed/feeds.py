"""Derives loader settings and builds the feeds; defines the backends without workers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ..clock.stages import START, StageMeter, StageTimer
from ..config import (
    Config,
    ConfigError,
    LoaderConfig,
    Mode,
    OrderName,
    named_backend,
    shown,
)
from ..data.ahead import BLOCK_BYTES
from ..data.datasets import AnyDataset, FakeDataset, ImageDataset, Splits
from ..data.own import OwnDataset
from ..data.storage import ArraySource, Subset
from ..data.transforms import mirror_into
from ..data.whole import Whole
from ..runtime import accelerator, limits
from ..runtime.distributed import World
from ..runtime.folder import log
from ..runtime.limits import Limits
from ..runtime.seeding import uniforms
from .base import AHEAD_BYTES, ARRAYS, PROCESSES, THREADS, Backend, Failure, FeedSettings, HostBatch
from .order import AnyOrder, Cursor, EpochRemainder, Lanes, Order, ProbeOrder
from .processes import ProcessFeed
from .threads import ThreadFeed

# the stage that crops and flips a batch
_GATHER = "gather"


def block_room(lanes: Lanes, ranks: int) -> int:
    """Returns the number of blocks that a rank keeps in memory.

    This exceeds the blocks in its windows, because announced samples belong to later windows.
    """
    return math.ceil(1.125 * lanes.lanes * lanes.window / ranks + AHEAD_BYTES / BLOCK_BYTES)


def has_fixed_size(dataset: object) -> TypeGuard[ImageDataset]:
    """Returns whether all images have the same size before the final crop and flip."""
    return (
        isinstance(dataset, ImageDataset)
        and dataset.own is None
        and dataset.transform.crop in ("pad", "center")
    )


def stored(dataset: object) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the array with the images in ``dataset``, and its rows; None if they are files."""
    if not has_fixed_size(dataset):
        return None
    source = dataset.source
    rows = np.arange(len(source))
    while isinstance(source, Subset):
        rows = source.indices[rows]
        source = source.source
    return (source.images, rows) if isinstance(source, ArraySource) else None


def pixel_bytes(dataset: ImageDataset) -> int:
    """Returns the size in bytes of the array in ``InMemoryImages``.

    Each row is preceded by ``pad`` zeros, each image by ``pad`` zero rows, and both also follow the
    last image. Neighboring rows and images share their margins.
    """
    pad = _padding(dataset)
    pitch = dataset.image_size + pad
    return 3 * ((len(dataset) * pitch + pad) * pitch + pad)


def _padding(dataset: ImageDataset) -> int:
    """Returns the zero margin around an image; 0 without a pad crop."""
    transform = dataset.transform
    return transform.pad if transform.crop == "pad" else 0


class InMemoryImages:
    """The images in a dataset as one array, before crop and flip.

    A crop is a window into the array. The constructor reads all images.

    Args:
        dataset: a dataset that satisfies ``has_fixed_size``.
        settings: settings for the ``threads`` backend that reads the images.
        device: stores the images if it is a GPU with twice their size free; otherwise, the host
            stores them.

    Attributes:
        on_device: whether the images are in device memory.
        replaced: unreadable samples that were replaced.

    Raises:
        BadSample: an image cannot be read.
        LoaderError: an image was not read within ``settings.timeout_s``.
        MemoryError: there is too little host memory.
    """

    def __init__(
        self, dataset: ImageDataset, settings: FeedSettings, device: torch.device | None = None
    ) -> None:
        self._dataset = dataset
        self._own = accelerator.get(device or "cpu")
        pad = _padding(dataset)
        # row stride in pixels, and image stride in rows
        self._pitch = pitch = dataset.image_size + pad
        # numpy raises MemoryError, torch does not
        memory = np.zeros(pixel_bytes(dataset), np.uint8)
        labels = np.array(dataset.source.labels, np.int64)
        self.replaced: dict[int, Failure] = {}
        whole = memory[: 3 * len(dataset) * pitch**2].reshape(-1, pitch, pitch, 3)
        inner = whole[:, pad:, pad:]
        # a pad crop resizes only images with another size
        resizes = dataset.transform.crop == "center" and dataset.transform.resize
        held = stored(dataset)
        if held and not resizes and held[0].shape[1:] == inner.shape[1:]:
            for place, row in enumerate(held[1]):
                inner[place] = held[0][row]
        else:
            self._read(settings, inner, labels)
        self._memory = torch.from_numpy(memory)
        self._labels = torch.from_numpy(labels)
        self.on_device = False
        if room := self._own.memory():
            # Half, because the network needs memory too. Memory reserved by torch is not free,
            # because the next step will use it.
            if 2 * len(memory) <= room.free:
                # another process may allocate it first
                with suppress(torch.OutOfMemoryError):
                    self._memory = self._own.copy(self._memory)
                    self._labels = self._own.copy(self._labels)
                    self.on_device = True
            if not self.on_device:
                log.info(
                    "arrays stay on the host: %.1f GB exceeds half of the device's free %.1f GB",
                    len(memory) / 1e9,
                    room.free / 1e9,
                )

    def _read(self, settings: FeedSettings, images: np.ndarray, labels: np.ndarray) -> None:
        """Writes all images and their labels."""
        # without the margin and the flips, which are drawn per epoch
        plain = copy.copy(self._dataset)
        plain.transform = replace(plain.transform, pad=0, hflip=0.0, vflip=0.0)
        order = Order(len(plain), settings.batch_size, shuffle=False)
        with closing(ThreadFeed(plain, order, settings)) as feed:
            for batch in feed:
                places = batch.indices.numpy()
                images[places] = batch.images.permute(0, 2, 3, 1).numpy()
                labels[places] = batch.labels.numpy()
                self.replaced |= {failure.sample: failure for failure in batch.failures}

    def batch(self, epoch: int, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns the images and labels at the given ``indices`` of the order in ``epoch``.

        Images are uint8 ``[N, 3, S, S]`` in channels_last memory, labels int64 ``[N]``.
        """
        # crop offset and flips of each sample, from its own random numbers
        rows = indices % len(self._labels)
        pitch = self._pitch
        begin = rows * pitch**2
        transform = self._dataset.transform
        pads = transform.crop == "pad"
        drawn = uniforms(self._dataset.seed, epoch, indices, 4 if pads else 2)
        if pads:
            top, left = ((2 * transform.pad + 1) * drawn[:, :2]).astype(np.int64).T
            begin += top * pitch + left
        mirrored, upended = (drawn[:, -2:] < (transform.hflip, transform.vflip)).T

        # image-sized windows, indexed by their first pixel
        size = self._dataset.image_size
        places = len(self._memory) // 3 - (size - 1) * pitch - size + 1
        windows = self._memory.as_strided((places, size, 3 * size), (3, 3 * pitch, 1))
        shape = len(rows), size, size, 3
        if self.on_device:
            # a few asynchronous launches for all samples
            where = torch.from_numpy(np.stack([begin, rows, mirrored, upended]))
            first, own, turned, overturned = self._own.copy(self._own.pin(where))
            images = windows.index_select(0, first).view(shape)
            images = torch.where(turned.bool().view(-1, 1, 1, 1), images.flip(2), images)
            if transform.vflip:
                images = torch.where(overturned.bool().view(-1, 1, 1, 1), images.flip(1), images)
            return images.permute(0, 3, 1, 2), self._labels.index_select(0, own)
        # numpy, because torch's thread pool would wait for cores used by the step
        cut = windows.numpy()[begin].reshape(shape)
        plain = cut[mirrored]
        turned_here = np.empty_like(plain)
        mirror_into(plain, turned_here)
        cut[mirrored] = turned_here
        cut[upended] = cut[upended, ::-1]
        images = torch.from_numpy(cut).permute(0, 3, 1, 2)
        return images, torch.from_numpy(self._labels.numpy()[rows])


class ArrayFeed(Backend):
    """Batches from ``dataset`` in ``order``, bitwise identical to those from ``processes``.

    With ``InMemoryImages`` on a GPU, batches are made there and not copied.

    Args:
        dataset: a dataset whose images have the same size before crop and flip.
        order: assigns samples to batches.
        settings: settings for a feed without workers.
        pixels: the dataset's pixels, shared with other feeds; None: allocated here, on the host.

    Raises:
        As ``InMemoryImages``, if ``pixels`` is None.
    """

    name = ARRAYS

    def __init__(
        self,
        dataset: ImageDataset,
        order: AnyOrder,
        settings: FeedSettings,
        pixels: InMemoryImages | None = None,
    ) -> None:
        super().__init__(order, settings)
        self.pixels = pixels or InMemoryImages(dataset, settings)
        self.made_on_device = self.pixels.on_device
        self._length = len(dataset)
        self.meter: StageMeter = StageMeter((_GATHER,), 1, shared=False)
        self._timer = StageTimer(self.meter, 0)

    def take(self, poll_s: float) -> HostBatch:
        """As in ``Backend``."""
        epoch, indices = next(self._coming)
        count = len(indices)
        # a batch is timed like a single sample with one stage
        self._timer.begin(1)
        self._timer.mark(START)
        gather = self.pixels.batch
        if self.times_samples:
            gather = self.meter.timed(0, gather, count)
        images, labels = gather(epoch, indices)
        if self.settings.pin_memory and not self.made_on_device:
            images = images.pin_memory()
            labels = labels.pin_memory()
        self._timer.mark(_GATHER)
        failures: tuple[Failure, ...] = ()
        if replaced := self.pixels.replaced:
            places = (indices % self._length).tolist()
            failures = tuple(replaced[i] for i in places if i in replaced)
        stamps = self._timer.end(count)
        return HostBatch(images, labels, torch.from_numpy(indices), failures, epoch, stamps)


class SyntheticFeed(Backend):
    """One ``batch`` on ``device``, repeated.

    The last batch in an epoch has the length given by ``order``.
    """

    name = "synthetic"
    made_on_device = True

    def __init__(
        self,
        order: AnyOrder,
        settings: FeedSettings,
        batch: HostBatch,
        device: torch.device,
    ) -> None:
        super().__init__(order, settings)
        self._images = batch.images.to(device)
        self._labels = batch.labels.to(device)

    def take(self, poll_s: float) -> HostBatch:
        """As in ``Backend``."""
        epoch, indices = next(self._coming)
        n = len(indices)
        return HostBatch(self._images[:n], self._labels[:n], torch.from_numpy(indices), epoch=epoch)


# the available backends by name
BACKENDS: dict[str, Any] = {kind.name: kind for kind in (ProcessFeed, ThreadFeed, ArrayFeed)}


@dataclass(slots=True)
class Feeds:
    """Creates one rank's feeds for ``splits``.

    Attributes:
        cursor: position of the rank's probes.
        lanes: order in the training feeds; None: uniform.

    Raises:
        ConfigError: loader.order=lanes is set for images without blocks.
    """

    splits: Splits
    config: Config
    world: World
    cursor: Cursor = field(default_factory=Cursor, init=False)
    # shared by all feeds for one dataset
    _pixels: dict[ImageDataset, InMemoryImages] = field(default_factory=dict, init=False)
    lanes: Lanes | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        loader = self.config.loader
        if loader.order is OrderName.uniform or not self.splits.trains:
            return
        blocks = getattr(getattr(self.splits.train, "source", None), "blocks", None)
        if blocks is None:
            raise ConfigError(
                f"loader.order=lanes: data.name={self.splits.name} has no blocks; pack its images "
                "with wellfed pack, or set loader.order=uniform"
            )
        count, size = loader.lanes, self.world.size
        window = (loader.window_mb << 20) // (count * BLOCK_BYTES)
        self.lanes = Lanes(blocks, count, max(1, window))
        if size > 1 and (count % size or size * loader.batch_size % count):
            log.warning(
                "loader.lanes=%d: some of the %d ranks read the same blocks; set a multiple of %d "
                "that divides the global batch size",
                count, size, size,
            )  # fmt: skip
        share = self.lanes.variety(self.splits.labels_for("loader.order=lanes"))
        if share < 0.5:
            log.warning(
                "loader.order=lanes: shards are sorted by class; a window has %.0f%% of the "
                "classes that it would have if shuffled; pack again with wellfed pack, or set "
                "loader.order=uniform",
                100 * share,
            )

    @property
    def backends(self) -> tuple[str, ...]:
        """The candidate backends: the user's choice, or all that suit the data.

        Arrays suit images that are already in memory.
        """
        if named := named_backend(self.config):
            return (named.name,)
        train = self.splits.train
        if isinstance(train, OwnDataset):
            # threads would share its RNGs
            return (PROCESSES,)
        return tuple(name for name in BACKENDS if name != ARRAYS or stored(train) is not None)

    def settings(self, limits: Limits) -> FeedSettings:
        """Returns the training feed's settings before tuning, with nulls filled in.

        Raises:
            ConfigError: the chosen backend cannot load the dataset.
        """
        loader = self.config.loader
        train = self.splits.train
        # Threads start quickly and share memory, and decoding releases the GIL. A user's dataset
        # may hold it.
        backend = THREADS if isinstance(train, ImageDataset) else PROCESSES
        if named := named_backend(self.config):
            backend = named.name
        workers = loader.num_workers
        if workers is None:
            # more than 16 processes only on request
            workers = max(1, min(16, int(limits.cores)))
        is_gpu = accelerator.get(self.world.device).has_streams
        settings = FeedSettings(
            batch_size=loader.batch_size,
            num_workers=workers,
            pin_memory=is_gpu and loader.pin_memory is not False,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=None if backend == THREADS else loader.persistent_workers,
            timeout_s=loader.timeout_s,
            start_method=loader.start_method.name,
            backend=backend,
        )
        if isinstance(train, OwnDataset) and backend != PROCESSES:
            raise ConfigError(
                f"loader.backend={backend}: {self.splits.name} returns a Dataset, whose "
                "RNGs threads would share; use loader.backend=processes, or return a source"
            )
        if backend == ARRAYS and isinstance(train, ImageDataset):
            if not has_fixed_size(train):
                raise ConfigError(
                    "loader.backend=arrays needs images of one size, but these have no common "
                    "size (augment.crop=random_resized); choose augment.crop=pad or center, or "
                    "loader.backend=threads"
                )
            held = self.held_bytes(settings)
            if held > 0.8 * limits.memory_bytes:
                raise ConfigError(
                    f"loader.backend=arrays: the images need {held / 1e9:.1f} GB of memory, but "
                    f"only {limits.memory_bytes / 1e9:.1f} GB is available (a fifth is "
                    "reserved); lower data.image_size or use loader.backend=threads"
                )
        return settings

    def resize(self, size: int) -> Feeds:
        """Sets the training image size for all feeds made from now on; returns itself.

        Raises:
            ConfigError: the dataset determines the size.
        """
        splits = self.splits
        train = splits.train
        # or the set is only evaluated
        if splits.trains and train.image_size != size:
            if not isinstance(train, ImageDataset):
                raise ConfigError(
                    f"data.train_size={size}: {splits.name} returns a Dataset, whose transforms "
                    "determine the size; set it to null, or return a source"
                )
            self._pixels.pop(train, None)
            self.splits = replace(splits, train=train.sized(size))
        return self

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        """Returns the validation feed's settings: those for training, with workers for one pass."""
        val = self.config.loader.val
        return replace(
            train,
            batch_size=val.batch_size or train.batch_size,
            num_workers=train.num_workers if val.num_workers is None else val.num_workers,
            prefetch_factor=val.prefetch_factor,
            persistent_workers=False,
        )

    def steps_per_epoch(self) -> int:
        """Returns the number of optimizer steps per epoch."""
        return math.ceil(len(self._train_order()) / self.config.trainer.accumulate_steps)

    def update_images(self) -> int:
        """Returns the effective batch size of an optimizer step across all ranks."""
        config = self.config
        return config.loader.batch_size * config.trainer.accumulate_steps * self.world.size

    def train(self, settings: FeedSettings, rest: EpochRemainder | None = None) -> Backend:
        """Returns the training feed, or the ``rest`` of one epoch.

        Frees the images left by arrays backend probes if another backend was chosen.
        """
        if settings.backend != ARRAYS:
            self._pixels.clear()
        default = LoaderConfig()
        for name in ("persistent_workers", "start_method"):
            asked = getattr(self.config.loader, name)
            idle = settings.backend == THREADS and asked != getattr(default, name)
            if idle and self.world.is_main:
                log.warning("loader.%s=%s has no effect with threads", name, shown(asked))
        order = replace(self._train_order(), rest=rest)
        dataset = self._in_blocks(self.splits.train, settings)
        return self._make(dataset, order, settings)

    def sized(
        self, plans: Mapping[int, FeedSettings], rest: EpochRemainder | None, size: int
    ) -> Backend:
        """Returns the training feed for images of side ``size``, with settings from ``plans``."""
        return self.resize(size).train(plans[size], rest)

    def val(self, settings: FeedSettings, dataset: AnyDataset | None = None) -> Backend:
        """Returns a feed with every sample once, in order, on one rank.

        The samples are from ``dataset``, or from the validation set if it is None.
        """
        if dataset is None:
            dataset = self.splits.val
        order = self._whole_order(dataset, settings.batch_size)
        return self._make(dataset, order, settings)

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Backend:
        """Returns an infinite feed of full training batches, from samples that no probe has used.

        Args:
            settings: the loader settings to probe.
            again: whether to repeat the samples that ``cursor`` has seen, which are readable.
        """
        order = self._train_order()
        # a short batch would have a different step time
        full = replace(order, drop_last=True)
        probes = ProbeOrder(full if len(full) else order, self.cursor, again)
        dataset = self.splits.train
        if isinstance(dataset, ImageDataset) and dataset.whole and self.config.trainer.epochs > 1:
            # as in a second epoch
            dataset = replace(dataset, whole=Whole(None))
        return self._make(self._in_blocks(dataset, settings), probes, settings)

    def batch_bytes(self, settings: FeedSettings) -> int:
        """Returns the size of one batch in bytes: uint8 images, int64 labels and indices."""
        return settings.batch_size * (3 * self.splits.train.image_size**2 + 8 + 8)

    def noise(self, count: int) -> HostBatch:
        """Returns ``count`` fixed random images and labels; step time does not depend on them.

        The images are uint8 ``[count, 3, S, S]``.
        """
        generator = torch.Generator().manual_seed(0)
        side = self.splits.train.image_size
        size = (count, 3, side, side)
        images = torch.randint(256, size, dtype=torch.uint8, generator=generator)
        labels = torch.randint(len(self.splits.classes), size[:1], generator=generator)
        return HostBatch(images, labels, torch.arange(count))

    def held_bytes(self, settings: FeedSettings) -> int:
        """Returns the bytes that feeds use in addition to batches; for arrays, both sets."""
        if settings.backend != ARRAYS:
            return 0
        # prediction has only one set
        sets = {self.splits.train, self.splits.val}
        return sum(pixel_bytes(dataset) for dataset in sets if isinstance(dataset, ImageDataset))

    def _whole_order(self, dataset: AnyDataset, batch_size: int) -> Order:
        return Order(
            len(dataset),
            batch_size,
            shuffle=False,
            rank=self.world.rank,
            world_size=self.world.size,
        )

    def _train_order(self) -> Order:
        loader = self.config.loader
        order = self._whole_order(self.splits.train, loader.batch_size)
        if self.config.mode is Mode.evaluate:
            # any number of images is enough if there are no steps
            return order
        strength = self.config.data.balance
        balance = None
        if strength:
            balance = self.splits.labels_for(f"data.balance={strength:g}"), strength
        order = replace(
            order,
            seed=self.config.seed,
            shuffle=True,
            drop_last=loader.drop_last,
            accumulate_steps=self.config.trainer.accumulate_steps,
            repeats=self.config.data.repeats,
            balance=balance,
            lanes=self.lanes,
        )
        if len(order) == 0:
            images = self.world.size * order.accumulate_steps * loader.batch_size
            raise ConfigError(
                f"loader.batch_size={loader.batch_size}: a step needs {images} images, but "
                f"there are only {order.length}; lower it or trainer.accumulate_steps, or, "
                "with one rank, set loader.drop_last=false"
            )
        return order

    def _in_blocks(self, dataset: AnyDataset, settings: FeedSettings) -> AnyDataset:
        """Returns ``dataset``, which fetches whole blocks for lanes if its workers share memory."""
        if self.lanes and settings.backend == THREADS and isinstance(dataset, ImageDataset):
            return replace(dataset, block_room=block_room(self.lanes, self.world.size))
        return dataset

    def _make(self, dataset: AnyDataset, order: AnyOrder, settings: FeedSettings) -> Backend:
        if isinstance(dataset, FakeDataset):
            batch = self.noise(settings.batch_size)
            return SyntheticFeed(order, settings, batch, self.world.device)
        if settings.backend == ARRAYS and isinstance(dataset, ImageDataset):
            if dataset not in self._pixels:
                readers = max(1, int(limits.measure(self.world.local_size).cores))
                reading = replace(
                    settings,
                    backend=THREADS,
                    num_workers=readers,
                    prefetch_factor=None,
                    pin_memory=False,
                )
                self._pixels[dataset] = InMemoryImages(dataset, reading, self.world.device)
            return ArrayFeed(dataset, order, settings, self._pixels[dataset])
        feed: Backend = BACKENDS[settings.backend](dataset, order, settings)
        feed.restarts = self.config.loader.restart_workers and isinstance(order, Order)
        return feed
