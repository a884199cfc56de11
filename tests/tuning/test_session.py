"""Tuning as a stage of a run: measured once, recalled after, without a trace in what is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import reports
import torch

from harness.config import Config
from harness.data import datasets
from harness.feed.base import FeedSettings
from harness.feed.feeds import Feeds
from harness.runtime.distributed import World
from harness.runtime.limits import Limits
from harness.training.state import make_state
from harness.training.step import Step
from harness.tuning import tuner
from harness.tuning.measures import TuningReport
from harness.tuning.training_steps import TrainingBenchmark
from harness.tuning.tuner import Change, Tuned, tuned

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
LIMITS = Limits(cores=2.0, memory_bytes=10**10, shm_bytes=10**9, open_files=10_000)
Composed = Callable[..., Config]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path))
    return tmp_path / "tuning"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A search that chooses three workers at once; grows by one whenever it runs."""
    ran: list[int] = []

    def search(*_: object) -> TuningReport:
        ran.append(len(ran))
        return reports.report(3, seconds=9.0)

    monkeypatch.setattr(tuner, "tune", search)
    return ran


def run(composed: Composed, *overrides: str, limits: Limits = LIMITS) -> Tuned:
    """The stage of a run on the digits."""
    config = composed("data=digits", "loader.autotune=true", *overrides)
    splits = datasets.load(config.data, config.augment, config.seed)
    state = make_state(config, len(splits.classes), ALONE, 10)
    trainee = TrainingBenchmark(Step(state))
    return tuned(Feeds(splits, config, ALONE), trainee, config, limits, ALONE)


def test_a_sweep_tunes_once(composed: Composed, searches: list[int]) -> None:
    """Eight jobs that differ in learning rate and seed and in the user's own loader settings: one
    search, one answer.
    """
    jobs = [
        run(composed, f"optim.lr={0.1 * i}", f"seed={i}", f"loader.num_workers={i % 3}")
        for i in range(1, 9)
    ]
    assert len(searches) == 1
    assert [job.report.reused for job in jobs] == [False] + [True] * 7
    assert {job.report.settings.num_workers for job in jobs} == {3}
    assert all(
        job.report.seconds < 9 and "tuner.fresh=true" in job.report.notes[0] for job in jobs[1:]
    )


def test_what_changes_the_costs_is_tuned_anew(composed: Composed, searches: list[int]) -> None:
    """The remembered answer is of another kind of run."""
    run(composed)
    run(composed, "loader.batch_size=32")
    assert len(searches) == 2


def test_what_other_programs_spoilt_is_not_remembered(
    composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run tunes again; the same search on a quiet machine is remembered."""
    found = [reports.report(3, others_cores=1.5), reports.report(3), reports.report(3)]
    monkeypatch.setattr(tuner, "tune", lambda *_: found.pop(0))
    assert [run(composed).report.reused for _ in range(3)] == [False, False, True]


def test_fresh_forgets(composed: Composed, searches: list[int]) -> None:
    """tuner.fresh=true tunes anew and remembers that."""
    run(composed)
    assert not run(composed, "tuner.fresh=true").report.reused
    assert run(composed).report.reused and len(searches) == 2


def test_what_does_not_fit_today_is_tuned_anew(composed: Composed, searches: list[int]) -> None:
    """Less shared memory than when it was found."""
    run(composed)
    assert not run(composed, limits=dataclasses.replace(LIMITS, shm_bytes=10)).report.reused
    assert len(searches) == 2


def test_the_timeout_is_the_users_own(composed: Composed, searches: list[int]) -> None:
    """What is never tuned comes from this run's settings."""
    run(composed)
    report = run(composed, "loader.timeout_s=7").report
    assert (report.settings.timeout_s, report.val.timeout_s) == (7.0, 7.0)


def test_an_answer_that_does_not_hold_is_forgotten(
    composed: Composed, searches: list[int], cache: Path
) -> None:
    """Once the first training steps have shown that."""
    job = run(composed)
    assert len(list(cache.glob("*.json"))) == 1 and job.forget is not None
    job.forget()
    assert not list(cache.glob("*.json"))


THREADED = ("loader.backend=threads", "loader.num_workers=3")


@pytest.mark.parametrize(
    ("overrides", "followed"),
    [
        (THREADED, [3, 3]),
        ((*THREADED, "loader.val.num_workers=3"), [3]),
        ((*THREADED, "tuner.live=true"), [3, 3]),
        ((*THREADED, "tuner.live=false"), []),
        ((*THREADED, "tuner=grid"), []),
        (("loader.backend=processes", "loader.num_workers=3"), []),
        (("loader.backend=threads", "loader.num_workers=0"), []),
    ],
)
def test_threads_follow_the_run(
    composed: Composed,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    followed: list[int],
) -> None:
    """Those of the training feed, and of the validation feed unless the user gave it a number;
    never processes.
    """
    monkeypatch.setattr(tuner, "tune", chosen_as_it_was)
    found = run(composed, *overrides)
    feeds = made(composed, *overrides)
    found.follow(feeds.train(found.report.settings), feeds.val(found.report.val), 5)
    assert (
        [feed.settings.num_workers for feed in found.live.feeds] if found.live else []
    ) == followed


def test_on_several_ranks_threads_stay(composed: Composed, searches: list[int]) -> None:
    """Ranks that wait for each other cannot judge their own tries."""

    class Ranks(World):
        def agreed(self, value: object) -> object:
            return value

    pair = Ranks(0, 2, 0, 2, torch.device("cpu"))
    config = composed("data=digits", "loader.autotune=true", *THREADED)
    feeds = made(composed, *THREADED)
    assert tuned(feeds, None, config, LIMITS, pair).most is None  # type: ignore[arg-type]
    assert tuned(feeds, None, config, LIMITS, ALONE).most == 8  # type: ignore[arg-type]


def test_the_report_tells_how_to_begin_with_the_last_number(
    composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try that is not judged yet does not count."""
    monkeypatch.setattr(tuner, "tune", chosen_as_it_was)
    found = run(composed, *THREADED)
    feeds = made(composed, *THREADED)
    found.follow(
        feeds.train(found.report.settings),
        feeds.val(found.report.val),
        5,
    )
    assert "settled" not in found.summary() and found.live is not None
    found.live.changes.append(Change(20, 8, 3, 400.0, "late files"))
    summary = found.summary()
    assert summary["changes"] == found.live.changes and "settled" not in summary
    for feed in found.live.feeds:
        feed.resize(8)
    settled = found.summary()["settled"]
    assert "loader.num_workers=8" in settled and "val" not in settled


def chosen_as_it_was(feeds: Feeds, trainee: object, own: FeedSettings, *_: object) -> TuningReport:
    """A search that chooses what there is."""
    report = reports.report(3)
    sides = {
        name: dataclasses.replace(getattr(report, name), settings=own)
        for name in ("before", "after")
    }
    return dataclasses.replace(report, val=feeds.val_settings(own), **sides)


def made(composed: Composed, *overrides: str) -> Feeds:
    """The feeds of a run on the digits."""
    config = composed("data=digits", "loader.autotune=true", *overrides)
    return Feeds(datasets.load(config.data, config.augment, config.seed), config, ALONE)


def test_the_validation_feed_is_this_runs(composed: Composed, searches: list[int]) -> None:
    """Its settings are derived anew, from what this run says."""
    run(composed)
    val = run(composed, "loader.val.batch_size=7", "loader.val.num_workers=1").report.val
    assert (val.batch_size, val.num_workers) == (7, 1)


def test_what_was_before_is_said_to_be_another_runs(
    composed: Composed, searches: list[int]
) -> None:
    """Its row has the setting that was measured, under a title that says when."""
    first = run(composed).report
    report = run(composed, "loader.num_workers=2").report
    title, _, before, *_ = report.lines()
    assert "remembered from an earlier run" in title
    assert before.startswith("before") and before.endswith(str(first.before.settings))
    assert "num_workers=2" not in before


def test_an_incomplete_answer_is_not_remembered(
    composed: Composed, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """The next run may have more time."""
    monkeypatch.setattr(tuner, "tune", lambda *_: reports.report(3, complete=False))
    run(composed)
    assert not list(cache.glob("*.json"))
