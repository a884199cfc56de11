"""The benchmark of the watching: that it measures what is there, adds it up and judges it."""

import json
from pathlib import Path

import pytest

from scripts import bench_watch
from scripts.measured import Sample
from scripts.paired import Cost


def test_memory_that_grows_is_found() -> None:
    """What each step keeps is in the growth; what the first tenth of the steps keeps is not."""
    kept: list[bytes] = []
    growing = bench_watch.memory_growth(lambda steps: kept.extend(bytes(1000) for _ in range(steps)), 100)
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
    arguments = ["--steps", "200", "--runs", "3", "--sampled-s", "0.01", "--json", str(out), "--write"]
    assert bench_watch.main(arguments) == 0
    said = capsys.readouterr().out
    for what in (
        "step clock, host clock, caches cold",
        "end of a window, every 10 steps",
        "sampler's thread",
        "a sample's own us",
    ):
        assert what in said
    assert "Claim, all watching takes at most 1% of a step of 20 ms: " in said
    assert said.rstrip() in (tmp_path / "page.md").read_text()
    found = json.loads(out.read_text())
    assert found["clocks"]["step clock, host clock"]["us"]["n"] == 4
    assert 0 < found["clocks"]["step clock, host clock"]["us"]["median"] < 1e4


@pytest.mark.parametrize(("window_us", "verdict"), [(100.0, "holds"), (2000.0, "FAILS")], ids=["cheap", "dear"])
def test_the_claim_is_about_all_together(window_us: float, verdict: str) -> None:
    """A clock of 40 us, a sampler of 0.2 % and the window's share of a step are held against 200 us."""
    of = lambda us: Sample(1, us, us, us)
    cost = lambda us: Cost(of(us), of(0.0), of(1.0))
    found = {
        "machine": bench_watch.machine(), "steps": 10, "window_steps": 10, "sample_s": 1.0, "clocks": {"one": cost(40.0)},
        "window": cost(window_us), "sampler_fraction": 0.002, "alone_fraction": 0.0, "memory_growth_bytes": {"one": 1},
        "stages": [cost(0.1)],
    }  # fmt: skip
    assert bench_watch.per_step_us(found) == {"one": pytest.approx(80 + window_us / 10)}
    assert bench_watch.show(found).endswith(f"Claim, all watching takes at most 1% of a step of 20 ms: {verdict}.")


def test_senseless_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names what is asked for."""
    with pytest.raises(SystemExit, match="2"):
        bench_watch.main(["--runs", "1"])
    assert "--steps: at least 10; --runs: at least 2; --sampled-s: more than 0" in capsys.readouterr().err
