"""Tags, keys and values are those of earlier versions: people's scripts read them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from model_time import Gpu, Hand, one_step, settled, step

from harness.clock.clock import StepClock
from harness.clock.figures import FIGURES, by_tag
from harness.config import Config
from harness.feed.base import FeedSettings
from harness.monitor.writer import RunWriter
from harness.report.reporter import Reporter

SAVED = Path(__file__).with_name(
    "figures_943a066.json"
)  # all tags; by clock one line of metrics and the report


def on_a_gpu() -> StepClock:
    """A clock of steps with every part: waits, copies that are waited for, launches, pauses."""
    gpu = Gpu()
    clock = gpu.clock()
    for number in range(40):
        step(
            clock,
            gpu,
            wait_s=0.003,
            compute_s=0.003,
            launch_s=0.001,
            copy_s=0.004 if number % 2 else 0.001,
        )
    with clock.pause("evaluate"):
        gpu.host += 2.0
    settled(clock, gpu)
    return clock


def on_a_cpu() -> StepClock:
    """A clock of steps that wait, compute, and do something else."""
    hand = Hand()
    clock = StepClock("cpu", now=hand)
    for number in range(40):
        one_step(clock, hand, wait_s=0.002 + 0.001 * (number % 3), compute_s=0.010, rest_s=0.001)
    with clock.noted("logging"):
        hand.pass_(0.1)
    with clock.pause("evaluate"):
        hand.pass_(2.0)
    return clock


def written(clock: StepClock, folder: Path) -> dict[str, Any]:
    """What a window and the whole run leave in ``metrics.jsonl`` and ``report.json``."""
    engine: Any = SimpleNamespace(
        monitor=SimpleNamespace(
            clock=clock, sampler=None, timer=SimpleNamespace(goodput=lambda total: None)
        ),
        status="completed",
        stopped=None,
        skipped=0,
        worker_s=0.0,
        replaced=(),
        ranks=(),
        evaluation=None,
        world=SimpleNamespace(size=2, device=torch.device("cpu")),
        state=SimpleNamespace(epoch=1, step=40),
        parts=[],
        part=lambda: {
            "size": None,
            "window": clock.total(-1),
            "stages": None,
            "settings": FeedSettings(8, 0, False, None, False, 60.0, None),
        },
        memory=SimpleNamespace(peaks=None),
        folder=folder,
        config=Config(),
    )
    window = clock.total()
    still = SimpleNamespace(monotonic=lambda: 0.0)
    at_once = mock.patch("harness.monitor.writer.time", still)
    with at_once, RunWriter(folder, tensorboard=False) as writer:
        writer.scalars(40, by_tag(window), epoch=1)
        report = Reporter(
            (), None, 2.0, SimpleNamespace(cache=None, root="", fetched=None)
        ).figures(engine)
        for name in ("environment", "verdict", "loader", "run", "decoded_without_pillow"):
            # of the machine, of other rooms
            report.pop(name)
        writer.report(report)
    metrics = json.loads((folder / "metrics.jsonl").read_text())
    return {"metrics": metrics, "report": json.loads((folder / "report.json").read_text())}


@pytest.mark.parametrize("make", [on_a_gpu, on_a_cpu])
def test_a_window_is_written_as_ever(tmp_path: Path, make: Any) -> None:
    """The same steps leave the same tags, keys and values."""
    saved = json.loads(SAVED.read_text())[make.__name__]
    assert written(make(), tmp_path) == saved


def test_no_tag_is_lost() -> None:
    """Every tag that earlier versions logged is still declared."""
    assert set(json.loads(SAVED.read_text())["tags"]) <= {figure.tag for figure in FIGURES}
