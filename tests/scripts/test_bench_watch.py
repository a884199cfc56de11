"""The benchmark of the watching: that it measures what is there, adds it up and judges it."""

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts import bench_watch
from scripts.measured import Sample
from scripts.paired import Cost, Estimate


def test_memory_that_grows_is_found() -> None:
    """What each step keeps is in the growth; what the first tenth of the steps keeps is not."""
    kept: list[bytes] = []
    growing = bench_watch.memory_growth(
        lambda steps: kept.extend(bytes(1000) for _ in range(steps)), 100
    )
    assert growing >= 90 * 1000
    assert bench_watch.memory_growth(lambda steps: None, 100) < 10_000


def test_all_of_it_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny run gives every table, the claim, the page and the figures behind them."""
    monkeypatch.setattr(bench_watch, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(bench_watch, "ROOT", tmp_path)
    monkeypatch.setattr(bench_watch, "_COLD_BYTES", 1 << 10)
    monkeypatch.setattr(bench_watch, "_WORK", (5,))
    out = tmp_path / "watch.json"
    arguments = [
        "--steps",
        "200",
        "--runs",
        "3",
        "--batches",
        "9",
        "--sampled-s",
        "0.01",
        "--json",
        str(out),
        "--write",
    ]
    assert bench_watch.main(arguments) == 0
    said = capsys.readouterr().out
    for what in (
        "step clock, host clock, caches cold",
        "end of a window, every 10 steps",
        "sampler's thread",
        "a sample's own us",
    ):
        assert what in said
    claims = re.findall("^Claim, (.*?) (?:take|stay)", said, re.MULTILINE)
    assert claims == ["all watching", "the workers' timers", "memory"]
    assert said.rstrip() in (tmp_path / "page.md").read_text()
    found = json.loads(out.read_text())
    assert found["clocks"]["step clock, host clock"]["us"]["n"] == 4
    assert 0 < found["clocks"]["step clock, host clock"]["us"]["median"] < 1e4


def figures(**changes: Any) -> dict[str, Any]:
    """What a run might have found; all claims hold."""
    return {
        "machine": bench_watch.machine(), "steps": 100_000, "window_steps": 10, "sample_s": 1.0,
        "clocks": {"one": cost(40.0)},
        "window": cost(100.0), "sampler_fraction": Estimate(0.002, 0.002, 0.002),
        "alone_fraction": 0.0,
        "memory_growth_bytes": {"one": 20_000}, "stages": [cost(9.0), cost(0.0005)],
    } | changes  # fmt: skip


def cost(us: float, low: float | None = None, high: float | None = None) -> Cost:
    """So much, beside work of 1 us."""
    of = lambda us: Sample(1, us, us, us)
    return Cost(
        of(us),
        of(0.0),
        of(1.0),
        Estimate(us, us if low is None else low, us if high is None else high),
    )


@pytest.mark.parametrize(
    ("changes", "claim", "verdict"),
    [
        pytest.param({}, 0, "0.450% [0.450%, 0.450%]: holds", id="40 us, a tenth of 100 us, 0.2 %"),
        pytest.param(
            {"window": cost(2000.0)}, 0, "1.400% [1.400%, 1.400%]: does not hold", id="dear windows"
        ),
        pytest.param(
            {"window": cost(100.0, high=2000.0)},
            0,
            "0.450% [0.450%, 1.400%]: not resolved",
            id="noisy windows",
        ),
        pytest.param({}, 1, "0.050% [0.050%, 0.050%]: holds", id="cheap timers"),
        pytest.param(
            {"stages": [cost(0.002)]}, 1, "0.200% [0.200%, 0.200%]: does not hold", id="dear timers"
        ),
        pytest.param(
            {"stages": [cost(0.0005, -0.01, 0.01)]},
            1,
            "[-1.000%, 1.000%]: not resolved",
            id="noisy timers",
        ),
        pytest.param({}, 2, "0.22 bytes: holds", id="buckets fill"),
        pytest.param(
            {"memory_growth_bytes": {"a": 9, "b": 2_000_000}},
            2,
            "22.22 bytes: does not hold",
            id="a leak",
        ),
        pytest.param({"steps": 200}, 2, "111.11 bytes: not resolved", id="too few steps"),
    ],
)
def test_each_claim_is_judged(changes: dict[str, Any], claim: int, verdict: str) -> None:
    """By its whole interval: all watching against 200 us, the timers against a thousandth, memory
    against a byte a step.
    """
    found = figures(**changes)
    assert bench_watch.claims(found)[claim].endswith(verdict)
    assert bench_watch.show(found).endswith(f"Claim, {bench_watch.claims(found)[2]}.")


def test_the_dearest_clock_is_judged() -> None:
    """The claim is about all of them."""
    found = figures(clocks={"cheap": cost(1.0), "dear": cost(400.0)})
    assert bench_watch.claims(found)[0].endswith("2.250% [2.250%, 2.250%]: does not hold")


def test_the_sampler_has_processes_to_look_at() -> None:
    """Sixteen sleep below this one inside the block, and are gone after it."""
    own = psutil.Process()
    before = {child.pid for child in own.children()}
    with bench_watch.children():
        there = [child for child in own.children() if child.pid not in before]
        assert [child.name() for child in there] == ["sleep"] * 16
    assert not any(child.is_running() for child in there)


def test_senseless_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names what is asked for."""
    with pytest.raises(SystemExit, match="2"):
        bench_watch.main(["--runs", "1"])
    assert (
        "--steps: at least 10; --runs and --batches: at least 2; --sampled-s: more than 0"
        in capsys.readouterr().err
    )
