"""What a sample costs, and how many workers would meet a demand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from harness.clock.stages import StageCost, StageTotals
from harness.report.evidence import WorkerCost, worker_cost


def supply(stages: Mapping[str, tuple[float, float]], full: bool = False) -> WorkerCost:
    """Of ten samples, whose stages took so many seconds of wall and of processor time in all."""
    costs = {name: StageCost(*seconds) for name, seconds in stages.items()}
    found = worker_cost(
        StageTotals(10, sum(cost.wall_s for cost in costs.values()), costs), full=full
    )
    assert found is not None
    return found


def test_on_full_cores_cpu_time_names_the_cause() -> None:
    """Reading from memory, and the other stages too, waited for a core."""
    stages = {
        "read": StageCost(6.02, 0.28),
        "decode": StageCost(3.15, 1.55),
        "resize": StageCost(3.25, 0.51),
        "collate": StageCost(0.61, 0.02),
    }
    found = worker_cost(StageTotals(10, 13.03, stages), full=True, cached=True)
    assert found is not None and (found.kind, found.waits) == ("decode", False)


def test_a_sample_costs_what_its_stages_do() -> None:
    """Seconds are per sample, shares are of the wall time, and stages of one kind add up."""
    found = supply(
        {
            "read": (1.0, 1.0),
            "crop": (2.0, 2.0),
            "resize": (4.0, 4.0),
            "collate": (0.8, 0.8),
            "share": (0.2, 0.2),
        }
    )
    assert (found.wall_s, found.cpu_s) == pytest.approx((0.8, 0.8))
    assert found.parts == pytest.approx(
        {"storage": 0.125, "augment": 0.75, "collate": 0.1, "transport": 0.025}
    )
    assert (found.kind, found.stage, found.waits) == ("augment", "resize", False)


@pytest.mark.parametrize(
    ("stages", "kind", "waits"),
    [
        pytest.param(
            {"read": (8.0, 0.1), "decode": (3.0, 3.0), "crop": (1.0, 1.0)},
            "storage",
            True,
            id="a slow disk",
        ),
        pytest.param(
            {"read": (8.0, 4.0), "decode": (6.0, 3.0), "crop": (2.0, 1.0)},
            "storage",
            False,
            id="crowded, not slow",
        ),
        pytest.param(
            {"decode": (8.0, 0.1), "crop": (1.0, 1.0)}, "decode", True, id="decoding elsewhere"
        ),
        pytest.param(
            {"sample": (8.0, 7.0), "collate": (0.1, 0.1)}, "decode", False, id="unsplit, working"
        ),
        pytest.param(
            {"sample": (8.0, 1.0), "collate": (0.1, 0.1)}, "storage", True, id="unsplit, waiting"
        ),
        pytest.param({"read": (8.0, 0.0)}, "storage", True, id="no processor time at all"),
    ],
)
def test_waiting_is_told_from_work_on_crowded_processors(
    stages: dict[str, tuple[float, float]], kind: str, waits: bool
) -> None:
    """All stages last longer than their processor time where processors are scarce; only one that
    waits does so alone.
    """
    found = supply(stages)
    assert (found.kind, found.waits) == (kind, waits)


@pytest.mark.parametrize(
    "full",
    [False, True],
    ids=["idle", "full processors"],
)
def test_a_lone_stage_waits_unless_the_processors_can_explain_it(
    full: bool,
) -> None:
    """With nothing to compare it with, a stage that lasts four times its processor time may just
    have been crowded out.
    """
    assert supply({"sample": (8.0, 2.0)}, full).waits is not full


def test_full_processors_hide_all_but_long_waits() -> None:
    """Where processors are full, only a stage that hardly ever has one is said to wait, whatever
    the others look like.
    """
    crowded = {"decode": (8.0, 1.0), "crop": (1.0, 1.0)}
    waiting = {"read": (8.0, 0.5), "crop": (1.0, 1.0)}
    assert (
        supply(crowded).waits,
        supply(crowded, True).waits,
        supply(waiting, True).waits,
    ) == (True, False, True)


def test_full_processors_have_no_room_beside_work() -> None:
    """Where processors are full, all of the work's time is taken for a wish to have one; waiting
    leaves them to others.
    """
    assert supply({"decode": (4.0, 4.0), "crop": (4.0, 4.0)}).wants_s == pytest.approx(0.8)
    crowded = {"decode": (8.0, 2.0), "crop": (8.0, 4.0)}
    assert supply(crowded).wants_s == pytest.approx(1.2)
    assert supply(crowded, True).wants_s == pytest.approx(1.6)
    waiting = {"read": (15.0, 0.1), "crop": (1.0, 0.9)}
    assert supply(waiting, True).wants_s == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(
    "totals",
    [
        pytest.param(None, id="no meter"),
        pytest.param(StageTotals(0, 0.0, {"read": StageCost(0.0, 0.0)}), id="nothing made"),
        pytest.param(StageTotals(5, 0.0, {}), id="no stages"),
    ],
)
def test_no_figures_give_no_supply(totals: StageTotals | None) -> None:
    """What is not known is absent."""
    assert worker_cost(totals, full=True) is None
