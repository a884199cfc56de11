"""Where the workers' time goes: what is exact, what is estimated, and what it may cost."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from model_time import known

from harness.clock.stages import (
    COLLATE,
    GROUPS,
    SHARE,
    START,
    StageCost,
    StageMeter,
    StageTimer,
    StageTotals,
    Stamps,
)

STAGES = ("read", "decode", "crop")
Sample = Sequence[tuple[float, float]]  # wall and processor seconds of each stage


@dataclass
class Clocks:
    """Wall and processor clock that stand still between two looks of ``look_s`` each."""

    wall_s: float = 1000.0
    cpu_s: float = 50.0
    look_s: float = 0.0
    looks: int = 0

    def now(self) -> float:
        self.go(self.look_s, self.look_s)
        self.looks += 1
        return self.wall_s

    def cpu_now(self) -> float:
        self.go(self.look_s, self.look_s)
        self.looks += 1
        return self.cpu_s

    def go(self, wall_s: float, cpu_s: float) -> None:
        self.wall_s += wall_s
        self.cpu_s += cpu_s

    def timer(self, meter: StageMeter, slot: int = 0) -> StageTimer:
        return StageTimer(meter, slot, self.now, self.cpu_now)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def make(
    timer: StageTimer,
    clocks: Clocks,
    batch: Sequence[Sample],
    collate_s: float = 0.0,
    share_s: float | None = None,
) -> Stamps:
    """Makes one batch: computes for ``collate_s``, then ``share_s``, then the samples."""
    lap = timer.begin(len(batch)) or (lambda stage: None)
    clocks.go(collate_s, collate_s)
    timer.mark(COLLATE)
    if share_s is not None:
        clocks.go(share_s, share_s)
        timer.mark(SHARE)
    for sample in batch:
        lap(START)
        for stage, cost in zip(STAGES, sample, strict=True):
            clocks.go(*cost)
            lap(stage)
    return timer.end(len(batch))


def assert_adds_up(totals: StageTotals) -> None:
    assert sum(cost.wall_s for cost in totals.stages.values()) == pytest.approx(totals.busy_s)


def walls(totals: StageTotals) -> list[float]:
    return [cost.wall_s for cost in totals.stages.values()]


def test_a_batch_is_divided_exactly(clocks: Clocks) -> None:
    """Where all samples are timed, the seconds of every stage are those it took."""
    meter = StageMeter(STAGES, 0)
    batch = [[(0.5, 0.1), (1.0, 1.0), (0.25, 0.25)], [(3.5, 0.3), (2.0, 2.0), (0.25, 0.25)]]
    make(clocks.timer(meter), clocks, batch, collate_s=0.125)
    totals = meter.read()
    assert (totals.samples, totals.busy_s) == (2, pytest.approx(7.625))
    expected = {
        "read": (4.0, 0.4),
        "decode": (3.0, 3.0),
        "crop": (0.5, 0.5),
        COLLATE: (0.125, 0.125),
    }
    assert list(totals.stages) == list(expected)
    assert all(totals.stages[name] == pytest.approx(cost) for name, cost in expected.items())


def test_each_batch_is_divided_by_itself_where_all_samples_are_timed(clocks: Clocks) -> None:
    """A slow read is in the window in which it happened, and leaves no trace in the next."""
    meter = StageMeter(STAGES, 0)
    timer = clocks.timer(meter)
    for _ in range(2):
        make(timer, clocks, [[(9.3, 0.0), (1.1, 1.1), (0.0, 0.0)]] * 4)
    first = meter.read()
    make(timer, clocks, [[(0.0, 0.0), (1.3, 0.1), (1.1, 1.1)]] * 4)
    window = meter.read().since(first)
    assert walls(window) == pytest.approx([0.0, 5.2, 4.4, 0.0])
    assert window.stages["decode"].cpu_s == pytest.approx(0.4)


def test_memory_that_processes_share_is_handing_over(clocks: Clocks) -> None:
    """To get memory that the trainer can map is a stage of its own, of processes alone."""
    meter = StageMeter(STAGES, 1)
    timer = clocks.timer(meter)
    for _ in range(3):
        make(timer, clocks, [[(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]] * 2, collate_s=0.5, share_s=4.0)
    totals = meter.read()
    assert list(totals.stages) == [*STAGES, COLLATE, SHARE] and GROUPS[SHARE] == "transport"
    assert walls(totals) == pytest.approx([6.0, 6.0, 0.0, 1.5, 12.0])
    assert totals.stages[SHARE].cpu_s == pytest.approx(12.0)
    assert_adds_up(totals)
    for alone in (StageMeter(STAGES, 0), StageMeter(STAGES, 2, shared=False)):
        make(
            clocks.timer(alone),
            clocks,
            [[(0.0, 0.0)] * 3],
            collate_s=0.5,
            share_s=4.0,
        )
        assert walls(alone.read()) == pytest.approx([0.0, 0.0, 0.0, 4.5])


def test_totals_are_those_of_all_workers(clocks: Clocks) -> None:
    """read() adds the slots up, each divided by its own shares."""
    meter = StageMeter(STAGES, 3, shared=False)
    make(clocks.timer(meter), clocks, [[(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]])
    make(
        clocks.timer(meter, 2),
        clocks,
        [[(0.0, 0.0), (2.0, 2.0), (4.0, 4.0)]] * 2,
    )
    totals = meter.read()
    assert (totals.samples, totals.busy_s) == (3, pytest.approx(14.0))
    assert walls(totals) == pytest.approx([1.0, 5.0, 8.0, 0.0])
    assert totals.stages["read"].cpu_s == pytest.approx(0.0)


def test_two_may_see_to_the_same_samples(clocks: Clocks) -> None:
    """The one that counts them and the one that does not both add their time."""
    meter = StageMeter(STAGES, 2, shared=False)
    make(clocks.timer(meter), clocks, [[(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]])
    timer = clocks.timer(meter, 1)
    timer.begin(1)
    clocks.wall_s += 3.0
    timer.end(0)
    totals = meter.read()
    assert (totals.samples, totals.busy_s) == (1, pytest.approx(5.0))


def test_a_new_worker_goes_on_where_the_old_one_ended(clocks: Clocks) -> None:
    """The totals of a slot survive its worker; since() leaves out what was there before."""
    meter = StageMeter(STAGES, 1, shared=False)
    make(clocks.timer(meter), clocks, [[(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]])
    before = meter.read()
    make(clocks.timer(meter), clocks, [[(0.0, 0.0), (2.0, 2.0), (0.0, 0.0)]])
    assert meter.read().busy_s == pytest.approx(4.0)
    after = meter.read().since(before)
    assert (after.samples, after.busy_s) == (1, pytest.approx(2.0))
    assert walls(after) == pytest.approx([0.0, 2.0, 0.0, 0.0])
    assert before.since(None) is before


def fed(
    batches: int, batch: Callable[[int], list[Sample]], look_s: float = 2e-7
) -> tuple[StageTotals, Clocks, list[float]]:
    """Returns the totals with clocks that cost ``look_s``, and the true seconds by stage."""
    clocks = Clocks(look_s=look_s)
    meter = StageMeter(STAGES, 0)
    timer = clocks.timer(meter)
    true = [0.0] * len(STAGES)
    clocks.looks = 0
    for number in range(batches):
        made = batch(number)
        true = [
            sum(sample[stage][0] for sample in made) + true[stage] for stage in range(len(STAGES))
        ]
        make(timer, clocks, made)
    return meter.read(), clocks, true


def test_timing_microseconds_costs_a_thousandth() -> None:
    """With samples of 20 us the looks take less than 0.1 % of the work."""
    sample = [(5e-6, 5e-6), (5e-6, 5e-6), (10e-6, 10e-6)]
    totals, clocks, _ = fed(1000, lambda _: [sample] * 128)
    assert totals.samples == 1000 * 128
    assert_adds_up(totals)
    assert walls(totals)[:3] == pytest.approx([0.64, 0.64, 1.28], rel=0.03)
    laps_s = (clocks.looks - 2 * 1000) * clocks.look_s
    assert 2e-5 < laps_s / totals.busy_s < 1e-3


def test_all_samples_are_timed_where_they_take_their_time() -> None:
    """With samples of 40 ms the costs of every single one are counted."""
    slow = [(0.5, 0.0), (2e-2, 2e-2), (2e-2, 2e-2)]
    other = [(0.0, 0.0), (2e-2, 2e-2), (2e-2, 2e-2)]
    totals, _, true = fed(
        50, lambda number: [slow if number % 10 == 7 and row == 3 else other for row in range(8)]
    )
    assert_adds_up(totals)
    assert walls(totals)[:3] == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("size", [8, 32])
def test_rare_slow_samples_count_on_average(size: int) -> None:
    """Where few samples are timed, one slow read in a hundred has its share all the same."""
    rng = random.Random(5)
    plain = [(1e-5, 1e-5), (2e-4, 2e-4), (1e-4, 1e-4)]
    slow = [(2e-2, 1e-5), (2e-4, 2e-4), (1e-4, 1e-4)]
    totals, _, true = fed(
        80_000 // size, lambda _: [slow if rng.random() < 0.01 else plain for _ in range(size)]
    )
    assert_adds_up(totals)
    assert walls(totals)[0] == pytest.approx(true[0], rel=0.3)


@pytest.mark.parametrize("place", [0, 63])
def test_no_place_in_a_batch_is_favored(place: int) -> None:
    """A stage that is slow only in one row of each batch is found as often as it happens."""
    plain = [(1e-4, 1e-4), (1e-3, 1e-3), (1e-3, 1e-3)]
    slow = [(1e-2, 1e-2), (1e-3, 1e-3), (1e-3, 1e-3)]
    totals, _, true = fed(1500, lambda _: [slow if row == place else plain for row in range(64)])
    assert walls(totals)[0] == pytest.approx(true[0], rel=0.1)


def test_what_warming_up_took_is_not_taken_for_the_rule() -> None:
    """Batches after a slow first one are divided by samples of their own."""
    cold = [(1e-6, 1e-6), (1e-3, 1e-3), (1e-6, 1e-6)]
    warm = [(1e-4, 1e-4), (1e-5, 1e-5), (1e-4, 1e-4)]
    totals, _, true = fed(1000, lambda number: [warm if number else cold] * 64)
    assert walls(totals)[:3] == pytest.approx(true, rel=0.05)


def test_a_window_never_shows_less_than_nothing() -> None:
    """since() of a stage to which an earlier reading gave too much is zero."""
    totals = [StageTotals(2, 1.0, {"read": StageCost(wall_s, wall_s)}) for wall_s in (0.75, 0.5)]
    assert totals[1].since(totals[0]).stages["read"] == (0.0, 0.0)


def test_stamps_tell_when_a_batch_was_made_and_when_it_came(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks
) -> None:
    """Made by the worker's clock, received where unpickled, pinned where torch asks."""
    stamps = make(clocks.timer(StageMeter(STAGES, 0)), clocks, [[(2.0, 2.0)] * 3])
    assert stamps == Stamps(made_s=1006.0, received_s=1006.0, pinned_s=1006.0)
    monkeypatch.setattr("time.perf_counter", clocks.now)
    sent = pickle.dumps(stamps)
    clocks.go(3.0, 0.0)
    received = pickle.loads(sent)
    assert received == (1006.0, 1009.0, 1009.0)
    clocks.go(0.5, 0.0)
    assert received.pin_memory() == (1006.0, 1009.0, 1009.5)


@pytest.mark.parametrize("timed", [4, 1], ids=["each sample", "the batch as one"])
def test_putting_together_may_follow_the_samples(clocks: Clocks, timed: int) -> None:
    """What follows ``collate`` is no sample's, where a batch is timed as one sample too."""
    meter = StageMeter(STAGES, 0)
    timer = clocks.timer(meter)
    lap = known(timer.begin(timed))
    for _ in range(timed):
        lap(START)
        for stage in STAGES:
            clocks.go(4 / timed, 1 / timed)
            lap(stage)
    timer.mark(START)
    clocks.go(3.0, 2.0)
    timer.end(4)
    totals = meter.read()
    assert (totals.samples, totals.stages[COLLATE]) == (4, pytest.approx((3.0, 2.0)))
    assert totals.stages["decode"] == pytest.approx((4.0, 1.0))
    assert_adds_up(totals)
