"""Memory for batches that is used again as soon as nobody holds any part of it."""

from __future__ import annotations

import weakref
from queue import Empty, SimpleQueue

import numpy as np
import torch


class Ring:
    """Lends memory for batches of uint8 images, channels last.

    Nobody gives a loan back: it ends with the last tensor that shares its memory, wherever that went, and only then is the
    memory lent anew. So who reads it in a way that tensors know nothing of, such as a copy that is still on its way to the
    device, keeps one of them until that is done.

    A loan beyond the ring's ``slots`` has memory of its own, which goes with it: a consumer that keeps batches takes memory,
    and nothing ever waits for it.

    Args:
        slots: batches that there is memory for.
        batch_size: images of the largest batch.
        image_size: their side in pixels.
        pin_memory: whether the memory is page-locked.

    Raises:
        MemoryError: there is not so much.
    """

    def __init__(self, slots: int, batch_size: int, image_size: int, pin_memory: bool) -> None:
        self._shape, self._pin_memory = (batch_size, image_size, image_size, 3), pin_memory
        self._free: SimpleQueue[np.ndarray] = SimpleQueue()  # takes things in the middle of anything, as loans end
        for _ in range(slots):
            self._free.put(self._allocate())

    def lend(self, count: int) -> np.ndarray:
        """Memory for ``count`` images, uint8 ``[count, 3, S, S]``: lent as long as there is the array itself.

        A tensor made of the array holds it, other arrays made of it do not.

        Raises:
            MemoryError: all slots are lent, and there is no memory for another.
        """
        try:
            slot = self._free.get_nowait()
        except Empty:
            return _images(self._allocate(), count)
        loan = _images(slot, count)
        weakref.finalize(loan, _take_back, weakref.ref(self), slot).atexit = False
        return loan

    def _allocate(self) -> np.ndarray:
        try:
            return torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._pin_memory).numpy()
        except RuntimeError as error:
            kind = "page-locked " if self._pin_memory else ""
            text = str(error).splitlines()[0]
            raise MemoryError(f"no {kind}memory for another batch of {np.prod(self._shape) / 1e6:.1f} MB ({text})") from error


def _images(slot: np.ndarray, count: int) -> np.ndarray:
    return slot[:count].transpose(0, 3, 1, 2)


def _take_back(owner: weakref.ref[Ring], slot: np.ndarray) -> None:
    ring = owner()
    if ring is not None:
        ring._free.put(slot)
