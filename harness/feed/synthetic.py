"""Batches that are made on the device once: the step without any loading, as pytorch/examples' ``--dummy`` wants it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.feed.interface import FeedSettings, HostBatch
from harness.feed.order import Order, ProbeOrder
from harness.watch.stages import StageMeter


class SyntheticFeed:
    """The same uint8 noise ``[N, 3, S, S]`` and random labels for every batch, on ``device``.

    The last batch of an epoch is as short as ``order`` makes it.
    """

    on_device = True
    meter: StageMeter | None = None  # nothing is made
    worker_pids: tuple[int, ...] = ()

    def __init__(
        self, order: Order | ProbeOrder, settings: FeedSettings, image_size: int, classes: int, device: torch.device
    ) -> None:
        self.settings = settings
        self.order = order
        self._epoch = 0
        generator = torch.Generator().manual_seed(0)
        size = (settings.batch_size, 3, image_size, image_size)
        self._images = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(device)
        self._labels = torch.randint(0, classes, size[:1], generator=generator).to(device)

    def __len__(self) -> int:
        return self.order.count(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter()`` gives: the order of its batches, not what is in them."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[HostBatch]:
        epoch = self._epoch
        for indices in self.order.batches(epoch):
            n = len(indices)
            yield HostBatch(self._images[:n], self._labels[:n], torch.from_numpy(indices), epoch=epoch)

    def prime(self, epoch: int) -> None:
        """The batches are there already."""

    def polled(self, poll_s: float) -> Iterator[HostBatch | None]:
        """One pass; there is never a wait."""
        return iter(self)

    def close(self) -> None:
        """There are no workers."""
