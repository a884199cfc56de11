"""Costs measured in pairs, in model time."""

from itertools import count

import numpy as np
import pytest
from model_time import Hand

from scripts.paired import Cost, Estimate, Plan


def test_a_cost_is_what_is_there_beyond_the_bare_loop() -> None:
    """Of 5 us a step beside 2 us it is 3 us; the control is nil; what comes before a run is not
    timed.
    """
    clock = Hand()
    plan = Plan(runs=4, steps=10, before=lambda: clock.pass_(9.0), now=clock)
    cost = Cost.of(
        lambda steps: clock.pass_(5e-6 * steps), lambda steps: clock.pass_(2e-6 * steps), plan
    )
    assert (cost.us.n, cost.us.median, cost.control_us.median) == (
        4,
        pytest.approx(3),
        pytest.approx(0, abs=1e-6),
    )
    assert cost.bare_us.median == pytest.approx(2)
    assert cost.mean_us == Estimate(*[pytest.approx(3)] * 3)


def test_runs_of_two_kinds_are_averaged() -> None:
    """Every fourth run takes 40 us more, which no median of all would show: they take 10 us more on
    average.
    """
    clock = Hand()
    turn = count()
    last: list[int] = [0]

    def watched(steps: int) -> None:
        last[0] = next(turn) % 4
        clock.pass_(40e-6 * (last[0] == 0))

    cost = Cost.of(watched, lambda steps: None, Plan(runs=40, now=clock, kind=lambda: last[0] == 0))
    assert cost.us.median == pytest.approx(0, abs=1e-6) and cost.mean_us.value == pytest.approx(10)


def test_an_interval_holds_the_median_of_nineteen_samples_in_twenty() -> None:
    """Of 400 samples of 101 values, the share whose interval holds
    the true median is about 0.95.
    """
    draw = np.random.default_rng(0)
    found = [Estimate.of(draw.exponential(size=101).tolist()) for _ in range(400)]
    assert 0.93 <= np.mean([one.low <= np.log(2) <= one.high for one in found]) <= 0.98


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((0.1, 0.9), "holds"), ((0.9, 1.1), "not resolved"), ((1.1, 1.2), "does not hold")],
    ids=["below", "across", "above"],
)
def test_a_claim_is_judged_by_the_whole_interval(
    interval: tuple[float, float], verdict: str
) -> None:
    """What lies on both sides of the limit is not resolved."""
    assert Estimate(1.0, *interval).judged(1.0) == verdict
