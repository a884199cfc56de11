"""The tutorial's search, and the choice among what was tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.tuning.search import Candidate, Trial, choose, grid, grid_size

Curve = Callable[[int], float]


def trial(num_workers: int, rate: float, pin_memory: bool = False, refused: str | None = None) -> Trial:
    return Trial(Candidate(num_workers, pin_memory), rate, images=100, seconds=1.0, refused=refused)


def visited(curve: Curve, cores: int, pin_choices: tuple[bool, ...] = (False,)) -> list[Candidate]:
    search = grid(cores, pin_choices)
    seen = [next(search)]
    try:
        while True:
            seen.append(search.send(trial(seen[-1].num_workers, curve(seen[-1].num_workers))))
    except StopIteration:
        return seen


@pytest.mark.parametrize(
    ("cores", "curve", "expected"),
    [
        pytest.param(4, lambda n: 100 + n, [0, 4, 8], id="always faster"),
        pytest.param(8, lambda n: 100 - n, [0, 4, 1, 2, 3], id="workers only harm"),
        pytest.param(8, lambda n: -abs(n - 4) + 100, [0, 4, 8, 1, 2, 3, 5, 6, 7], id="peak at 4"),
        pytest.param(8, lambda n: -abs(n - 9) + 100, [0, 4, 8, 12, 5, 6, 7, 9, 10, 11], id="peak between steps"),
        pytest.param(8, lambda n: 50.0, [0, 4, 1, 2, 3], id="flat"),
        pytest.param(8, lambda n: 0.0, [0, 1, 2, 3], id="all refused"),
        pytest.param(1, lambda n: 100 + n, [0], id="one core"),
        pytest.param(2, lambda n: -abs(n - 2) * 10 + 100 - n, [0, 4, 1, 2, 3], id="two cores"),
    ],
)
def test_the_grid_visits_what_the_tutorial_does(cores: int, curve: Curve, expected: list[int]) -> None:
    """Steps of four until one is no faster, then the three values on each side of the best so far; never below zero."""
    assert [candidate.num_workers for candidate in visited(curve, cores)] == expected


def test_the_grid_is_walked_for_each_pin_memory() -> None:
    """What one value of pin_memory found does not shorten the walk for the other."""
    seen = visited(lambda n: 100 + n, 4, (False, True))
    assert [(c.num_workers, c.pin_memory) for c in seen] == [(n, pin) for pin in (False, True) for n in (0, 4, 8)]


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 64])
def test_the_size_is_an_upper_bound(cores: int) -> None:
    """No response curve makes the grid longer than grid_size, and one with its peak before the end makes it as long."""
    peaks = range(2 * cores + 2)
    lengths = [len(visited(lambda n, peak=peak: 1000.0 - abs(n - peak), cores, (False, True))) for peak in peaks]  # type: ignore[misc]
    assert max(lengths) <= grid_size(cores, (False, True))
    if cores > 3:
        assert max(lengths) == grid_size(cores, (False, True))


def test_the_fastest_is_chosen() -> None:
    """The most images per second win."""
    assert choose([trial(0, 10), trial(4, 30), trial(8, 20)]) == trial(4, 30)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([trial(4, 10), trial(2, 10)], trial(2, 10)),
        ([trial(2, 10, pin_memory=True), trial(2, 10)], trial(2, 10)),
        ([trial(1, 10, pin_memory=True), trial(2, 10)], trial(1, 10, pin_memory=True)),
    ],
    ids=["fewer workers", "unpinned", "workers before pinning"],
)
def test_equals_are_told_apart_by_cost(trials: list[Trial], expected: Trial) -> None:
    """Of two equally fast settings the cheaper one is chosen."""
    assert choose(trials) == expected == choose(trials[::-1])


def test_a_refused_candidate_is_never_chosen() -> None:
    """A refused trial loses to any other."""
    assert choose([trial(8, 99, refused="died"), trial(0, 1)]) == trial(0, 1)


def test_with_everything_refused_the_first_is_kept() -> None:
    """Nothing could be measured: the user's own setting, tried first, stays."""
    assert choose([trial(2, 0, refused="a worker died"), trial(0, 0, refused="another reason")]).candidate.num_workers == 2


def test_a_candidate_prints_as_the_user_would_type_it() -> None:
    """str() is the two settings."""
    assert str(Candidate(4, True)) == "num_workers=4 pin_memory=true"
