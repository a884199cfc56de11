"""The page of the loaders' benchmark: how it judges, and of which measurements it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import bench_loader, loader_page
from scripts.bench_tuner import Results
from scripts.loader_page import Claim
from scripts.loader_peers import PEERS
from scripts.loader_score import Part, collect, cpu_ms
from scripts.tuner_score import Line

KEY = {"commit": "abc1234", "workers": 2, "seconds": 3.0}
MACHINE = {
    "kind": "machine",
    "date": "2026-01-01",
    "load": 0.5,
    "versions": ["simplejpeg 1.9.0"],
    "machine": {
        "cpu": "none",
        "usable_cores": 2.0,
        "cores": 2,
        "torch_threads": 2,
        "python": "3",
        "torch": "2",
        "platform": "Linux",
    },
}


def turn(part: str, row: str, cpu_ms: float, number: int = 0, **more: Any) -> Line:
    """A measurement of 1000 images on two busy cores."""
    return {
        "kind": "turn",
        "part": part,
        "row": row,
        "round": number,
        "images": 1000,
        "cpu_s": cpu_ms,
        "wall_s": cpu_ms / 2,
        **KEY,
        **more,
    }


def claims(*lines: Line) -> list[Claim]:
    """What the page says of the only part in ``lines``."""
    ((name, part),) = collect([MACHINE, *lines]).items()
    return [piece for piece in loader_page.PAGES[name](part) if isinstance(piece, Claim)]


def held(*lines: Line) -> list[bool]:
    return [claim.holds for claim in claims(*lines)]


def jpegs(ours: float, error: float = 0.02) -> list[Line]:
    """Peers of known cost beside threads of ``ours`` ms an image."""
    costs = {
        "full decode": 1.0,
        "pytorch/examples": 3.5,
        "DALI": 1.95,
        "processes": 9.0,
        "threads": ours,
    }
    return [turn("jpeg", row, cost, number) for row, cost in costs.items() for number in (0, 1)] + [
        {
            "kind": "turn",
            "part": "jpeg",
            "row": "pixels",
            "round": 0,
            "error": error,
            "largest": 0.1,
            "images": 4,
            **KEY,
        }
    ]


def missing(part: str, row: str) -> Line:
    """A row that cannot be had."""
    return {"kind": "missing", "part": part, "row": row, "reason": "no module", **KEY}


@pytest.mark.parametrize(
    ("ours", "error", "expected"),
    [
        pytest.param(1.25, 0.02, [True, True, True, True], id="all"),
        pytest.param(1.39, 0.02, [True, True, False, True], id="too far from decoding"),
        pytest.param(1.55, 0.02, [False, False, False, True], id="none"),
        pytest.param(1.25, 0.2, [True, True, True, False], id="wrong pixels"),
    ],
)
def test_jpeg_is_held_against_the_recipe_the_best_peer_and_decoding(
    ours: float, error: float, expected: list[bool]
) -> None:
    """At least 2.5 times, 1.3 times and 0.72 of full decode, with the right pixels; the better of
    our forms counts.
    """
    assert held(*jpegs(ours, error)) == expected


def test_ratios_are_paired_by_round() -> None:
    """A machine that is twice as slow in one round changes no ratio."""
    lines = [
        turn("jpeg", row, cost * slow, number)
        for number, slow in enumerate((1, 2))
        for row, cost in (("a", 3), ("b", 1))
    ]
    found = collect([MACHINE, *lines])["jpeg"].ratio("a", "b", cpu_ms)
    assert (found.n, found.low, found.high) == (2, 3.0, 3.0)


def test_the_bound_is_what_all_cores_allow() -> None:
    """Two cores and 1.25 ms an image are 1600 images/s; the table holds cost, bound, both ratios
    and n.
    """
    page = loader_page.show([MACHINE, *jpegs(1.25)])
    (row,) = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if "decode threads" in line
    ]
    assert row == [
        "threads",
        loader_page._OURS["threads"],
        "1.25 (1.25 to 1.25)",
        "1600",
        "1600",
        "2.80",
        "0.80",
        "2",
    ]
    assert (
        "- YES: times cheaper than pytorch/examples: at least 2.5: pytorch/examples over threads: "
        "2.8 (2.8" in page
    )


@pytest.mark.parametrize(
    ("us", "same", "expected"),
    [(3.0, 10, [True, True]), (5.0, 9, [False, False])],
    ids=["all", "none"],
)
def test_arrays_are_held_against_the_cheaper_recipe(
    us: float, same: int, expected: list[bool]
) -> None:
    """Sixty times the cheaper of no workers and workers, and every image equal."""
    equal = {
        "kind": "turn",
        "part": "arrays",
        "row": "equal",
        "round": 0,
        "images": 10,
        "same": same,
        **KEY,
    }
    costs = (("per item", 0.25), ("per item, workers", 0.2), ("arrays", us / 1e3))
    assert held(*(turn("arrays", row, cost) for row, cost in costs), equal) == expected


def test_arrays_say_what_normalising_leaves_of_it() -> None:
    """The claim names what is compared, uint8 with floats; a line of its own compares floats with
    floats.
    """
    costs = (("per item", 0.2), ("arrays", 0.002), ("arrays, normalised", 0.01))
    page = loader_page.show([MACHINE, *(turn("arrays", row, cost) for row, cost in costs)])
    assert "uint8 batches, times cheaper per core than the recipe's normalised floats" in page
    assert (
        "Normalised floats of both: per item over arrays, normalised: 20 (20 to 20), n = 1." in page
    )


@pytest.mark.parametrize(
    ("cost", "digest", "expected"),
    [(0.2, "a", [True, True]), (0.3, "b", [False, False])],
    ids=["all", "none"],
)
def test_a_cache_is_fast_and_gives_the_same_pixels(
    cost: float, digest: str, expected: list[bool]
) -> None:
    """Five times cheaper in the second pass than the feed without it, one digest for all rows;
    later passes are shown.
    """
    later = turn("cache", "", 7.0)
    rows = (("threads", 1.2, "a"), ("threads, ram", cost, digest))
    lines = [turn("cache", row, cost, digest=digest, later=later) for row, cost, digest in rows]
    assert held(*lines) == expected
    assert loader_page.show([MACHINE, *lines]).count("| 7 (7 to 7)") == 2


def trained(old: float, new: float, best: float) -> list[Line]:
    """Feeds of these costs, a step of 1 ms, and training that gives ``best`` times the images of
    the old feed's best.
    """
    rows = {
        "step alone": 1.0,
        "feed old": old,
        "feed new": new,
        "train pytorch/examples 1": 9.0,
        "train pytorch/examples 2": 6.0,
        "train threads 2": 6.0 / best,
    }
    return [turn("train", row, cost) for row, cost in rows.items()]


@pytest.mark.parametrize(
    ("old", "new", "best", "expected"),
    [
        pytest.param(3.0, 1.0, 1.9, True, id="nearly what is possible"),
        pytest.param(3.0, 1.0, 1.7, False, id="less than that"),
        pytest.param(1.5, 0.5, 1.9, False, id="the feed is not what binds"),
    ],
)
def test_training_gains_what_the_costs_allow(
    old: float, new: float, best: float, expected: bool
) -> None:
    """Against the best number of workers of the old feed, 0.9 of (L_old + T) / (L_new + T)."""
    assert held(*trained(old, new, best)) == [expected]


@pytest.mark.parametrize(
    ("cost", "expected"), [(7.0, True), (5.0, False)], ids=["the last", "one before"]
)
def test_the_best_of_the_old_feed_may_be_the_last_that_was_tried(
    cost: float, expected: bool
) -> None:
    """Then more workers might be better still, and the claim says that none were tried."""
    (claim,) = claims(*trained(3.0, 1.0, 1.9), turn("train", "train pytorch/examples 0", cost))
    assert (
        "train pytorch/examples 2 (the most workers that were tried)" in claim.figures
    ) is expected


@pytest.mark.parametrize(
    ("row", "theirs", "expected"),
    [
        ("device, fast", 490, True),
        ("device, fast", 510, False),
        ("device, slow", 1010, True),
        ("device, slow", 1030, False),
    ],
    ids=["twice", "less than twice", "as fast", "slower"],
)
def test_a_sleeping_device_gets_more_or_as_much(row: str, theirs: int, expected: bool) -> None:
    """The old feed's best number of workers counts."""
    rates = {
        "threads": 1000.0,
        "threads again": 1.0,
        "pytorch/examples 2": theirs,
        "pytorch/examples 3": 1.0,
    }
    line = {
        "kind": "turn",
        "part": "train",
        "row": row,
        "round": 0,
        "supply": 1.0,
        "demand": 1.0,
        "rates": rates,
        **KEY,
    }
    assert held(line) == [expected]


def test_start_and_memory_are_judged() -> None:
    """0.3 s to the first batch of threads and arrays; a third of what eight processes add to the
    memory of a trainer.
    """
    rows = (
        ("no loader", 0.0, 400.0),
        ("threads, 8", 0.2, 500.0),
        ("processes, 8", 1.0, 701.0),
        ("arrays", 0.4, 450.0),
    )
    lines = [
        {
            "kind": "turn",
            "part": "start",
            "row": row,
            "round": 0,
            "first_s": first_s,
            "memory_mb": memory,
            **KEY,
        }
        for row, first_s, memory in rows
    ]
    assert [(claim.text.split(":")[0], claim.holds) for claim in claims(*lines)] == [
        ("threads, 8", True), ("arrays", False),
        (("memory that 8 processes add over what 8 threads add"), True)
    ]  # fmt: skip


def test_the_index_is_judged() -> None:
    """First build, later ones by their median, and what a worker grows by."""
    readers = {
        "forkserver": {"before_mb": 100.0, "after_mb": 104.0},
        "fork": {"before_mb": 10.0, "after_mb": 11.0},
    }
    line = {
        "kind": "turn",
        "part": "index",
        "row": "index of 10 files",
        "round": 0,
        "files": 10,
        "first_s": 31.0,
        "later_s": [1.0, 1.2, 9.0],
    }
    assert held({**line, **KEY, "readers": readers}) == [False, True, True, False]


def test_the_tuner_may_miss_the_best_form_by_noise_alone() -> None:
    """One workload within 2 %, one far from the best; one that failed is none that was chosen well
    for.
    """
    choices = {"auto": "threads 2x2", "processes": "2x2", "threads": "threads 2x2"}
    costs = {"auto": 9.0}

    def line(workload: str, threads: float) -> Line:
        rates = {"threads 2x2": [threads, threads], "2x2": [100.0, 100.0]}
        means = {setting: values[0] for setting, values in rates.items()}
        found = {"choices": choices, "costs_s": costs, "rates": rates, "mean": means}
        return {"kind": "turn", "part": "tuner", "row": workload, "round": 0, **KEY, **found}

    assert held(line("a", 99.0)) == [True] and held(line("a", 99.0), line("b", 80.0)) == [False]
    (claim,) = claims(line("a", 99.0), missing("tuner", "c"))
    assert (claim.holds, claim.figures) == (False, "1 of 2 workloads, of which 1 failed")


def test_what_was_measured_in_the_end_is_not_missing() -> None:
    """A row that failed first and was measured later leaves no reason behind; the others' stand on
    the page.
    """
    page = loader_page.show(
        [MACHINE, missing("jpeg", "threads"), missing("jpeg", "FFCV"), *jpegs(1.25)]
    )
    assert "Not measured: FFCV: no module." in page and "Not measured: threads" not in page


def test_the_best_peer_is_the_best_of_those_that_were_measured() -> None:
    """How many they are is in the claim, and which are not among them."""
    text = "times cheaper than the best of {} peers{}: at least 1.3"
    assert claims(*jpegs(1.25))[1].text == text.format(
        2, " (missing: Apex, timm, torchvision v2, TorchCodec + v2, SPDL, FFCV)"
    )
    assert claims(*jpegs(1.25), *(turn("jpeg", peer, 9.0) for peer in PEERS))[
        1
    ].text == text.format(8, "")


@pytest.mark.parametrize("name", ["commit", "workers", "seconds"])
def test_a_table_holds_nothing_of_an_earlier_commit_or_other_settings(name: str) -> None:
    """What was measured last counts, and under its own name; other parts stay."""
    other = [
        {**line, name: "other"} for line in [turn("jpeg", "DALI", 0.1), missing("jpeg", "FFCV")]
    ]
    ours = [turn("jpeg", "threads", 1.0), turn("jpeg", "processes", 1.0)]
    part = collect([MACHINE, turn("cache", "threads", 1.0), ours[0], *other, ours[1]])
    assert (list(part), list(part["jpeg"].rows), part["jpeg"].missing) == (
        ["cache", "jpeg"],
        ["threads", "processes"],
        {},
    )


def test_each_table_says_of_what_it_is() -> None:
    """Commit, workers and window."""
    assert "Commit abc1234; 2 workers; windows of 3 s at least." in loader_page.show(
        [MACHINE, *jpegs(1.25)]
    )


def test_a_ratio_needs_a_round_with_both() -> None:
    """Rows of different rounds, as after a failure, are in the table and not against each other."""
    lines = [turn("jpeg", "threads", 1.0, 0), turn("jpeg", "pytorch/examples", 3.0, 1)]
    assert held(*lines) == []
    assert "| threads          |" in loader_page.show([MACHINE, *lines])


def test_a_part_without_rows_has_no_least() -> None:
    """Nothing measured is no figure."""
    assert Part().least(["threads"], cpu_ms) is None


def test_a_page_is_made_of_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page and its raw lines are written without measuring anything."""
    monkeypatch.setattr(bench_loader, "ROOT", tmp_path)
    monkeypatch.setattr(bench_loader, "PAGE", tmp_path / "page.md")
    results = Results(tmp_path / "results.jsonl")
    for line in [MACHINE, *jpegs(1.25)]:
        results.add(**line)
    assert bench_loader.main(["--table", "--write", "--results", str(results.path)]) == 0
    assert (tmp_path / "page.jsonl").read_text() == results.path.read_text()
    assert (
        "## jpeg: JPEG files at 224 pixels, beside the peers" in (tmp_path / "page.md").read_text()
    )
