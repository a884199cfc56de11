"""The runs of a diagnosis: what is measured in which order, in time,
and what is said of the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import samples
import torch

from harness.clock.stages import StageMeter
from harness.diagnose.diagnosis import _COLD, _DEMAND, _LOADING, _STEPS, _WARM, Session
from harness.feed.base import HostBatch
from harness.feed.order import Cursor
from harness.runtime.distributed import World
from harness.runtime.errors import LoaderError
from harness.tuning.lab import LoaderBenchmark
from harness.tuning.measures import Rate, SampleCost, Trial


@dataclass
class Rig:
    """A lab, its probes, its table and a clock, all made up: each measurement takes the seconds
    that it is given.

    ``steps`` are what rounds of real steps deliver, a text where they are refused; a sample takes a
    worker ``sample_s``.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: list[float | str] = field(default_factory=lambda: [100.0, 300.0, 200.0])
    sample_s: float = 0.005
    loading: str | None = None
    whole_batches: int = 3
    fetch: Rate | str = field(default_factory=lambda: Rate.exactly(200.0))
    at: float = 0.0
    first_s: float = 0.0
    did: list[str] = field(default_factory=list)
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks: Any = World(0, 1, 0, 1, torch.device("cpu"))
        self.trainee = SimpleNamespace(device=torch.device("cpu"))
        self.batch = HostBatch(
            torch.zeros(10, 3, 4, 4, dtype=torch.uint8), torch.zeros(10), torch.arange(10)
        )
        self.meter, self.warm, self.cursor = StageMeter(("read",), 0), False, Cursor()
        self.probes = self

    def spend(self, what: str) -> None:
        self.did.append(what)
        self.at += self.seconds.get(what, 1.0)

    def demand(self, limit_s: float, rate: object = None) -> tuple[Rate, float]:
        self.spend("G")
        return Rate.exactly(400.0), 0.002

    def attempt(self, settings: Any, kind: str, limit_s: float) -> Trial:
        if kind == "steps":
            self.spend("A")
            got = self.steps[(self.did.count("A") - 1) % len(self.steps)]
            if isinstance(got, str):
                return Trial(settings, "steps", refused=got)
            return Trial(settings, "steps", Rate.exactly(got), wait_fraction=got / 1000)
        self.spend("P" if self.warm else "loading")
        if self.loading and not self.warm:
            return Trial(settings, "supply", refused=self.loading)
        self.saw(self.whole_batches)
        return Trial(
            settings,
            "supply",
            Rate.exactly(350.0),
            cost=SampleCost(self.sample_s, self.sample_s, 0.1),
        )

    def copies_s(self) -> tuple[float, float] | None:
        return LoaderBenchmark.copies_s(cast(LoaderBenchmark, self))

    def saw(self, batches: int) -> None:
        if batches:
            self.cursor.saw(batches)

    def fetched(self, paths: object, readers: int, limit_s: float) -> Rate | str:
        self.spend("F")
        return self.fetch

    def run(self, workers: int = 2, *, pinned: bool = False) -> dict[str, Any]:
        """The whole session, which ends at 60 s."""
        parts: Any = self
        nothing: Any = ()
        session = Session(
            parts, nothing, self.rows.append, 60.0, now=lambda: self.at, fetch=self.fetched
        )
        settings = samples.settings(workers, batch_size=10)
        return session.run(dataclasses.replace(settings, pin_memory=pinned))


def noted(found: dict[str, Any]) -> list[str]:
    """Returns the runs that the notes name."""
    return [note.removeprefix("not measured: ").partition(" (")[0] for note in found["notes"]]


def test_the_runs_take_turns() -> None:
    """Loading as it is, three rounds of G and A, then P and F; rates are the rounds' medians."""
    rig = Rig()
    found = rig.run()
    assert rig.did == ["loading", "G", "A", "G", "A", "G", "A", "P", "F"]
    assert found["demand"].images_per_s == 400.0 and found["step_cpu_s"] == 0.002
    assert (
        found["delivered"] is not None
        and found["delivered"].images_per_s == 200.0
        and found["wait_fraction"] == 0.2
    )
    assert found["warm"] is not None and found["fetch"] == rig.fetch and not found["notes"]
    assert [row[0] for row in rig.rows] == [_LOADING, _DEMAND, _STEPS, _WARM, _COLD]


@pytest.mark.parametrize(
    ("seconds", "did"),
    [
        pytest.param(
            {"G": 6.0, "A": 10.0}, ["loading", *3 * ["G", "A"], "P", "F"], id="three long rounds"
        ),
        pytest.param(
            {"G": 8.0, "A": 12.0}, ["loading", "G", "A", "G", "A", "P", "F"], id="two rounds"
        ),
        pytest.param({"G": 20.0, "A": 20.0}, ["loading", "G", "A", "P", "F"], id="one round"),
        pytest.param({"G": 8.0, "A": 47.0}, ["loading", "G", "A", "F"], id="no time for P"),
        pytest.param({"G": 8.0, "A": 50.0}, ["loading", "G", "A"], id="nor for F"),
        pytest.param({"G": 58.0}, ["loading", "G"], id="nor for A"),
    ],
)
def test_what_does_not_fit_is_left_out_and_said(seconds: dict[str, float], did: list[str]) -> None:
    """Slow runs cost rounds first, then P, then F; a note names each figure that is missing."""
    rig = Rig(seconds)
    found = rig.run()
    assert rig.did == did
    assert rig.at < 62.0
    missing = [
        name
        for name, part in zip(
            (_STEPS, _WARM, _COLD),
            (found["delivered"], found["warm"], found["fetch"]),
            strict=True,
        )
        if part is None
    ]
    assert [row[0] for row in rig.rows if row[1] == "-"] == missing == noted(found)


def test_batches_that_take_too_long_are_not_waited_for() -> None:
    """Two workers that need thirty seconds a batch would need more than a minute for the first
    steps.
    """
    found = (rig := Rig(sample_s=3.0, whole_batches=0)).run()
    assert rig.did == ["loading", "G", "F"]
    assert found["delivered"] is None and found["wait_fraction"] is None
    assert noted(found) == [_STEPS, _WARM]


def test_without_workers_nothing_unread_is_read_in_this_process() -> None:
    """Real steps run on what came from a worker before; where no whole batch did, they are left
    out, and a note says why.
    """
    assert Rig().run(0)["delivered"] is not None
    found = (rig := Rig(whole_batches=0)).run(0)
    assert rig.did == ["loading", "G", "F"]
    assert noted(found) == [_STEPS, _WARM]


class Meeting:
    """Where two ranks, in a thread each, agree; that one of them does not come is an error in the
    other.
    """

    def __init__(self) -> None:
        self.barrier, self.told = threading.Barrier(2, timeout=10.0), [None, None]

    def smallest_of(self, rank: int) -> Callable[[float], float]:
        def smallest(value: float) -> float:
            return min(self.all(rank, value))

        return smallest

    def all(self, rank: int, value: Any) -> list[Any]:
        self.told[rank] = value
        self.barrier.wait()
        found = [*self.told]
        self.barrier.wait()
        return found


@pytest.mark.parametrize(
    ("other", "did"),
    [
        pytest.param(
            {"seconds": {"A": 25.0}},
            ["loading", "G", "A", "P", "F"],
            id="a clock on which a round took longer",
        ),
        pytest.param(
            {"whole_batches": 0, "steps": ["a worker died"]},
            ["loading", "G", "A", "F"],
            id="nothing was seen",
        ),
    ],
)
def test_ranks_stay_together(other: dict[str, Any], did: list[str]) -> None:
    """What one rank alone knows, its own clock and what it has seen, parts no ranks."""
    meeting = Meeting()
    rigs = (Rig(steps=other.get("steps", [100.0])), Rig(**{"steps": [100.0], **other}))
    for rank, rig in enumerate(rigs):
        gathered = functools.partial(meeting.all, rank)
        rig.ranks = SimpleNamespace(smallest=meeting.smallest_of(rank), gathered=gathered)
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(rig.run) for rig in rigs]:
            ended.result()
    assert [rig.did for rig in rigs] == [did, did]


def test_refused_steps_are_said() -> None:
    """A worker that dies under real steps ends the rounds, not the diagnosis."""
    found = (rig := Rig(steps=["a worker died"])).run()
    assert rig.did == ["loading", "G", "A", "P", "F"]
    assert noted(found) == [_STEPS] and "a worker died" in found["notes"][0]


def test_a_later_round_that_fails_leaves_the_earlier_ones() -> None:
    """Their median stands."""
    found = Rig(steps=[100.0, "a worker died"]).run()
    assert found["delivered"] is not None and found["delivered"].images_per_s == 100.0
    assert noted(found) == [_STEPS] and "a worker died" in found["notes"][0]


def test_loading_that_does_not_work_ends_it() -> None:
    """With the symptom, and a way out."""
    with pytest.raises(
        LoaderError,
        match=r"loading does not work with num_workers=2.*: a worker died; try other loader "
        r"settings",
    ):
        Rig(loading="a worker died").run()


def test_files_that_stay_in_the_page_cache() -> None:
    """Reading cold files is absent, and the note has the reason."""
    found = Rig(fetch="the page cache could not be emptied").run()
    assert found["fetch"] is None
    assert noted(found) == [_COLD] and "the page cache could not be emptied" in found["notes"][0]


@pytest.mark.parametrize(("workers", "readers"), [(0, 1), (3, 3)])
def test_cold_files_are_read_as_workers_would(workers: int, readers: int) -> None:
    """As many at a time as there are workers, one without any."""
    asked: list[int] = []
    rig = Rig()
    real: Callable[..., Any] = rig.fetched
    rig.fetched = lambda paths, count, limit_s: (asked.append(count), real(paths, count, limit_s))[
        1
    ]  # type: ignore[method-assign]
    rig.run(workers)
    assert asked == [readers]


@pytest.mark.parametrize(("pinned", "copy_per_s"), [(False, 100.0), (True, 1000.0)])
def test_copies_are_those_of_the_settings(
    pinned: bool, copy_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten images in 100 ms from pageable memory, in 10 ms from page-locked; without a CUDA device
    there are none.
    """
    rig = Rig()
    assert rig.run()["copy_per_s"] is None
    monkeypatch.setattr(LoaderBenchmark, "copies_s", lambda _: (0.1, 0.01))
    assert rig.run(pinned=pinned)["copy_per_s"] == pytest.approx(copy_per_s)


def test_copies_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory cannot be page-locked a note says why, and the figure is absent."""

    def refuse(_: LoaderBenchmark) -> tuple[float, float]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LoaderBenchmark, "copies_s", refuse)
    rig = Rig()
    found = rig.run()
    assert found["copy_per_s"] is None and found["notes"] == [
        "copies were not measured: out of memory"
    ]
