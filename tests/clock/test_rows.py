"""Rows in shared memory; the tests of work show that they reach workers."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest

from harness.clock.stages import cells, shared_rows


def test_cells_are_the_rows_one_after_the_other() -> None:
    """What is written into the cells of a row is read as [rows, columns]."""
    rows = shared_rows(2, 3)
    cells(rows, 1)[1] = 1.5
    assert rows.tolist() == [[0.0, 0.0, 0.0], [0.0, 1.5, 0.0]]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_only_shared_memory_takes_shared_memory(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Where nothing is to be shared, a machine without shared memory will do."""

    def refuse(*_: object) -> None:
        raise RuntimeError("unable to open shared memory object")

    monkeypatch.setattr("torch.Tensor.share_memory_", refuse)
    if shared:
        with pytest.raises(RuntimeError, match="shared memory"):
            shared_rows(1, 1)
    else:
        assert shared_rows(1, 1, shared=False).tolist() == [[0.0]]


def test_it_does_not_travel_as_a_copy() -> None:
    """Pickled as for a worker and unpickled, it is the same memory."""
    rows = shared_rows(1, 1)
    cells(pickle.loads(ForkingPickler.dumps(rows)), 0)[0] = 3.0
    assert rows.item() == 3.0
