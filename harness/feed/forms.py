"""The feeds of a run: which form serves the data set, with which order and settings."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from harness.config import Backend, Config, ConfigError, TunerName, form_asked_for
from harness.data.datasets import FakeDataset, Splits
from harness.data.images import ImageDataset
from harness.data.own import OwnDataset
from harness.feed.arrays import ARRAYS, ArrayFeed, in_form
from harness.feed.gauge import Gauge
from harness.feed.interface import (
    PROCESSES,
    THREADS,
    Feed,
    FeedSettings,
    FillableDataset,
    HostBatch,
    train_settings,
    val_settings,
)
from harness.feed.order import AnyOrder, Cursor, Order, ProbeOrder, Rest
from harness.feed.pixels import InMemoryImages, pixel_bytes, why_not_in_memory
from harness.feed.processes import ProcessFeed
from harness.feed.synthetic import SyntheticFeed
from harness.feed.threads import ThreadFeed
from harness.runtime import accelerator, limits
from harness.runtime.distributed import World
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits

Maker = Callable[[FillableDataset, AnyOrder, FeedSettings, Gauge | None], Feed]
# by the names that ``FeedSettings.backend`` may have
FORMS: dict[str, Maker] = {
    PROCESSES: ProcessFeed,
    THREADS: ThreadFeed,
    ARRAYS: ArrayFeed,
}
# of the free memory that images may fill
_SHARE = 0.8

_log = logging.getLogger(LOGGER)


@dataclass(slots=True)
class Feeds:
    """Makes one rank's feeds over ``splits``, and knows what its probes have read."""

    splits: Splits
    config: Config
    world: World
    _cursor: Cursor = field(default_factory=Cursor, init=False)
    # that its feeds of arrays share
    _pixels: dict[ImageDataset, InMemoryImages] = field(default_factory=dict, init=False)

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of the forms to choose from: the one that the user named, else all that can
        serve the data set.
        """
        named = self.config.loader.backend
        if named not in (None, Backend.auto):
            return (named.name,)
        if isinstance(self.splits.train, OwnDataset):
            return (PROCESSES,)
        return tuple(
            name for name in FORMS if name != ARRAYS or why_not_in_memory(self.splits.train) is None
        )

    @property
    def default_form(self) -> str:
        """The name of the form before any tuning.

        Where nothing is said about form and workers, images are decoded by threads: they start at
        once, hand nothing over, and decoding leaves the interpreter to others. A data set that is
        not ours may keep it, and gets processes, as does who asks for workers: these are torch's
        settings.
        """
        loader = self.config.loader
        if asked := form_asked_for(loader):
            return asked.name
        by_grid = loader.autotune and self.config.tuner.name is TunerName.grid
        return PROCESSES if by_grid or not isinstance(self.splits.train, ImageDataset) else THREADS

    def settings(self, limits: Limits) -> FeedSettings:
        """The training feed's settings before any tuning.

        Raises:
            ConfigError: the form that the user named cannot serve the data set.
        """
        if self.config.loader.pin_memory and not accelerator.of(self.world.device).has_streams:
            # accepted, so that a sweep over it runs anywhere
            _log.warning(
                "loader.pin_memory=true has no effect on %s: there is no copy to a device",
                self.world.device.type,
            )
        return self.derived_settings(limits)

    def derived_settings(self, limits: Limits) -> FeedSettings:
        """As ``settings``, without a word about what has no effect."""
        derived = train_settings(
            self.config.loader, limits, accelerator.of(self.world.device).has_streams
        )
        settings = in_form(derived, self.default_form)
        if isinstance(self.splits.train, OwnDataset) and settings.backend != PROCESSES:
            raise ConfigError(
                f"loader.backend={settings.backend}: {self.splits.name} gives a Dataset, whose "
                "random numbers threads would "
                "share; use loader.backend=processes, or give a source"
            )
        if settings.backend == ARRAYS:
            self._check_arrays(settings, limits)
        return settings

    def steps_per_epoch(self) -> int:
        """Optimizer updates in one epoch."""
        return math.ceil(len(self._train_order()) / self.config.trainer.accumulate_steps)

    def train(self, settings: FeedSettings, rest: Rest | None = None) -> Feed:
        """The training feed, of one epoch only the ``rest``; what probes hold in memory for another
        form of it goes.
        """
        if settings.backend != ARRAYS:
            self._pixels.clear()
        return self._make(
            self.splits.train, dataclasses.replace(self._train_order(), rest=rest), settings
        )

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        """The settings of the validation feed that goes with a training feed of ``train``."""
        return in_form(val_settings(self.config.loader, train), train.backend)

    def val(self, settings: FeedSettings) -> Feed:
        """The validation feed, with ``settings`` of its own: every sample once, on one of the
        ranks.
        """
        order = Order(
            len(self.splits.val),
            settings.batch_size,
            shuffle=False,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        return self._make(self.splits.val, order, settings)

    def probe(
        self, settings: FeedSettings, gauge: Gauge | None = None, *, again: bool = False
    ) -> Feed:
        """A feed like the training feed, but without an end or short batches, over samples that no
        probe has asked for before.

        Args:
            settings: how its batches are made.
            gauge: is told what its workers do; nothing is where the batches are on the device
                already.
            again: round the samples of the last ``saw``, which can be read.
        """
        if not again:
            self._cursor.begin = self._cursor.asked
        return self._make(
            self.splits.train, ProbeOrder(self._probe_order(), self._cursor, again), settings, gauge
        )

    def saw(self, batches: int) -> None:
        """Note that the last probe that was made has given so many batches."""
        self._cursor.seen = range(self._cursor.begin, self._cursor.begin + batches)

    def probed(self) -> float:
        """How many times probes have asked for the training set so far: 0.2 is a fifth of it."""
        return self._cursor.asked / len(self._probe_order())

    def batch_bytes(self, settings: FeedSettings) -> int:
        """Bytes of one batch's tensors: uint8 images, int64 labels and indices."""
        return settings.batch_size * (3 * self.splits.train.image_size**2 + 8 + 8)

    def noise(self, count: int) -> HostBatch:
        """A batch of ``count`` images that nobody had to load: a step takes as long, and as much
        memory, on any pixels.
        """
        generator = torch.Generator().manual_seed(0)
        side = self.splits.train.image_size
        images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
        labels = torch.randint(len(self.splits.classes), (count,), generator=generator)
        return HostBatch(images, labels, torch.arange(count))

    def on_device(self, settings: FeedSettings) -> bool:
        """Whether the images of feeds of ``settings`` are to lie in a GPU's memory."""
        return settings.backend == ARRAYS and accelerator.of(self.world.device).has_streams

    def held_bytes(self, settings: FeedSettings) -> int:
        """Bytes that feeds of ``settings`` hold besides their batches: of arrays all images of both
        sets, else none.
        """
        held = (self.splits.train, self.splits.val) if settings.backend == ARRAYS else ()
        return sum(pixel_bytes(dataset) for dataset in held if isinstance(dataset, ImageDataset))

    def _check_arrays(self, settings: FeedSettings, limits: Limits) -> None:
        train = self.splits.train
        held = self.held_bytes(settings)
        free = limits.memory_bytes
        if isinstance(train, ImageDataset) and (reason := why_not_in_memory(train)):
            raise ConfigError(
                f"loader.backend=arrays: {reason} (augment.crop=random_resized); choose "
                "augment.crop=pad or center, or "
                "loader.backend=threads"
            )
        if held > _SHARE * free:
            count = len(train) + len(self.splits.val)
            side = train.image_size
            raise ConfigError(
                f"loader.backend=arrays: {count} images of {side}x{side} pixels take "
                f"{held / 1e9:.1f} GB of memory, of which "
                f"{free / 1e9:.1f} GB are free (a fifth is kept back); lower data.image_size or "
                "use loader.backend=threads"
            )

    def _probe_order(self) -> Order:
        """As in training, without an epoch's short batch, whose step would be another."""
        order = self._train_order()
        full = dataclasses.replace(order, drop_last=True)
        return full if len(full) else order

    def _train_order(self) -> Order:
        loader = self.config.loader
        length = len(self.splits.train)
        order = Order(
            length,
            loader.batch_size,
            seed=self.config.seed,
            drop_last=loader.drop_last,
            rank=self.world.rank,
            world_size=self.world.size,
            parts=self.config.trainer.accumulate_steps,
        )
        if len(order) == 0:
            raise ConfigError(
                f"loader.batch_size={loader.batch_size}: the {self.world.size * order.parts} of an "
                "update are more than the "
                f"{length} training images; lower "
                f"it{' or trainer.accumulate_steps' if order.parts > 1 else ''}"
                + (" or set loader.drop_last=false" if self.world.size == 1 else "")
            )
        return order

    def _make(
        self,
        dataset: ImageDataset | OwnDataset | FakeDataset,
        order: AnyOrder,
        settings: FeedSettings,
        gauge: Gauge | None = None,
    ) -> Feed:
        if isinstance(dataset, FakeDataset):
            return SyntheticFeed(
                order, settings, dataset.image_size, dataset.num_classes, self.world.device
            )
        if settings.backend == ARRAYS and isinstance(dataset, ImageDataset):
            if dataset not in self._pixels:
                self._pixels[dataset] = InMemoryImages(dataset, self.world.device)
            readers = max(1, int(limits.measure(self.world.local_size).cores))
            return ArrayFeed(dataset, order, settings, gauge, self._pixels[dataset], readers)
        return FORMS[settings.backend](dataset, order, settings, gauge)
