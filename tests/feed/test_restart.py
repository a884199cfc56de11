"""``loader.restart_workers``: workers that die or hang are replaced, and no sample is lost or comes
twice.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import samples
from samples import assert_same, comes_true, passes

from harness.feed.base import Backend
from harness.feed.order import Order
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed
from harness.runtime.errors import LoaderError

LENGTH = 43
ORDER = Order(LENGTH, 4, seed=3)


def once(path: Path, trouble: Callable[[], object]) -> None:
    """``trouble`` for the first to come."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return
    trouble()


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[Callable[[], object]]:
    """Hangs until the test is over."""
    yield partial(samples.wait_for, tmp_path / "over")
    (tmp_path / "over").touch()


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Backend]]:
    made: list[Backend] = []

    def make(kind: type[Backend], dataset: samples.Noise, **settings: object) -> Backend:
        own = samples.settings(2, **settings)  # type: ignore[arg-type]
        feed = kind(dataset, ORDER, own)  # type: ignore[call-arg]
        feed.restarts = True
        made.append(feed)
        return feed

    monkeypatch.setattr("harness.feed.processes._POLL_S", 0.1)
    monkeypatch.setattr("harness.feed.threads._JOIN_S", 0.1)
    samples.start_server()
    yield make
    while made:
        made.pop().close()
    assert comes_true(lambda: samples.at_work() == [])
    assert samples.left_behind() == []


@pytest.mark.parametrize("persistent", [False, True], ids=["own workers", "persistent"])
@pytest.mark.parametrize(
    "index", [pytest.param(0, marks=pytest.mark.slow), 21, pytest.param(42, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        pytest.param(ProcessFeed, samples.die, id="a process dies"),
        pytest.param(ProcessFeed, samples.die_with_lock, id="a process dies with a lock"),
        pytest.param(ProcessFeed, samples.halt, id="a process stops"),
        pytest.param(ThreadFeed, None, id="a thread hangs"),
    ],
)
def test_the_epoch_goes_on_after_a_loss(
    lasting: Callable[..., Backend],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    hang: Callable[[], object],
    kind: type[Backend],
    trouble: Callable[[], object] | None,
    index: int,
    persistent: bool,
) -> None:
    """Two epochs are bitwise those without a loss, and one warning tells what happened."""
    dataset = samples.Troubled(LENGTH, index, partial(once, tmp_path / "seen", trouble or hang))
    feed = lasting(kind, dataset, persistent_workers=persistent, timeout_s=1.0)
    assert_same(passes(feed), passes(ProcessFeed(samples.Noise(LENGTH), ORDER, samples.settings())))
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("loader.restart_workers: ")
    assert ". New workers continue with batch " in line


@pytest.mark.parametrize("kind", [ProcessFeed, ThreadFeed])
def test_a_sample_that_takes_every_worker_along_ends_the_run(
    lasting: Callable[..., Backend],
    caplog: pytest.LogCaptureFixture,
    hang: Callable[[], object],
    kind: type[Backend],
) -> None:
    """The third loss at one batch is an error, as the first is without restarts."""
    trouble = samples.die if kind is ProcessFeed else hang
    index = int(ORDER.indices(0)[21])
    feed = lasting(kind, samples.Troubled(LENGTH, index, trouble), timeout_s=0.5)
    given: list[int] = []
    with pytest.raises(LoaderError, match="worker"):
        given.extend(len(batch.labels) for batch in feed)
    # a process takes along what it has made and the trainer has not fetched
    assert len(given) == 5 or (kind is ProcessFeed and len(given) < 5)
    assert 2 <= len(caplog.records) <= 6


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
    ],
)
def test_workers_that_are_hit_again_and_again(lasting: Callable[..., Backend], sent: int) -> None:
    """Whichever worker is hit at whichever batch, every index comes once."""
    feed = lasting(ProcessFeed, samples.Noise(LENGTH), prefetch_factor=1, timeout_s=0.5)
    draw = random.Random(5)
    given = []
    for number, batch in enumerate(feed):
        if number % 3 == 1:
            os.kill(draw.choice(feed.worker_pids), sent)
        given.append(batch)
    expected = list(ProcessFeed(samples.Noise(LENGTH), ORDER, samples.settings()))
    assert_same(given, expected)
