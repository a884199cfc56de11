"""The buffer pool on CUDA: page-locked memory that is not used again while a copy of it is under
way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import samples
import torch

from harness.feed import base as buffers
from harness.feed.order import Order
from harness.feed.prefetcher import DataPrefetcher
from harness.feed.threads import ThreadFeed

pytestmark = pytest.mark.cuda_order

LENGTH = 640
BATCH = 64
SLEEP_CYCLES = 5_000_000  # a few milliseconds of any GPU


class Numbered(samples.Noise):
    """Every pixel of a sample is its index, modulo 251."""

    image_size = 224

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        out[...] = index % 251
        return index


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "plain"])
def test_a_copy_is_never_of_poison(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """With a device that lags behind, and memory that is poisoned as it comes back, every batch
    arrives as it was made.
    """
    take_back = buffers._take_back

    def poison(owner: Any, slot: np.ndarray) -> None:
        slot.fill(255)
        take_back(owner, slot)

    monkeypatch.setattr(buffers, "_take_back", poison)
    settings = samples.settings(4, batch_size=BATCH, persistent_workers=True, pin_memory=True)
    feed = ThreadFeed(Numbered(LENGTH), Order(LENGTH, BATCH), settings)
    for epoch in range(2):
        feed.set_epoch(epoch)
        arrived = []
        # as the feed lays them out: nothing but copies touches them
        for batch in DataPrefetcher(feed, "cuda", channels_last=True, ahead=ahead):
            torch.cuda._sleep(SLEEP_CYCLES)
            arrived.append([part.to("cpu", non_blocking=True) for part in batch])
        torch.cuda.synchronize()
        assert all((images == (k % 251).byte().view(-1, 1, 1, 1)).all() for images, k in arrived)
    feed.close()


def test_batches_are_page_locked() -> None:
    """Images and labels are, so that their copies wait for nothing."""
    feed = ThreadFeed(
        Numbered(200), Order(200, BATCH), samples.settings(2, batch_size=BATCH, pin_memory=True)
    )
    assert all(batch.images.is_pinned() and batch.labels.is_pinned() for batch in feed)
