"""The tuning stage: what it reports, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch

from harness.config import TunerConfig
from harness.feed.interface import Feed, FeedSettings, HostBatch
from harness.feed.order import Order, ProbeOrder
from harness.feed.processes import ProcessFeed
from harness.runtime.errors import BadSample, LoaderError
from harness.runtime.limits import Limits
from harness.tuning import probe
from harness.tuning.probe import measure_supply
from harness.tuning.search import Candidate
from harness.tuning.tuner import TuningReport, tune

CONFIG = TunerConfig(budget_s=60.0, batches=4)


@dataclasses.dataclass
class OneRank:
    """A world of one, of which ``others`` is the slowest other rank's figure."""

    device: torch.device = torch.device("cpu")
    others: float = math.inf

    def smallest(self, value: float) -> float:
        return min(value, self.others)

    def agreed(self, value: Any) -> Any:
        return value


class Fake:
    """Feeds that deliver ``curve(settings)`` images a second on a clock of their own, each start costing ``start_s``."""

    def __init__(self, curve: Callable[[FeedSettings], float], start_s: float = 0.0) -> None:
        self.curve, self.start_s = curve, start_s
        self.clock = 0.0
        self.made: list[tuple[FeedSettings, int]] = []

    def perf_counter(self) -> float:
        return self.clock

    def __call__(self, settings: FeedSettings, batches: int) -> Feed:
        self.made.append((settings, batches))
        return _FakeFeed(self, settings, batches)


class _FakeFeed:
    on_device = False

    def __init__(self, owner: Fake, settings: FeedSettings, batches: int) -> None:
        self.owner, self.settings, self.batches = owner, settings, batches

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[HostBatch]:
        self.owner.clock += self.owner.start_s
        for _ in range(self.batches):
            self.owner.clock += self.settings.batch_size / self.owner.curve(self.settings)
            labels = torch.zeros(self.settings.batch_size)
            yield HostBatch(labels, labels, labels)

    def close(self) -> None: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TuningReport]:
    def tune_fake(
        fake: Fake,
        settings: FeedSettings | None = None,
        config: TunerConfig = CONFIG,
        cores: float = 2.0,
        ranks: OneRank | None = None,
    ) -> TuningReport:
        monkeypatch.setattr("harness.tuning.tuner.time", fake)
        monkeypatch.setattr(probe, "measure_supply", partial(measure_supply, now=fake.perf_counter))
        return tune(fake, settings or samples.settings(1), config, limits(cores), ranks or OneRank())

    return tune_fake


Run = Callable[..., TuningReport]


def limits(cores: float = 2.0) -> Limits:
    return Limits(cores=cores, memory_bytes=2**30, shm_bytes=None, open_files=1024)


def peak_at(best: int) -> Callable[[FeedSettings], float]:
    return lambda settings: 100.0 - 10 * abs(settings.num_workers - best)


def tried(report: TuningReport) -> list[int]:
    return [trial.candidate.num_workers for trial in report.trials]


def test_the_users_setting_comes_first_and_the_fastest_is_chosen(run: Run) -> None:
    """The user's own setting is measured before the search's, never twice, and is what the gain is measured against."""
    report = run(Fake(peak_at(3)))
    assert tried(report) == [1, 0, 4]
    assert (report.before.candidate, report.after.candidate) == (Candidate(1, False), Candidate(4, False))
    assert report.before.images_per_s == pytest.approx(80)
    assert report.after.images_per_s == pytest.approx(90)
    assert report.settings == samples.settings(4, persistent_workers=False)
    assert report.complete


def test_where_nothing_is_faster_the_users_setting_stays(run: Run) -> None:
    """The choice is the same trial as before."""
    settings = samples.settings(1, prefetch_factor=5, timeout_s=9.0, persistent_workers=True)
    report = run(Fake(peak_at(1)), settings)
    assert report.after is report.before
    assert report.settings == settings


def test_the_other_settings_of_the_user_are_kept(run: Run) -> None:
    """Only num_workers and pin_memory are chosen; what the others need follows."""
    user = samples.settings(1, batch_size=7, prefetch_factor=5, timeout_s=9.0, start_method="spawn")
    assert run(Fake(peak_at(4)), user).settings == dataclasses.replace(user, num_workers=4)


def test_workers_that_were_not_there_are_kept_alive(run: Run) -> None:
    """From num_workers=0 the search leads to persistent workers with torch's prefetch_factor, and back to neither."""
    assert run(Fake(peak_at(4)), samples.settings(0)).settings == samples.settings(4, persistent_workers=True)
    assert run(Fake(peak_at(0)), samples.settings(1, persistent_workers=True)).settings == samples.settings(0)


@pytest.mark.parametrize(("device", "pinned"), [("cpu", {False}), ("cuda", {False, True})])
def test_pinned_memory_is_tried_where_it_has_a_use(run: Run, device: str, pinned: set[bool]) -> None:
    """Without a CUDA device the search is over num_workers alone."""
    report = run(Fake(peak_at(1)), ranks=OneRank(torch.device(device)))
    assert {trial.candidate.pin_memory for trial in report.trials} == pinned


def test_the_slowest_rank_decides(run: Run) -> None:
    """A trial's figure is the smallest over all ranks."""
    report = run(Fake(peak_at(4)), ranks=OneRank(others=5.0))
    assert {trial.images_per_s for trial in report.trials} == {5.0}


def test_what_another_rank_refuses_is_refused(run: Run) -> None:
    """A candidate that delivered nothing on some rank cannot be chosen."""
    report = run(Fake(peak_at(4)), ranks=OneRank(others=0.0))
    assert report.after is report.before
    assert {trial.refused for trial in report.trials} == {"refused on another rank"}


def test_the_budget_ends_the_search(run: Run) -> None:
    """No candidate is begun that its share of the budget would carry over the end; the report says so."""
    config = TunerConfig(budget_s=18.0, batches=1)
    fake = Fake(lambda settings: 4.0, start_s=7.0)  # a batch a second: shares of 2 s, which the start alone exceeds
    report = run(fake, samples.settings(0), config)
    assert not report.complete
    assert tried(report) == [0, 4]
    assert report.seconds == fake.clock <= 18.0


def test_a_candidate_takes_no_more_than_its_share(run: Run) -> None:
    """A slow loader is measured with fewer batches, and the whole search stays within its budget."""
    report = run(Fake(lambda settings: 4.0), samples.settings(0), TunerConfig(budget_s=45.0, batches=4000))
    assert report.complete
    assert report.seconds <= 45.0


def test_a_candidate_that_fails_is_refused_with_its_reason(run: Run) -> None:
    """The search goes on after a LoaderError, and the reason is in the report."""

    def curve(settings: FeedSettings) -> float:
        if settings.num_workers == 4:
            raise LoaderError("worker 7 exited: /dev/shm is full")
        return peak_at(3)(settings)

    report = run(Fake(curve))
    assert tried(report) == [1, 0, 4, 2, 3]
    assert [trial.refused for trial in report.trials] == [None, None, "worker 7 exited: /dev/shm is full", None, None]
    assert report.after.candidate == Candidate(3, False)


def test_a_bad_sample_ends_the_search(run: Run) -> None:
    """A sample that cannot be read is no setting's fault: it is shown, and nothing is refused for it."""

    def curve(settings: FeedSettings) -> float:
        raise BadSample("cats/7.jpg", "empty file")

    with pytest.raises(BadSample, match="^cats/7.jpg: empty file$"):
        run(Fake(curve))


def test_every_candidate_is_asked_for_the_same_batches(run: Run) -> None:
    """Each feed has its primed queue, one batch for the start, and its batches to time; probes do not wait long."""
    fake = Fake(peak_at(4))
    run(fake)
    assert [count - 1 - 2 * settings.num_workers for settings, count in fake.made] == [4] * len(fake.made)
    assert {settings.timeout_s for settings, _ in fake.made} == {60.0}


def test_publishing_shows_and_writes_everything(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a row for each trial and a row before and after; tuning.json holds the same."""
    report = run(Fake(peak_at(4)))
    report.publish(tmp_path)
    shown = capsys.readouterr().out
    assert "tuner=grid: 3 settings" in shown and "chosen" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("before", "after"))] == ["before", "after"]
    assert "1.43x" in shown  # 100 over 70
    written = json.loads((tmp_path / "tuning.json").read_text())
    assert [trial["candidate"]["num_workers"] for trial in written["trials"]] == tried(report)
    assert written["settings"] == dataclasses.asdict(report.settings)
    assert report.summary()["chosen"] == "num_workers=4 pin_memory=false prefetch_factor=2"


def probe_feeds(dataset: samples.Noise) -> Callable[[FeedSettings, int], Feed]:
    order = Order(len(dataset), 4)
    return lambda settings, batches: ProcessFeed(dataset, ProbeOrder(order, batches), settings)


@pytest.fixture(scope="module")
def _server() -> None:
    samples.start_server()


@pytest.mark.usefixtures("_server")
def test_a_real_search_leaves_no_trace() -> None:
    """With real workers: every row has a figure, no process is left, and the global random states are as before."""

    def states() -> tuple[object, ...]:
        return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes()

    before = states()
    report = tune(probe_feeds(samples.Noise(20)), samples.settings(1), CONFIG, limits(1.0), OneRank())
    assert tried(report) == [1, 0]
    assert all(trial.images_per_s > 0 and trial.images == 16 for trial in report.trials)
    assert multiprocessing.active_children() == []
    assert states() == before


@pytest.mark.usefixtures("_server")
def test_a_real_bad_sample_leaves_no_worker() -> None:
    """BadSample from a worker ends the search with no process left."""
    feeds = probe_feeds(samples.Troubled(20, 5, samples.refuse))
    with pytest.raises(BadSample, match="^cats/7.jpg: empty file$"):
        tune(feeds, samples.settings(1), CONFIG, limits(1.0), OneRank())
    assert multiprocessing.active_children() == []
