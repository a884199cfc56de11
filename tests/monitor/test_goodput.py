"""The wall time of a run, by what it went to."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from model_time import Hand, known

from harness.clock.figures import Ledger, Window
from harness.monitor import goodput
from harness.monitor.goodput import GoodputTimer


def figures(**known: object) -> Window:
    """The figures of a run that did nothing, but for what is ``known``."""
    return dataclasses.replace(Ledger().window(), **known)


def test_busy_seconds_and_the_rest_make_up_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start, tuning, parts of the steps, first steps and pauses are named; the rest is other."""
    clock = Hand()
    monkeypatch.setattr(goodput, "time", SimpleNamespace(perf_counter=clock))
    course = GoodputTimer(90.0)
    course.mark("start")
    clock.now = 106.0
    course.mark("tuning")
    clock.now = 140.0
    shares = {"compute": 0.5, "starved": 0.3, "host": 0.2}
    run = figures(shares=shares, elapsed_s=20.0, first_step_s=3.0, pauses_s={"evaluate": 4.0})
    found = known(course.goodput(run))
    assert (found["busy_s"], found["wall_s"], found["fraction"]) == (10.0, 50.0, 0.2)
    spent = {part["name"]: part["s"] for part in found["rest"]}
    assert spent == pytest.approx(
        {
            "start": 10,
            "other": 7,
            "tuning": 6,
            "starved": 6,
            "host": 4,
            "evaluate": 4,
            "first_steps": 3,
        }
    )
    assert [*spent][:2] == ["start", "other"]
    assert sum(spent.values()) == pytest.approx(found["wall_s"] - found["busy_s"])


def test_there_is_none_where_the_device_time_is_not_known() -> None:
    """Without a share of computing nothing is claimed."""
    assert GoodputTimer(0.0).goodput(figures(shares={}, elapsed_s=5.0)) is None
