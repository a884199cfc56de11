"""Whether training waits as tuning said, and what the user is told where it does not."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import reports

from harness.clock.clock import StepClock
from harness.runtime.folder import LOGGER
from harness.tuning.measures import TuningReport
from harness.tuning.tuner import STEPS, Tuned

PREDICTED = 0.05


class Loop:
    """Training steps on a clock of their own."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = StepClock("cpu", now=lambda: self.seconds)

    def steps(self, count: int, wait_s: float, compute_s: float) -> None:
        for _ in range(count):
            with self.clock.waiting():
                self.seconds += wait_s
            with self.clock.computing():
                self.seconds += compute_s
            self.clock.step(8)


def predicted(step_ms: float = 20.0, wait_fraction: float | None = PREDICTED) -> TuningReport:
    """A report of a step that takes ``step_ms`` for its batch and waits for ``wait_fraction`` of
    the time.
    """
    report = reports.report()
    demand = report.settings.batch_size / step_ms * 1e3
    after = dataclasses.replace(
        report.after, wait_fraction=wait_fraction, rate=reports.rate(demand * 0.95)
    )
    return dataclasses.replace(report, demand=reports.rate(demand), after=after)


def follow(loop: Loop, report: TuningReport) -> list[str]:
    missed: list[str] = []
    checks = Tuned(report, lambda: missed.append("missed"))
    for _ in range(3):
        checks.check(loop.clock)
    return missed


@pytest.mark.parametrize(
    ("steps", "wait_s", "says"),
    [(STEPS + 2, 0.010, True), (STEPS + 2, 0.001, False), (STEPS - 10, 0.010, False)],
    ids=["far over the prediction", "as predicted", "too early to tell"],
)
def test_a_stall_over_the_prediction_is_told_once(
    steps: int, wait_s: float, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """After a hundred steps, if the stall is more than five points over what tuning said."""
    loop = Loop()
    loop.steps(steps, wait_s, 0.020)
    with caplog.at_level(logging.WARNING, LOGGER):
        missed = follow(loop, predicted())
    assert (len(caplog.records), missed) == ((1, ["missed"]) if says else (0, []))


@pytest.mark.parametrize(
    ("compute_s", "cause"),
    [(0.010, "A step takes 10.0 ms, not 20.0"), (0.020, "Training reaches")],
    ids=["faster step", "slower loader"],
)
def test_what_changed_is_named(
    compute_s: float, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that became faster, or else a loader that became slower."""
    loop = Loop()
    loop.steps(STEPS + 2, 0.015, compute_s)
    with caplog.at_level(logging.WARNING, LOGGER):
        follow(loop, predicted())
    assert cause in caplog.text and "Tuning predicted 5%" in caplog.text


def test_without_a_prediction_nothing_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    """The tutorial's grid predicts no stall."""
    loop = Loop()
    loop.steps(STEPS + 2, 1.0, 0.001)
    assert follow(loop, predicted(wait_fraction=None)) == [] and not caplog.records
