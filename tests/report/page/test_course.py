"""As many points as a chart can show, and no spike lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import SPIKES, long_run, window

from harness.report.page.course import TAGS, Windows, course, declared, latest, read_windows, spikes


def windows_of(longest_ms: list[float], usual_ms: float = 10.0) -> Windows:
    """One window of 10 steps for each longest step."""
    if not longest_ms:
        return Windows()
    lines = [
        window(10 * step, {"compute": usual_ms}, **{"time/step_ms/max": ms})
        for step, ms in enumerate(longest_ms, 1)
    ]
    columns = {name: [line.get(name) for line in lines] for name in ("step", "epoch", *TAGS)}
    return Windows(columns, lines[-1])


def test_a_long_run_keeps_every_spike(tmp_path: Path) -> None:
    """All four steps that stand out are there, the longest first, with their cause."""
    found = course(read_windows(long_run(tmp_path) / "metrics.jsonl"), 400)
    assert found is not None
    told = [(spike["step"], spike["ms"], spike["cause"]) for spike in found["spikes"]]
    assert told == sorted(
        ((step, ms, "starved") for step, ms in SPIKES.items()), key=lambda spike: -spike[1]
    )
    assert (found["windows"], len(found["steps"]), found["spike_count"]) == (2000, 400, 4)
    column = found["columns"]["time/step_ms/max"]
    highest = column.get("high", column["mean"])
    assert [highest[spike["at"]] for spike in found["spikes"]] == [
        spike["ms"] for spike in found["spikes"]
    ]


def test_each_group_marks_its_longest_spike() -> None:
    """All windows that stand out are counted; of equal ones the earliest is told."""
    longest_ms = [10.0 if index % 4 else 90.0 + (index == 80) for index in range(400)]
    found = course(windows_of(longest_ms), 50)
    assert found is not None and (found["spike_count"], len(found["spikes"])) == (100, 50)
    marked = [(spike["ms"], spike["at"], spike["step"]) for spike in found["spikes"]]
    assert marked == [
        (91.0, 10, 810),
        *((90.0, group, 80 * group + 10) for group in range(50) if group != 10),
    ]


@pytest.mark.parametrize("buckets", [1, 3, 7, 40])
def test_groups_keep_lowest_and_highest(buckets: int) -> None:
    """Whatever the number of groups, all extremes stay, and steps end at the last."""
    windows = windows_of([float(10 + index % 13) for index in range(40)])
    found = course(windows, buckets)
    assert found is not None and len(found["steps"]) == buckets and found["steps"][-1] == 400
    column = found["columns"]["time/step_ms/max"]
    highest = column.get("high", column["mean"])
    lowest = column.get("low", column["mean"])
    assert (max(highest), min(lowest)) == (22, 10)


@pytest.mark.parametrize("windows", [399, 400, 401, 700, 1601])
def test_a_chart_has_all_points_that_fit(windows: int) -> None:
    """One window beyond does not halve them."""
    found = course(windows_of([12.0] * windows), 400)
    assert found is not None and len(found["steps"]) == min(windows, 400)


def test_every_line_of_a_chart_is_read() -> None:
    """What the page draws is among the tags that are read for it."""
    charts = {
        chart["title"]: [line["tag"] for line in chart["series"]] for chart in declared()["charts"]
    }
    assert {tag for tags in charts.values() for tag in tags} <= set(TAGS)
    assert charts["CPU cores in use"] == ["host/machine_cpu_cores", "host/own_cpu_cores"]


def test_few_windows_are_told_one_by_one() -> None:
    """Each is a group of its own."""
    found = course(windows_of([12.0, 13.0]), 400)
    assert found is not None
    column = found["columns"]["time/step_ms/max"]
    assert column == {"mean": [12.0, 13.0]}


def test_a_figure_that_no_window_has_is_no_column() -> None:
    """Absent is absent, not a column of nulls."""
    found = course(windows_of([12.0]), 400)
    assert found is not None and "gpu/utilization" not in found["columns"]


@pytest.mark.parametrize(
    ("longest_ms", "expected"),
    [
        pytest.param([12.0] * 9 + [90.0], [9], id="one-stands-out"),
        pytest.param([12.0, 90.0, 12.0, 300.0, 12.0], [3, 1], id="longest-first"),
        pytest.param([12.0, 90.0, 12.0, 90.0, 12.0], [1, 3], id="equal-ones-in-order"),
        pytest.param([80.0] * 10, [], id="every-window-has-one"),
        pytest.param([12.0] * 9 + [25.0], [], id="not-far-enough"),
        pytest.param([], [], id="no-window"),
    ],
)
def test_a_spike_stands_out_of_its_run(longest_ms: list[float], expected: list[int]) -> None:
    """A spike is far longer than a typical step and than the usual longest one."""
    assert spikes(windows_of(longest_ms)) == expected


def test_damaged_lines_are_counted_and_a_growing_one_is_not(tmp_path: Path) -> None:
    """What cannot be read is left out; a last line without its end is still being written."""
    good = json.dumps(window(10, {"compute": 5.0}))
    (tmp_path / "m.jsonl").write_text(
        f'{{"step": 5, "val/top1": 0.5}}\nno json\n[1]\n{good}\n{{"step": 20, "time/st'
    )
    windows = read_windows(tmp_path / "m.jsonl")
    assert (windows.columns["step"], windows.damaged) == ([10], 2)


def test_what_is_not_finite_is_absent(tmp_path: Path) -> None:
    """A null, a NaN and a text in place of a figure give no point."""
    lines = [
        window(10 * n, {"compute": 5.0}) | {"gpu/utilization": value}
        for n, value in enumerate((None, float("nan"), "x", 0.5), 1)
    ]
    (tmp_path / "m.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_windows(tmp_path / "m.jsonl").columns["gpu/utilization"] == [None, None, None, 0.5]


def test_the_last_window_speaks_for_a_run_without_report() -> None:
    """Its parts become shares that sum to 1; without any window there is nothing to tell."""
    told = latest(windows_of([12.0, 13.0]))
    assert (told["steps"], told["step_ms"]["max"], told["shares"]) == (20, 13.0, {"compute": 1.0})
    assert latest(Windows()) == {}
