"""The picture of supply: what is where, and that nothing is too little or too much for it."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import numpy as np
import pytest
from PIL import Image
from reports import OPEN, rate, report, trial, workers

from harness.feed.interface import PROCESSES
from harness.tuning import chart
from harness.tuning.chart import Scale, choice_at, place, scale_of, supply_figure, ticks
from harness.tuning.figures import Rate
from harness.tuning.report import Side, TuningReport


def pixels(own: TuningReport) -> np.ndarray:
    """uint8 ``[height, width, 3]``."""
    png, width, height = supply_figure(own, PROCESSES)
    image = Image.open(io.BytesIO(png))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (width, height)) == ("PNG", "RGB", (640, 360))
    return np.asarray(image)


def shows(seen: np.ndarray, at: tuple[float, float], colour: tuple[int, int, int], radius: int = 1) -> bool:
    """Whether a pixel within ``radius`` of a place has about this colour."""
    x, y = round(at[0]), round(at[1])
    near = seen[max(0, y - radius) : y + radius + 1, max(0, x - radius) : x + radius + 1].astype(int)
    return bool((np.abs(near - colour).max(axis=-1) < 40).any())


def test_each_measurement_is_at_its_place() -> None:
    """Supply and delivered rates have their marks, refused settings a cross on the lower edge, demand its line."""
    own = report()
    seen, scale = pixels(own), scale_of(own)
    assert shows(seen, scale.at(3, 700.0), chart.SUPPLY)
    assert shows(seen, place(scale, 3, rate(620.0), steps=True), chart.STEPS)
    x, y = scale.at(8, 0)
    assert shows(seen, (x, y - 7), chart.REFUSED)
    assert shows(seen, (chart.LEFT + 3, scale.at(0, 640.0)[1]), chart.DEMAND)
    assert not shows(seen, scale.at(5, 400.0), chart.SUPPLY, 10)


def test_the_choice_is_ringed() -> None:
    """A ring goes round the delivered rate of the choice, and round no other."""
    own = report(trials=(trial(1, rate(240.0)), trial(3, rate(620.0), "steps")))
    seen, scale = pixels(own), scale_of(own)
    at = choice_at(scale, own)
    assert at == place(scale, 3, rate(620.0), steps=True)
    assert shows(seen, (at[0] + 7, at[1]), chart.INK)
    other = scale.at(1, 240.0)
    assert not shows(seen, (other[0] + 7, other[1]), chart.INK)


def test_a_form_has_its_own_marks() -> None:
    """The choice's line and ring are in the picture of its form alone."""
    own = report(trials=(trial(3, rate(620.0), "steps"),))
    png, _, _ = supply_figure(own, "threads")
    seen, scale = np.asarray(Image.open(io.BytesIO(png))), scale_of(own)
    at = choice_at(scale, own)
    assert at is not None and not shows(seen, at, chart.STEPS, 5) and not shows(seen, (at[0], chart.TOP + 40), chart.PALE, 3)
    assert shows(pixels(own), at, chart.STEPS, 5)


def test_without_steps_the_choice_is_its_supply() -> None:
    """The grid's choice is ringed where its only figure is."""
    own = report(trials=(trial(3, rate(620.0)),), demand=None)
    assert choice_at(scale_of(own), own) == scale_of(own).at(3, 620.0)


def test_a_choice_without_a_rate_keeps_its_line() -> None:
    """The dotted line at its num_workers is there all the same."""
    own = report(after=Side(workers(3), None, None, None), trials=())
    x, _ = scale_of(own).at(3, 0)
    assert choice_at(scale_of(own), own) is None
    assert shows(pixels(own), (x, chart.TOP + 40), chart.PALE, 3)


def test_intervals_are_bars() -> None:
    """A bar ends at both ends of the interval; an open one goes over the whole height."""
    own = report(trials=(trial(2, Rate(400.0, 200.0, 600.0)), trial(5, OPEN)), demand=None)
    seen, scale = pixels(own), scale_of(own)
    for inside in (210.0, 590.0):
        assert shows(seen, scale.at(2, inside), chart.SUPPLY)
    for outside in (180.0, 620.0):
        assert not shows(seen, scale.at(2, outside), chart.SUPPLY)
    x, _ = scale.at(5, 0)
    assert shows(seen, (x, chart.TOP + 2), chart.SUPPLY)


@pytest.mark.parametrize(
    ("demand", "line"),
    [pytest.param(1000.0, 1000.0, id="near"), pytest.param(12_000.0, math.inf, id="far")],
)
def test_a_far_demand_does_not_press_the_rates_together(demand: float, line: float) -> None:
    """It is drawn on the upper edge, and the fastest rate still has most of the height."""
    own = report(demand=rate(demand))
    scale = scale_of(own)
    assert shows(pixels(own), (chart.LEFT + 3, scale.at(0, line)[1]), chart.DEMAND)
    assert scale.max_rate < 3.4 * 700


def test_a_scale_keeps_inside_the_plot() -> None:
    """Zero is on the lower edge, what is too much on the upper one, and num_workers goes from left to right."""
    scale = Scale(64, 100.0)
    assert [scale.at(0, value)[1] for value in (0.0, 50.0, 100.0, math.inf)] == [
        chart.BOTTOM, (chart.TOP + chart.BOTTOM) / 2, chart.TOP, chart.TOP,
    ]  # fmt: skip
    across = [scale.at(n, 0)[0] for n in range(65)]
    assert chart.LEFT < across[0] < across[-1] < chart.RIGHT
    assert across == sorted(across)


@pytest.mark.parametrize(
    ("span", "most", "expected"),
    [
        (1.0, 1, [0, 1]),
        (8.0, 8, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (64.0, 16, [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60]),
        (770.0, 6, [0, 200, 400, 600]),
        (0.77, 6, [0, 0.2, 0.4, 0.6]),
        (82_500.0, 6, [0, 20_000, 40_000, 60_000, 80_000]),
    ],
)
def test_ticks_are_round(span: float, most: int, expected: list[float]) -> None:
    """Steps are 1, 2 or 5 times a power of ten, and not too many."""
    assert ticks(span, most) == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"trials": ()}, id="no trials"),
        pytest.param({"trials": (), "demand": None, "after": Side(workers(0), None, None, None)}, id="nothing at all"),
        pytest.param({"trials": (trial(0, OPEN),), "after": Side(workers(0), OPEN, None, None)}, id="one open interval"),
        pytest.param({"trials": (trial(0, rate(0.4)),), "demand": None}, id="slower than one image"),
        pytest.param({"trials": (trial(8, None, refused="full"),), "demand": OPEN}, id="all refused"),
        pytest.param({"trials": (trial(1, Rate(0.0, 0.0, math.inf)),)}, id="nothing came"),
        pytest.param({"trials": tuple(trial(n, rate(100.0 * n)) for n in range(65))}, id="64 workers"),
    ],
)
def test_anything_can_be_drawn(changes: dict[str, Any]) -> None:
    """Whatever was measured or not, there is a picture with axes and no mark outside the plot."""
    own = report(**changes)
    if not own.after.images_per_s:
        own = dataclasses.replace(own, before=own.after)
    seen = pixels(own)
    assert shows(seen, (chart.RIGHT - 1, chart.BOTTOM), chart.PALE)
    assert (seen[chart.TOP :, chart.RIGHT + 1 :] > 100).all()
