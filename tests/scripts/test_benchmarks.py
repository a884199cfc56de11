"""The benchmarks: each runs in its smallest size, and its statistics are right."""

from __future__ import annotations

import importlib
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from model_time import Hand
from pictures import write_tree

from scripts.bench.differential import compare, emulated_rig
from scripts.bench.loader import measures, peers
from scripts.bench.loader import run as loader
from scripts.bench.paired import Cost, Estimate, Plan
from scripts.bench.watch import run as watch

RESULTS = Path(loader.__file__).parents[1] / "results"
SMALLEST = {
    "watch.diagnose": "--rounds 1 --seconds 0.1 --images 8 --only shapes --photos {place}",
    "loader.run": "--table --results {results}/loader.jsonl",
    "loop": "--pairs 2 --steps 3 --window 2 --batch-size 4 --image-size 16 --device cpu",
    "watch.run": "--steps 200 --runs 3 --batches 9 --sampled-s 0.01",
}  # fmt: skip


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of all tables in Markdown, without the headers."""
    lines = text.splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("|") and not line.startswith("|-") and not after.startswith("|-")
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "watch.diagnose"))
        for name in SMALLEST
    ],
)
@pytest.mark.usefixtures("kept_globals")
def test_a_benchmark_gives_its_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "_COLD_BYTES", 1 << 10)
    monkeypatch.setattr(watch, "_WORK", (5,))
    arguments = SMALLEST[name].format(place=tmp_path, results=RESULTS).split()
    assert importlib.import_module(f"scripts.bench.{name}").main(arguments) == 0
    found = rows(capsys.readouterr().out)
    assert found and all(map(any, found))


@pytest.mark.slow
def test_a_loop_is_compared_with_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides of the loop's benchmark train to bitwise the same weights."""
    importlib.import_module("scripts.bench.loop").main(SMALLEST["loop"].split())
    assert "bitwise identical" in capsys.readouterr().out


# the statistics that the pages quote


def test_a_cost_is_what_is_there_beyond_the_bare_loop() -> None:
    """Of 5 us a step beside 2 us it is 3 us, and the control is nil."""
    clock = Hand()
    plan = Plan(runs=4, steps=10, before=lambda: clock.pass_(9.0), now=clock)
    cost = Cost.of(
        lambda steps: clock.pass_(5e-6 * steps), lambda steps: clock.pass_(2e-6 * steps), plan
    )
    assert cost.us.median == pytest.approx(3) and cost.bare_us.median == pytest.approx(2)
    assert cost.control_us.median == pytest.approx(0, abs=1e-6)
    assert cost.mean_us == Estimate(*[pytest.approx(3)] * 3)


def test_runs_of_two_kinds_are_averaged() -> None:
    """Every fourth run takes 40 us more: the mean is 10 us, the median nil."""
    clock = Hand()
    turn = count()
    last = [0]

    def watched(steps: int) -> None:
        last[0] = next(turn) % 4
        clock.pass_(40e-6 * (last[0] == 0))

    cost = Cost.of(watched, lambda steps: None, Plan(runs=40, now=clock, kind=lambda: last[0] == 0))
    assert cost.us.median == pytest.approx(0, abs=1e-6) and cost.mean_us.value == pytest.approx(10)


def test_an_interval_holds_the_median_of_nineteen_samples_in_twenty() -> None:
    draw = np.random.default_rng(0)
    found = [Estimate.of(draw.exponential(size=101).tolist()) for _ in range(400)]
    assert 0.93 <= np.mean([one.low <= np.log(2) <= one.high for one in found]) <= 0.98
    assert Estimate.ratio([0.9, 1.8, 2.7], [1.0, 2.0, 3.0]) == Estimate(*[pytest.approx(0.9)] * 3)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.9, "holds"), (0.9, 1.1, "not resolved"), (1.1, 1.2, "does not hold")],
)
def test_a_claim_is_judged_by_the_whole_interval(low: float, high: float, verdict: str) -> None:
    assert Estimate(1.0, low, high).judged(1.0) == verdict


def test_growing_memory_is_found() -> None:
    """The growth counts what each step keeps, but for the first tenth."""
    kept: list[bytes] = []
    growing = watch.memory_growth(lambda steps: kept.extend(bytes(1000) for _ in range(steps)), 100)
    assert growing >= 90 * 1000
    assert watch.memory_growth(lambda steps: None, 100) < 10_000


# the loaders'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Small pictures, just more than a batch."""
    return write_tree(tmp_path / "tree", (40, 30), train=65, val=1)


@pytest.mark.parametrize("row", ["full decode", "pytorch/examples", "Apex"])
def test_a_peer_gives_batches_without_an_end(row: str, tree: Path, kept_globals: None) -> None:
    """More of them than one pass over the files holds."""
    torch.set_num_threads(1)
    make = peers.full_decode if row == "full decode" else peers.PEERS[row].make
    assert [*islice(make(tree, 1 if row == "full decode" else 0), 2)] == [128, 128]


def test_the_threads_are_measured(tree: Path, kept_globals: None) -> None:
    """A window holds whole batches, and pixels are held against PIL's."""
    found = measures.form("threads", str(tree), 1, 0.0, side=32)
    assert found["images"] % 64 == 0 and found["images"] > 0
    assert measures.pixels(str(tree))["largest"] <= 1.0


# the differential method


@pytest.mark.slow
def test_on_threads_the_two_methods_agree_as_well() -> None:
    """On an emulated device with real sleeps, within three points."""
    assert [row for row in compare(emulated_rig(), 40, 0.03) if "wrong" in row] == []
