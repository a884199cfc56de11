"""What the loader's queue delivers on paper."""

from __future__ import annotations

import numpy as np
import pytest

from harness.tuning.queueing import Batches, batch_times, delivered, delivered_together, moments, pooled, with_slow_of

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
    total_s = batches.total_s
    assert total_s.mean() == pytest.approx(64 * 0.00698, rel=0.1)
    assert total_s.std() == pytest.approx(8 * 0.0495, rel=0.1)
    assert np.array_equal(total_s, batch_times(times, 64).total_s)


def test_the_longest_sample_is_drawn_with_its_batch() -> None:
    """A batch holds a slow sample or none."""
    total_s, longest_s = batch_times([(0.002, 99.0), (0.5, 1.0)], 64)
    assert set(longest_s.tolist()) == {0.002, 0.5}
    assert ((total_s > 0.4) == (longest_s == 0.5)).all()


@pytest.mark.parametrize(
    ("threads", "step_s", "expected"), [(1, 0.0, 2.5), (4, 0.0, 10.0), (4, 0.5, 2.0)], ids=["one", "four", "slow step"]
)
def test_threads_make_even_batches_together(threads: int, step_s: float, expected: float) -> None:
    """As fast as their number allows, or the step."""
    batches = Batches(EVEN, EVEN / 64)
    assert delivered_together(batches, threads, 3, step_s) == pytest.approx(expected, rel=0.01)


def test_threads_go_on_while_one_is_held_up() -> None:
    """As far as they may be ahead: with few batches a slow sample holds up all of them, with many hardly any."""
    rng = np.random.default_rng(0)
    longest_s = rng.permutation(([0.002] * 19 + [1.0]) * 50)
    batches = Batches(longest_s + 0.1, longest_s)
    shallow, deep = (delivered_together(batches, 4, ahead, 0.0) for ahead in (1, 60))
    assert deep > 1.5 * shallow
    assert deep <= 4 / batches.total_s.mean() * 1.01


def test_slow_samples_are_taken_from_where_more_were_seen() -> None:
    """As many for each fast one; the fast ones stay one's own."""
    few, more = [(0.003, 500.0), (0.5, 1.0)], [(0.002, 980.0), (0.4, 10.0), (0.5, 10.0)]
    np.testing.assert_allclose(with_slow_of(more, few), [(0.003, 500.0), (0.4, 500 / 98), (0.5, 500 / 98)])
    slow = [count for seconds, count in with_slow_of(pooled([few, more]), few) if seconds > 0.1]
    assert sum(slow) == pytest.approx(500 * 21 / 1480)
    assert moments(with_slow_of(more, more)) == pytest.approx(moments(more))


@pytest.mark.parametrize("many", [[(0.002, 99.0)], []], ids=["none of them is slow", "none was seen"])
def test_without_slow_samples_elsewhere_times_stay_as_they_are(many: list[tuple[float, float]]) -> None:
    """And so do those that hold nothing but slow ones."""
    own = [(0.003, 50.0), (0.5, 1.0)]
    assert with_slow_of(many, own) == own
    assert with_slow_of([(0.002, 990.0), (0.5, 10.0)], [(0.5, 3.0)]) == [(0.5, 3.0)]
