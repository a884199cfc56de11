"""Costs measured in pairs, in model time."""

import pytest
from model_time import Hand

from scripts.paired import Cost, Plan


def test_a_cost_is_what_is_there_beyond_the_bare_loop() -> None:
    """Of 5 us a step beside 2 us it is 3 us; the control is nil; what comes before a run is not timed."""
    clock = Hand()
    plan = Plan(runs=4, steps=10, before=lambda: clock.pass_(9.0), now=clock)
    cost = Cost.of(lambda steps: clock.pass_(5e-6 * steps), lambda steps: clock.pass_(2e-6 * steps), plan)
    assert (cost.us.n, cost.us.median, cost.control_us.median) == (4, pytest.approx(3), pytest.approx(0, abs=1e-6))
    assert cost.bare_us.median == pytest.approx(2)
