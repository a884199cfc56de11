"""Whether other programs keep processors from a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.clock.figures import Tag
from harness.monitor import host
from harness.monitor.host import Neighbors, taken

look = Neighbors.look  # which the tests' own machine leaves alone


def sampled(others: float, queued: float, own: float) -> dict[str, float]:
    return {Tag.OTHERS_CPU_CORES: others, Tag.QUEUED_THREADS: queued, Tag.CPU_CORES: own}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        pytest.param(
            sampled(1.6, 1.2, 0.4), 1.6, id="others have the cores that the run waits for"
        ),
        pytest.param(sampled(0.05, 5.0, 1.95), None, id="the run fills its cores by itself"),
        pytest.param(sampled(1.0, 0.05, 1.0), None, id="the run wants no more cores than it has"),
        pytest.param(
            sampled(0.0, 3.0, 8.0), None, id="others are on cores that the run may not use"
        ),
        pytest.param(sampled(0.26, 2.0, 1.0), 0.26, id="a little more than a fifth"),
        pytest.param(sampled(0.24, 2.0, 1.0), None, id="a little less than a fifth"),
        pytest.param(
            sampled(2.0, 0.11, 0.05), 2.0, id="a run that sleeps and waits a tenth of the time"
        ),
        pytest.param(sampled(2.0, 0.09, 0.05), None, id="a run that sleeps and hardly waits"),
        pytest.param(sampled(0.0, 0.0, 0.0), None, id="nobody does anything"),
        pytest.param(sampled(2.0, 1.0, 0.0), 2.0, id="the run gets nothing at all"),
        *(
            pytest.param(
                {tag: x for tag, x in sampled(1.6, 1.2, 0.4).items() if tag != lost},
                None,
                id=f"no {lost}",
            )
            for lost in sampled(1.6, 1.2, 0.4)
        ),
    ],
)
def test_harm_takes_others_and_threads_that_wait(
    given: dict[str, float], found: float | None
) -> None:
    """Others' cores count as far as threads of the run waited for them."""
    assert taken(given) == found


def test_looks_are_some_time_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a few ticks no figure holds: the look after them speaks for that time as well."""
    samples = iter([{}, sampled(1.6, 1.2, 0.4), sampled(0.0, 0.0, 0.4)])
    monkeypatch.setattr(host.HostSensor, "sample", lambda self: next(samples))
    times = iter([0.0, 0.4, 1.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: next(times)))
    looked = Neighbors(2.0)
    assert [look(looked) for _ in range(3)] == [None, 1.6, None]
