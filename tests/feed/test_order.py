"""The order of samples: a pure function of seed, epoch and position, shared out over ranks."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice, zip_longest

import numpy as np
import pytest

from harness.feed.order import Cursor, Order, ProbeOrder


def batches(order: Order, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [batch.tolist() for batch in order.batches(epoch, start)]


def ranks(length: int, global_batch_size: int, world_size: int, drop_last: bool = False) -> list[Order]:
    size = global_batch_size // world_size
    return [Order(length, size, seed=5, drop_last=drop_last, rank=rank, world_size=world_size) for rank in range(world_size)]


def test_the_order_is_a_pure_function_of_seed_and_epoch() -> None:
    """Two orders of one seed agree in any epoch, asked in any sequence; another seed or epoch gives another order."""
    one, other = Order(50, 8, seed=1), Order(50, 8, seed=1)
    later = batches(one, 3)
    assert batches(other, 0) == batches(one, 0)
    assert batches(other, 3) == later
    assert batches(one, 0) != later
    assert batches(Order(50, 8, seed=2), 0) != batches(one, 0)


def test_a_batch_is_int64() -> None:
    """A batch holds int64 indices."""
    assert {batch.dtype for batch in Order(10, 4).batches(0)} == {np.dtype(np.int64)}


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    """shuffle=False gives 0, 1, 2, ... in every epoch."""
    order = Order(7, 3, shuffle=False)
    assert batches(order, 0) == batches(order, 9) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 5, 12, 35, 36, 37, 41])
def test_any_number_of_ranks_sees_the_same_global_batches(length: int, drop_last: bool) -> None:
    """1, 2 and 3 ranks at an equal global batch size make the same global batches, one after the other."""

    def global_batches(world_size: int) -> list[list[int]]:
        shares = [batches(order, 2) for order in ranks(length, 12, world_size, drop_last)]
        return [list(chain(*parts)) for parts in zip_longest(*shares, fillvalue=[])]

    assert global_batches(1) == global_batches(2) == global_batches(3)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 11, 12, 13, 29])
def test_every_sample_is_seen_once(length: int, world_size: int) -> None:
    """Without drop_last every index comes once over all ranks, also where the set does not divide evenly."""
    seen = Counter(index for order in ranks(length, 6, world_size) for batch in batches(order) for index in batch)
    assert seen == Counter(range(length))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drop_last_leaves_full_batches_and_equal_ranks(world_size: int) -> None:
    """With drop_last every batch is full and every rank has as many."""
    orders = ranks(29, 6, world_size, drop_last=True)
    assert [len(batches(order)) for order in orders] == [4] * world_size
    assert {len(batch) for order in orders for batch in batches(order)} == {6 // world_size}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 12])
def test_the_length_is_the_number_of_batches(length: int, drop_last: bool) -> None:
    """len() of each rank's order is what batches() gives."""
    for order in ranks(length, 6, 2, drop_last):
        assert len(order) == len(batches(order))


@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_a_start_leaves_out_the_batches_before_it(start: int) -> None:
    """batches(epoch, start) is batches(epoch) from position start on."""
    order = Order(41, 8, seed=4)
    assert len(order) == 6
    assert batches(order, 1, start) == batches(order, 1)[start:]


def asked(order: ProbeOrder, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(order.batches(0), count)]


def test_probes_share_out_the_set() -> None:
    """Probes of one cursor, also by turns, ask for every sample once before any a second time."""
    order, cursor = Order(20, 4, seed=1), Cursor()
    first = asked(ProbeOrder(order, cursor), 2)
    turns = ProbeOrder(order, cursor).batches(0), ProbeOrder(order, cursor).batches(0)
    rest = [next(turns[0]).tolist(), next(turns[1]).tolist(), next(turns[0]).tolist()]
    assert sorted(chain(*first, *rest)) == list(range(20))
    assert cursor.asked == 5
    assert sorted(chain(*asked(ProbeOrder(order, cursor), 5))) == list(range(20))


def test_a_batch_counts_when_it_is_asked_for() -> None:
    """Nothing is drawn ahead: the cursor is where the requests are."""
    cursor = Cursor()
    batches = ProbeOrder(Order(20, 4), cursor).batches(0)
    assert cursor.asked == 0
    next(batches)
    assert cursor.asked == 1


def test_again_goes_round_what_was_seen() -> None:
    """again=True stays among the batches that have been given, and moves nothing."""
    order, cursor = Order(20, 4, seed=1), Cursor()
    first = asked(ProbeOrder(order, cursor), 3)
    cursor.seen = range(1, 3)
    assert asked(ProbeOrder(order, cursor, again=True), 5) == [first[1], first[2], first[1], first[2], first[1]]
    assert cursor.asked == 3


def test_a_probe_never_uses_an_epoch_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epochs behind a probe's batches lie beyond every epoch that a run can reach, and differ from each other."""
    used: list[int] = []
    real = Order.indices

    def noted(order: Order, epoch: int) -> np.ndarray:
        used.append(epoch)
        return real(order, epoch)

    monkeypatch.setattr(Order, "indices", noted)
    assert len(asked(ProbeOrder(Order(20, 4), Cursor()), 12)) == 12
    assert min(used) >= 2**31
    assert len(set(used)) == len(used) == 3
