"""Quantiles in fixed memory, and the figures of a window."""

import math

import numpy as np
import pytest
from model_time import known

from harness.clock.figures import Ledger


@pytest.mark.parametrize(
    "scale_ms", [0.01, 1.0, 5e4], ids=["microseconds", "milliseconds", "minutes"]
)
@pytest.mark.parametrize("share", [0.5, 0.95], ids=["median", "p95"])
def test_a_quantile_is_within_one_per_cent(scale_ms: float, share: float) -> None:
    """Median and p95 are within 1 % of the value of that rank, over seven orders of magnitude."""
    values = np.random.default_rng(0).lognormal(mean=math.log(scale_ms), sigma=1.0, size=5000)
    ledger = Ledger()
    for value in values:
        ledger.count("step_ms", float(value) / 1e3)
    spread = known(ledger.quantiles("step_ms"))
    expected = float(np.percentile(values, share * 100, method="inverted_cdf"))
    assert {0.5: spread.median, 0.95: spread.p95}[share] == pytest.approx(expected, rel=0.0101)


def test_the_maximum_is_exact_and_a_spike_survives() -> None:
    """One slow step among ten thousand is the maximum, to the bit."""
    ledger = Ledger()
    for _ in range(10_000):
        ledger.count("step_ms", 0.01)
    ledger.count("step_ms", 1.2345678)
    spread = known(ledger.quantiles("step_ms"))
    assert spread.max == 1e3 * 1.2345678
    assert spread.p95 == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e300], ids=["zero", "tiny", "huge"])
def test_values_out_of_range_are_counted(value: float) -> None:
    """A value outside the buckets neither raises nor gives a quantile above the maximum."""
    ledger = Ledger()
    ledger.count("step_ms", value)
    spread = known(ledger.quantiles("step_ms"))
    assert 0.0 <= spread.median <= spread.max == 1e3 * value


def test_memory_is_bounded() -> None:
    """Values of all sizes fill at most 1,383 buckets."""
    ledger = Ledger()
    for exponent in np.linspace(-12, 15, 50_000):
        ledger.count("step_ms", float(10.0**exponent))
    assert len(ledger.sums["step_ms"]) <= 1383


def test_an_empty_ledger_has_no_figures() -> None:
    """Without steps rates, fractions and times are None."""
    window = Ledger().window()
    figures = (
        window.images_per_s,
        window.step_ms,
        window.data_wait_fraction,
        window.stall_fraction,
        window.first_step_s,
    )
    assert figures == (None,) * 5
    assert (window.shares, window.wait_parts, window.host_parts_s) == ({}, {}, {"gc": 0.0})


def test_merged_ledgers_count_everything() -> None:
    """Sums add, quantiles are of all values, pauses add by name."""
    one = Ledger()
    one.sums["run"] |= {"steps": 1, "images": 8, "elapsed_s": 0.5}
    two = Ledger()
    two.sums["run"] |= {"steps": 3, "images": 24, "elapsed_s": 1.5}
    one.sums["pause"] |= {"evaluate": 1.0}
    two.sums["pause"] |= {"evaluate": 2.0, "checkpoint": 0.5}
    one.sums["device"] |= {"compute": 1.0}
    two.sums["device"] |= {"compute": 2.0, "starved": 1.0}
    two.sums["wait"] |= {"make": 3.0, "move": 1.0}
    one.sums["host"] |= {"logging": 0.2}
    two.sums["run"]["gc_s"] = 0.1
    one.count("data_wait_ms", 0.001)
    for _ in range(3):
        two.count("data_wait_ms", 0.009)
    one.merge(two)
    window = one.window()
    assert (window.steps, window.images, window.elapsed_s, window.images_per_s) == (
        4,
        32,
        2.0,
        16.0,
    )
    assert window.pauses_s == {"evaluate": 3.0, "checkpoint": 0.5}
    assert window.shares == {"compute": 0.75, "starved": 0.25}
    assert window.wait_parts == {"make": 0.75, "move": 0.25}
    assert window.host_parts_s == {"logging": 0.2, "gc": 0.1}
    assert known(window.data_wait_ms).median == pytest.approx(9.0, rel=0.01)
