"""Batches made on the device once: the step without loading, as pytorch/examples' ``--dummy``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.feed.interface import Feed, FeedSettings, HostBatch
from harness.feed.order import AnyOrder


class SyntheticFeed(Feed):
    """The same uint8 noise ``[N, 3, S, S]`` and random labels for every batch, on ``device``.

    The last batch of an epoch is as short as ``order`` makes it.
    """

    on_device = True

    def __init__(
        self,
        order: AnyOrder,
        settings: FeedSettings,
        image_size: int,
        classes: int,
        device: torch.device,
    ) -> None:
        super().__init__(order, settings)
        batch = noise(settings.batch_size, image_size, classes)
        self._images = batch.images.to(device)
        self._labels = batch.labels.to(device)

    def batches_of(self, epoch: int, poll_s: float) -> Iterator[HostBatch | None]:
        """As in ``Feed``."""
        for indices in self.order.batches(epoch):
            n = len(indices)
            yield HostBatch(
                self._images[:n], self._labels[:n], torch.from_numpy(indices), epoch=epoch
            )


def noise(count: int, image_size: int, classes: int) -> HostBatch:
    """Returns ``count`` random images and labels, the same each time.

    The images are uint8 ``[count, 3, image_size, image_size]``.
    """
    generator = torch.Generator().manual_seed(0)
    size = (count, 3, image_size, image_size)
    images = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    labels = torch.randint(classes, size[:1], generator=generator)
    return HostBatch(images, labels, torch.arange(count))
