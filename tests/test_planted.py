"""Planted bottlenecks are told by name; ``scripts/bench/watch/planted.py`` has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.watch.planted import PLANTS

# sleeps that are long beside all else, so that other work on the machine changes no class
LARGEST = {plant.name: plant for plant in PLANTS}


@pytest.mark.parametrize("name", ["slow disk", "slow logging", "slow launches"])
def test_the_report_names_what_was_planted(name: str, tmp_path: Path, kept_globals: None) -> None:
    """In its largest size; a ceiling and evidence come with the class."""
    plant = LARGEST[name]
    verdict = plant.run(plant.high, tmp_path)["verdict"]
    assert verdict["bottleneck"] == plant.bottleneck, verdict
    assert verdict["ceiling"] >= 1 and verdict["evidence"]
