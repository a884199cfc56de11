"""The order of samples: a pure function of seed, epoch and position, shared out over ranks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate, chain, islice, zip_longest

import numpy as np
import pytest

from harness.feed.order import Cursor, EpochRemainder, Order, ProbeOrder


def batches(order: Order, epoch: int = 0) -> list[list[int]]:
    return [batch.tolist() for batch in order.batches(epoch)]


def ranks(
    length: int, global_batch_size: int, world_size: int, drop_last: bool = False
) -> list[Order]:
    size = global_batch_size // world_size
    return [
        Order(length, size, seed=5, drop_last=drop_last, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def test_the_order_is_a_pure_function_of_seed_and_epoch() -> None:
    """Two orders of one seed agree in any epoch, asked in any sequence; another seed or epoch gives
    another order.
    """
    one = Order(50, 8, seed=1)
    other = Order(50, 8, seed=1)
    later = batches(one, 3)
    assert batches(other, 0) == batches(one, 0)
    assert batches(other, 3) == later
    assert batches(one, 0) != later
    assert batches(Order(50, 8, seed=2), 0) != batches(one, 0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 5, 12, 35, 36, 37, 41])
def test_any_number_of_ranks_sees_the_same_global_batches(length: int, drop_last: bool) -> None:
    """1, 2 and 3 ranks at an equal global batch size make the same global batches, one after the
    other.
    """

    def global_batches(world_size: int) -> list[list[int]]:
        shares = [batches(order, 2) for order in ranks(length, 12, world_size, drop_last)]
        return [list(chain(*parts)) for parts in zip_longest(*shares, fillvalue=[])]

    assert global_batches(1) == global_batches(2) == global_batches(3)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 11, 12, 13, 29])
def test_every_sample_is_seen_once(length: int, world_size: int) -> None:
    """Without drop_last every index comes once over all ranks, also where the set does not divide
    evenly.
    """
    seen = Counter(
        index
        for order in ranks(length, 6, world_size)
        for batch in batches(order)
        for index in batch
    )
    assert seen == Counter(range(length))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drop_last_leaves_full_batches_and_equal_ranks(world_size: int) -> None:
    """With drop_last every batch is full and every rank has as many."""
    orders = ranks(29, 6, world_size, drop_last=True)
    assert [len(batches(order)) for order in orders] == [4] * world_size
    assert {len(batch) for order in orders for batch in batches(order)} == {6 // world_size}


def test_of_a_whole_epoch_batches_take_one_global_batch_after_the_other() -> None:
    """taken() counts over all ranks; the last, short global batch ends where the set does, or is
    left out.
    """
    order = ranks(29, 6, 2)[1]
    dropped = ranks(29, 6, 2, drop_last=True)[1]
    assert [order.taken(3, batches) for batches in range(6)] == [0, 6, 12, 18, 24, 29]
    assert (order.taken(3), dropped.taken(3), dropped.taken(3, dropped.count(3))) == (29, 24, 24)


def resting(order: Order, start: int, stop: int | None = None, epoch: int = 1) -> Order:
    """``order`` with nothing of ``epoch`` but what lies between ``start`` and ``stop``, or the
    epoch's end.
    """
    return replace(
        order, rest=EpochRemainder(epoch, start, order.taken(epoch) if stop is None else stop)
    )


@pytest.mark.parametrize(("world_size", "drop_last"), [(1, False), (1, True), (2, True), (3, True)])
@pytest.mark.parametrize("position", [0, 1, 3, 4])
def test_a_rest_goes_on_where_the_epoch_was_left(
    world_size: int, drop_last: bool, position: int
) -> None:
    """From a whole global batch on the batches are those of the whole epoch, and other epochs are
    whole.
    """
    for order in ranks(29, 6, world_size, drop_last):
        rest = resting(order, order.taken(1, position))
        assert batches(rest, 1) == batches(order, 1)[position:]
        assert [batches(rest, epoch) for epoch in (0, 2)] == [
            batches(order, epoch) for epoch in (0, 2)
        ]
        assert (len(rest), rest.count(1), rest.count(2)) == (
            len(order),
            order.count(1) - position,
            order.count(2),
        )


@pytest.mark.parametrize("seed", range(100))
def test_a_rest_is_shared_out_evenly(seed: int) -> None:
    """Every sample once; ranks have equally many batches, no empty one, and split a short global
    batch evenly.
    """
    draw = random.Random(seed)
    size = draw.randint(2, 5)
    world_size = draw.randint(1, 6)
    start = draw.randint(0, 40)
    left = draw.randint(world_size, 70)
    beyond = draw.randint(0, 9)
    orders = [
        resting(
            Order(start + left + beyond, size, seed, rank=rank, world_size=world_size),
            start,
            start + left,
        )
        for rank in range(world_size)
    ]
    shares = [batches(order, 1) for order in orders]
    assert (
        {len(share) for share in shares}
        == {orders[0].count(1)}
        == {-(-left // (size * world_size))}
    )
    expected = orders[0].indices(1)[start : start + left].tolist()
    assert list(chain(*(chain(*parts) for parts in zip(*shares, strict=True)))) == expected
    behind = start
    for position, parts in enumerate(zip(*shares, strict=True), 1):
        sizes = [len(part) for part in parts]
        assert 1 <= max(sizes) - 1 <= min(sizes) or sizes == [1] * world_size
        assert max(sizes) <= size
        assert sum(sizes) == size * world_size or position >= len(shares[0]) - 1
        behind += sum(sizes)
        assert {order.taken(1, position) for order in orders} == {behind}
    assert {order.taken(1) for order in orders} == {behind} == {start + left}


@pytest.mark.parametrize(
    ("left", "sizes"),
    [(17, [9, 8]), (18, [9, 9]), (19, [10, 9]), (20, [16, 4]), (16, [16]), (4, [4])],
)
def test_fewer_samples_than_ranks_share_with_the_batch_before(left: int, sizes: list[int]) -> None:
    """On 4 ranks with batches of 4, the last 16 and 1 to 3 more become two global batches of about
    half each.
    """
    order = resting(Order(60, 4, world_size=4), 7, 7 + left)
    assert [order.taken(1, place) for place in range(order.count(1) + 1)] == [
        7,
        *accumulate(sizes, initial=7),
    ][1:]


@pytest.mark.parametrize("start", [0, 5, 12, 13])
def test_a_rest_of_a_rest_goes_on_as_the_first_does(start: int) -> None:
    """Left again after any batch, also between the two halves at its end, an epoch goes on with the
    same batches.
    """
    for rank in range(4):
        first = resting(Order(50, 2, seed=5, rank=rank, world_size=4), start)
        later = first
        for position in range(1, first.count(1) + 1):
            later = resting(later, later.taken(1, 1))
            assert batches(later, 1) == batches(first, 1)[position:]


def test_the_number_of_ranks_may_change_twice_within_an_epoch() -> None:
    """2, then 3, then 1 rank: what each of them gives before it is left is together every sample
    once.
    """
    given = []
    start = 0
    for world_size, count in ((2, 3), (3, 2), (1, None)):
        orders = [
            resting(Order(50, 4, seed=5, rank=rank, world_size=world_size), start, 50)
            for rank in range(world_size)
        ]
        given += [
            index for order in orders for batch in batches(order, 1)[:count] for index in batch
        ]
        start = orders[0].taken(1, count or orders[0].count(1))
    assert Counter(given) == Counter(range(50)) and start == 50


@pytest.mark.parametrize(
    ("size", "start", "stop"),
    [
        pytest.param(4, 27, 29, id="fewer than ranks"),
        pytest.param(1, 0, 4, id="batches of one that do not divide"),
        pytest.param(4, 24, 30, id="beyond the end"),
        pytest.param(4, -1, 29, id="before the beginning"),
        pytest.param(4, 9, 8, id="backwards"),
    ],
)
def test_a_rest_that_ranks_cannot_share_is_refused(size: int, start: int, stop: int) -> None:
    """The error names the ranks and the samples, on every rank alike."""
    for rank in range(3):
        with pytest.raises(
            ValueError,
            match=f"^epoch 4: 3 ranks cannot share samples {start} to {stop} of 29 evenly",
        ):
            resting(Order(29, size, rank=rank, world_size=3), start, stop, epoch=4)


def test_a_rest_of_nothing_has_no_batches() -> None:
    """An epoch that was left at its very end is over on every rank."""
    for rank in range(3):
        order = resting(Order(29, 2, rank=rank, world_size=3, drop_last=True), 24)
        assert (order.count(1), batches(order, 1), order.taken(1, 0)) == (0, [], 24)


def asked(order: ProbeOrder, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(order.batches(0), count)]


def test_probes_share_out_the_set() -> None:
    """Probes of one cursor, also by turns, ask for every sample once before any a second time."""
    order = Order(20, 4, seed=1)
    cursor = Cursor()
    first = asked(ProbeOrder(order, cursor), 2)
    turns = ProbeOrder(order, cursor).batches(0), ProbeOrder(order, cursor).batches(0)
    rest = [next(turns[0]).tolist(), next(turns[1]).tolist(), next(turns[0]).tolist()]
    assert sorted(chain(*first, *rest)) == list(range(20))
    assert cursor.asked == 5
    assert sorted(chain(*asked(ProbeOrder(order, cursor), 5))) == list(range(20))


def test_again_goes_round_what_was_seen() -> None:
    """again=True stays among the batches that have been given, and moves nothing."""
    order = Order(20, 4, seed=1)
    cursor = Cursor()
    first = asked(ProbeOrder(order, cursor), 3)
    cursor.seen = range(1, 3)
    assert asked(ProbeOrder(order, cursor, again=True), 5) == [
        first[1],
        first[2],
        first[1],
        first[2],
        first[1],
    ]
    assert cursor.asked == 3


def test_a_probe_never_uses_an_epoch_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epochs behind a probe's batches lie beyond every epoch that a run can reach, and differ
    from each other.
    """
    used: list[int] = []
    real = Order.indices

    def noted(order: Order, epoch: int) -> np.ndarray:
        used.append(epoch)
        return real(order, epoch)

    monkeypatch.setattr(Order, "indices", noted)
    assert len(asked(ProbeOrder(Order(20, 4), Cursor()), 12)) == 12
    assert min(used) >= 2**31
    assert len(set(used)) == len(used) == 3
