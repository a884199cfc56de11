"""How many threads load while training, on made-up machines."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.clock.figures import Ledger
from harness.clock.stages import StageCost, StageTotals
from harness.feed.base import THREADS, FeedSettings
from harness.feed.threads import ThreadFeed
from harness.tuning.tuner import OnlineTuner, Period

MOST = 8
CORES = 2


@dataclass(frozen=True)
class Machine:
    """Samples of ``wait_s`` of waiting and ``cpu_s`` of work, and a step that takes ``demand``
    images/s.
    """

    wait_s: float = 0.0
    cpu_s: float = 0.25e-3
    demand: float = 1500.0
    storage: float = math.inf  # images/s for all threads together
    step_cpu_s: float = 0.1e-3

    def period(self, threads: int, luck: float = 1.0) -> Period:
        supply = min(
            threads / (luck * self.wait_s + self.cpu_s),
            self.storage,
            CORES / (self.cpu_s + self.step_cpu_s),
        )
        rate = min(self.demand, supply)
        # threads that are not slow enough to be waited for rest
        wall_s = threads / supply if supply < self.demand else luck * self.wait_s + self.cpu_s
        return Period(rate, 1 - rate / self.demand, wall_s, self.cpu_s, self.step_cpu_s)


LATE = Machine(wait_s=5e-3)
FED = Machine(wait_s=1e-3, demand=1000)


class Feed:
    """A thread feed in which nothing is made: what its threads have done is what is said."""

    def __init__(self, threads: int) -> None:
        self.settings = FeedSettings(16, threads, False, None, True, 0.0, "fork", THREADS)
        self.meter = SimpleNamespace(read=lambda: self.totals)
        self.totals = StageTotals(0, 0.0, {"read": StageCost(0.0, 0.0)})
        self.limit = 64

    def resize(self, threads: int) -> None:
        self.settings = replace(self.settings, num_workers=min(threads, self.limit))

    def work(self, samples: int, wall_s: float, cpu_s: float) -> None:
        then = self.totals
        cost = StageCost(
            then.stages["read"].wall_s + samples * wall_s,
            then.stages["read"].cpu_s + samples * cpu_s,
        )
        self.totals = StageTotals(then.samples + samples, cost.wall_s, {"read": cost})


def policy(threads: int, cores: float, most: int) -> OnlineTuner:
    """Gives a feed as many threads as pays; ``judge`` is told of each period."""
    return OnlineTuner([cast(Any, Feed(threads))], cores, most)


def after(live: OnlineTuner, period: Period) -> int:
    """The number of threads from ``period`` on."""
    live.judge(period)
    return live.threads


def course(live: OnlineTuner, *machines: Machine, each: int = 8) -> list[int]:
    """The numbers of threads after each period, ``each`` of them on one machine after the other."""
    return [after(live, machine.period(live.threads)) for machine in machines for _ in range(each)]


def changes(numbers: list[int]) -> list[int]:
    """Each number that differs from the one before."""
    return [now for now, before in zip(numbers, [None, *numbers], strict=False) if now != before]


def test_late_files_get_as_many_threads_as_the_model_asks_for() -> None:
    """After two periods that say the same, at once and for good: 5.25 ms for 1,500 images/s and a
    twentieth more are 9.
    """
    live = policy(2, CORES, 32)
    assert course(live, LATE) == [2, *[9] * 7]
    (change,) = live.changes
    assert "75%" in change.reason and "5.2 ms" in change.reason


@pytest.mark.parametrize(
    "machine",
    [
        FED,
        Machine(cpu_s=1e-3, demand=5000),
        Machine(cpu_s=0.1e-3, demand=5000, step_cpu_s=0.3e-3),
        Machine(wait_s=1.3e-3, demand=1300),
    ],
    ids=[
        "fed",
        "processors full of loading",
        "processors full of the step",
        "waits of 1 in 100",
    ],
)
def test_nothing_is_changed_where_nothing_would_help(machine: Machine) -> None:
    """Neither where steps have what they need, nor where no processor is left."""
    assert course(policy(2, CORES, MOST), machine, each=40) == [2] * 40


def test_what_gains_nothing_is_taken_back_and_seldom_tried_again() -> None:
    """A storage that gives no more to more threads costs a try in 30 periods, then in 120, then in
    480.
    """
    live = policy(2, CORES, MOST)
    numbers = course(live, Machine(wait_s=5e-3, storage=390), each=300)
    assert changes(numbers) == [2, 8, 2, 8, 2, 8, 2]
    assert [index for index, number in enumerate(numbers) if number == 8] == [1, 33, 155]


def test_threads_go_when_files_are_warm() -> None:
    """To as many as the model asks for then; and come again with the cold."""
    live = policy(2, CORES, MOST)
    assert changes(course(live, LATE, Machine(), LATE)) == [2, 8, 2, 8]
    live = policy(2, CORES, MOST)
    assert changes(course(live, LATE, Machine(wait_s=1.5e-3))) == [2, 8, 3]


def test_a_look_that_chose_many_is_no_floor() -> None:
    """A run that began with 8 goes to as many as there are processors."""
    assert changes(course(policy(8, CORES, MOST), LATE, Machine())) == [8, 2]


@dataclass(frozen=True)
class Crowd(Machine):
    """Threads that wait for each other: each takes the longer the more there are, and all together
    give the less.
    """

    def period(self, threads: int, luck: float = 1.0) -> Period:
        alone = super().period(threads, luck)
        rate = min(self.demand, 1200 / (1 + 0.05 * threads))
        return alone._replace(
            images_per_s=rate, stall=1 - rate / self.demand, wall_s=threads / rate
        )


def test_threads_that_wait_for_each_other_become_the_fewest() -> None:
    """The model would have them all, for each takes long; fewer are tried, and are better."""
    assert changes(course(policy(8, CORES, MOST), Machine(wait_s=20e-3), Crowd(), each=20)) == [
        8,
        2,
    ]


def test_fewer_threads_that_give_less_are_taken_back() -> None:
    """Files that come in half the time are still late."""
    live = policy(8, CORES, MOST)
    assert changes(course(live, Machine(wait_s=20e-3), Machine(wait_s=8e-3), each=20)) == [
        8,
        2,
        8,
    ]


def test_a_hiccup_in_a_try_is_not_for_ever() -> None:
    """What one bad period has prevented is tried again."""
    live = policy(2, CORES, MOST)
    course(live, LATE, each=2)
    assert live.threads == 8 and live.settled == 2
    assert after(live, LATE.period(8)._replace(images_per_s=300.0)) == 2
    assert course(live, LATE, each=40)[-1] == live.settled == 8


@pytest.mark.parametrize("seed", range(20))
def test_varying_storage_makes_few_changes(seed: int) -> None:
    """Ten minutes in which a sample's wait varies by a third, and all threads share what the
    storage gives.
    """
    live = policy(2, CORES, 32)
    luck = random.Random(seed)
    machine = Machine(
        wait_s=luck.uniform(2e-3, 20e-3), storage=luck.uniform(200, 1500), demand=2000
    )
    numbers = [
        after(live, machine.period(live.threads, luck.lognormvariate(0, 0.3))) for _ in range(600)
    ]
    assert len(changes(numbers)) - 1 <= 16
    assert machine.period(numbers[-1]).images_per_s >= 0.9 * machine.period(32).images_per_s


def test_one_odd_period_is_luck() -> None:
    """Nothing is changed for it."""
    assert changes(course(policy(2, CORES, MOST), *[FED, LATE] * 5, each=1)) == [2]


@pytest.mark.parametrize(
    "machine", [FED, Machine(cpu_s=1e-3, demand=5000), Machine(wait_s=8e-3, demand=200)]
)
def test_uneven_samples_change_nothing(machine: Machine) -> None:
    """Ten minutes of periods in which waiting takes 0.7 to 1.3 times as long."""
    live = policy(2, CORES, MOST)
    luck = random.Random(1)
    assert {
        after(live, machine.period(live.threads, luck.uniform(0.7, 1.3))) for _ in range(600)
    } == {2}


@dataclass
class Run:
    """Windows of ten steps on ``feeds``, which ``live`` looks at."""

    feeds: tuple[Feed, Feed]
    live: OnlineTuner
    cpu_s: list[float]
    seconds: float = 0.0

    def windows(self, machine: Machine, count: int, extra_cpu_s: float = 0.0, **facts: Any) -> None:
        for _ in range(count):
            period = machine.period(self.feeds[0].settings.num_workers)
            took_s = 160 / period.images_per_s
            self.seconds += took_s
            self.feeds[0].work(160, period.wall_s, period.cpu_s)
            self.cpu_s[0] += 160 * (period.cpu_s + period.step_cpu_s) + extra_cpu_s
            ledger = Ledger()
            ledger.sums["run"].update(
                steps=10,
                images=160,
                elapsed_s=took_s,
                wait_s=period.stall * took_s,
                compute_s=(1 - period.stall) * took_s,
                **facts,
            )
            self.live.look(ledger.window())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    feeds = (Feed(2), Feed(2))
    cpu_s = [0.0]
    monkeypatch.setattr("time.process_time", lambda: cpu_s[0])
    live = OnlineTuner(
        cast("list[ThreadFeed]", feeds),
        CORES,
        MOST,
        step=100,
    )
    return Run(feeds, live, cpu_s)


def test_all_feeds_follow_the_windows_of_a_run(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A change is made, told with its step and its reason, and kept for the report."""
    run.windows(LATE, 12)
    assert [feed.settings.num_workers for feed in run.feeds] == [8, 8]
    (change,) = run.live.changes
    assert (change.threads, change.before, change.images_per_s) == (
        8,
        2,
        pytest.approx(2 / 5.25e-3),
    )
    assert (
        f"Step {change.step}: now using 8 loader threads (was 2). Training waited for data 75% of"
        in capsys.readouterr().out
    )
    assert 100 < change.step <= 220 and change.step % 10 == 0


def test_windows_with_an_evaluation_tell_nothing_of_the_steps_processors(run: Run) -> None:
    """Of one epoch a window, each with a pause that takes all processors: threads are tried all the
    same.
    """
    pause = {"pauses_s": {"evaluate": 1.0}, "first_steps": 1}
    run.windows(LATE, 12, extra_cpu_s=4.0, **pause)
    assert run.feeds[0].settings.num_workers == 8


def test_processors_that_the_step_takes_are_not_there_for_threads(run: Run) -> None:
    """The same time, taken amid the steps."""
    run.windows(LATE, 12, extra_cpu_s=4.0)
    assert run.feeds[0].settings.num_workers == 2


@pytest.mark.parametrize(("limit", "changes"), [(5, [(2, 5)]), (2, [])])
def test_where_no_thread_can_be_started_there_are_those_that_are(
    run: Run, limit: int, changes: list[tuple[int, int]]
) -> None:
    """The report tells what there is, and no more are tried."""
    run.feeds[0].limit = run.feeds[1].limit = limit
    run.windows(LATE, 100)
    assert [(change.before, change.threads) for change in run.live.changes] == changes
    assert run.feeds[0].settings.num_workers == limit
    assert run.live.settled == limit


def test_threads_are_no_more_than_samples_in_the_making(run: Run) -> None:
    """Of small batches there are too few to share."""
    small = Feed(2)
    small.settings = replace(small.settings, batch_size=1)
    live = OnlineTuner([cast(Any, small)], CORES, MOST)
    alone = Run((small, small), live, run.cpu_s)
    alone.windows(LATE, 40)
    assert small.settings.num_workers == 3
