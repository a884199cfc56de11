"""What the loader's queue delivers on paper."""

from __future__ import annotations

import numpy as np
import pytest

from harness.tuning.queueing import batch_times, delivered

EVEN = np.full(1000, 0.4)


@pytest.mark.parametrize(
    ("workers", "step_s", "expected"),
    [(1, 0.0, 2.5), (2, 0.0, 5.0), (2, 0.5, 2.0), (8, 0.1, 10.0), (3, 0.1, 7.5)],
    ids=["one worker", "two workers", "slow step", "enough workers", "too few workers"],
)
def test_even_batches_come_as_fast_as_workers_or_steps_allow(workers: int, step_s: float, expected: float) -> None:
    """The slower of the two, and two batches in flight are enough."""
    assert delivered(EVEN, workers, 2, step_s) == pytest.approx(expected, rel=0.01)


def test_one_slow_batch_holds_up_those_behind_it() -> None:
    """With few batches in flight the workers stand still until it has come; with many they go on."""
    uneven = np.random.default_rng(0).permutation(([0.1] * 19 + [2.0]) * 50)
    shallow, deep = delivered(uneven, 4, 1, 0.0), delivered(uneven, 4, 8, 0.0)
    assert deep > 1.2 * shallow
    assert deep <= 4 / uneven.mean() * 1.01


def test_batches_are_drawn_from_the_samples() -> None:
    """Their mean is that of so many samples, and the same on every call."""
    times = [(0.002, 99.0), (0.5, 1.0)]
    batches = batch_times(times, 64)
    assert batches.mean() == pytest.approx(64 * 0.00698, rel=0.1)
    assert batches.std() == pytest.approx(8 * 0.0495, rel=0.1)
    assert np.array_equal(batches, batch_times(times, 64))
