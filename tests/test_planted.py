"""Bottlenecks that are planted into real runs are told by name."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import planted_acts as acts
import pytest
import torch
from planted import PLANTS, Plant, composed

from harness.job import Job, main_worker
from harness.tuning.memory import Memory
from harness.watch.neighbours import Neighbours

# which the tests' own machine leaves alone
LOOK = Neighbours.look
# another one in every session: no threshold can be made for a size
SEED = int(os.environ.get("PLANTED_SEED") or random.SystemRandom().randrange(2**32))
QUICK = ("slow disk", "slow logging", "slow launches")


def marked(plant: Plant) -> object:
    marks = [] if plant.name in QUICK else [pytest.mark.slow]
    if "device=cuda" in plant.overrides:
        marks = [
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ]
    return pytest.param(plant, id=plant.name, marks=marks)


# by the wall clock: another program on the machine may spoil a run
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("plant", [marked(plant) for plant in PLANTS])
def test_the_report_names_what_was_planted(
    plant: Plant, tmp_path: Path, kept_globals: None
) -> None:
    """The class is right, the sentence holds the figure or the word that matters, and the evidence
    comes with it.
    """
    size = plant.draw(random.Random(f"{SEED} {plant.name}"))
    report = plant.run(size, tmp_path)
    verdict = report["verdict"]
    drawn = f"seed {SEED}: {size:.4g} {plant.unit}: {report['verdict']}"
    assert verdict["bottleneck"] == plant.bottleneck, drawn
    assert plant.said in verdict["sentence"], drawn
    assert verdict["ceiling"] >= 1 and verdict["evidence"], drawn


@pytest.mark.slow
@pytest.mark.parametrize("override", ["loader.autotune=true", "mode=diagnose"])
def test_tuning_and_diagnosis_warn_of_a_neighbour(
    override: str,
    tmp_path: Path,
    kept_globals: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line says how many cores other programs took; no answer of then is remembered, and the
    diagnosis, or the run after tuning, names them.
    """
    monkeypatch.setattr(Neighbours, "look", LOOK)
    kept: list[object] = []
    monkeypatch.setattr(Memory, "keep", lambda self, answer: kept.append(answer))
    with acts.neighbours(1.5):
        main_worker(0, Job(composed(override), tmp_path, ()))
    said = capsys.readouterr().out
    warnings = re.findall(
        r"^warning: other programs took [\d.]+ of the \S+ cores meanwhile", said, re.MULTILINE
    )
    assert len(warnings) == 1, said
    assert "Held back by other programs. Other programs take " in said, said
    assert not kept
