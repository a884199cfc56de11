"""The choice among forms of the feed, on made-up machines."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import product

import pytest
from machines import Machine, own, problem, search

from harness.feed.arrays import in_form
from harness.tuning.evidence import Evidence
from harness.tuning.figures import Trial
from harness.tuning.search import Ask, with_workers

MOST = 16
FORMS = {"processes": 1.0, "threads": 1.15}
DECODED = {**FORMS, "arrays": 100.0}
NOISE = pytest.mark.parametrize("noise", [0.0, 0.02], ids=["exact", "noisy"])


def test_receiving_counts_beside_making() -> None:
    """The most that processors allow is with both of them and the step, each of them once."""
    machine = Machine(0.004, 0.004, demand=1000, cores=3.0, step_cpu_s=0.001, receive_s=0.001)
    found = Evidence(problem(machine, own(8)))
    found.note(found.problem.calibration[0])
    assert found.roofline("processes") == pytest.approx(machine.cores / 0.006)
    assert machine.delivered(own(8)) == pytest.approx(found.roofline("processes"))


def best(machine: Machine, workers: int) -> float:
    """The most images/s that any setting of any form delivers."""
    tried = (with_workers(in_form(own(workers), form), n) for form, n in product(machine.form_speed, range(MOST + 1)))
    return max(map(machine.delivered, tried))


@NOISE
@pytest.mark.parametrize(
    ("machine", "before", "expected"),
    [
        pytest.param(Machine(267e-6, 267e-6, demand=16_000, form_speed=DECODED), 1, {"arrays"}, id="small arrays"),
        pytest.param(Machine(267e-6, 267e-6, demand=16_000, form_speed=DECODED), 0, {"arrays"}, id="small arrays, no workers"),
        pytest.param(
            Machine(0.0004, 0.0004, demand=1600, step_cpu_s=2 / 1600, form_speed=DECODED), 1, {"arrays"},
            id="small arrays beside a step on the same cores",
        ),
        pytest.param(Machine(0.0014, 0.0014, demand=2000, form_speed=FORMS), 1, {"threads"}, id="decoding fills two cores"),
        pytest.param(
            Machine(0.0014, 0.0014, demand=9000, cores=16.0, form_speed=FORMS, form_ceiling={"threads": 2500.0}), 7,
            {"processes"}, id="the interpreter lock binds",
        ),
        pytest.param(
            Machine(0.0014, 0.0014, demand=2500, cores=16.0, form_speed=FORMS, form_slows={"threads": 0.8}), 1,
            {"processes"}, id="threads slow the step",
        ),
        pytest.param(Machine(0.002, 0.0019, demand=200, form_speed=DECODED), 1, {"processes"}, id="nothing to gain"),
        pytest.param(
            Machine(0.007, 0.0001, demand=900, cores=8.0, variation=7.0, form_speed={**FORMS, "arrays": 1e3}), 3, {"arrays"},
            id="uneven samples, once read",
        ),
        pytest.param(
            Machine(0.007, 0.0001, demand=560, cores=8.0, variation=7.0, form_speed=FORMS), 3, {"processes", "threads"},
            id="uneven samples",
        ),
        pytest.param(
            Machine(0.007, 0.0001, demand=560, cores=8.0, variation=7.0, form_speed=FORMS, form_slows={"threads": 0.9}), 3,
            {"processes"}, id="uneven samples, and threads slow the step",
        ),
    ],
)  # fmt: skip
def test_the_form_that_delivers_is_chosen(machine: Machine, before: int, expected: set[str], noise: float) -> None:
    """By what was measured: nothing is known of a form by its name but that arrays have no workers."""
    machine = dataclasses.replace(machine, noise=noise, asked=[])
    chosen = search(machine, own(before)).settings
    assert chosen.backend in expected
    assert machine.delivered(chosen) >= 0.97 * best(machine, before)


@dataclasses.dataclass
class Lucky(Machine):
    """Probes of a form meet ``luck`` times as many slow samples as there are."""

    luck: dict[str, float] = dataclasses.field(default_factory=dict)

    def answer(self, ask: Ask) -> Trial:
        trial = super().answer(ask)
        if trial.cost is None:
            return trial
        (fast_s, many), (slow_s, few) = trial.cost.times
        times = (fast_s, many), (slow_s, int(few * self.luck.get(ask.settings.backend, 1.0)))
        return dataclasses.replace(trial, cost=dataclasses.replace(trial.cost, times=times))


def test_slow_samples_that_one_form_met_count_for_all() -> None:
    """How many there are is the data's: a form that met few of them by luck is not the better for it."""
    even = {"processes": 1.0, "threads": 1.0}
    reckoned: list[list[float]] = []
    kinds: list[dict[str, float]] = [{"processes": 0.25, "threads": 1.75}, {"processes": 1.75, "threads": 0.25}, {}]
    for luck in kinds:
        machine = Lucky(0.007, 0.0001, demand=560, cores=8.0, variation=7.0, form_speed=even, luck=luck)
        found = Evidence(problem(machine, own(3)))
        for form in even:
            found.note(machine.answer(Ask(in_form(own(3), form), "supply")))
        assert all(map(found.uneven, even))
        reckoned.append([found.on_paper(in_form(own(4), form)) for form in even])
    assert reckoned[0] == pytest.approx(reckoned[2], rel=0.03) and reckoned[1] == pytest.approx(reckoned[2], rel=0.03)


def test_threads_are_tried_beside_real_steps_before_uneven_samples_are_given_to_them() -> None:
    """Once, and not where another form is better on paper."""
    alike, slower = (
        Machine(0.007, 0.0001, demand=560, cores=8.0, variation=7.0, form_speed={"processes": 1.0, "threads": speed})
        for speed in (1.0, 0.5)
    )
    chosen = [search(machine, own(3)).settings.backend for machine in (alike, slower)]
    tried = [[ask.settings.backend for ask in machine.asked if ask.kind == "steps"] for machine in (alike, slower)]
    assert chosen == ["threads", "processes"] and tried == [["processes", "threads"], []]


@pytest.mark.parametrize(
    ("ranks", "demand", "budget_s"),
    [(2, 560, 30.0), (1, 40_000, 30.0), (1, 560, 7.2)],
    ids=["other ranks' slow samples count too", "steps would only wait", "no time left"],
)
def test_steps_that_tell_nothing_of_uneven_samples_are_not_run(ranks: int, demand: float, budget_s: float) -> None:
    """Then what threads may cost the steps stays unknown."""
    alike = {"processes": 1.0, "threads": 1.0}
    machine = Machine(0.007, 0.0001, demand=demand, cores=8.0, variation=7.0, form_speed=alike)
    search(machine, own(3), ranks=ranks, budget_s=budget_s)
    assert [(ask.settings.backend, ask.kind) for ask in machine.asked][-1] == ("threads", "supply")
    assert all(ask.kind == "supply" for ask in machine.asked)


def test_uneven_samples_of_one_form_are_uneven_for_the_others() -> None:
    """Also for threads whose own probe met none of the slow ones; what steps lose beside them is seen all the same."""
    machine = Lucky(0.007, 0.0001, demand=560, cores=8.0, variation=7.0, form_speed=FORMS, form_slows={"threads": 0.7},
                    luck={"threads": 0.0})  # fmt: skip
    assert search(machine, own(3)).settings.backend == "processes"
    assert [ask.settings.backend for ask in machine.asked if ask.kind == "steps"] == ["processes", "threads"]


def made_up(seed: int) -> Machine:
    """A machine of any kind with two or three forms."""
    rng = random.Random(seed)
    wall_s = 10 ** rng.uniform(-4, -1.5)
    forms = {"processes": 1.0, "threads": rng.choice([0.7, 1.0, 1.15, 1.5])}
    if rng.random() < 0.3:
        forms["arrays"] = wall_s / rng.choice([2e-6, 5e-6])
    return Machine(
        wall_s,
        wall_s * rng.choice([0.02, 0.5, 0.99]),
        demand=10 ** rng.uniform(1.5, 4),
        cores=rng.choice([1.0, 2.0, 8.0, 64.0]),
        ceiling=rng.choice([math.inf, math.inf, 300.0]),
        form_speed=forms,
        form_ceiling={"threads": rng.choice([math.inf, 500.0, 2000.0])},
        form_slows={"threads": rng.choice([1.0, 1.0, 0.8])},
        noise=0.01,
        seed=seed,
    )


@pytest.mark.parametrize("before", [0, 1, 2, 7])
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_the_best_form_or_within_the_noise_of_it(seed: int, before: int) -> None:
    """And never slower than the user's setting."""
    machine = made_up(seed)
    choice = search(machine, own(before))
    assert machine.delivered(choice.settings) >= 0.96 * best(machine, before)
    assert machine.delivered(choice.settings) >= 0.97 * machine.delivered(own(before))


def seconds(machine: Machine) -> float:
    """What the search would have cost."""
    return sum({"supply": 1.3, "steps": 1.7}[ask.kind] for ask in machine.asked)


def test_more_forms_do_not_cost_much_more_time() -> None:
    """The median search is over in a few seconds, and none goes far beyond the budget."""
    costs = []
    for seed in range(20):
        machine = made_up(seed)
        search(machine, own(2))
        costs.append(seconds(machine))
    assert sorted(costs)[10] < 12.0
    assert max(costs) < 36.0


def test_arrays_are_measured_once_and_never_with_workers() -> None:
    """They come first, in this process, and where they feed the model no other form is looked at."""
    machine = Machine(267e-6, 267e-6, demand=5000, form_speed=DECODED)
    choice = search(machine, own(1))
    arrays = [ask for ask in machine.asked if ask.settings.backend == "arrays"]
    assert choice.settings.backend == "arrays"
    assert [ask.kind for ask in arrays].count("supply") == 1
    assert {ask.settings.num_workers for ask in arrays} == {0}
    assert all(ask.settings.backend != "threads" for ask in machine.asked)


def test_a_form_that_does_not_fit_is_not_started() -> None:
    """Images larger than the memory: refused before anything runs, and the other forms are looked at."""
    machine = Machine(267e-6, 267e-6, demand=16_000, form_speed=DECODED)
    choice = search(machine, own(1), fits=lambda s: "too large" if s.backend == "arrays" else None)
    assert choice.settings.backend == "threads"
    assert all(ask.settings.backend != "arrays" for ask in machine.asked)


def test_a_form_that_fails_is_not_chosen() -> None:
    """Threads that die leave the choice among the others."""
    machine = Machine(0.0014, 0.0014, demand=2000, form_speed=FORMS, broken=lambda s: s.backend == "threads")
    choice = search(machine, own(1))
    assert choice.settings.backend == "processes"
    assert machine.delivered(choice.settings) >= 0.97 * 2 / 0.0014


@pytest.mark.parametrize("form", ["threads", "arrays"])
def test_a_form_that_the_user_named_is_the_only_one(form: str) -> None:
    """The search stays in it; of arrays there is nothing to choose."""
    machine = Machine(0.002, 0.0019, demand=700, form_speed={form: DECODED[form]})
    choice = search(machine, in_form(own(1), form))
    assert {ask.settings.backend for ask in machine.asked} == {choice.settings.backend} == {form}


def test_arrays_that_the_user_named_are_probed_again() -> None:
    """The first probe of a run decodes what it gives, as no later pass does: the faster one counts."""
    machine, asked = Machine(0.002, 0.002, demand=2000, form_speed={"arrays": 1.0}), list[float]()
    real = machine.answer

    def answer(ask: Ask) -> Trial:
        asked.append(machine.form_speed["arrays"])
        trial = real(ask)
        machine.form_speed["arrays"] = 1000.0
        return trial

    machine.answer = answer  # type: ignore[method-assign]
    choice = search(machine, in_form(own(0), "arrays"))
    assert asked[:2] == [1.0, 1000.0]
    assert choice.after is not None and choice.after.images_per_s == pytest.approx(2000, rel=0.01)


def test_the_reason_says_who_makes_samples() -> None:
    """A worker, or without any the trainer."""
    arrays = search(Machine(267e-6, 267e-6, demand=16_000, form_speed=DECODED), own(1))
    threads = search(Machine(0.0014, 0.0014, demand=2000, form_speed=FORMS), own(1))
    assert "a sample takes the trainer 0.0027 ms" in arrays.reason and "a feed of arrays needs no workers" in arrays.reason
    assert "a sample takes a worker" in threads.reason
