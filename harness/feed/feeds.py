"""The feeds of a run: which backend serves the data set, with which order and settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from harness.config import BackendName, Config, ConfigError, Mode, TunerName, named_backend
from harness.data.datasets import AnyDataset, FakeDataset, ImageDataset, Splits
from harness.data.own import OwnDataset
from harness.feed.arrays import (
    ArrayFeed,
    InMemoryImages,
    SyntheticFeed,
    has_fixed_size,
    noise,
    pixel_bytes,
    stored,
)
from harness.feed.interface import (
    ARRAYS,
    THREADS,
    Backend,
    FeedSettings,
    HostBatch,
    train_settings,
    val_settings,
    with_backend,
)
from harness.feed.order import AnyOrder, Cursor, Order, ProbeOrder, Rest
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed
from harness.runtime import accelerator, limits
from harness.runtime.distributed import World
from harness.runtime.limits import Limits

# the backends by name, to choose from
BACKENDS: dict[str, Any] = {kind.name: kind for kind in (ProcessFeed, ThreadFeed, ArrayFeed)}


@dataclass(slots=True)
class Feeds:
    """Makes one rank's feeds over ``splits``; ``cursor`` is how far its probes are."""

    splits: Splits
    config: Config
    world: World
    cursor: Cursor = field(default_factory=Cursor, init=False)
    # shared by all feeds of one data set
    _pixels: dict[ImageDataset, InMemoryImages] = field(default_factory=dict, init=False)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends to choose from: the one that the user named, or all that suit the data.

        Arrays suit images that lie in memory already.
        """
        named = self.config.loader.backend
        if named not in (None, BackendName.auto):
            return (named.name,)
        train = self.splits.train
        found = [name for name in BACKENDS if name != ARRAYS or stored(train) is not None]
        if isinstance(train, OwnDataset):
            found = [name for name in found if not BACKENDS[name].shares_interpreter]
        return tuple(found)

    def settings(self, limits: Limits) -> FeedSettings:
        """Returns the training feed's settings before any tuning.

        Raises:
            ConfigError: the backend that the user named cannot serve the data set.
        """
        loader = self.config.loader
        train = self.splits.train
        settings = train_settings(loader, limits, accelerator.of(self.world.device).has_streams)
        if named := named_backend(loader):
            settings = with_backend(settings, named.name)
        elif isinstance(train, ImageDataset) and not (
            loader.autotune and self.config.tuner.name is TunerName.grid
        ):
            # Threads start at once and hand nothing over, and decoding leaves the interpreter to
            # others. A data set that is not ours may keep the interpreter.
            settings = with_backend(settings, THREADS)

        if isinstance(train, OwnDataset) and BACKENDS[settings.backend].shares_interpreter:
            raise ConfigError(
                f"loader.backend={settings.backend}: {self.splits.name} gives a Dataset, whose "
                "random numbers threads would share; use loader.backend=processes, or give a source"
            )
        if settings.backend == ARRAYS and isinstance(train, ImageDataset):
            if not has_fixed_size(train):
                raise ConfigError(
                    "loader.backend=arrays: crops are cut from whole images, which have no common "
                    "size (augment.crop=random_resized); choose augment.crop=pad or center, or "
                    "loader.backend=threads"
                )
            held = self.held_bytes(settings)
            if held > 0.8 * limits.memory_bytes:
                raise ConfigError(
                    f"loader.backend=arrays: the images take {held / 1e9:.1f} GB of memory, of "
                    f"which {limits.memory_bytes / 1e9:.1f} GB are free (a fifth is kept back); "
                    "lower data.image_size or use loader.backend=threads"
                )
        return settings

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        """Returns the settings of the validation feed beside a training feed of ``train``."""
        return val_settings(self.config.loader, train)

    def steps_per_epoch(self) -> int:
        """Returns the optimizer updates of one epoch."""
        return math.ceil(len(self._train_order()) / self.config.trainer.accumulate_steps)

    def train(self, settings: FeedSettings, rest: Rest | None = None) -> Backend:
        """Returns the training feed; of one epoch only the ``rest``.

        Frees the images that probes of the arrays backend have left, if another one was chosen.
        """
        if settings.backend != ARRAYS:
            self._pixels.clear()
        order = replace(self._train_order(), rest=rest)
        return self._make(self.splits.train, order, settings, self.config.loader.restart_workers)

    def val(self, settings: FeedSettings) -> Backend:
        """Returns the validation feed: every sample once, on one of the ranks."""
        return self.whole(self.splits.val, settings)

    def whole(self, dataset: AnyDataset, settings: FeedSettings) -> Backend:
        """Returns a feed of every sample of ``dataset`` once, in order, on one of the ranks."""
        order = self._whole_order(dataset, settings.batch_size)
        return self._make(dataset, order, settings, self.config.loader.restart_workers)

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Backend:
        """Returns an endless training feed without short batches, over samples new to probes.

        Args:
            settings: how the batches are made.
            again: repeat the samples that ``cursor`` has seen, which can be read.
        """
        order = self._train_order()
        # a short batch would have another step time
        full = replace(order, drop_last=True)
        probes = ProbeOrder(full if len(full) else order, self.cursor, again)
        return self._make(self.splits.train, probes, settings)

    def batch_bytes(self, settings: FeedSettings) -> int:
        """Returns the bytes of one batch: uint8 images, int64 labels and indices."""
        return settings.batch_size * (3 * self.splits.train.image_size**2 + 8 + 8)

    def noise(self, count: int) -> HostBatch:
        """Returns ``count`` random images: a step takes as long on any pixels."""
        return noise(count, self.splits.train.image_size, len(self.splits.classes))

    def on_device(self, settings: FeedSettings) -> bool:
        """Whether the images of feeds of ``settings`` are to lie in a GPU's memory."""
        return settings.backend == ARRAYS and accelerator.of(self.world.device).has_streams

    def held_bytes(self, settings: FeedSettings) -> int:
        """Returns the bytes that feeds hold in addition to batches: for arrays, both sets."""
        if settings.backend != ARRAYS:
            return 0
        # a prediction has one set
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
        if self.config.mode is Mode.evaluate:
            # of no step: any number of images will do
            return self._whole_order(self.splits.train, loader.batch_size)
        strength = self.config.data.balance
        balance = None
        if strength:
            balance = self.splits.labels_for(f"data.balance={strength:g}"), strength
        order = Order(
            len(self.splits.train),
            loader.batch_size,
            seed=self.config.seed,
            drop_last=loader.drop_last,
            rank=self.world.rank,
            world_size=self.world.size,
            parts=self.config.trainer.accumulate_steps,
            balance=balance,
        )
        if len(order) == 0:
            images = self.world.size * order.parts * loader.batch_size
            raise ConfigError(
                f"loader.batch_size={loader.batch_size}: an update takes {images} images, and "
                f"there are {order.length} for training; lower it or trainer.accumulate_steps, or "
                "with one rank set loader.drop_last=false"
            )
        return order

    def _make(
        self, dataset: AnyDataset, order: AnyOrder, settings: FeedSettings, restarts: bool = False
    ) -> Backend:
        if isinstance(dataset, FakeDataset):
            return SyntheticFeed(
                order, settings, dataset.image_size, dataset.num_classes, self.world.device
            )
        if settings.backend == ARRAYS and isinstance(dataset, ImageDataset):
            if dataset not in self._pixels:
                readers = max(1, int(limits.measure(self.world.local_size).cores))
                reading = replace(
                    settings,
                    backend=THREADS,
                    num_workers=readers,
                    prefetch_factor=2,
                    pin_memory=False,
                )
                self._pixels[dataset] = InMemoryImages(dataset, reading, self.world.device)
            return ArrayFeed(dataset, order, settings, self._pixels[dataset])
        feed: Backend = BACKENDS[settings.backend](dataset, order, settings)
        feed.restarts = restarts
        return feed
