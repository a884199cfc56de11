"""Rows of figures that worker processes write and the process that started them reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Rows:
    """Float64 zeros in shared memory: each process writes its own row, one reads them all.

    An aligned float64 is stored by one instruction on every 64-bit machine: without a lock a reader
    finds each figure as it was before or after a write, never half of both. Figures that are
    written together may be seen apart.

    Pickled for a worker process, the memory itself travels (as torch's batches do, and with the
    same means); it is gone with its last owner.

    Args:
        rows: processes that will write.
        columns: figures of each.
        shared: whether there are processes to share them with.

    Attributes:
        cells: the figures, row after row: ten times faster to write than the tensor.

    Raises:
        RuntimeError, OSError: there is no shared memory to be had.
    """

    cells: memoryview[float]

    def __init__(self, rows: int, columns: int, shared: bool = True) -> None:
        # not above: what imports this file for a type needs no torch
        import torch

        zeros = torch.zeros(rows, columns, dtype=torch.float64)
        if shared:
            zeros.share_memory_()
        self.__setstate__(zeros)

    def row(self, slot: int) -> memoryview[float]:
        """Returns the cells of one row."""
        columns = self._rows.shape[1]
        return self.cells[slot * columns : (slot + 1) * columns]

    def read(self) -> Tensor:
        """Returns the figures now, ``[rows, columns]``."""
        return self._rows.clone()

    def __getstate__(self) -> Tensor:
        return self._rows

    def __setstate__(self, rows: Tensor) -> None:
        self._rows = rows
        # numpy's arrays are buffers
        self.cells = memoryview(rows.view(-1).numpy())  # type: ignore[arg-type]
