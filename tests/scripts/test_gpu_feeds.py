"""The feeds beside a GPU: which runs are made, and what is said of them."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from samples import comes_true

from harness.config import DataConfig
from harness.data import datasets
from harness.feed.order import Order
from harness.feed.threads import ThreadFeed
from scripts import gpu_feeds, gpu_loaders
from scripts.gpu_feeds import Decoding


def test_every_form_runs_on_ever_fewer_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most cores first, until the time is over, beside a run that loads nothing; the fewest
    that are enough are named.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    left = iter([900.0] * 5 + [0.0])
    seen = []

    def run(feed: str, cores: int) -> dict[str, Any]:
        seen.append((feed, cores))
        each = {"threads": 333.0, "processes": 240.0}.get(feed, 1000.0)
        return {"images_per_s": min(1000.0, cores * each), "decoder": ""}

    rows = list(gpu_feeds.cores(gpu_loaders.OURS, run, lambda: next(left)))
    measured = [(4, "threads"), (4, "processes"), (2, "threads"), (2, "processes"), (1, "threads")]
    assert [(row["cores"], row["feed"]) for row in rows] == measured
    assert seen == [("no loading", 4), *((feed, cores) for cores, feed in measured)]
    assert (
        gpu_feeds.fewest(rows) == "threads: 4 cores reach 0.99; processes: none of these reach 0.99"
    )


@pytest.mark.parametrize(
    ("error", "why"),
    [
        pytest.param(
            subprocess.TimeoutExpired("gpu_loaders.py", 120), "took more than 120 s", id="too slow"
        ),
        pytest.param(
            RuntimeError("gpu_loaders.py ended with 2:\nno"),
            "gpu_loaders.py ended with 2: no",
            id="an error",
        ),
    ],
)
def test_a_run_that_fails_is_a_row(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why, and the others are measured; nothing is fed by it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2)))

    def run(feed: str, cores: int) -> dict[str, Any]:
        if (feed, cores) == ("threads", 2):
            raise error
        return {"images_per_s": 1000.0, "decoder": ""}

    rows = list(gpu_feeds.cores(gpu_loaders.OURS, run, lambda: 900.0))
    assert [row["failed"] for row in rows] == [why, "", "", ""]
    assert (
        gpu_feeds.fewest(rows[:2])
        == "threads: none of these reach 0.99; processes: 2 cores reach 0.99"
    )


def test_sets_of_another_size_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that wants fewer images leaves none in the way of one that wants more, and one that
    wants as many finds them.
    """
    made: list[DataConfig] = []
    monkeypatch.setattr(datasets, "load", lambda data, *_: made.append(data))
    common, files = gpu_feeds.resnet50(tmp_path, 1280, 25)
    assert (
        files == ["data=shapes", f"data.root={made[0].root}"]
        and "data.generate.train_images=1280" in common
    )
    assert (
        made == [gpu_feeds.shapes(tmp_path, 1280)]
        and made[0].root != gpu_feeds.shapes(tmp_path, 2560).root
    )


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given time to settle."""
    monkeypatch.setattr(gpu_feeds, "_SETTLE_S", 0.0)


def feed(dataset: samples.Noise) -> ThreadFeed:
    return ThreadFeed(dataset, Order(len(dataset), 4), samples.settings(2))


def test_batches_are_taken_beside_and_counted(at_once: None) -> None:
    """From pass to pass while it is told to, and none otherwise; its threads end with it."""
    with Decoding(feed(samples.Noise(8))) as decoding:
        assert decoding.beside(lambda: 5.0, busy=False) == (5.0, 0.0)
        took_ms, rate = decoding.beside(
            lambda: float(comes_true(lambda: decoding._images >= 24)), busy=True
        )
        assert took_ms == 1.0 and rate > 0
    assert comes_true(lambda: samples.at_work() == [])


def test_a_feed_that_fails_beside_is_no_measurement(at_once: None) -> None:
    """Its own error is told: the network would be measured alone, and found as fast as that."""
    with (
        Decoding(feed(samples.Staged(8, bad=0))) as decoding,
        pytest.raises(
            RuntimeError, match="the feed beside the network gave 0 images: BadSample: .*"
        ),
    ):
        decoding.beside(lambda: float(comes_true(lambda: bool(decoding._error))), busy=True)


def test_a_feed_that_gives_nothing_is_no_measurement(at_once: None) -> None:
    """A turn without a batch is not one beside decoding."""
    gate = threading.Event()

    class Held(samples.Noise):
        def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
            gate.wait(10)
            return super().fill(epoch, index, out)

    with Decoding(feed(Held(8))) as decoding:
        with pytest.raises(
            RuntimeError, match="the feed beside the network gave 0 images: it is too slow"
        ):
            decoding.beside(lambda: 1.0, busy=True)
        gate.set()
