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
        generator = torch.Generator().manual_seed(0)
        size = (settings.batch_size, 3, image_size, image_size)
        self._images = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(
            device
        )
        self._labels = torch.randint(0, classes, size[:1], generator=generator).to(device)

    def batches_of(self, epoch: int, poll_s: float) -> Iterator[HostBatch | None]:
        """As in ``Feed``."""
        for indices in self.order.batches(epoch):
            n = len(indices)
            yield HostBatch(
                self._images[:n], self._labels[:n], torch.from_numpy(indices), epoch=epoch
            )
