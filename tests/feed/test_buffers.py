"""The buffer pool: memory is used again when nobody holds any part of it, and never before."""

from __future__ import annotations

import gc

import pytest
import torch

from harness.feed.base import BufferPool
from harness.runtime.errors import is_out_of_memory


def lend(pool: BufferPool) -> torch.Tensor:
    return pool.acquire(150).view(2, 5, 5, 3).permute(0, 3, 1, 2)


def tensors(pool: BufferPool, count: int) -> list[torch.Tensor]:
    return [lend(pool) for _ in range(count)]


def places(images: list[torch.Tensor]) -> set[int]:
    return {one.data_ptr() for one in images}


def test_the_same_memory_is_lent_again() -> None:
    """However often batches come and go, they lie in as many places as there are slots."""
    pool = BufferPool(3, 150)
    seen = set()
    for _ in range(20):
        seen |= places(tensors(pool, 3))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(lambda images: images, id="the batch"),
        pytest.param(lambda images: images[1, :, 2:], id="a slice"),
        pytest.param(lambda images: images.numpy(), id="an array of it"),
        pytest.param(
            lambda images: images.permute(0, 2, 3, 1).view(-1), id="a view of another shape"
        ),
        pytest.param(lambda images: images.untyped_storage(), id="its storage"),
        pytest.param(lambda images: torch.from_dlpack(images), id="a tensor of another library"),
        pytest.param(lambda images: [[images.detach()]], id="something that holds it"),
    ],
)
def test_what_anybody_holds_is_not_lent(held: object) -> None:
    """As long as there is any view of a batch its memory stays as it is; then it is lent."""
    pool = BufferPool(1, 150)
    images = lend(pool)
    place, kept = images.data_ptr(), held(images)  # type: ignore[operator]
    del images
    assert lend(pool).data_ptr() != place
    del kept
    assert lend(pool).data_ptr() == place


def test_the_ring_lends_memory_of_its_own_beyond_its_slots() -> None:
    """A consumer that keeps every batch gets different memory for each, and the pool does not grow
    by it.
    """
    pool = BufferPool(2, 150)
    kept = tensors(pool, 6)
    used = places(kept)
    assert len(used) == 6
    kept.clear()
    assert len(pool._free) == 2
    assert places(tensors(pool, 2)) < used


def test_a_batch_outlives_its_ring() -> None:
    """What is held stays as it is when the pool is gone."""
    pool = BufferPool(1, 150)
    images = lend(pool).fill_(7)
    del pool
    gc.collect()
    assert (images == 7).all()


def test_a_loan_may_end_in_the_middle_of_a_call_to_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector ends loans anywhere, so in the pool's own calls: nothing waits for itself."""
    pool = BufferPool(1, 150)
    cycle: list[object] = [lend(pool)]
    cycle.append(cycle)
    del cycle

    def collect(size: int, **_: object) -> torch.Tensor:
        gc.collect()
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", collect)
    lend(pool)
    assert len(pool._free) == 1


def test_no_memory_is_an_error_of_memory() -> None:
    """Too large a buffer is no fault of a sample's."""
    with pytest.raises(RuntimeError) as raised:
        BufferPool(1, 75 * 10**16).acquire(1)
    assert is_out_of_memory(raised.value)
