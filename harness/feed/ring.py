"""Memory for batches that is used again as soon as nobody holds any part of it."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor


class Ring:
    """Lends memory for batches.

    Nobody gives a loan back: it ends with the last tensor or array that shares its memory, wherever that went, and only then
    is the memory lent again. So who reads it in a way that tensors know nothing of, such as a copy that is still on its way
    to the device, keeps one of them until that is done.

    A loan beyond the ring's ``slots`` has memory of its own, which goes with it: a consumer that keeps batches takes memory,
    and nothing ever waits for it.

    Args:
        slots: batches that there is memory for.
        slot_bytes: size of the largest batch.
        pin_memory: whether the memory is page-locked.

    Raises:
        MemoryError: there is not so much.
    """

    def __init__(self, slots: int, slot_bytes: int, pin_memory: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self._pin_memory = pin_memory
        # appends and pops are atomic: loans end in any thread, in the middle of anything
        self._free = deque(self._allocate() for _ in range(slots))

    def lend(self, count: int) -> Tensor:
        """Memory of ``count`` bytes, uint8 ``[count]``: the most recently used that is free.

        Raises:
            MemoryError: all slots are lent, and there is no memory for another.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            return torch.from_numpy(self._allocate()[:count])
        # the storage of the tensor holds this array, and with it the loan, for as long as there is the storage
        loan = slot[:count]
        weakref.finalize(loan, _take_back, weakref.ref(self), slot).atexit = False
        return torch.from_numpy(loan)

    def _allocate(self) -> np.ndarray:
        try:
            return torch.empty(self.slot_bytes, dtype=torch.uint8, pin_memory=self._pin_memory).numpy()
        except RuntimeError as error:
            kind = "page-locked " if self._pin_memory else ""
            text = str(error).splitlines()[0]
            raise MemoryError(f"no {kind}memory for another batch of {self.slot_bytes / 1e6:.1f} MB ({text})") from error


def _take_back(owner: weakref.ref[Ring], slot: np.ndarray) -> None:
    ring = owner()
    if ring is not None:
        ring._free.append(slot)
