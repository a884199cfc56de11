"""The tutorial's search, and what settings cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import samples
from machines import Machine, made_up

from harness.feed.base import FeedSettings
from harness.tuning.auto import cost_of, grid
from harness.tuning.measures import Kind, Rate, Trial, TuningReport, in_flight

Curve = Callable[[int], float]
OWN = samples.settings(1)


def run(
    curve: Curve,
    cores: int,
    pins: tuple[bool, ...] = (False,),
    budget_s: float = 1e9,
    own: FeedSettings = OWN,
) -> tuple[list[FeedSettings], TuningReport]:
    seen: list[FeedSettings] = []

    class Curved(Machine):
        def answer(self, settings: FeedSettings, kind: Kind, limit_s: float = 0.0) -> Trial:
            assert kind == "passes"
            seen.append(settings)
            rate = curve(settings.num_workers)
            found = Rate(rate, rate, rate) if rate > 0 else None
            return Trial(settings, "supply", found, 1.0, refused=None if found else "died")

    lab = made_up(Curved(1.0, 1.0, 1.0, cores=cores))
    return seen, grid(lab, own, pins, budget_s)


@pytest.mark.parametrize(
    ("cores", "curve", "expected"),
    [
        pytest.param(4, lambda n: 100 + n, [0, 4, 8], id="always faster"),
        pytest.param(8, lambda n: 100 - n, [0, 4, 1, 2, 3], id="workers only harm"),
        pytest.param(8, lambda n: -abs(n - 4) + 100, [0, 4, 8, 1, 2, 3, 5, 6, 7], id="peak at 4"),
        pytest.param(
            8,
            lambda n: -abs(n - 9) + 100,
            [0, 4, 8, 12, 5, 6, 7, 9, 10, 11],
            id="peak between steps",
        ),
        pytest.param(8, lambda n: 50.0, [0, 4, 1, 2, 3], id="flat"),
        pytest.param(8, lambda n: 0.0, [0, 1, 2, 3], id="all refused"),
        pytest.param(1, lambda n: 100 + n, [0], id="one core"),
        pytest.param(2, lambda n: -abs(n - 2) * 10 + 100 - n, [0, 4, 1, 2, 3], id="two cores"),
    ],
)
def test_the_grid_visits_what_the_tutorial_does(
    cores: int, curve: Curve, expected: list[int]
) -> None:
    """Steps of four until one is no faster, then the three values on each side of the best so far;
    never below zero.
    """
    seen, _ = run(curve, cores, own=samples.settings(99))
    assert [settings.num_workers for settings in seen] == [99, *expected]


def test_the_users_setting_comes_first_and_is_not_measured_twice() -> None:
    """The grid meets it again without asking."""
    seen, choice = run(lambda n: 10.0 - n, 8, own=dataclasses.replace(OWN, num_workers=4))
    assert [settings.num_workers for settings in seen] == [4, 0, 1, 2, 3]
    assert choice.before.rate == Rate(6.0, 6.0, 6.0)


def test_the_grid_is_walked_for_each_pin_memory() -> None:
    """What one value of pin_memory found does not shorten the walk for the other."""
    seen, _ = run(lambda n: 100 + n, 4, (False, True), own=samples.settings(99))
    assert [(s.num_workers, s.pin_memory) for s in seen[1:]] == [
        (n, pin) for pin in (False, True) for n in (0, 4, 8)
    ]


def test_the_fastest_is_chosen_and_of_equals_the_cheaper() -> None:
    """Most images/s win; what was refused cannot."""
    assert run(lambda n: 100 - abs(n - 3), 8)[1].settings.num_workers == 3
    assert run(lambda n: 100.0, 8)[1].settings.num_workers == 0
    assert run(lambda n: 100.0 if n == 1 else 0.0, 8)[1].settings == OWN


def test_with_everything_refused_the_users_setting_stays() -> None:
    """Nothing could be measured."""
    choice = run(lambda n: 0.0, 8)[1]
    assert choice.before == choice.after and choice.settings == OWN
    assert choice.after.rate is None


def test_the_budget_ends_the_grid() -> None:
    """What was being measured is finished, no more is begun, and the choice says so."""
    seen, choice = run(lambda n: 100 + n, 64, budget_s=2.5)
    assert (len(seen), choice.complete) == (3, False)
    assert run(lambda n: 100 + n, 4)[1].complete


def test_costs_are_told_by_workers_then_batches_in_flight_then_pinned_memory() -> None:
    """In this order."""
    cheap = samples.settings(2)
    deep = samples.settings(2, prefetch_factor=8)
    pinned = dataclasses.replace(cheap, pin_memory=True)
    assert sorted([samples.settings(3), deep, pinned, cheap], key=cost_of) == [
        cheap,
        pinned,
        deep,
        samples.settings(3),
    ]


def test_of_forms_with_as_many_workers_the_one_that_takes_least_is_cheaper() -> None:
    """Arrays before threads, these before processes; fewer workers come before any of that."""
    arrays = dataclasses.replace(samples.settings(0), backend="arrays")
    threads = dataclasses.replace(samples.settings(2), backend="threads")
    order = [
        arrays,
        samples.settings(0),
        samples.settings(1),
        threads,
        samples.settings(2),
    ]
    assert sorted(order[3:] + order[:3], key=cost_of) == order


@pytest.mark.parametrize(
    ("backend", "workers", "expected"),
    [
        ("processes", 3, 6),
        ("threads", 3, 3),
        ("threads", 0, 0),
        ("processes", 0, 0),
        ("arrays", 0, 0),
    ],
)
def test_batches_that_are_made_before_one_is_taken(
    backend: str, workers: int, expected: int
) -> None:
    """Each process makes its own ahead; threads make one together, beside those that are ready."""
    assert in_flight(samples.settings(workers, backend=backend)) == expected
