"""The trace: its steps and names; a full disk, a short run."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from harness.cli import job
from harness.clock import spans
from harness.config import Config
from harness.training.profile import Trace


class Pauses:
    """Notes every pause that was made."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


def go(trace: Trace, first: int, last: int) -> None:
    """Steps of a run; a thread moves batches, an evaluation follows step 3."""
    for number in range(first, last + 1):
        with trace.step(number):
            with spans.named("wait for data"):
                mover = threading.Thread(target=move)
                mover.start()
                mover.join()
            with spans.named("forward"):
                torch.ones(8, 8) @ torch.ones(8, 8)
        if number == 3:
            with spans.named("evaluate"):
                torch.ones(8).sum()
    trace.close()


def move() -> None:
    """The prefetcher's part."""
    with spans.named("copy"):
        torch.ones(8).add(1)


def names(path: Path) -> list[str]:
    """Our own names in the trace, in order of time."""
    events = json.loads(path.read_text())["traceEvents"]
    ours = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(ours, key=lambda event: event["ts"])]


def test_the_steps_asked_for_are_in_the_trace_by_name(tmp_path: Path) -> None:
    """Steps 2 to 4 alone: their parts, other threads' parts and what lies between."""
    go(Trace("2-4", tmp_path, Pauses()), 1, 6)
    path = tmp_path / "trace" / "steps-2-4.json"
    parts = ["wait for data", "copy", "forward"]
    assert names(path) == ["step 2", *parts, "step 3", *parts, "evaluate", "step 4", *parts]
    assert "aten::matmul" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_profiler_works_in_pauses(tmp_path: Path) -> None:
    """Neither its start nor its writing counts as a step's time."""
    pauses = Pauses()
    go(Trace("1-2", tmp_path, pauses), 1, 3)
    assert pauses.names == ["profile", "profile"]


@pytest.mark.parametrize(
    ("first", "last", "name"),
    [
        pytest.param(1, 3, "steps-2-3.json", id="ends_early"),
        pytest.param(4, 9, "steps-4-5.json", id="resumed_late"),
    ],
)
def test_the_file_says_which_steps_it_holds(
    tmp_path: Path, first: int, last: int, name: str
) -> None:
    """A run that begins or ends within these steps leaves those it made."""
    go(Trace("2-5", tmp_path, Pauses()), first, last)
    assert [file.name for file in (tmp_path / "trace").iterdir()] == [name]


def test_a_step_that_fails_is_written_too(tmp_path: Path) -> None:
    """The steps before an error, and the one that raised it, can be looked at."""
    trace = Trace("1-5", tmp_path, Pauses())
    with pytest.raises(RuntimeError, match="no more"), trace.step(1), spans.named("forward"):
        raise RuntimeError("no more")
    trace.close()
    trace.close()
    assert names(tmp_path / "trace" / "steps-1-1.json") == ["step 1", "forward"]
    assert not names_are_made()


def test_nothing_is_recorded_unasked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without profile.steps there is no file, no pause and no word."""
    pauses = Pauses()
    go(Trace(None, tmp_path, pauses), 1, 3)
    assert not [*tmp_path.iterdir()] and not pauses.names and not caplog.records


def test_a_run_too_short_for_the_trace_says_so(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    """Steps that never came leave a warning, once."""
    trace = Trace("10-20", tmp_path, Pauses())
    go(trace, 1, 3)
    trace.close()
    assert [record.getMessage() for record in logged.records] == [
        "profile.steps=10-20: none of these steps ran, so there is no trace"
    ]


def test_a_run_names_what_it_does(
    composed: Callable[..., Config], tmp_path: Path, kept_globals: None
) -> None:
    """A whole run's trace has every part of a step, and what comes between steps."""
    config = composed(
        "data=digits",
        "loader.num_workers=0",
        "trainer.max_steps=3",
        "watch.window_steps=2",
        "trainer.accumulate_steps=2",
        "loader.batch_size=16",
        "profile.steps=2-3",
        "device=cpu",
    )
    job.main_worker(0, job.Job(config, tmp_path, ()))
    part = ["wait for data", "copy", "forward", "backward"]
    ours = {*part, "update", "step 2", "step 3", "close window", "evaluate", "checkpoint"}
    found = [name for name in names(tmp_path / "trace" / "steps-2-3.json") if name in ours]
    assert found == [
        "step 2",
        *part,
        *part,
        "update",
        "close window",
        "step 3",
        *part,
        *part,
        "update",
    ]
    assert json.loads((tmp_path / "report.json").read_text())["pauses_s"]["profile"] > 0


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The project's log, as pytest sees it."""
    logger = logging.getLogger("wellfed")
    former = logger.propagate
    logger.propagate = True
    yield caplog
    logger.propagate = former


def names_are_made() -> bool:
    """Whether a recording is still told of names."""
    return spans.named("a") is not spans.named("b")


@pytest.mark.parametrize("failing", ["start", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_costs_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    """Whatever a profiler raises is one warning; every step is made, no file is left."""

    def fail(*_: object) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(torch.profiler.profile, failing, fail)
    with caplog.at_level(logging.WARNING, "wellfed"):
        go(Trace("2-3", tmp_path, Pauses()), 1, 4)
    assert [record.getMessage() for record in caplog.records if "no CUPTI" in record.getMessage()]
    assert len(caplog.records) == 1
    assert not list(tmp_path.rglob("*.json"))
