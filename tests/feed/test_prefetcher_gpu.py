"""DataPrefetcher on CUDA: the CPU's values, one side stream, and no race in either direction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.clock.clock import StepClock
from harness.feed.base import HostBatch
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator

pytestmark = pytest.mark.usefixtures("cuda_class")

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SLEEP_S = 3e-3


class Loader:
    """Gives ``count`` fresh batches in every pass; batch k holds the value k % 251 everywhere."""

    def __init__(self, count: int, size: int, side: int = 32, pinned: bool = True) -> None:
        self.count, self.size, self.side, self.pinned = count, size, side, pinned

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[HostBatch]:
        for k in range(self.count):
            images = torch.full((self.size, 3, self.side, self.side), k % 251, dtype=torch.uint8)
            labels = torch.full((self.size,), k)
            if self.pinned:
                images, labels = images.pin_memory(), labels.pin_memory()
            yield HostBatch(images, labels, labels)


@pytest.mark.cuda_values
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_values_are_the_cpus(dtype: torch.dtype, channels_last: bool) -> None:
    """Copied and normalized on the side stream, every batch is bitwise what the CPU makes of it."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randint(
                0, 256, (n, 3, 16, 16), dtype=torch.uint8, generator=generator
            ).pin_memory(),
            torch.arange(n),
        )
        for n in (8, 8, 3)
    ]
    devices = ("cuda", "cpu")
    made = [
        DataPrefetcher(
            batches, device, mean=MEAN, std=STD, dtype=dtype, channels_last=channels_last
        )
        for device in devices
    ]
    for (images, labels), (expected, expected_labels) in zip(*made, strict=True):
        assert images.device.type == labels.device.type == "cuda"
        assert images.stride() == expected.stride()
        assert torch.equal(images.cpu(), expected) and torch.equal(labels.cpu(), expected_labels)


@pytest.mark.cuda_order
def test_one_side_stream_for_life() -> None:
    """Twenty epochs use the same stream, and the later ones reserve hardly more memory."""
    own = accelerator.get("cuda")
    batches = DataPrefetcher(Loader(6, 64), "cuda", mean=MEAN, std=STD)
    stream = batches._transfer.stream
    reserved = []
    for _ in range(20):
        for images, _ in batches:
            images.mean()
        own.synchronize()
        reserved.append(own.memory().reserved)  # type: ignore[union-attr]
    assert batches._transfer.stream is stream
    assert reserved[-1] <= 2 * reserved[4]


@pytest.mark.cuda_order
def test_a_batch_in_use_is_not_written_over() -> None:
    """Late work still reads batch k right while k + 1 and k + 2 are copied, although the loop has
    let go of k.
    """
    read = []
    for images, _ in DataPrefetcher(Loader(40, 64), "cuda"):
        accelerator.get("cuda").delay(SLEEP_S)
        read.append(images.to("cpu", non_blocking=True))
        del images
    torch.cuda.synchronize()
    assert all((images == k).all() for k, images in enumerate(read))


@pytest.mark.cuda_order
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_compute_waits_for_the_copy(pinned: bool) -> None:
    """What is queued at once on a batch of 10 MB sees all of it, 40 times."""
    read = []
    for batch in DataPrefetcher(Loader(40, 64, side=224, pinned=pinned), "cuda"):
        read.append([part.to("cpu", non_blocking=True) for part in batch])
    torch.cuda.synchronize()
    assert all((part == k).all() for k, parts in enumerate(read) for part in parts)


class Ears(StepClock):
    """A clock that only listens."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.heard: list[tuple[Any, ...]] = []

    def copied(self, *events: Any) -> None:
        self.heard.append(events)


@pytest.mark.cuda_order
def test_copies_are_told_to_the_clock() -> None:
    """The clock hears of each batch's copy, and of its end on the
    way, by three events of its own.
    """
    ears = Ears()
    list(DataPrefetcher(Loader(3, 64), "cuda", clock=ears))
    accelerator.get("cuda").synchronize()
    assert len({id(event) for events in ears.heard for event in events}) == 9
    assert all(
        start.elapsed_time(end) > 0 and end.elapsed_time(ready) >= 0
        for start, end, ready in ears.heard
    )


@pytest.mark.cuda_order
def test_an_error_leaves_no_thread() -> None:
    """What the loader raises surfaces on CUDA as it does on the CPU."""

    def broken() -> Iterator[HostBatch]:
        yield from Loader(2, 4)
        raise KeyError("third")

    seen: list[Any] = []
    with pytest.raises(KeyError, match="third"):
        seen.extend(DataPrefetcher(broken(), "cuda"))
    assert len(seen) == 2
