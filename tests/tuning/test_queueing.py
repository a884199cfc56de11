"""What the loader's queue delivers on paper."""

from __future__ import annotations

import numpy as np
import pytest

from harness.tuning.queueing import Batches, batch_times, delivered, delivered_together, moments, with_slow_of

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


def test_slow_samples_are_as_many_as_all_forms_together_have_seen() -> None:
    """For each fast one; the fast ones stay a form's own, and what is slow for it is judged by its own times."""
    few, more = [(0.003, 500.0), (0.5, 1.0)], [(0.002, 980.0), (0.4, 10.0), (0.5, 10.0)]
    np.testing.assert_allclose(with_slow_of([few, more], few), [(0.003, 500.0), (0.4, 500 / 148), (0.5, 550 / 148)])
    assert moments(with_slow_of([more], more)) == pytest.approx(moments(more))
    crawling = [(0.016, 1500.0)]  # 16 times as slow, for want of processors: none of them is one of the data's slow ones
    assert with_slow_of([crawling, more], crawling)[0] == (0.016, 1500.0)
    assert sum(count for _, count in with_slow_of([crawling, more], more)) == pytest.approx(980 * (1 + 20 / 2480))


@pytest.mark.parametrize("others", [[[(0.002, 99.0)]], [[]], []], ids=["none of them is slow", "none was seen", "no others"])
def test_without_slow_samples_elsewhere_times_stay_as_they_are(others: list[list[tuple[float, float]]]) -> None:
    """And so do those of which none is fast."""
    own = [(0.003, 50.0), (0.5, 1.0)]
    assert with_slow_of(others, own) == own
    assert with_slow_of([[(0.002, 990.0), (0.5, 10.0)]], []) == []


def test_forms_meet_slow_samples_at_the_same_places() -> None:
    """Each as often as its share says: what is drawn tells forms apart by nothing but their times."""
    slow = (0.5, 10.0)
    some, others = (batch_times([*fast, slow], 32) for fast in ([(0.002, 990.0)], [(0.001, 300.0), (0.003, 690.0)]))
    assert ((some.longest_s == 0.5) == (others.longest_s == 0.5)).all()
    assert some.total_s.mean() == pytest.approx(32 * (0.99 * 0.002 + 0.005), rel=1e-3)
