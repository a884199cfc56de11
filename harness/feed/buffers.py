"""Memory for batches, used again as soon as nothing holds any part of it."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor


class BufferPool:
    """A pool of buffers for batches.

    There is no release call: a buffer is free again when the last tensor or array that views it is
    gone. Code that reads a buffer asynchronously, such as a copy on its way to the device, must
    hold such a tensor until it is done. A consumer that keeps more batches than ``slots`` never
    waits: a buffer is new memory where none is free, and beyond ``slots`` free ones it is given
    back.

    Args:
        slots: number of buffers that are kept for use again.
        slot_bytes: size of the largest batch.
        pin_memory: whether the memory is page-locked.
    """

    def __init__(self, slots: int, slot_bytes: int, pin_memory: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self._pin_memory = pin_memory
        # appends and pops are atomic: buffers come back in any thread, in the middle of anything
        self._free: deque[np.ndarray] = deque(maxlen=slots)

    def acquire(self, count: int) -> Tensor:
        """Returns ``count`` bytes, uint8 ``[count]``, of the most recently used free buffer.

        Raises:
            RuntimeError: no buffer is free, and torch has no memory for another.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._allocate()
        # the storage of the tensor holds this array, and with it the buffer, until the last tensor
        # of the storage is gone
        view = slot[:count]
        weakref.finalize(view, _take_back, weakref.ref(self), slot).atexit = False
        return torch.from_numpy(view)

    def _allocate(self) -> np.ndarray:
        size = self.slot_bytes
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory).numpy()


def _take_back(owner: weakref.ref[BufferPool], slot: np.ndarray) -> None:
    # a batch that outlives its pool must not keep the pool's other buffers
    if (pool := owner()) is not None:
        pool._free.append(slot)
