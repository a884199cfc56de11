"""The script that stops runs in many ways: that its checks can fail, and, where there is time, that
its parts pass.
"""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.feed.order import Order
from harness.monitor.writer import RunWriter
from tests.hostile.chaos import run as chaos
from tests.hostile.chaos.samples import Updates, updates, wrong_samples
from tests.support.run_state import lines, wrong_lines

pytestmark = pytest.mark.slow


def made(length: int, batch: int) -> Updates:
    """One epoch on one rank."""
    order = Order(length, batch)
    return {step: (0, {0: part.tolist()}) for step, part in enumerate(order.batches(0), 1)}


def test_samples_that_are_missing_or_doubled_are_found() -> None:
    """An epoch of its own samples passes; one with a sample twice, with too few, or without a step
    does not.
    """
    assert wrong_samples(made(20, 4), 20, 4) == []
    twice = made(20, 4)
    short = made(20, 4)
    gap = made(20, 4)
    twice[2][1][0][0] = twice[1][1][0][0]
    del short[5], gap[3]
    assert wrong_samples(twice, 20, 4) == ["epoch 1: 20 samples, 19 different, of 20"]
    assert wrong_samples(short, 20, 4) == ["epoch 1: 16 samples, 16 different, of 20"]
    assert "a step is missing" in wrong_samples(gap, 20, 4)


def test_a_step_made_again_must_have_the_same_samples(tmp_path: Path) -> None:
    """A step that was lost with a kill may be noted twice, with the same samples alone."""
    line = '{"rank": 0, "step": 1, "epoch": 0, "indices": [3, 1]}\n'
    notes = tmp_path / "notes.jsonl"
    notes.write_text(line + line)
    assert updates(notes) == {1: (0, {0: [3, 1]})}
    notes.write_text(line + line.replace("3, 1", "1, 3"))
    with pytest.raises(ValueError, match="step 1 was made again with other samples"):
        updates(notes)


@pytest.mark.parametrize("damage", ["none", "torn", "doubled", "apart"])
def test_lines_and_events_that_differ_are_found(tmp_path: Path, damage: str) -> None:
    """A whole log passes; one with a torn event file, a step twice, or a line that TensorBoard
    lacks does not.
    """
    with RunWriter(tmp_path, tensorboard=True) as writer:
        for step in (1, 1 if damage == "doubled" else 2):
            writer.scalars(step, {"train/lr": 0.1})
    (events,) = tmp_path.glob("events.*")
    if damage == "torn":
        events.write_bytes(events.read_bytes()[:-3])
    if damage == "apart":
        metrics = tmp_path / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace('"step": 2', '"step": 3'))
    assert len(lines(tmp_path)) == 2
    assert bool(wrong_lines(tmp_path)) == (damage != "none")


def test_a_page_keeps_its_earlier_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each table that is written comes below those that are there, as it was printed."""
    page = tmp_path / "chaos.md"
    monkeypatch.setattr(chaos, "PAGE", page)
    monkeypatch.setitem(
        chaos.PARTS, "user", (lambda plan: [chaos.row("user", plan.n, "all", [])], 1)
    )
    printed = []
    for n in ("3", "4"):
        assert chaos.main(["--parts", "user", "--n", n, "--write"]) == 0
        printed.append(capsys.readouterr().out.rstrip())
    assert page.read_text() == "\n\n".join(["# Runs that were stopped", *printed]) + "\n"


@pytest.mark.parametrize("ends", [True, False])
def test_a_lost_worker_that_nobody_tells_of_is_found(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on in silence is told of; one that ends needed the worker no more."""
    monkeypatch.setattr(chaos, "_TOLD_S", 0.0)
    life = Mock(said="")
    life.goes_on.return_value = not ends
    assert chaos._told_after(life, 0) == (None if ends else math.inf)
    life.said = "New workers continue with batch 3"
    assert chaos._told_after(life, 0) not in (None, math.inf)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", list(chaos.PARTS))
def test_each_part_passes(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One stop of each kind leaves what was never stopped."""
    assert chaos.main(["--parts", part, "--n", "1"]) == 0, capsys.readouterr().out
