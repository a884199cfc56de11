"""The benchmark of the loop: that both sides do the same work, and what it makes of the times."""

import json
from pathlib import Path

import pytest

from scripts import bench_loop
from scripts.paired import Estimate


def test_both_sides_do_the_same_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny run gives both tables, a verdict on the claim, every epoch's seconds, and bitwise the
    same weights.
    """
    out = tmp_path / "loop.json"
    sizes = [
        "--pairs",
        "2",
        "--steps",
        "3",
        "--window",
        "2",
        "--batch-size",
        "4",
        "--image-size",
        "16",
        "--device",
        "cpu",
    ]
    assert bench_loop.main([*sizes, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "harness / hand written" in said and "hand written / itself (control)" in said
    assert "bitwise the same on both sides" in said
    assert "Claim, the interval of harness / hand written does not lie below 0.98: " in said
    found = json.loads(out.read_text())
    assert {name: len(seconds) for name, seconds in found["epoch_seconds"].items()} == {
        "harness": 2, "hand_written": 2, "control_a": 2, "control_b": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        pytest.param(1.0, "holds, the whole interval is above", id="equal"),
        pytest.param(0.9, "FAILS, the whole interval is below", id="slower"),
    ],
)
def test_the_verdict_follows_the_interval(factor: float, verdict: str) -> None:
    """A ratio without noise is its own interval, and the claim is judged by it."""
    ratio = Estimate.ratio([factor * t for t in (1.0, 2.0, 3.0)], [1.0, 2.0, 3.0])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((factor, factor, factor))
    assert bench_loop.verdict(ratio) == verdict
