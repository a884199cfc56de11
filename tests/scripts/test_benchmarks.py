"""The benchmarks: each runs in its smallest size, and its statistics are right."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_time import Gpu, Hand
from pictures import write_tree
from PIL import Image

from harness.clock.clock import StepClock
from scripts.bench.differential import Rig, Row, compare, emulated_rig
from scripts.bench.loader import measures, page, peers
from scripts.bench.loader import run as loader
from scripts.bench.loader.page import Claim
from scripts.bench.loader.score import collect
from scripts.bench.paired import Cost, Estimate, Plan
from scripts.bench.results import Line, Results, Sample
from scripts.bench.tuner import run as tuner
from scripts.bench.watch import beside_traceml as traceml
from scripts.bench.watch import diagnose
from scripts.bench.watch import run as watch

SMALLEST = {
    "watch.diagnose": "--rounds 1 --seconds 0.1 --images 8 --only shapes --photos {place}",
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
    arguments = SMALLEST[name].format(place=tmp_path).split()
    assert importlib.import_module(f"scripts.bench.{name}").main(arguments) == 0
    found = rows(capsys.readouterr().out)
    assert found and all(map(any, found))


def test_a_loop_is_compared_with_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides of the loop's benchmark train to bitwise the same weights."""
    importlib.import_module("scripts.bench.loop").main(SMALLEST["loop"].split())
    assert "bitwise the same" in capsys.readouterr().out


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


@pytest.mark.parametrize(("ceiling", "within"), [(3.3, "yes"), (2.6, "NO")])
def test_a_ceiling_is_compared_with_the_speed_up_of_cached_batches(
    ceiling: float, within: str, tmp_path: Path
) -> None:
    """The median ceiling over the median speed-up of 3; 10 % are allowed."""
    found = {
        "diagnose": [
            {"ceiling": each, "class": "decode", "seconds": 30.0, "G": 300.0, "A": 100.0}
            for each in (2.0, ceiling, 4.0)
        ],
        "real": [{"images_per_s": 100.0}] * 3,
        "cached": [{"images_per_s": rate} for rate in (200.0, 300.0, 400.0)],
    }
    config = diagnose.workloads(tmp_path, 1)["shapes"]
    line = diagnose.row("shapes", config, found)
    assert (line["off"], line["within 10 %"]) == (f"{ceiling / 3 - 1:+.1%}", within)


def elastic(strategy: str, number: int, seconds: float, **facts: Any) -> Line:
    key = {"workload": "jpeg_64", "epochs": 3, "strategy": strategy, "round": number}
    return {**key, "seconds": seconds, "tuning_s": 0.0, "chosen": None, **facts}


def test_whole_runs_are_compared_within_a_round() -> None:
    """A round without the default does not count."""
    told = rows(tuner.table([
        elastic("default", 0, 20.0), elastic("default", 1, 30.0),
        elastic("tuned", 0, 18.0), elastic("tuned", 1, 27.0), elastic("tuned", 2, 99.0),
    ]))  # fmt: skip
    assert told[0][2:5] == ["default", "2", "25.0"]
    assert told[1][2:7] == ["tuned", "2", "27.0", "-2.5 s [-3.0, -2.0]", "0.90 [0.90, 0.90]"]


def test_a_change_of_threads_is_told_by_the_images_after_it() -> None:
    """The best fixed number of threads counts from a second after the change on."""
    windows = {
        "8 threads": [[10.0, 100.0, 10], [13.5, 400.0, 10], [15.0, 400.0, 10], [15.1, 1600.0, 1]],
        "tuned": [[10.0, 90.0, 10], [14.5, 100.0, 10], [15.0, 440.0, 30], [17.0, 440.0, 1]],
    }
    changed = [{"before": 2, "threads": 8}]
    lines = [
        elastic(name, 0, 9.0, windows=found, changes=changed * (name == "tuned"))
        | {"workload": "warms_5"}
        for name, found in windows.items()
    ]
    told = rows(tuner.changing(lines))
    best = 11 / (10 / 400 + 1 / 1600)
    rate = 41 / (10 / 100 + 31 / 440)
    assert told[1][3:] == ["90", f"{rate:.0f}", f"{rate / best:.2f}", "2.0 s", "2 to 8"]


def test_the_images_of_a_minute_count_its_pauses() -> None:
    """64 images, two seconds of pause, 128 in one second, 128 in two."""
    windows = [[11.0, 64.0, 1], [14.0, 128.0, 2], [16.0, 64.0, 2]]
    assert tuner.trained({"windows": windows}, 0, 5) == pytest.approx((64 + 128 + 64) / 5)
    assert tuner.trained({"windows": windows}, 3.5, 4) == pytest.approx(128)


def test_growing_memory_is_found() -> None:
    """The growth counts what each step keeps, but for the first tenth."""
    kept: list[bytes] = []
    growing = watch.memory_growth(lambda steps: kept.extend(bytes(1000) for _ in range(steps)), 100)
    assert growing >= 90 * 1000
    assert watch.memory_growth(lambda steps: None, 100) < 10_000


def cost(us: float, high: float | None = None) -> Cost:
    """So much, beside work of 1 us."""
    of = lambda us: Sample(1, us, us, us)
    return Cost(of(us), of(0.0), of(1.0), Estimate(us, us, us if high is None else high))


@pytest.mark.parametrize(
    ("changes", "claim", "verdict"),
    [
        ({}, 0, "0.450% [0.450%, 0.450%]: holds"),
        ({"window": cost(2000.0)}, 0, "1.400% [1.400%, 1.400%]: does not hold"),
        ({"window": cost(100.0, 2000.0)}, 0, "0.450% [0.450%, 1.400%]: not resolved"),
        ({}, 1, "0.050% [0.050%, 0.050%]: holds"),
        ({"stages": [cost(0.002)]}, 1, "0.200% [0.200%, 0.200%]: does not hold"),
        ({}, 2, "0.22 bytes: holds"),
        ({"memory_growth_bytes": {"a": 9, "b": 2_000_000}}, 2, "22.22 bytes: does not hold"),
        ({"steps": 200}, 2, "111.11 bytes: not resolved"),
    ],
)
def test_the_costs_of_watching_are_judged(
    changes: dict[str, Any], claim: int, verdict: str
) -> None:
    """All of it against 200 us a step, timers against a thousandth, memory against a byte."""
    found = {
        "machine": watch.machine(), "steps": 100_000, "window_steps": 10, "sample_s": 1.0,
        "clocks": {"one": cost(40.0)}, "window": cost(100.0),
        "sampler_fraction": Estimate(0.002, 0.002, 0.002), "alone_fraction": 0.0,
        "memory_growth_bytes": {"one": 20_000}, "stages": [cost(9.0), cost(0.0005)],
    } | changes  # fmt: skip
    assert watch.claims(found)[claim].endswith(verdict)


def test_another_tools_costs_are_paired_differences_to_the_bare_loop() -> None:
    """What all turns of a round share falls out; the control is a row of its own."""
    drift = [1e-3 * number for number in range(1, 6)]
    longer = {"bare": 0.0, "control": 0.0, "traceml": 300e-6, "clock": 50e-6, "watch": 60e-6}
    turns = {
        name: [(wall + more, wall + 2 * more) for wall in drift] for name, more in longer.items()
    }
    found = traceml.cost_rows({2.0: turns})
    wall, cpu = (
        [str(row[column]).split()[0] for row in found]
        for column in ("us a step longer", "us of a processor more")
    )
    assert (wall, cpu[1:]) == (["+0", "+300", "+50", "+60"], ["+600", "+100", "+120"])
    assert [row["of the step"] for row in found] == ["0.00%", "10.00%", "1.67%", "2.00%"]


# the loaders'


KEY = {"commit": "abc1234", "workers": 2, "seconds": 3.0}
MACHINE = {
    "kind": "machine", "date": "2026-01-01", "load": 0.5, "versions": ["simplejpeg 1.9.0"],
    "machine": {
        "cpu": "none", "usable_cores": 2.0, "cores": 2, "torch_threads": 2, "python": "3",
        "torch": "2", "platform": "Linux",
    },
}  # fmt: skip


def turn(part: str, row: str, cpu_ms: float = 1.0, number: int = 0, **more: Any) -> Line:
    """A measurement of 1000 images on two busy cores."""
    key = {"kind": "turn", "part": part, "row": row, "round": number, **KEY}
    return {**key, "images": 1000, "cpu_s": cpu_ms, "wall_s": cpu_ms / 2, **more}


def jpegs(ours: float, error: float) -> list[Line]:
    """Peers of known cost beside threads of ``ours`` ms an image, twice as slow in round 1."""
    costs = {"full decode": 1.0, "pytorch/examples": 3.5, "DALI": 1.95, "threads": ours}
    pixels = turn("jpeg", "pixels", error=error, largest=0.1)
    del pixels["cpu_s"]
    return [
        *(
            turn("jpeg", row, cost * (1 + number), number)
            for row, cost in costs.items()
            for number in (0, 1)
        ),
        pixels,
    ]


def trained(old: float, new: float, best: float) -> list[Line]:
    """A step of 1 ms; training gives ``best`` times the images of the old feed's best."""
    costs = {"step alone": 1.0, "feed old": old, "feed new": new}
    costs |= {"train pytorch/examples 2": 6.0, "train threads 2": 6.0 / best}
    return [turn("train", row, cost) for row, cost in costs.items()]


def device(row: str, theirs: int) -> list[Line]:
    rates = {"threads": 1000.0, "pytorch/examples 2": theirs, "pytorch/examples 3": 1.0}
    return [turn("train", row, rates=rates, demand=1.0)]


def arrays(us: float, same: int) -> list[Line]:
    costs = {"per item": 0.25, "per item, workers": 0.2, "arrays": us / 1e3}
    equal = turn("arrays", "equal", same=same) | {"images": 10}
    del equal["cpu_s"]
    return [*(turn("arrays", row, cost) for row, cost in costs.items()), equal]


def cached(cost: float, digest: str) -> list[Line]:
    found = {"threads": (1.2, "a"), "threads, ram": (cost, digest)}
    return [
        turn("cache", row, ms, digest=each, later=turn("cache", "", 7.0))
        for row, (ms, each) in found.items()
    ]


def started(first_s: float, memory: float) -> list[Line]:
    found = {"no loader": (0.0, 400.0), "threads, 8": (first_s, 500.0)}
    found["processes, 8"] = 1.0, memory
    return [turn("start", row, first_s=s, memory_mb=mb) for row, (s, mb) in found.items()]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (jpegs(1.25, 0.02), [True, True, True, True]),
        (jpegs(1.39, 0.02), [True, True, False, True]),
        (jpegs(1.55, 0.2), [False, False, False, False]),
        (arrays(3.0, 10), [True, True]),
        (arrays(5.0, 9), [False, False]),
        (cached(0.2, "a"), [True, True]),
        (cached(0.3, "b"), [False, False]),
        (trained(3.0, 1.0, 1.9), [True]),
        (trained(3.0, 1.0, 1.7), [False]),
        (trained(1.5, 0.5, 1.9), [False]),
        (device("device, fast", 490), [True]),
        (device("device, fast", 510), [False]),
        (device("device, slow", 1010), [True]),
        (device("device, slow", 1030), [False]),
        (started(0.2, 701.0), [True, True]),
        (started(0.4, 699.0), [False, False]),
    ],
)
def test_the_loaders_are_judged(lines: list[Line], expected: list[bool]) -> None:
    """By ratios that are paired by round, against the limits of ``page.py``."""
    ((name, part),) = collect([MACHINE, *lines]).items()
    claims = [piece for piece in page.PAGES[name](part) if isinstance(piece, Claim)]
    assert [claim.holds for claim in claims] == expected


def test_the_loaders_page_is_made_of_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two cores and 1.25 ms an image are at most 1600 images/s."""
    results = Results(tmp_path / "results.jsonl")
    missing = {"kind": "missing", "part": "jpeg", "reason": "no module", **KEY}
    for line in [MACHINE, {**missing, "row": "threads"}, *jpegs(1.25, 0.02)]:
        results.add(**line)
    # of an earlier commit
    results.lines.insert(1, turn("jpeg", "DALI", 0.1, commit="other"))
    assert loader.main(["--table", "--results", str(results.path)]) == 0
    found = {row[0]: row for row in rows(capsys.readouterr().out)}
    assert found["threads"][4:] == ["1067", "2.80", "0.80", "2"]
    assert collect(results.lines)["jpeg"].missing == {}


def test_a_window_counts_what_comes_after_the_first_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a batch a second: two are skipped, and turns of two make four of 2.5 s."""
    clock = Hand()

    def batches() -> Iterator[int]:
        for number in count():
            clock.pass_(1.0)
            yield 10 + number

    monkeypatch.setattr(measures.time, "perf_counter", clock)
    monkeypatch.setattr(measures, "_processor_s", lambda tree: 3 * clock())
    found = measures.window(batches(), 2.5, skip=2, cycle=2)
    assert found == {"images": 12 + 13 + 14 + 15, "cpu_s": 12.0, "wall_s": 4.0}


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


def judged(rig: Rig, tolerance: float) -> tuple[list[Row], list[str]]:
    """The table of a rig, and what is wrong."""
    found = [*compare(rig, 40, tolerance)]
    return [row for row in found if "wrong" not in row], [
        row["wrong"] for row in found if "wrong" in row
    ]


class Deaf(StepClock):
    """A clock that hears of no wait."""

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


def model_rig(clock: type[StepClock] = StepClock) -> Rig:
    """Steps of 10 ms on a GPU in model time, and batches with a copy of 1 ms, one ahead."""
    gpu = Gpu()

    def batches(load_s: float, count: int, told: StepClock) -> Iterator[None]:
        ready_s = gpu.host + load_s
        for _ in range(count):
            gpu.host = max(gpu.host, ready_s)
            if load_s:
                copied = gpu.copy(0.001, at=ready_s)
                told.copied(*copied)
                gpu.await_copy(copied[1])
            ready_s = gpu.host + load_s
            yield None

    def move(seconds: float) -> None:
        gpu.host += seconds

    return Rig(
        clock=lambda: gpu.clock(clock),
        batches=batches,
        launch=lambda batch: gpu.launch(0.010),
        wait=lambda: move(max(0.0, gpu.compute_until - gpu.host)),
        sleep=move,
        now=gpu.now,
    )


def test_the_clock_agrees_with_the_differential_method() -> None:
    """Within a tenth of a point, from no stall to 90 %; a hidden wait is no stall."""
    table, wrong = judged(model_rig(), 0.001)
    assert wrong == []
    stalls = [float(row["stall"]) for row in table]
    assert len(stalls) >= 8 and min(stalls) == 0 and max(stalls) >= 0.9
    found = {(row["loader / step"], row["loop / step"]): row for row in table}
    hidden, working = found[0.5, 0.0], found[0.0, 1.5]
    assert float(hidden["data wait"]) > 0.45 and float(hidden["stall"]) < 0.03
    assert float(working["stall"]) == 0 and float(working["host"]) > 0.3


def test_a_clock_that_is_deaf_is_found_out() -> None:
    assert judged(model_rig(Deaf), 0.01)[1]


@pytest.mark.slow
def test_on_threads_the_two_methods_agree_as_well() -> None:
    """On an emulated device with real sleeps, within three points."""
    assert judged(emulated_rig(), 0.03)[1] == []


# the pictures of the README


def test_parts_of_two_pages_stand_beside_each_other() -> None:
    """Each page is a column; each part is a row, as high as its higher picture."""
    pytest.importorskip("selenium", reason="needs selenium (uv sync)")
    screenshots = importlib.import_module("scripts.docs.screenshots")
    new = Image.new
    left = [new("RGB", (10, 5), "white"), new("RGB", (10, 3), "red")]
    right = [new("RGB", (10, 2), "green"), new("RGB", (10, 4), "blue")]
    whole = screenshots.beside(left, right)
    second = 10 + screenshots.GAP
    assert whole.size == (second + 10, 9)
    assert [whole.getpixel(at) for at in [(0, 5), (second, 0), (second, 8)]] == [
        (255, 0, 0), (0, 128, 0), (0, 0, 255),
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in screenshots.PICTURES.iterdir()) <= 300_000
