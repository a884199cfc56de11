"""The policy of tuner=auto on made-up machines: what it asks for, and what it chooses."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from machines import Machine, own, search

from harness.tuning.figures import Trial
from harness.tuning.search import Ask


def tried(machine: Machine, kind: str) -> list[int]:
    return [ask.settings.num_workers for ask in machine.asked if ask.kind == kind]


SLEEPS = {"cores": 8.0, "cpu_s": 0.0001}
NOISE = pytest.mark.parametrize("noise", [0.0, 0.02], ids=["exact", "noisy"])


@NOISE
@pytest.mark.parametrize(
    ("machine", "before", "expected"),
    [
        pytest.param(Machine(0.0021, demand=1500, **SLEEPS), 7, {4}, id="2 ms asleep, demand met by 4"),
        pytest.param(Machine(0.0102, demand=640, **SLEEPS), 7, {7}, id="10 ms asleep, as the user has it"),
        pytest.param(Machine(0.0502, demand=200, **SLEEPS), 7, {11}, id="50 ms asleep, more workers than cores"),
        pytest.param(Machine(0.002, 0.0019, demand=700), 1, {2}, id="two cores meet demand"),
        pytest.param(Machine(0.002, 0.0019, demand=5000), 1, {2, 3}, id="two cores do not"),
        pytest.param(Machine(0.002, 0.0019, demand=700), 0, {2}, id="none at first"),
        pytest.param(Machine(0.002, 0.0002, demand=1000, ceiling=700), 1, {2}, id="storage gives no more"),
        pytest.param(Machine(0.002, 0.0019, demand=200), 8, {1}, id="far too many at first"),
        pytest.param(Machine(0.002, 0.0019, demand=5), 0, {0}, id="slow step, none at first"),
        pytest.param(Machine(0.0002, 0.0002, demand=1600, step_cpu_s=2 / 1600), 1, {1}, id="the step fills the cores"),
    ],
)
def test_the_fewest_workers_that_deliver_are_chosen(machine: Machine, before: int, expected: set[int], noise: float) -> None:
    """Where demand can be met, no more workers than meet it; where not, no more than give what can be had."""
    for seed in range(5 if noise else 1):
        machine = dataclasses.replace(machine, noise=noise, seed=seed, asked=[])
        chosen = search(machine, own(before)).settings
        near = {n + more for n in expected for more in (0, 1)} if noise else expected
        assert chosen.num_workers in near
        assert machine.delivered(chosen) >= 0.97 * machine.delivered(own(before))


@pytest.mark.parametrize("before", [0, 1, 2, 4, 7, 8])
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_never_slower_than_the_users_setting(before: int, seed: int) -> None:
    """On made-up machines of all kinds, the choice delivers what the user's setting does, within the tolerance."""
    rng = random.Random(seed)
    wall_s = 10 ** rng.uniform(-4, -1.5)
    machine = Machine(
        wall_s,
        wall_s * rng.choice([0.02, 0.5, 0.99]),
        demand=10 ** rng.uniform(1.5, 4),
        cores=rng.choice([1.0, 2.0, 8.0, 64.0]),
        ceiling=rng.choice([math.inf, 300.0]),
        noise=0.01,
        seed=seed,
    )
    choice = search(machine, own(before))
    assert machine.delivered(choice.settings) >= 0.96 * machine.delivered(own(before))
    assert sum(1.5 for _ in machine.asked) < 40


def test_where_loading_keeps_up_the_search_ends_at_once() -> None:
    """One probe and one look at real steps; the model is the limit."""
    machine = Machine(0.002, 0.0019, demand=200)
    choice = search(machine, own(1))
    assert [(ask.kind, ask.settings.num_workers) for ask in machine.asked] == [("supply", 1), ("steps", 1)]
    assert (choice.settings, choice.bound) == (own(1), "model")


def test_a_slower_step_needs_fewer_workers() -> None:
    """The choice follows demand."""
    chosen = [search(Machine(0.01, demand=demand, **SLEEPS), own(7)).settings.num_workers for demand in (1200, 600, 150)]
    assert chosen == sorted(chosen, reverse=True) and len(set(chosen)) == 3


@pytest.mark.parametrize(
    ("machine", "bound"),
    [
        (Machine(0.002, 0.0019, demand=700), "model"),
        (Machine(0.002, 0.0019, demand=5000), "processor"),
        (Machine(0.002, 0.0002, demand=5000, ceiling=700), "storage"),
        (Machine(0.002, 0.0019, demand=5000, cores=64.0, handing=1500), "transport"),
        (Machine(0.05, 0.0001, demand=5000, cores=8.0), "workers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_limit_has_a_name(machine: Machine, bound: str) -> None:
    """Model, processor, storage, transport, or that no more workers may be tried."""
    assert search(machine, own(1)).bound == bound


def test_memory_may_be_the_limit() -> None:
    """What does not fit is not asked for, and the bound says so."""
    machine = Machine(0.05, 0.0001, demand=5000, cores=8.0)
    choice = search(machine, own(1), fits=lambda s: "too large" if s.num_workers > 3 else None)
    assert max(ask.settings.num_workers for ask in machine.asked) == 3
    assert (choice.settings.num_workers, choice.bound) == (3, "memory")


def test_a_setting_that_fails_is_not_chosen_and_no_larger_one_is_tried() -> None:
    """From four workers on they die: three are the most."""
    machine = Machine(0.01, demand=2000, **SLEEPS, broken=lambda s: s.num_workers > 3)
    choice = search(machine, own(1))
    assert choice.settings.num_workers <= 3
    assert machine.delivered(choice.settings) >= machine.delivered(own(1))


def test_the_fastest_form_is_chosen_without_knowing_its_name() -> None:
    """A form that needs half the time serves the demand that the other cannot."""
    machine = Machine(0.002, 0.0019, demand=1800, form_speed={"processes": 1.0, "other": 2.5})
    assert search(machine, own(1)).settings.backend == "other"


@dataclasses.dataclass
class BusyAtFirst(Machine):
    """Other programs hold up the samples of the first ``busy`` probes, a hundredth of them by far."""

    busy: int = 1

    def answer(self, ask: Ask) -> Trial:
        self.variation = 7.0 if len(self.asked) < self.busy else 0.1
        return super().answer(ask)


def test_a_machine_that_was_busy_once_does_not_make_samples_uneven() -> None:
    """The samples' own slow ones would have come again in the next probe: the search goes its usual way."""
    even = Machine(0.01, demand=640, variation=0.1, **SLEEPS)
    busy, always = BusyAtFirst(0.01, demand=640, **SLEEPS), BusyAtFirst(0.01, demand=640, busy=99, **SLEEPS)
    wanted = search(even, own(1)).settings
    assert search(busy, own(1)).settings == wanted != search(always, own(1)).settings
    assert any(ask.kind == "steps" for ask in busy.asked) and all(ask.kind == "supply" for ask in always.asked)


def test_what_looks_best_is_probed_again_before_samples_are_called_uneven() -> None:
    """Though it was the first that was probed: one probe cannot tell the data's slow samples from the machine's."""
    machine = BusyAtFirst(0.001, demand=640, **SLEEPS)  # one worker does
    search(machine, own(1))
    assert [ask.settings.num_workers for ask in machine.asked[:2]] == [1, 1]


def test_uneven_samples_get_a_deeper_queue() -> None:
    """The same mean with a heavy tail needs more batches in flight; even samples keep torch's two."""
    even, uneven = (Machine(0.01, demand=640, variation=v, **SLEEPS) for v in (0.1, 7.0))
    depths = [search(machine, own(1)).settings.prefetch_factor for machine in (even, uneven)]
    assert depths[0] == 2 and (depths[1] or 0) > 2


def test_uneven_samples_may_need_very_many_workers() -> None:
    """Where nothing is enough, nearly as many as may be tried."""
    machine = Machine(0.05, 0.0001, demand=1e5, cores=64.0, variation=7.0)
    chosen = search(machine, own(3), most=200).settings
    assert 160 < chosen.num_workers <= 200


def test_short_batches_get_a_deeper_queue_where_all_processors_are_busy() -> None:
    """Two batches of a fifth of a second each outlast what holds a worker up; two of 6 ms do not, unless the step is slow."""
    short, long = (Machine(wall_s, wall_s, demand=10 / wall_s) for wall_s in (0.0002, 0.006))
    fed = Machine(0.0002, 0.0002, demand=1000)
    depths = [search(machine, own(1)).settings.prefetch_factor for machine in (short, long, fed)]
    assert (depths[0] or 0) > 2 and depths[1:] == [2, 2]


def test_a_small_budget_ends_the_search_and_says_so() -> None:
    """Little time: few questions, an answer all the same."""
    machine = Machine(0.0502, demand=2000, **SLEEPS)
    choice = search(machine, own(7), budget_s=1.0)
    assert len(machine.asked) < 4
    assert machine.delivered(choice.settings) >= machine.delivered(own(7))


def test_with_nothing_measured_the_users_setting_stays() -> None:
    """Everything after the first probe is refused."""
    machine = Machine(0.01, demand=2000, **SLEEPS)
    first = machine.answer(Ask(own(2), "supply"))
    machine.broken = lambda _: True
    machine.answer = lambda ask, real=machine.answer: first if len(machine.asked) == 0 else real(ask)  # type: ignore[method-assign]
    assert search(machine, own(2)).settings == own(2)
