"""What an asynchronous device does with memory, its own and page-locked, on the emulated one and on
CUDA.

Each test names where torch or NVIDIA says so, as in ``test_accelerator.py``.
"""

from __future__ import annotations

import pytest
import torch
from emulator import BUSY_S, MIB, SIZE, EmulatedDevice, marked, source

from harness.runtime.accelerator import Accelerator


def reserved(own: Accelerator) -> int:
    memory = own.memory()
    assert memory is not None
    return memory.reserved


def page_locked(own: Accelerator) -> int:
    """Bytes that the allocator of page-locked memory holds, in use or not; the seam has no word for
    them.
    """
    if isinstance(own, EmulatedDevice):
        return own.pinned_pool.reserved
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


# The device's memory.


@pytest.mark.slow
def test_freed_memory_is_used_again_at_once_on_its_own_stream(own: Accelerator) -> None:
    """Although the stream is busy: its order keeps both apart (c10/cuda/CUDACachingAllocator.cpp,
    get_free_block).
    """
    pinned = source(own)
    first = own.copy(pinned)
    before = reserved(own)
    own.delay(BUSY_S)
    end = marked(own)
    del first
    second = own.copy(pinned)
    assert reserved(own) == before and not end.query()
    del second


def test_memory_of_one_stream_is_not_given_out_on_another(own: Accelerator) -> None:
    """A pool of free blocks is a stream's own (c10/cuda/CUDACachingAllocator.cpp, get_free_block
    compares streams).
    """
    pinned = source(own)
    first = own.copy(pinned)
    before = reserved(own)
    own.synchronize()
    del first
    with own.on(own.side_stream()):
        second = own.copy(pinned)
    assert reserved(own) == before + SIZE
    del second


@pytest.mark.parametrize("work", ["before", "after"])
def test_memory_in_use_by_another_stream_is_kept(own: Accelerator, work: str) -> None:
    """Until that is through what it had when the memory was freed
    (c10/cuda/CUDACachingAllocator.cpp, insert_events).
    """
    pinned = source(own)
    side = own.side_stream()
    first = own.copy(pinned)
    own.synchronize()
    before = reserved(own)
    if work == "after":
        own.keep_for(side, first)
    with own.on(side):
        own.delay(BUSY_S)
        end = marked(own)
    if work == "before":
        own.keep_for(side, first)
    del first
    second = own.copy(pinned)
    assert reserved(own) == before + SIZE and not end.query()
    end.synchronize()
    third = own.copy(pinned)
    assert reserved(own) == before + SIZE
    del second, third


def test_free_memory_goes_back_by_release_alone(own: Accelerator) -> None:
    """What is in use stays (torch/cuda/memory.py, empty_cache)."""
    pinned = source(own)
    before = reserved(own)
    first = own.copy(pinned)
    second = own.copy(pinned)
    own.synchronize()
    del first
    assert reserved(own) == before + 2 * SIZE
    own.release()
    assert reserved(own) == before + SIZE
    del second
    own.release()
    assert reserved(own) == before


def test_peaks_begin_at_what_there_is(own: Accelerator) -> None:
    """``reset_peaks`` forgets what was more (torch/cuda/memory.py, reset_peak_memory_stats)."""
    pinned = source(own)
    kept = own.copy(pinned)
    dropped = own.copy(pinned)
    own.synchronize()
    del dropped
    before = own.memory()
    own.reset_peaks()
    after = own.memory()
    again = own.copy(pinned)
    then = own.memory()
    assert before is not None and after is not None and then is not None
    assert before.peak_allocated >= before.allocated + SIZE
    assert (after.peak_allocated, after.peak_reserved) == (after.allocated, after.reserved)
    assert then.peak_allocated == then.allocated == after.allocated + SIZE
    del kept, again


# Page-locked memory.


def test_freed_page_locked_memory_is_used_again(own: Accelerator) -> None:
    """By what rounds to the same size (the same file, get_free_block)."""
    pinned = source(own, 5 * MIB)
    before = page_locked(own)
    del pinned
    pinned = source(own, 7 * MIB)
    assert page_locked(own) == before
    more = source(own, 9 * MIB)
    assert page_locked(own) == before + 16 * MIB
    del pinned, more


def test_page_locked_memory_is_not_used_again_while_it_is_copied(own: Accelerator) -> None:
    """Dropping the source of a copy harms nothing (the same file, record_event, free and
    process_events).
    """
    pinned = source(own, MIB, 5)
    own.delay(BUSY_S)
    copied = own.copy(pinned)
    before = page_locked(own)
    del pinned
    other = source(own, MIB, 6)
    assert page_locked(own) == before + MIB
    own.synchronize()
    assert (copied.cpu() == 5).all()
    again = source(own, MIB, 7)
    assert page_locked(own) == before + MIB
    del other, again
