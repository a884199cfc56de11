"""How settings are measured on all ranks together, and what becomes of those that do not fit or
fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import samples
import torch
from machines import room

from harness.feed.base import Backend, FeedSettings, HostBatch
from harness.feed.order import Cursor
from harness.runtime.errors import BadSample, LoaderError
from harness.runtime.limits import Limits
from harness.tuning.lab import LoaderBenchmark
from harness.tuning.measures import Rate, SampleCost, Trial
from harness.tuning.steps import StepRun

OWN = samples.settings(2, batch_size=10)
PLENTY = Limits(cores=2.0, memory_bytes=10**10, shm_bytes=10**9, open_files=10_000)


class Ranks:
    """This rank, and others that gather ``others`` beside its value."""

    def __init__(self, *others: Any) -> None:
        self.others = others

    def smallest(self, value: float) -> float:
        return value

    def agreed(self, value: Any) -> Any:
        return value

    def gathered(self, value: Any) -> list[Any]:
        return [value, *self.others] if isinstance(value, tuple) else [value]


class Feeds:
    """Feeds that are never iterated; notes what was asked for."""

    backends = ("processes",)

    def __init__(self) -> None:
        self.asked: list[tuple[FeedSettings, bool]] = []
        self.closed = 0
        self.cursor = Cursor()

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        return 10**6

    def held_bytes(self, settings: FeedSettings) -> int:
        return 0

    def val_settings(self, train: FeedSettings) -> FeedSettings:
        return train

    def probe(self, settings: FeedSettings, *, again: bool = False) -> Backend:
        self.asked.append((settings, again))
        return self  # type: ignore[return-value]  # only closed

    def close(self) -> None:
        self.closed += 1


class Step:
    """Steps that take a tenth of a second, half of it waiting; ``delivers`` replaces that."""

    device = torch.device("cpu")
    overlaps = False

    def __init__(self, delivers: Callable[[], StepRun] | None = None) -> None:
        self.delivers = delivers or (lambda: StepRun((10,) * 20, (0.1,) * 20, 0.5, 1.0))
        self.skipped: list[int] = []

    @contextlib.contextmanager
    def preserved_state(self) -> Iterator[None]:
        yield

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        return StepRun((10,) * 20, (0.05,) * 20, 0.0, 2.0)

    def deliver(self, feed: Backend, skip: int, limit_s: float) -> StepRun:
        self.skipped.append(skip)
        return self.delivers()


def batch() -> HostBatch:
    return HostBatch(torch.zeros(10, 3, 4, 4, dtype=torch.uint8), torch.zeros(10), torch.zeros(10))


def lab(
    step: Step | None = None, ranks: Ranks | None = None, limits: Limits = PLENTY
) -> LoaderBenchmark:
    return LoaderBenchmark(Feeds(), step or Step(), limits, ranks or Ranks())  # type: ignore[arg-type]


def asked(lab: LoaderBenchmark) -> list[tuple[FeedSettings, bool]]:
    assert isinstance(lab.probes, Feeds)
    return lab.probes.asked


def fail(error: Exception) -> Callable[[], StepRun]:
    def run() -> StepRun:
        raise error

    return run


@pytest.fixture
def supply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supply probe that finds 200 images/s and workers of 50 MB."""

    def found(self: LoaderBenchmark, feed: Backend, limit_s: float, skip: int) -> SimpleNamespace:
        self.batch = batch()
        cost = SampleCost(0.01, 0.005, 0.1)
        rate = Rate(200.0, 190.0, 210.0)
        return SimpleNamespace(rate=rate, cost=cost, worker_bytes=50 * 10**6, batches=7)

    monkeypatch.setattr(LoaderBenchmark, "supplied", found)


def test_what_does_not_fit_is_refused_before_it_runs() -> None:
    """With the arithmetic as the reason, and no feed made."""
    small = lab(limits=dataclasses.replace(PLENTY, shm_bytes=4 * 10**6))
    trial = small.attempt(OWN, "supply")
    assert trial.rate is None and "lack of shared memory: 7.0 MB needed, 4.0 MB free" in (
        trial.refused or ""
    )
    assert asked(small) == []


@pytest.mark.usefixtures("supply")
def test_a_supply_probe_teaches_what_a_worker_takes() -> None:
    """Its memory is what later settings are reckoned with, and its batch serves the step."""
    own = lab(limits=dataclasses.replace(PLENTY, memory_bytes=600 * 10**6))
    assert (
        own.refusal(dataclasses.replace(OWN, num_workers=8)) is not None
    )  # a hundred MiB each, before one was seen
    trial = own.attempt(OWN, "supply")
    assert (trial.rate, trial.kind) == (Rate(200.0, 190.0, 210.0), "supply")
    assert own.worker_bytes == 50 * 10**6 and own.batch is not None
    assert isinstance(own.probes, Feeds) and own.probes.cursor.seen == range(7)
    assert own.refusal(dataclasses.replace(OWN, num_workers=8)) is None
    assert own.needs(OWN).memory == 2 * 50 * 10**6 + (2 * 2 + 3) * 10**6


@pytest.mark.parametrize(("shm", "workers"), [(1000, 4), (250, 1), (50, 0)])
def test_validation_makes_way_for_training(
    shm: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation feed gives up workers until both feeds fit."""
    train = samples.settings(4, persistent_workers=True)
    wanted = dataclasses.replace(train, batch_size=5, prefetch_factor=3)
    monkeypatch.setattr(Feeds, "val_settings", lambda _, settings: wanted)
    monkeypatch.setattr(Feeds, "batch_bytes", lambda _, s: 10 if s == train else 12)
    limits = dataclasses.replace(PLENTY, shm_bytes=shm)
    val = lab(limits=limits).val_beside(train)
    assert val.num_workers == workers
    assert (val == wanted) == (shm == 1000)
    taken = room(10, 100).needs(train)
    assert room(12, 100, limits=limits).refusal(val, taken) is None


def test_real_steps_tell_the_wait() -> None:
    """The rate is of the steps with their waits; the queue that was full at first is left out."""
    step = Step()
    trial = lab(step).attempt(OWN, "steps")
    assert trial.rate is not None and trial.rate.images_per_s == pytest.approx(100.0)
    assert (trial.wait_fraction, step.skipped) == (pytest.approx(0.5), [4])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_this_process_loads_only_what_a_worker_has_loaded_before(num_workers: int) -> None:
    """So that a sample that hangs cannot hang the run while it is tuned."""
    own = lab()
    own.attempt(samples.settings(num_workers), "steps")
    assert [again for _, again in asked(own)] == [num_workers == 0]


@pytest.mark.usefixtures("supply")
def test_arrays_are_probed_on_what_was_seen() -> None:
    """So that nothing is decoded in this process while it is measured; the first probe of a run has
    seen nothing yet.
    """
    own = lab()
    arrays = dataclasses.replace(OWN, backend="arrays")
    for settings in (arrays, OWN, arrays):
        own.attempt(settings, "supply")
    assert [again for _, again in asked(own)] == [False, False, True]


@pytest.mark.usefixtures("supply")
def test_a_warm_lab_goes_round_what_was_read() -> None:
    """While warm; any other trial of workers reads samples of its own."""
    own = lab()
    for own.warm in (False, True):
        own.attempt(OWN, "supply")
    assert [again for _, again in asked(own)] == [False, True]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LoaderError("a worker died"), "a worker died"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
    ],
    ids=["worker", "memory", "the device's memory", "torch's memory"],
)
def test_what_fails_is_refused_with_its_symptom(error: Exception, reason: str) -> None:
    """Tuning goes on, and the feed is closed."""
    own = lab(Step(fail(error)))
    assert own.attempt(OWN, "steps").refused == reason
    assert isinstance(own.probes, Feeds) and own.probes.closed == 1


@pytest.mark.parametrize("here", [True, False], ids=["here", "on another rank"])
def test_a_bad_sample_is_no_settings_fault(here: bool) -> None:
    """It is raised on every rank, whichever met it."""
    step = Step(fail(BadSample("7.jpg", "empty file"))) if here else None
    ranks = Ranks() if here else Ranks((Trial(OWN, "steps"), BadSample("7.jpg", "empty file")))
    with pytest.raises(BadSample, match="^7.jpg: empty file$"):
        lab(step, ranks).attempt(OWN, "steps")


def test_the_slowest_rank_counts() -> None:
    """One that was refused there is refused here."""
    slow = Trial(OWN, "steps", Rate(40.0, 39.0, 41.0))
    assert lab(ranks=Ranks((slow, None))).attempt(OWN, "steps") == slow
    refused = Trial(OWN, "steps", refused="a worker died")
    assert lab(ranks=Ranks((slow, None), (refused, None))).attempt(OWN, "steps") == refused


def test_steps_that_another_rank_ended_give_no_figure() -> None:
    """None were made here."""
    trial = lab(Step(lambda: StepRun((), ()))).attempt(OWN, "steps")
    assert trial.refused == "failed on another rank"


@pytest.mark.usefixtures("supply")
def test_demand_needs_a_batch() -> None:
    """Which a supply probe brings; the slowest rank's step counts."""
    own = lab(ranks=Ranks())
    own.attempt(OWN, "supply")
    rate, step_cpu_s = own.demand(1.0)
    assert (rate.images_per_s, step_cpu_s) == (pytest.approx(200.0), pytest.approx(0.01))
    own.ranks = Ranks((Rate(50.0, 50.0, 50.0), 0.02))
    assert own.demand(1.0) == (Rate(50.0, 50.0, 50.0), 0.02)


@pytest.mark.parametrize(
    ("memory_bytes", "pinned_s", "pays"),
    [
        pytest.param(10**10, 0.9, True, id="sooner"),
        pytest.param(10**10, 0.97, False, id="hardly sooner"),
        pytest.param(10**6, 0.9, False, id="no room"),
    ],
)
def test_pinning_must_pay(
    memory_bytes: int, pinned_s: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the copy from page-locked memory must fit and be clearly faster."""
    monkeypatch.setattr(Step, "device", torch.device("cuda"))
    monkeypatch.setattr(LoaderBenchmark, "copies_s", lambda _: (1.0, pinned_s))
    limits = dataclasses.replace(PLENTY, memory_bytes=memory_bytes)
    own = lab(limits=limits)
    own.batch = batch()
    assert own.pays_to_pin(OWN) is pays
