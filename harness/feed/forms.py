"""The feeds of a run: which backend serves the data set, with which order and settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from harness.config import Backend, Config, ConfigError, Mode, TunerName, form_asked_for
from harness.data.datasets import AnyDataset, FakeDataset, Splits
from harness.data.images import ImageDataset
from harness.data.own import OwnDataset
from harness.feed.arrays import ArrayFeed
from harness.feed.interface import (
    ARRAYS,
    PROCESSES,
    THREADS,
    Feed,
    FeedSettings,
    FillableDataset,
    HostBatch,
    in_form,
    train_settings,
    val_settings,
)
from harness.feed.order import AnyOrder, Cursor, Order, ProbeOrder, Rest
from harness.feed.pixels import InMemoryImages, has_one_form, pixel_bytes
from harness.feed.processes import ProcessFeed
from harness.feed.synthetic import SyntheticFeed, noise
from harness.feed.threads import ThreadFeed
from harness.runtime import accelerator, limits
from harness.runtime.distributed import World
from harness.runtime.folder import log
from harness.runtime.limits import Limits

# the backends by name
FORMS: dict[str, Callable[[FillableDataset, AnyOrder, FeedSettings], Feed]] = {
    PROCESSES: ProcessFeed,
    THREADS: ThreadFeed,
    ARRAYS: ArrayFeed,
}


@dataclass(slots=True)
class Feeds:
    """Makes one rank's feeds over ``splits``; ``cursor`` is how far its probes are."""

    splits: Splits
    config: Config
    world: World
    cursor: Cursor = field(default_factory=Cursor, init=False)
    # shared by all feeds of one data set
    _pixels: dict[ImageDataset, InMemoryImages] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.config.loader.pin_memory and not accelerator.of(self.world.device).has_streams:
            # accepted, so that a sweep over pin_memory runs anywhere
            log.warning(
                "loader.pin_memory=true has no effect on %s: there is no copy to a device",
                self.world.device.type,
            )

    @property
    def forms(self) -> tuple[str, ...]:
        """The backends to choose from: the one that the user named, or all that can serve."""
        named = self.config.loader.backend
        if named not in (None, Backend.auto):
            return (named.name,)
        if isinstance(self.splits.train, OwnDataset):
            return (PROCESSES,)
        return tuple(name for name in FORMS if name != ARRAYS or has_one_form(self.splits.train))

    def settings(self, limits: Limits) -> FeedSettings:
        """Returns the training feed's settings before any tuning.

        Raises:
            ConfigError: the backend that the user named cannot serve the data set.
        """
        loader = self.config.loader
        train = self.splits.train
        settings = train_settings(loader, limits, accelerator.of(self.world.device).has_streams)
        if asked := form_asked_for(loader):
            settings = in_form(settings, asked.name)
        elif isinstance(train, ImageDataset) and not (
            loader.autotune and self.config.tuner.name is TunerName.grid
        ):
            # Threads start at once and hand nothing over, and decoding leaves the interpreter to
            # others. A data set that is not ours may keep the interpreter.
            settings = in_form(settings, THREADS)

        if isinstance(train, OwnDataset) and settings.backend != PROCESSES:
            raise ConfigError(
                f"loader.backend={settings.backend}: {self.splits.name} gives a Dataset, whose "
                "random numbers threads would share; use loader.backend=processes, or give a source"
            )
        if settings.backend == ARRAYS and isinstance(train, ImageDataset):
            if not has_one_form(train):
                raise ConfigError(
                    "loader.backend=arrays: crops are cut from whole images, which have no common "
                    "size (augment.crop=random_resized); choose augment.crop=pad or center, or "
                    "loader.backend=threads"
                )
            held = self.held_bytes(settings)
            if held > 0.8 * limits.memory_bytes:
                raise ConfigError(
                    f"loader.backend=arrays: {len(train) + len(self.splits.val)} images of "
                    f"{train.image_size}x{train.image_size} pixels take {held / 1e9:.1f} GB of "
                    f"memory, of which {limits.memory_bytes / 1e9:.1f} GB are free (a fifth is "
                    "kept back); lower data.image_size or use loader.backend=threads"
                )
        return settings

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        """Returns the settings of the validation feed beside a training feed of ``train``."""
        return val_settings(self.config.loader, train)

    def steps_per_epoch(self) -> int:
        """Returns the optimizer updates of one epoch."""
        return math.ceil(len(self._train_order()) / self.config.trainer.accumulate_steps)

    def train(self, settings: FeedSettings, rest: Rest | None = None) -> Feed:
        """Returns the training feed; of one epoch only the ``rest``.

        Frees the images that probes of the arrays backend have left, if another one was chosen.
        """
        if settings.backend != ARRAYS:
            self._pixels.clear()
        order = replace(self._train_order(), rest=rest)
        return self._with_restarts(self._make(self.splits.train, order, settings))

    def val(self, settings: FeedSettings) -> Feed:
        """Returns the validation feed: every sample once, on one of the ranks."""
        return self.whole(self.splits.val, settings)

    def whole(self, dataset: AnyDataset, settings: FeedSettings) -> Feed:
        """Returns a feed of every sample of ``dataset`` once, in order, on one of the ranks."""
        order = self._whole_order(dataset, settings.batch_size)
        return self._with_restarts(self._make(dataset, order, settings))

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Feed:
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
        """Returns the bytes that feeds hold besides their batches: for arrays, both sets."""
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
            advice = "lower it"
            if order.parts > 1:
                advice += " or trainer.accumulate_steps"
            if self.world.size == 1:
                advice += " or set loader.drop_last=false"
            images = self.world.size * order.parts * loader.batch_size
            raise ConfigError(
                f"loader.batch_size={loader.batch_size}: an update takes {images} images, and "
                f"there are {order.length} for training; {advice}"
            )
        return order

    def _with_restarts(self, feed: Feed) -> Feed:
        feed.restarts = self.config.loader.restart_workers
        return feed

    def _make(
        self,
        dataset: AnyDataset,
        order: AnyOrder,
        settings: FeedSettings,
    ) -> Feed:
        if isinstance(dataset, FakeDataset):
            return SyntheticFeed(
                order, settings, dataset.image_size, dataset.num_classes, self.world.device
            )
        if settings.backend == ARRAYS and isinstance(dataset, ImageDataset):
            if dataset not in self._pixels:
                self._pixels[dataset] = InMemoryImages(dataset, self.world.device)
            readers = max(1, int(limits.measure(self.world.local_size).cores))
            return ArrayFeed(dataset, order, settings, self._pixels[dataset], readers)
        return FORMS[settings.backend](dataset, order, settings)
