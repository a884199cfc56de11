"""The benchmark of the tuner: how it measures and judges, that it resumes, and what its workloads
do.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from samples import Noise

from harness.data.storage import ArraySource
from scripts import bench_tuner, tuner_page, tuner_strategies
from scripts.bench_tuner import Results
from scripts.tuner_score import Found, Line, Ratio, Setting, choosing, steady
from scripts.tuner_strategies import PacedTrainee, loadtune_choice
from scripts.tuner_workloads import WORKLOADS, RateLimitedSource, Sleeper, Workload

W = "jpeg_64"


def setting(text: str) -> Setting:
    return Setting.parse(text)


def rate(text: str, phase: str, number: int, value: float, *, twin: bool = False) -> Line:
    return {
        "kind": "rate",
        "workload": W,
        "phase": phase,
        "round": number,
        "setting": text,
        "twin": twin,
        "images_per_s": value,
    }


def choice(strategy: str, text: str | None, seconds: float = 1.0, repeat: int = 0) -> Line:
    return {
        "kind": "choice",
        "workload": W,
        "strategy": strategy,
        "repeat": repeat,
        "seconds": seconds,
        "setting": text,
        "note": "",
    }


LINES = [
    {"kind": "demand", "workload": W, "images_per_s": 200.0},
    choice("own", "1x2", 0.0),
    choice("auto", "2x2", 4.0),
    choice("auto", "3x2", 6.0, repeat=1),
    choice("grid", "4x2", 50.0),
    choice("loadtune", None, 9.0),
    *(
        rate(s, "choose", r, v)
        for r in (0, 1)
        for s, v in (("1x2", 100), ("2x2", 197), ("3x2", 199), ("4x2", 200))
    ),
    rate("0", "choose", 0, 50),
    *(
        rate(s, "score", r, v)
        for r in (0, 1)
        for s, v in (("1x2", 100), ("2x2", 190), ("3x2", 200), ("4x2", 200 + 0 * r))
    ),
    rate("4x2", "score", 0, 202, twin=True),
    rate("4x2", "score", 1, 198, twin=True),
]


@pytest.fixture
def found() -> Found:
    return Found.collect(LINES)[W]


@pytest.mark.parametrize("text", ["0", "3x2", "threads 16x4"])
def test_a_setting_reads_what_it_writes(text: str) -> None:
    """The text of a setting, which the results hold, gives the setting back."""
    assert str(setting(text)) == text


class FakeClock:
    """Steps that take the seconds given, over and over."""

    def __init__(self, *durations: float) -> None:
        self.durations = durations
        self.now = 0.0

    def steps(self) -> Iterator[int]:
        while True:
            for seconds in self.durations:
                self.now += seconds
                yield 10


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.3, 4.0])
def test_bursts_do_not_bias_the_rate(seconds: float) -> None:
    """Batches that come four at a time, one from each worker, give the true rate whatever the
    window.
    """
    clock = FakeClock(0.97, 0.01, 0.01, 0.01)
    images, took = steady(clock.steps(), setting("4x2"), seconds, lambda: clock.now)
    assert images / took == pytest.approx(40)
    assert took >= seconds


def test_the_primed_queue_is_left_out() -> None:
    """What the workers had in hand when the consumer began does not count."""
    slow = FakeClock(1.0)

    def steps() -> Iterator[int]:
        # at once
        yield from (10 for _ in range(5))
        yield from slow.steps()

    assert steady(steps(), setting("2x2"), 2.0, lambda: slow.now) == (20, 2.0)


def test_slow_workers_are_not_awaited_for_a_queue_they_cannot_fill() -> None:
    """The window opens after the time of one window, though more batches may be in flight by the
    settings.
    """
    clock = FakeClock(1.0)
    steady(clock.steps(), setting("2x16"), 2.0, lambda: clock.now)
    assert clock.now == 5.0


def test_later_choosing_rounds_keep_what_may_be_best() -> None:
    """At first all settings are measured, then those near the best with few workers or the highest
    rates, and the chosen.
    """
    every = [Setting.of(n, 2) for n in range(20)]
    assert choosing(every[1:], [every[0]], {}) == every
    earlier = {s: [min(100.0 + s.num_workers / 100, 20.0 * s.num_workers)] for s in every}
    assert [s.num_workers for s in choosing(every, [every[1]], earlier)] == [
        1,
        5,
        6,
        7,
        8,
        9,
        10,
        16,
        17,
        18,
        19,
    ]


def test_the_oracle_picks_from_the_choosing_rounds_alone(found: Found) -> None:
    """Its pick is the best mean there; the fewest workers are those within 2 % of it; thinned
    settings are out.
    """
    assert found.oracle() == (setting("4x2"), 2)


def test_a_repeated_strategy_is_scored_by_the_mean_of_its_choices(found: Found) -> None:
    """Delivered over the oracle's, of two choices with 190 and 200 images/s against 200; cost and
    workers likewise.
    """
    ratio = found.ratio("auto")
    assert ratio is not None and (ratio.value, ratio.low, ratio.high) == pytest.approx(
        (0.975, 0.975, 0.975)
    )
    assert (found.seconds("auto"), found.spare("auto"), found.ratio("loadtune")) == (5.0, 1, None)


def test_the_control_is_the_pick_over_itself(found: Found) -> None:
    """A/A pairs the second measurement with the first in each round."""
    control = found.control()
    assert (
        control is not None
        and control.low == pytest.approx(0.99)
        and control.high == pytest.approx(1.01)
    )


def test_the_interval_holds_the_ratio_and_is_the_same_in_every_run() -> None:
    """The bootstrap is seeded."""
    over = [1.0, 1.2, 0.9, 1.1]
    under = [1.0, 1.1, 1.0, 1.0]
    ratio = Ratio.of(over, under)
    assert ratio == Ratio.of(over, under) and ratio.low < ratio.value < ratio.high


def test_the_page_says_what_was_found() -> None:
    """Workloads, strategies, rivals and every choice stand in tables, and so does what was not
    measured.
    """
    page = tuner_page.show(LINES)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    assert ["auto", "1", "0.975", "0.975", "0", "5.0", "5.0", "1 of 1"] in rows
    assert ["grid", "0", "0", "1", "10.0", "10.0", "10.0"] in rows
    assert [W, "loadtune", "none", "-", "-", "9.0", "-"] in rows
    assert "Not measured: jpeg_224, " in page


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(
            "[loadtune] best overall: workers=4, prefetch=8, persistent - 2.1x",
            "4x8",
            id="prefetch",
        ),
        pytest.param(
            "[loadtune] best overall: workers=6, persistent, threads=1 - 2x", "4x2", id="capped"
        ),
        pytest.param("[loadtune] brain proposed no trials", "0", id="baseline"),
    ],
)
def test_loadtunes_last_line_is_its_choice(said: str, expected: str) -> None:
    """Without a better one its baseline stays."""
    assert loadtune_choice(said, most=4) == setting(expected)


def test_a_line_cut_off_is_measured_again(tmp_path: Path) -> None:
    """A results file that an interrupt left half-written is read up to the last whole line and goes
    on from there.
    """
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "demand", "workload": "a"}\n{"kind": "choi')
    results = Results(path)
    results.add(kind="choice")
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == [
        "demand",
        "choice",
    ]
    assert results.has(kind="demand", workload="a") and not results.has(kind="demand", workload="b")


def test_all_readers_share_the_throttled_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of the source, as in two workers, wait for each other: 2 x 12 bytes at 24 bytes/s
    take a second.
    """
    waited: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(time, "sleep", waited.append)
    arrays = ArraySource(np.zeros((2, 2, 2, 3), np.uint8), np.zeros(2), "a", "tiny")
    source = RateLimitedSource(arrays, 24.0, tmp_path / "clock")
    for one in (source, pickle.loads(pickle.dumps(source))):
        one.read(0)
    assert waited == pytest.approx([0.5, 1.0])


def test_every_hundredth_sample_is_in_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample in a hundred waits long."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    sleeper = Sleeper(2, 200, 0.002, 0.5)
    out = np.empty((3, 2, 2), np.uint8)
    for index in range(200):
        sleeper.fill(0, index, out)
    assert (waited.count(0.5), waited.count(0.002)) == (2, 198)


def test_there_are_enough_workloads() -> None:
    """At least twelve, each with a demand of its own but the real step."""
    assert len(WORKLOADS) >= 12
    assert [name for name, workload in WORKLOADS.items() if workload.demand is None] == ["cpu_step"]


def test_a_paced_step_takes_its_time() -> None:
    """The trainee's steps on one batch last what they are set to, and cost no processor."""
    from harness.feed.processes import _Batches

    batch = _Batches(Noise(8), None, None).__getitems__((0, np.arange(4)))
    run = PacedTrainee(0.005).demand(batch, limit_s=0.0)
    assert run.images == (4, 4) and min(run.seconds) >= 0.005


@pytest.mark.parametrize("arrays", [["arrays"], []], ids=["arrays too", "no arrays"])
def test_the_oracle_gives_each_form_the_workers_that_it_can_have(arrays: list[str]) -> None:
    """Arrays have none; they are looked at where they can serve the data set."""
    rig = SimpleNamespace(
        most=1, feeds=lambda: SimpleNamespace(forms=("processes", "threads", *arrays))
    )
    found = {str(setting) for setting in tuner_strategies.candidates(rig)}
    assert found == {
        "0",
        "1x2",
        "1x4",
        "threads 1x2",
        "threads 1x4",
        *(f"{form} 0" for form in arrays),
    }


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept_globals: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A whole benchmark of one tiny workload: all parts are measured once, a second run measures
    nothing again.
    """
    tiny = Workload("tiny", "noise", lambda folder: Noise(64), 4, 0.0001, cores=1)
    for module in (bench_tuner, tuner_page):
        monkeypatch.setattr(module, "WORKLOADS", {"tiny": tiny})
    monkeypatch.setattr(tuner_strategies.Rig, "demand", lambda rig: 40_000.0)
    monkeypatch.setattr(tuner_strategies, "candidates", lambda rig: [setting("0"), setting("1x2")])
    results = tmp_path / "results.jsonl"
    arguments = [
        "--only",
        "tiny",
        "--strategies",
        "own,lightning",
        "--results",
        str(results),
        "--folder",
        str(tmp_path),
        "--choosing-rounds",
        "1",
        "--rounds",
        "1",
        "--seconds",
        "0.01",
    ]
    assert bench_tuner.main([*arguments, "--minutes", "0"]) == 0
    assert bench_tuner.main(arguments) == 0
    first = [json.loads(line) for line in results.read_text().splitlines()]
    assert bench_tuner.main(arguments) == 0
    again = [json.loads(line) for line in results.read_text().splitlines()]
    kinds = [line["kind"] for line in first if line["kind"] != "machine"]
    assert kinds == ["demand", "choice", "choice", *["rate"] * 5]
    assert [line["kind"] for line in again[len(first) :]] == ["machine"]
    assert "| tiny     | own       | 1x2    |" in capsys.readouterr().out


def test_without_leave_to_mount_a_workload_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is printed, and nothing is run."""
    refused = subprocess.CompletedProcess([], 1, "", "unshare failed: Operation not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *command, **how: refused)
    assert not bench_tuner.run_apart(WORKLOADS["small_shm"], [])
    assert "small_shm skipped: unshare failed: Operation not permitted" in capsys.readouterr().err
