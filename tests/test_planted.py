"""Planted bottlenecks are told by name; ``scripts/bench/watch/planted.py`` has all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.cli.job import Job, main_worker
from harness.monitor.host import Neighbours
from harness.tuning.tuner import TuningCache
from scripts.bench.watch import planted_acts
from scripts.bench.watch.planted import PLANTS, composed

# which the tests' own machine leaves alone
LOOK = Neighbours.look
# sleeps that are long beside all else, so that other work on the machine changes no class
LARGEST = {plant.name: plant for plant in PLANTS}


@pytest.mark.parametrize("name", ["slow disk", "slow logging", "slow launches"])
def test_the_report_names_what_was_planted(name: str, tmp_path: Path, kept_globals: None) -> None:
    """In its largest size; a ceiling and evidence come with the class."""
    plant = LARGEST[name]
    verdict = plant.run(plant.high, tmp_path)["verdict"]
    assert verdict["bottleneck"] == plant.bottleneck, verdict
    assert verdict["ceiling"] >= 1 and verdict["evidence"]


@pytest.mark.slow
@pytest.mark.parametrize("override", ["loader.autotune=true", "mode=diagnose"])
def test_tuning_and_diagnosis_warn_of_a_neighbour(
    override: str,
    tmp_path: Path,
    kept_globals: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One warning, and no answer of then is remembered."""
    monkeypatch.setattr(Neighbours, "look", LOOK)
    kept: list[object] = []
    monkeypatch.setattr(TuningCache, "keep", lambda self, answer: kept.append(answer))
    with planted_acts.neighbours(1.5):
        main_worker(0, Job(composed(override), tmp_path, ()))
    said = capsys.readouterr().out
    assert len(re.findall("^warning: other programs took ", said, re.MULTILINE)) == 1, said
    assert not kept
