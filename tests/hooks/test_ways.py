"""One training in the ways that people write it, watched on CUDA."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from watched_runs import LOOPS, WATCH, anew

# the way of the loop, and the package that it needs
WAYS = {
    "moved_first": "torch",
    "labels_in_the_loss": "torch",
    "amp": "torch",
    "dictionary": "torch",
    "accumulation": "torch",
    "closure": "torch",
    "lightning": "lightning",
    "accelerate": "accelerate",
}


@pytest.mark.slow
@pytest.mark.cuda_order
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("way", "package"), WAYS.items(), ids=WAYS)
def test_every_way_has_the_same_shares(tmp_path: Path, way: str, package: str) -> None:
    """The device's work on a batch, a little for the host, and the rest for data.

    Within 3 points, on a quiet machine.
    """
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: uv sync --group {package}")
    watch = (*WATCH, "--no-tensorboard", "--out", "report")
    done = anew(*watch, str(LOOPS / "ways.py"), way, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    shares = report["shares"]
    # of the seconds from one batch of 4 to the next
    work = float(done.stdout.split()[0]) * report["images_per_s"] / 4
    assert 0.5 < work < 0.7
    found = {
        "compute": shares["compute"] + shares.get("launch", 0.0),
        "data": shares["starved"] + shares["exposed_copy"],
        "host": shares["host"],
    }
    assert found == pytest.approx({"compute": work, "data": 1 - work, "host": 0.0}, abs=0.03)
