"""The policy of tuner=auto on made-up machines: what it asks for, and what it chooses."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from itertools import product

import pytest
from machines import Machine, own, search

from harness.feed.base import FeedSettings
from harness.tuning.measures import Kind, Rate, Trial, TuningReport

SLEEPS = {"cores": 8.0, "cpu_s": 0.0001}
BACKENDS = {"processes": 1.0, "threads": 1.15}
DECODED = {**BACKENDS, "arrays": 100.0}
MOST = 16
NOISE = pytest.mark.parametrize("noise", [0.0, 0.01], ids=["exact", "noisy"])


def rate(choice: TuningReport) -> float:
    """What the choice is said to deliver."""
    return choice.after.images_per_s


def asked(machine: Machine) -> list[tuple[str, int]]:
    return [(ask.kind, ask.settings.num_workers) for ask in machine.asked]


@NOISE
@pytest.mark.parametrize(
    ("machine", "before", "expected"),
    [
        pytest.param(
            Machine(0.0021, demand=1500, **SLEEPS), 7, {4}, id="2 ms asleep, demand met by 4"
        ),
        pytest.param(
            Machine(0.0102, demand=640, **SLEEPS), 7, {7}, id="10 ms asleep, as the user has it"
        ),
        pytest.param(
            Machine(0.0502, demand=200, **SLEEPS),
            7,
            {11},
            id="50 ms asleep, more workers than cores",
        ),
        pytest.param(Machine(0.002, 0.0019, demand=700), 1, {2}, id="two cores meet demand"),
        pytest.param(Machine(0.002, 0.0019, demand=5000), 1, {2, 3}, id="two cores do not"),
        pytest.param(Machine(0.002, 0.0019, demand=700), 0, {2}, id="none at first"),
        pytest.param(
            Machine(0.002, 0.0002, demand=1000, ceiling=700), 1, {2}, id="storage gives no more"
        ),
        pytest.param(
            Machine(0.002, 0.0002, demand=1000, ceiling=700),
            8,
            {2},
            id="storage gives no more to many",
        ),
        pytest.param(Machine(0.002, 0.0019, demand=200), 8, {1}, id="far too many at first"),
        pytest.param(Machine(0.002, 0.0019, demand=5), 0, {0}, id="slow step, none at first"),
        pytest.param(
            Machine(0.0002, 0.0002, demand=1600, step_cpu_s=2 / 1600),
            2,
            {2},
            id="the step fills the cores",
        ),
    ],
)
def test_the_fewest_workers_that_deliver_are_chosen(
    machine: Machine, before: int, expected: set[int], noise: float
) -> None:
    """Where demand can be met, no more workers than meet it; where not, no more than give what can
    be had.

    Beside a step that fills the processors it stays with the user's own: there fewer workers would
    get less of these.
    """
    for seed in range(5 if noise else 1):
        machine = dataclasses.replace(machine, noise=noise, seed=seed, asked=[])
        chosen = search(machine, own(before)).settings
        near = {n + more for n in expected for more in (0, 1)} if noise else expected
        assert chosen.num_workers in near
        assert machine.delivered(chosen) >= 0.97 * machine.delivered(own(before))


def made_up(seed: int) -> Machine:
    """A machine of any kind with two or three backends."""
    rng = random.Random(seed)
    wall_s = 10 ** rng.uniform(-4, -1.5)
    backends = {"processes": 1.0, "threads": rng.choice([0.7, 1.0, 1.15, 1.5])}
    if rng.random() < 0.3:
        backends["arrays"] = wall_s / rng.choice([2e-6, 5e-6])
    return Machine(
        wall_s,
        wall_s * rng.choice([0.02, 0.5, 0.99]),
        demand=10 ** rng.uniform(2.2, 4),
        cores=rng.choice([1.0, 2.0, 8.0, 64.0]),
        ceiling=rng.choice([math.inf, math.inf, 300.0]),
        form_speed=backends,
        form_ceiling={"threads": rng.choice([math.inf, 500.0, 2000.0])},
        form_slows={"threads": rng.choice([1.0, 1.0, 0.8])},
        noise=0.01,
        seed=seed,
    )


def best(machine: Machine) -> float:
    """The most images/s that any setting of any backend delivers."""
    tried = (own(n, backend) for backend, n in product(machine.form_speed, range(MOST + 1)))
    return max(map(machine.delivered, tried))


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("before", [0, 1, 2, 7])
@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_or_near_it(seed: int, before: int, backend: str) -> None:
    """On machines of all kinds, by a few measurements; never slower than the user's own setting."""
    machine = made_up(seed)
    chosen = search(machine, own(before, backend)).settings
    assert machine.delivered(chosen) >= 0.92 * best(machine)
    assert machine.delivered(chosen) >= 0.97 * machine.delivered(own(before, backend))
    assert len(machine.asked) <= 7


class Disturbed(Machine):
    """Where the first measurement falls into a moment in which
    other programs have the processors.
    """

    def answer(self, settings: FeedSettings, kind: Kind, limit_s: float = 0.0) -> Trial:
        found = super().answer(settings, kind)
        if len(self.asked) > 1 or found.rate is None or found.cost is None:
            return found
        slow = dataclasses.replace(found.cost, wall_s=2.1 * found.cost.wall_s)
        return dataclasses.replace(
            found, rate=Rate.exactly(found.rate.images_per_s / 2.1), cost=slow
        )


@pytest.mark.parametrize("budget_s", [30.0, 1.4], ids=["time", "little time"])
@pytest.mark.parametrize("before", ["threads", "processes"])
def test_a_disturbed_measurement_of_the_users_own_does_not_replace_it(
    before: str, budget_s: float
) -> None:
    """Two workers fill both processors: neither one alone, nor another backend, is better, whatever
    the first figure says.
    """
    backends = {before: 1.0, "processes" if before == "threads" else "threads": 0.95}
    machine = Disturbed(0.0015, 0.0015, demand=1700, form_speed=backends)
    have = own(2, before)
    assert search(machine, have, budget_s=budget_s).settings == have


def test_where_loading_keeps_up_the_look_ends_at_once() -> None:
    """One probe and one look at real steps."""
    machine = Machine(0.002, 0.0019, demand=200, form_speed=DECODED)
    choice = search(machine, own(1))
    assert asked(machine) == [("supply", 1), ("steps", 1)]
    assert choice.settings == own(1)


def test_memory_may_be_the_limit() -> None:
    """What does not fit is not asked for, and the reason says so."""
    machine = Machine(0.05, 0.0001, demand=5000, cores=8.0)
    choice = search(machine, own(1), fits=lambda s: "too large" if s.num_workers > 3 else None)
    assert max(ask.settings.num_workers for ask in machine.asked) == 3
    assert choice.settings.num_workers == 3
    assert "tuner.max_workers" in choice.reason


def test_a_setting_that_fails_is_not_chosen() -> None:
    """From four workers on they die: what was measured before stays."""
    machine = Machine(0.01, demand=2000, **SLEEPS, broken=lambda s: s.num_workers > 3)
    choice = search(machine, own(1))
    assert choice.settings.num_workers <= 3
    assert machine.delivered(choice.settings) >= machine.delivered(own(1))


def test_processes_are_not_tried_where_the_processors_are_full() -> None:
    """They hand batches over besides."""
    machine = Machine(0.0014, 0.0014, demand=5000, form_speed=BACKENDS)
    search(machine, own(2, "threads"))
    assert {ask.settings.backend for ask in machine.asked} == {"threads"}


def test_a_form_that_does_not_fit_is_not_started() -> None:
    """Images larger than the memory: refused before anything runs, and others are looked
    at.
    """
    machine = Machine(267e-6, 267e-6, demand=16_000, form_speed=DECODED)
    choice = search(machine, own(1), fits=lambda s: "too large" if s.backend == "arrays" else None)
    assert choice.settings.backend == "threads"
    assert all(ask.settings.backend != "arrays" for ask in machine.asked)


def test_a_form_that_fails_is_not_chosen() -> None:
    """Threads that die leave the choice among the others."""
    machine = Machine(
        0.0014, 0.0014, demand=2000, form_speed=BACKENDS, broken=lambda s: s.backend == "threads"
    )
    choice = search(machine, own(1))
    assert choice.settings.backend == "processes"
    assert machine.delivered(choice.settings) >= 0.97 * 2 / 0.0014


@pytest.mark.parametrize("backend", ["threads", "arrays"])
def test_a_form_that_the_user_named_is_the_only_one(backend: str) -> None:
    """The look stays in it; of arrays there is nothing to choose."""
    machine = Machine(0.002, 0.0019, demand=700, form_speed={backend: DECODED[backend]})
    choice = search(machine, own(1, backend))
    assert {ask.settings.backend for ask in machine.asked} == {choice.settings.backend} == {backend}


def test_arrays_that_the_user_named_are_seen_beside_real_steps() -> None:
    """Their first probe decodes what it gives, as no later pass does."""
    machine = Machine(0.002, 0.002, demand=2000, form_speed={"arrays": 1.0})
    real = machine.answer

    def answer(settings: FeedSettings, kind: Kind, limit_s: float = 0.0) -> Trial:
        machine.form_speed["arrays"] = 1.0 if kind == "supply" else 1000.0
        return real(settings, kind)

    machine.answer = answer  # type: ignore[method-assign]
    choice = search(machine, own(0, "arrays"))
    assert rate(choice) == pytest.approx(2000, rel=0.01)


def test_uneven_samples_get_a_deeper_queue() -> None:
    """Sixteen batches ahead of threads; even samples keep torch's two."""
    even, uneven = (
        Machine(0.01, demand=640, variation=v, form_speed={"threads": 1.0}, **SLEEPS)
        for v in (0.1, 7.0)
    )
    chosen = [search(machine, own(1, "threads")).settings for machine in (even, uneven)]
    assert [settings.batches_ahead for settings in chosen] == [2, 16]
    assert asked(uneven) == [("supply", 1), ("supply", 8)], "real steps could not tell more"


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_uneven_samples_change_nothing_where_demand_is_met(backend: str) -> None:
    """A loader that is 24 times as fast keeps its setting; one that hardly leads gets a queue."""
    before = own(2, backend)
    fast, close = (
        Machine(0.01, demand=200 / times, variation=7.0, form_speed={backend: 1.0}, **SLEEPS)
        for times in (24, 1.05)
    )
    assert search(fast, before).settings == before
    assert search(close, before).settings.batches_ahead > before.batches_ahead


def test_a_deep_queue_is_as_deep_as_fits() -> None:
    """Processes have four batches each."""
    machine = Machine(0.01, demand=640, variation=7.0, **SLEEPS)
    free = search(machine, own(1)).settings
    tight = search(
        machine, own(1), fits=lambda s: "too large" if (s.prefetch_factor or 0) > 2 else None
    ).settings
    assert (free.num_workers, free.prefetch_factor) == (8, 4)
    assert (tight.num_workers, tight.prefetch_factor) == (8, 2)
    assert search(machine, free).settings == free


def test_where_the_time_is_over_the_users_setting_stays_and_it_is_said() -> None:
    """A run that is nearly over goes without; what was measured is told all the same."""
    machine = Machine(0.0502, demand=2000, **SLEEPS)
    choice = search(machine, own(7), budget_s=0.5)
    assert asked(machine) == [("supply", 7)]
    assert (choice.settings, choice.complete) == (own(7), False)
    assert choice.before.images_per_s == pytest.approx(7 / 0.0502)
    assert "tuner.budget_s" in choice.reason


def test_what_no_longer_fits_into_the_time_is_left_out() -> None:
    """The best of what was measured is chosen, and the answer is not called complete."""
    machine = Machine(0.0502, demand=500, form_speed=BACKENDS, **SLEEPS)
    choice = search(machine, own(4), budget_s=1.1)
    assert asked(machine) == [("supply", 4), ("supply", 1)]
    assert (choice.settings.num_workers, choice.complete) == (4, False)


def without(least: int) -> Callable[[FeedSettings], str | None]:
    return lambda settings: "too large" if settings.num_workers >= least else None


@pytest.mark.parametrize(
    ("machine", "before", "budget_s", "expected"),
    [
        pytest.param(Machine(0.01, demand=550, **SLEEPS), 16, 30.0, 6, id="the fewest that do"),
        pytest.param(Machine(0.01, demand=1400, **SLEEPS), 16, 30.0, 7, id="as many as fit"),
        pytest.param(Machine(0.01, demand=1400, **SLEEPS), 16, 0.5, 1, id="no time"),
        pytest.param(
            Machine(0.01, demand=550, variation=4.0, **SLEEPS), 16, 30.0, 7, id="uneven samples"
        ),
    ],
)
def test_where_the_users_setting_does_not_fit_another_one_does(
    machine: Machine, before: int, budget_s: float, expected: int
) -> None:
    """Never one that was refused."""
    choice = search(machine, own(before), fits=without(8), budget_s=budget_s)
    assert choice.settings.num_workers == expected
    assert rate(choice) > 0


def test_what_was_refused_for_its_depth_is_no_limit_for_others() -> None:
    """Eight batches of a worker do not fit; torch's two do."""
    tight = dataclasses.replace(own(1), prefetch_factor=8)
    machine = Machine(0.01, demand=550, **SLEEPS)
    choice = search(
        machine, tight, fits=lambda s: "too large" if (s.prefetch_factor or 0) > 7 else None
    )
    assert (choice.settings.num_workers, choice.settings.prefetch_factor) == (6, 2)


def test_each_form_has_its_own_limit() -> None:
    """Processes of which three fit, and threads that need no shared memory."""
    machine = Machine(0.01, demand=1400, form_speed={"processes": 1.0, "threads": 1.0}, **SLEEPS)
    choice = search(
        machine,
        own(2),
        fits=lambda s: "too large" if s.backend == "processes" and s.num_workers > 3 else None,
    )
    assert (choice.settings.backend, choice.settings.num_workers) == ("threads", 15)


@pytest.mark.parametrize("workers", [3, 4])
def test_what_real_steps_got_is_not_outbid_by_the_model(workers: int) -> None:
    """Handing over is the limit: no other number is said to feed the model, whatever the loader
    alone gives.
    """

    class Handing(Machine):
        def delivered(self, s: FeedSettings) -> float:
            return min(super().delivered(s), 800.0)

    machine = Handing(0.0025, 0.0001, demand=1000, cores=8.0)
    choice = search(machine, own(workers))
    assert rate(choice) <= 800.0


def test_threads_that_slow_the_step_are_not_taken_unseen() -> None:
    """Where the time ends before steps could be seen beside them."""
    machine = Machine(
        0.002,
        0.0001,
        demand=2500,
        form_speed={"processes": 1.0, "threads": 2.0},
        form_slows={"threads": 0.5},
    )
    assert search(machine, own(2), most=2, budget_s=2.0).settings.backend == "processes"
