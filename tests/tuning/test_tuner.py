"""The tuning stage: what it reports, and that it leaves no trace."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import samples
import torch
from machines import Machine, own

from harness.config import TunerConfig, TunerName
from harness.feed.base import Backend, FeedSettings, HostBatch
from harness.feed.feeds import BACKENDS
from harness.feed.order import Cursor, Order, ProbeOrder
from harness.monitor.host import Neighbors
from harness.runtime.distributed import World
from harness.runtime.errors import BadSample
from harness.runtime.limits import Limits
from harness.tuning.lab import LoaderBenchmark
from harness.tuning.measures import Rate, TuningReport
from harness.tuning.steps import StepRun
from harness.tuning.tuner import tune

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, CPU)
BACKENDS_HERE = ("processes", "threads")
LIMITS = Limits(cores=2.0, memory_bytes=10**10, shm_bytes=10**9, open_files=10_000)


class Pair(World):
    """Two ranks of which the other one says the same."""

    def agreed(self, value: Any) -> Any:
        return value

    def gathered(self, value: Any) -> list[Any]:
        return [value] * self.size

    def smallest(self, value: float) -> float:
        return value


class Feeds:
    """Feeds over a small data set."""

    def __init__(self, dataset: samples.Noise, backends: tuple[str, ...] = ("processes",)) -> None:
        self.dataset, self.backends, self.cursor = dataset, backends, Cursor()

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        return settings.batch_size * (3 * 16 + 16)

    def held_bytes(self, settings: FeedSettings) -> int:
        return 0

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        return dataclasses.replace(train, persistent_workers=False)

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Backend:
        order = ProbeOrder(Order(len(self.dataset), settings.batch_size), self.cursor, again)
        return BACKENDS[settings.backend](self.dataset, order, settings)


class Step:
    """A step that waits, as for a device; counts the blocks in which its state is kept."""

    device = CPU
    overlaps = False

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds, self.open, self.blocks = seconds, 0, 0

    @contextlib.contextmanager
    def preserved_state(self) -> Iterator[None]:
        self.open += 1
        self.blocks += 1
        try:
            yield
        finally:
            self.open -= 1

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        assert self.open == 1
        return StepRun((len(batch.labels),) * 10, (self.seconds,) * 10)

    def deliver(self, feed: Backend, skip: int, limit_s: float) -> StepRun:
        assert self.open == 1
        done = []
        end = time.perf_counter()
        for batch in feed:
            wait_s = time.perf_counter() - end
            time.sleep(self.seconds)
            done.append((len(batch.labels), time.perf_counter() - end, wait_s))
            end += done[-1][1]
            if len(done) > 20:
                break
        images, seconds, waits = zip(*done[1:], strict=True)
        return StepRun(images, seconds, sum(waits) / sum(seconds))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TuningReport]:
    """Tunes on a made-up machine, which answers in place of measurements."""

    def run(
        machine: Machine,
        workers: int,
        step: Step | None = None,
        shm_bytes: int = 10**9,
        images_left: float = math.inf,
        ranks: World = ALONE,
        **config: Any,
    ) -> TuningReport:
        exact = Rate(machine.demand, machine.demand, machine.demand)
        monkeypatch.setattr(LoaderBenchmark, "measured", lambda self, *ask: machine.answer(*ask))
        monkeypatch.setattr(
            LoaderBenchmark, "demand", lambda self, limit_s: (exact, machine.step_cpu_s)
        )
        limits = dataclasses.replace(LIMITS, cores=machine.cores, shm_bytes=shm_bytes)
        return tune(
            Feeds(samples.Noise(40), tuple(machine.form_speed)),
            step or Step(),
            own(workers),
            TunerConfig(**config),
            limits,
            ranks,
            images_left,
        )

    return run


On = Callable[..., TuningReport]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings, without the lines that are printed."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_report_tells_before_and_after(on: On) -> None:
    """What the user's setting delivers, what the choice does, the ceiling, the bound and the
    reason.
    """
    report = on(Machine(0.002, 0.0019, demand=700), 1)
    assert (report.before.settings, report.settings.num_workers) == (own(1), 2)
    assert report.before.images_per_s == pytest.approx(500)
    assert report.after.images_per_s == pytest.approx(700)
    assert report.ceiling == pytest.approx(1.4)
    assert report.before.wait_fraction == pytest.approx(
        2 / 7
    ) and report.after.wait_fraction == pytest.approx(0)
    assert "The choice is the cheapest setting that keeps the model busy" in report.sentence
    assert [trial.kind for trial in report.trials][:2] == ["supply", "supply"]


@pytest.mark.parametrize(
    ("images_left", "budget_s", "expected"),
    [
        pytest.param(math.inf, None, [8, 1, 5, 8], id="five seconds"),
        pytest.param(500 * 6, None, [8], id="a tenth of six seconds"),
        pytest.param(500 * 6, 30.0, [8, 1, 5, 8], id="as the user says"),
    ],
)
def test_a_look_takes_a_tenth_of_the_run_at_most(
    on: On, images_left: float, budget_s: float | None, expected: list[int]
) -> None:
    """What no longer fits is left out, said, and not remembered; the user's own setting delivers
    500 images/s.
    """
    machine = Machine(0.01, 0.0001, demand=700, cores=8.0, ceiling=500.0)
    report = on(machine, 8, images_left=images_left, budget_s=budget_s)
    assert [trial.settings.num_workers for trial in report.trials] == expected
    assert report.complete == (len(expected) == 4) != ("out of time" in report.sentence)


@pytest.mark.parametrize("others", [1.5, None], ids=["others", "none"])
def test_other_programs_are_warned_of(
    on: On, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, others: float | None
) -> None:
    """One warning says how much they took."""
    monkeypatch.setattr(Neighbors, "look", lambda self: others)
    report = on(Machine(0.002, 0.0019, demand=700), 1)
    assert report.others_cores == others
    assert len(warned(caplog)) == (others is not None)


def test_ranks_do_not_take_each_other_for_strangers(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are several, what other programs take is not looked at."""
    made: list[float | None] = []
    monkeypatch.setattr(
        "harness.tuning.tuner.Neighbors", lambda cores: made.append(cores) or Neighbors(cores)
    )
    on(Machine(0.002, 0.0019, demand=700), 1)
    report = on(Machine(0.002, 0.0019, demand=700), 1, ranks=Pair(0, 2, 0, 2, CPU))
    assert report.notes == ("images/s are for the slowest of 2 ranks",)
    assert made == [2.0, None]


def test_the_grid_runs_on_the_same_measurements(on: On) -> None:
    """tuner=grid: no demand, the fastest loader."""
    report = on(Machine(0.002, 0.0019, demand=700), 1, name=TunerName.grid)
    assert (report.search, report.demand, report.ceiling) == ("grid", None, None)
    assert [trial.settings.num_workers for trial in report.trials] == [1, 0, 4]
    assert "Model speed was not measured" in report.sentence


def test_the_most_workers_are_the_users_to_set(on: On) -> None:
    """tuner.max_workers."""
    machine = Machine(0.05, 0.0001, demand=5000, cores=8.0)
    assert max(trial.settings.num_workers for trial in on(machine, 1, max_workers=5).trials) == 5


def test_what_cannot_be_measured_stays_as_it_is(on: On, caplog: pytest.LogCaptureFixture) -> None:
    """The user's setting and one modest worker fail: one warning, and training begins with the
    user's own.
    """
    report = on(Machine(0.01, 0.01, demand=100, broken=lambda _: True), 3)
    assert (report.settings, report.after.rate) == (own(3), None)
    assert [(t.settings.num_workers, t.settings.prefetch_factor) for t in report.trials] == [
        (3, 2),
        (1, 1),
    ]
    assert "the loader could not be tuned: a worker died" in caplog.text
    assert "No setting could be measured" in report.sentence


def test_where_not_one_worker_fits_the_trainer_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches larger than the shared memory: refused before they run, and no workers are the
    answer.
    """
    monkeypatch.setattr(Feeds, "batch_bytes", lambda *_: 10**9)
    report = real(samples.Noise(40), 3)
    assert report.settings == samples.settings(0)
    assert [trial.seconds for trial in report.trials] == [0.0, 0.0]
    assert "shared memory: 4.0 GB" in caplog.text
    assert "No setting could be measured" in report.sentence


def test_where_no_process_fits_threads_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a few batches, and need no shared memory."""
    monkeypatch.setattr(Feeds, "batch_bytes", lambda *_: 10**9)
    report = real(samples.Noise(40), 1, backends=BACKENDS_HERE)
    assert report.settings.backend == "threads"
    assert [(trial.settings.backend, trial.rate is None) for trial in report.trials][:3] == [
        ("processes", True),
        ("processes", True),
        ("threads", False),
    ]


def test_threads_are_not_tried_after_workers_that_died(on: On) -> None:
    """What kills a worker would kill this process, and what hangs
    there would hang here for good.
    """
    machine = Machine(
        0.01, 0.01, demand=100, form_speed=dict.fromkeys(BACKENDS_HERE, 1.0), broken=lambda _: True
    )
    assert {trial.settings.backend for trial in on(machine, 3).trials} == {"processes"}


def test_the_validation_feed_fits_beside_the_training_feed(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both do not, the validation feed gets less, and the report says so."""
    monkeypatch.setattr(Feeds, "batch_bytes", lambda *_: 10**6)
    report = on(Machine(0.002, 0.0019, demand=700), 1, shm_bytes=13 * 10**6)
    assert report.val.num_workers < report.settings.num_workers


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "ends with an error"])
def test_the_steps_state_is_kept(on: On, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is measured inside one block of it, which is left whatever happens."""
    step = Step()
    machine = Machine(0.002, 0.0019, demand=700)
    if fails:
        monkeypatch.setattr(machine, "answer", lambda *_: samples.refuse())
    with pytest.raises(BadSample) if fails else contextlib.nullcontext():
        on(machine, 1, step)
    assert (step.blocks, step.open) == (1, 0)


def traces() -> tuple[object, ...]:
    states = (
        random.getstate(),
        pickle.dumps(np.random.get_state()),
        torch.get_rng_state().numpy().tobytes(),
    )
    return (
        states,
        torch.get_num_threads(),
        samples.at_work(),
        samples.left_behind(),
        len(os.listdir("/proc/self/fd")),
    )


def real(
    dataset: samples.Noise,
    own: FeedSettings | int = 1,
    step: Step | None = None,
    budget_s: float = 3.0,
    backends: tuple[str, ...] = ("processes",),
) -> TuningReport:
    config = TunerConfig(budget_s=budget_s, max_workers=2)
    settings = samples.settings(own) if isinstance(own, int) else own
    return tune(Feeds(dataset, backends), step or Step(), settings, config, LIMITS, ALONE)


def test_a_real_search_leaves_no_trace() -> None:
    """With real workers: figures in every row; no worker, file, shared memory or random number is
    left or used up.
    """
    samples.start_server()
    real(samples.Noise(40), backends=BACKENDS_HERE)  # whatever is opened once for good
    before = traces()
    report = real(samples.Noise(40), backends=BACKENDS_HERE)
    assert report.trials and all(trial.rate is not None for trial in report.trials)
    # on a busy machine a thread may close its ends of a queue a moment later
    for _ in range(50):
        if traces() == before:
            break
        time.sleep(0.1)
    assert traces() == before


@pytest.mark.parametrize(
    ("trouble", "symptom", "timeout_s"),
    [(samples.die, "a worker died", 60.0), (samples.hang, "no batch within", 1.0)],
    ids=["killed", "hanging"],
)
def test_a_setting_whose_workers_fail_is_refused(
    trouble: Callable[[], object], symptom: str, timeout_s: float
) -> None:
    """With its symptom; the user's setting stays, and nothing is left."""
    own = dataclasses.replace(samples.settings(1), timeout_s=timeout_s)
    report = real(samples.Troubled(40, None, trouble), own)
    assert report.settings == own
    assert [symptom in (trial.refused or "") for trial in report.trials] == [True, True]
    assert not samples.left_behind()
