"""A slow disk in somebody's script is told by name; ``scripts/bench/watch/watched.py`` has all."""

from __future__ import annotations

import dataclasses

import pytest

from scripts.bench.watch.watched import CASES, SUPPORT, judged


@pytest.mark.slow
def test_the_report_names_what_was_planted() -> None:
    """A change of the loader comes with it, as arguments of the script's own DataLoader."""
    case = next(case for case in CASES if case.plant == "slow_disk")
    case = dataclasses.replace(case, flags=("--steps=15",))
    report = judged(case, (str(SUPPORT / "watch_alone.py"),))
    assert report["verdict"]["bottleneck"] == case.bottleneck
    change = report["change"]
    assert change["arguments"] == {"num_workers": 8, "persistent_workers": True}
    assert 2 < change["gain"] < 6
