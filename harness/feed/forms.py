"""The feeds of a run: which form serves the data set, with which order and settings."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from harness.config import Config, ConfigError
from harness.data.datasets import FakeDataset, ImageDataset, Splits
from harness.feed.interface import Feed, FeedSettings, train_settings, val_settings
from harness.feed.order import Order, ProbeOrder
from harness.feed.processes import ProcessFeed
from harness.feed.synthetic import SyntheticFeed
from harness.runtime.distributed import World
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits

_log = logging.getLogger(LOGGER)


@dataclass(frozen=True, slots=True)
class Feeds:
    """Makes one rank's feeds over ``splits``."""

    splits: Splits
    config: Config
    world: World

    def settings(self, limits: Limits) -> FeedSettings:
        """The training feed's settings before any tuning."""
        pinnable = self.world.device.type == "cuda"
        if self.config.loader.pin_memory and not pinnable:  # accepted, so that a sweep over it runs anywhere
            _log.warning("loader.pin_memory=true has no effect on %s: there is no copy to a device", self.world.device.type)
        return train_settings(self.config.loader, limits, pinnable)

    def steps_per_epoch(self) -> int:
        """Optimizer updates in one epoch."""
        return math.ceil(len(self._train_order()) / self.config.trainer.accumulate_steps)

    def train(self, settings: FeedSettings) -> Feed:
        """The training feed."""
        return self._make(self.splits.train, self._train_order(), settings)

    def probe(self, settings: FeedSettings, batches: int) -> Feed:
        """A feed like the training feed, of ``batches`` batches in one pass."""
        return self._make(self.splits.train, ProbeOrder(self._train_order(), batches), settings)

    def val(self, settings: FeedSettings) -> Feed:
        """The validation feed that goes with a training feed of ``settings``: every sample once, on one of the ranks."""
        own = val_settings(self.config.loader, settings)
        order = Order(len(self.splits.val), own.batch_size, shuffle=False, rank=self.world.rank, world_size=self.world.size)
        return self._make(self.splits.val, order, own)

    def _train_order(self) -> Order:
        loader, length = self.config.loader, len(self.splits.train)
        order = Order(
            length,
            loader.batch_size,
            seed=self.config.seed,
            drop_last=loader.drop_last,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        if len(order) == 0:
            raise ConfigError(
                f"loader.batch_size={loader.batch_size}: {self.world.size} of these are more than the {length} training "
                "images; lower it" + (" or set loader.drop_last=false" if self.world.size == 1 else "")
            )
        return order

    def _make(self, dataset: ImageDataset | FakeDataset, order: Order | ProbeOrder, settings: FeedSettings) -> Feed:
        if isinstance(dataset, FakeDataset):
            return SyntheticFeed(order, settings, dataset.image_size, dataset.num_classes, self.world.device)
        return ProcessFeed(dataset, order, settings)
