"""The model of throughput: its three bounds, and what busy workers take from each other."""

from __future__ import annotations

import math

import pytest

from harness.tuning.measures import Model, SampleCost, undisturbed


def model(
    demand: float = 1000.0,
    cores: float = 4.0,
    cpu_s: float = 0.004,
    receive_s: float = 0.0,
    step_cpu_s: float = 0.0,
    alone_s: float = 0.001,
) -> Model:
    cost = SampleCost(0.004, cpu_s, 0.0, receive_s)
    return Model(demand=demand, cost=cost, cores=cores, step_cpu_s=step_cpu_s, alone_s=alone_s)


@pytest.mark.parametrize(
    ("found", "workers", "rate"),
    [
        pytest.param(model(), 2, 500.0, id="workers over wall"),
        pytest.param(model(), 9, 1000.0, id="the step"),
        pytest.param(model(cores=2.0), 9, 500.0, id="processors"),
        pytest.param(
            model(cores=3.0, step_cpu_s=0.001, receive_s=0.001),
            9,
            500.0,
            id="making, receiving and step together",
        ),
        pytest.param(model(), 0, 200.0, id="no workers: one after the other"),
        pytest.param(model(alone_s=0.0), 0, 250.0, id="no workers: beside the step"),
        pytest.param(model(cpu_s=0.0), 9, 1000.0, id="samples that only wait"),
    ],
)
def test_the_smallest_bound_holds(found: Model, workers: int, rate: float) -> None:
    """Workers over wall time, processors over processor time, and demand."""
    assert found.delivered(workers) == pytest.approx(rate)


def test_workers_for_a_rate() -> None:
    """The fewest whose samples suffice, by a twentieth; never none."""
    assert [model().workers_for(rate) for rate in (1.0, 250.0, 262.0, 263.0, 1000.0)] == [
        1,
        1,
        1,
        2,
        4,
    ]


def test_crowding_is_loading_and_step_beside_each_other() -> None:
    """From four fifths of the processors on."""
    assert not model(demand=700.0).is_crowded
    assert model(demand=900.0).is_crowded
    assert math.isinf(model(cpu_s=0.0).roofline)


@pytest.mark.parametrize(
    ("wall_s", "workers", "expected_s"),
    [(0.004, 2, 0.004), (0.016, 8, 0.004), (0.008, 8, 0.004), (0.1, 8, 0.1)],
    ids=["as many as cores", "four times", "never less than the processor's", "asleep"],
)
def test_what_workers_took_from_each_other_is_left_out(
    wall_s: float, workers: int, expected_s: float
) -> None:
    """Where there are more busy ones than two processors, they waited for these."""
    assert undisturbed(SampleCost(wall_s, 0.004, 0.0), workers, 2.0).wall_s == pytest.approx(
        expected_s
    )
