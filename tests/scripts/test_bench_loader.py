"""The benchmark of the loaders: what it counts, how it judges, that it goes there and back and on where it stopped."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from scripts import bench_loader, loader_data, loader_measures, loader_page, loader_peers
from scripts.bench_loader import PARTS, Row, Setup
from scripts.bench_tuner import Results
from scripts.loader_data import many_files
from scripts.loader_page import Claim, Part
from scripts.loader_runs import MEASURES
from scripts.loader_turn import FailedError
from scripts.tuner_score import Line

MACHINE = {"kind": "machine", "date": "2026-01-01", "load": 0.5, "versions": ["simplejpeg 1.9.0"], "machine": {
    "cpu": "none", "usable_cores": 2.0, "cores": 2, "torch_threads": 2, "python": "3", "torch": "2", "platform": "Linux",
}}  # fmt: skip


def turn(part: str, row: str, cpu_ms: float, number: int = 0, **more: Any) -> Line:
    """A measurement of 1000 images on two busy cores."""
    return {"kind": "turn", "part": part, "row": row, "round": number, "images": 1000, "cpu_s": cpu_ms, "wall_s": cpu_ms / 2,
            **more}  # fmt: skip


def claims(*lines: Line) -> list[Claim]:
    """What the page says of the only part in ``lines``."""
    ((name, part),) = loader_page.collect([MACHINE, *lines]).items()
    return [piece for piece in loader_page.PAGES[name](part) if isinstance(piece, Claim)]


def held(*lines: Line) -> list[bool]:
    return [claim.holds for claim in claims(*lines)]


def jpegs(ours: float, error: float = 0.02) -> list[Line]:
    """Peers of known cost beside threads of ``ours`` ms an image."""
    costs = {"full decode": 1.0, "pytorch/examples": 3.5, "DALI": 1.95, "processes": 9.0, "threads": ours}
    return [turn("jpeg", row, cost, number) for row, cost in costs.items() for number in (0, 1)] + [
        {"kind": "turn", "part": "jpeg", "row": "pixels", "round": 0, "error": error, "largest": 0.1, "images": 4}
    ]


@pytest.mark.parametrize(
    ("ours", "error", "expected"),
    [
        pytest.param(1.25, 0.02, [True, True, True, True], id="all"),
        pytest.param(1.39, 0.02, [True, True, False, True], id="too far from decoding"),
        pytest.param(1.55, 0.02, [False, False, False, True], id="none"),
        pytest.param(1.25, 0.2, [True, True, True, False], id="wrong pixels"),
    ],
)
def test_jpeg_is_held_against_the_recipe_the_best_peer_and_decoding(ours: float, error: float, expected: list[bool]) -> None:
    """At least 2.5 times, 1.3 times and 0.72 of full decode, with the right pixels; the better of our forms counts."""
    assert held(*jpegs(ours, error)) == expected


def test_ratios_are_paired_by_round() -> None:
    """A machine that is twice as slow in one round changes no ratio."""
    lines = [turn("jpeg", row, cost * slow, number) for number, slow in enumerate((1, 2)) for row, cost in (("a", 3), ("b", 1))]
    found = loader_page.collect([MACHINE, *lines])["jpeg"].ratio("a", "b", loader_page.cpu_ms)
    assert (found.n, found.low, found.high) == (2, 3.0, 3.0)


def test_the_bound_is_what_all_cores_allow() -> None:
    """Two cores and 1.25 ms an image are 1600 images/s; the table holds cost, bound, both ratios and n."""
    page = loader_page.show([MACHINE, *jpegs(1.25)])
    (row,) = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "decode threads" in line]
    assert row == ["threads", loader_page._OURS["threads"], "1.25 (1.25 to 1.25)", "1600", "1600", "2.80", "0.80", "2"]
    assert "- YES: times cheaper than pytorch/examples: at least 2.5: pytorch/examples over threads: 2.8 (2.8" in page


@pytest.mark.parametrize(("us", "same", "expected"), [(3.0, 10, [True, True]), (5.0, 9, [False, False])], ids=["all", "none"])
def test_arrays_are_held_against_the_cheaper_recipe(us: float, same: int, expected: list[bool]) -> None:
    """Sixty times the cheaper of no workers and workers, and every image equal."""
    equal = {"kind": "turn", "part": "arrays", "row": "equal", "round": 0, "images": 10, "same": same}
    costs = (("per item", 0.25), ("per item, workers", 0.2), ("arrays", us / 1e3))
    assert held(*(turn("arrays", row, cost) for row, cost in costs), equal) == expected


@pytest.mark.parametrize(
    ("cost", "digest", "expected"), [(0.2, "a", [True, True]), (0.3, "b", [False, False])], ids=["all", "none"]
)
def test_a_cache_is_fast_and_gives_the_same_pixels(cost: float, digest: str, expected: list[bool]) -> None:
    """Five times cheaper than the feed without it, one digest for all rows."""
    assert held(turn("cache", "threads", 1.2, digest="a"), turn("cache", "threads, ram", cost, digest=digest)) == expected


def trained(old: float, new: float, best: float) -> list[Line]:
    """Feeds of these costs, a step of 1 ms, and training that gives ``best`` times the images of the old feed's best."""
    rows = {"step alone": 1.0, "feed old": old, "feed new": new, "train pytorch/examples 1": 9.0,
            "train pytorch/examples 2": 6.0, "train threads 2": 6.0 / best}  # fmt: skip
    return [turn("train", row, cost) for row, cost in rows.items()]


@pytest.mark.parametrize(
    ("old", "new", "best", "expected"),
    [
        pytest.param(3.0, 1.0, 1.9, True, id="nearly what is possible"),
        pytest.param(3.0, 1.0, 1.7, False, id="less than that"),
        pytest.param(1.5, 0.5, 1.9, False, id="the feed is not what binds"),
    ],
)
def test_training_gains_what_the_costs_allow(old: float, new: float, best: float, expected: bool) -> None:
    """Against the best number of workers of the old feed, 0.9 of (L_old + T) / (L_new + T)."""
    assert held(*trained(old, new, best)) == [expected]


@pytest.mark.parametrize(
    ("row", "theirs", "expected"),
    [("device, fast", 490, True), ("device, fast", 510, False), ("device, slow", 1010, True), ("device, slow", 1030, False)],
    ids=["twice", "less than twice", "as fast", "slower"],
)
def test_a_sleeping_device_gets_more_or_as_much(row: str, theirs: int, expected: bool) -> None:
    """The old feed's best number of workers counts."""
    rates = {"threads": 1000.0, "threads again": 1.0, "pytorch/examples 2": theirs, "pytorch/examples 3": 1.0}
    line = {"kind": "turn", "part": "train", "row": row, "round": 0, "supply": 1.0, "demand": 1.0, "rates": rates}
    assert held(line) == [expected]


def test_start_and_memory_are_judged() -> None:
    """0.3 s to the first batch of threads and arrays; a third of what eight processes add to the memory of a trainer."""
    rows = (("no loader", 0.0, 400.0), ("threads, 8", 0.2, 500.0), ("processes, 8", 1.0, 701.0), ("arrays", 0.4, 450.0))
    lines = [
        {"kind": "turn", "part": "start", "row": row, "round": 0, "first_s": first_s, "memory_mb": memory}
        for row, first_s, memory in rows
    ]
    assert [(claim.text.split(":")[0], claim.holds) for claim in claims(*lines)] == [
        ("threads, 8", True), ("arrays", False), ("memory that 8 processes add over what 8 threads add", True)
    ]  # fmt: skip


def test_the_index_is_judged() -> None:
    """First build, later ones by their median, and what a worker grows by."""
    readers = {"forkserver": {"before_mb": 100.0, "after_mb": 104.0}, "fork": {"before_mb": 10.0, "after_mb": 11.0}}
    line = {
        "kind": "turn",
        "part": "index",
        "row": "index",
        "round": 0,
        "files": 10,
        "first_s": 31.0,
        "later_s": [1.0, 1.2, 9.0],
    }
    assert held({**line, "readers": readers}) == [False, True, True, False]


def test_the_tuner_may_miss_the_best_form_by_noise_alone() -> None:
    """One workload within 2 %, one far from the best."""
    choices, costs = {"auto": "threads 2x2", "processes": "2x2", "threads": "threads 2x2"}, {"auto": 9.0}

    def line(workload: str, threads: float) -> Line:
        rates = {"threads 2x2": [threads, threads], "2x2": [100.0, 100.0]}
        means = {setting: values[0] for setting, values in rates.items()}
        found = {"choices": choices, "costs_s": costs, "rates": rates, "mean": means}
        return {"kind": "turn", "part": "tuner", "row": workload, "round": 0, **found}

    assert held(line("a", 99.0)) == [True] and held(line("a", 99.0), line("b", 80.0)) == [False]


def test_what_was_measured_in_the_end_is_not_missing() -> None:
    """A row that failed first and was measured later leaves no reason behind; the others' stand on the page."""
    lost = [{"kind": "missing", "part": "jpeg", "row": row, "reason": "no module"} for row in ("threads", "FFCV")]
    page = loader_page.show([MACHINE, *lost, *jpegs(1.25)])
    assert "Not measured: FFCV: no module." in page and "Not measured: threads" not in page


def test_a_window_counts_what_comes_after_the_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a batch a second: two are skipped, 2.5 s ask for three more, and turns of two make four of it."""
    clock = [0.0]

    def batches() -> Iterator[int]:
        for number in count():
            clock[0] += 1.0
            yield 10 + number

    monkeypatch.setattr(loader_measures.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loader_measures, "_processor_s", lambda tree: 3 * clock[0])
    found = loader_measures.window(batches(), skip=2, seconds=2.5, cycle=2)
    assert found == {"images": 12 + 13 + 14 + 15, "cpu_s": 12.0, "wall_s": 4.0}


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Small settings over data that nobody makes."""
    monkeypatch.setattr(bench_loader, "jpegs", lambda folder: folder / "jpeg")
    monkeypatch.setattr(bench_loader, "cifar_like", lambda folder: None)
    return Setup(tmp_path, 2, 0.1, 10, ("cifar", "small_shm"))


@pytest.mark.parametrize("part", PARTS)
def test_every_row_can_be_asked_for(part: str, setup: Setup) -> None:
    """Names are unique, and each measurement takes the arguments that it is given."""
    rows = [*PARTS[part](setup)]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        back = {"back": True} if row.measure == "paced" else {}
        measures = {**MEASURES, "many": bench_loader.many}
        inspect.signature(measures[row.measure]).bind(**json.loads(json.dumps(row.arguments)), **back)


def test_rounds_go_there_and_back_and_on_where_they_stopped(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is noted and tried again in the next run, nothing else is; what is wanted once is measured once."""
    asked: list[str] = []
    broken = ["b"]

    def ask(measure: str, cache: str, **arguments: Any) -> dict[str, Any]:
        asked.append(measure)
        if measure in broken:
            raise FailedError("out of order.")
        return {"images": 1}

    monkeypatch.setattr(bench_loader, "ask", ask)
    monkeypatch.setitem(PARTS, "cache", lambda setup: iter((Row("a", "a"), Row("b", "b"), Row("c", "c", once=True))))
    results = Results(tmp_path / "results.jsonl")
    assert bench_loader.run("cache", setup, 2, results, float("inf"))
    assert asked == ["a", "b", "c", "b", "a"]
    assert results.has(kind="missing", row="b", reason="out of order")
    broken.clear()
    assert not bench_loader.run("cache", setup, 2, results, 0.0)
    assert bench_loader.run("cache", setup, 2, results, float("inf"))
    assert asked[5:] == ["b", "b"]


def test_the_arguments_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown part is refused with the known ones."""
    with pytest.raises(SystemExit, match="2"):
        bench_loader.main(["--part", "jpegs"])
    assert "--part: unknown: jpegs; there are jpeg, arrays," in capsys.readouterr().err


def test_a_page_is_made_of_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page and its raw lines are written without measuring anything."""
    monkeypatch.setattr(bench_loader, "ROOT", tmp_path)
    monkeypatch.setattr(bench_loader, "PAGE", tmp_path / "page.md")
    results = Results(tmp_path / "results.jsonl")
    for line in [MACHINE, *jpegs(1.25)]:
        results.add(**line)
    assert bench_loader.main(["--table", "--write", "--results", str(results.path)]) == 0
    assert (tmp_path / "page.jsonl").read_text() == results.path.read_text()
    assert "## jpeg: JPEG files at 224 pixels, beside the peers" in (tmp_path / "page.md").read_text()


def test_many_files_come_and_go(tmp_path: Path) -> None:
    """As many as are wanted, in folders of a thousand, each of which has one for validation; none stays."""
    with many_files(tmp_path, 1005) as root:
        files = [file.parent.parent.name for file in root.rglob("*.jpg")]
        assert (files.count("train"), files.count("val")) == (1005, 2)
    assert not any(tmp_path.iterdir())


def test_no_file_of_the_index_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is there while it is asked for, with a cache of its own, and gone when a measurement fails."""
    asked: list[str] = []

    def ask(measure: str, cache: str, *, root: str, **arguments: Any) -> dict[str, Any]:
        asked.append(measure)
        assert (Path(root) / "train" / "c0000").is_dir() and Path(cache).parent == Path(root)
        if measure != "index":
            raise FailedError("out of order")
        return {"seconds": 1.0}

    monkeypatch.setattr(bench_loader, "ask", ask)
    with pytest.raises(FailedError):
        bench_loader.many(str(tmp_path), 3, later=2)
    assert asked == ["index", "index", "index", "index_readers"]
    assert not any(tmp_path.iterdir())


def test_more_files_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    """The line names the folder, both numbers and the way out."""
    with pytest.raises(OSError, match="files are wanted, the file system has room for .*; set --folder or --files"):
        many_files(tmp_path, 10**15).__enter__()


def test_files_have_imagenets_mean_size() -> None:
    """Evenly spread shares give the common sizes as often as they are common: 461 x 396 pixels in the mean."""
    sizes = np.array([loader_data._size((number + 0.5) / 20) for number in range(20)])
    assert sizes.mean(axis=0).tolist() == pytest.approx([461, 396], abs=1)


def test_apex_collates_pixels_as_they_are() -> None:
    """Its batch holds what torch's own would, in bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), np.uint8)
    images, labels = loader_peers._fast_collate([(Image.fromarray(image), label) for label, image in enumerate(pixels)])
    assert torch.equal(images, default_collate([torch.from_numpy(image).permute(2, 0, 1) for image in pixels]))
    assert labels.tolist() == [0, 1]


def test_a_missing_peer_says_how_to_have_it() -> None:
    """One whose module is not there, or not even the package that it lies in."""
    peer = loader_peers.Peer("", lambda root, workers: iter(()), "some-loader", "no_such_package.loader")
    assert peer.missing() == "no module no_such_package.loader: add --with some-loader"
    assert loader_peers.PEERS["Apex"].missing() is None


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Small pictures, just more than a batch."""
    for split, number in (("train", 130), ("val", 2)):
        for index in range(number):
            folder = tmp_path / "tree" / split / f"class{index % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (index, 100, 200)).save(folder / f"{index:03d}.jpg", quality=95)
    return tmp_path / "tree"


@pytest.mark.parametrize("row", ["full decode", "pytorch/examples", "Apex"])
def test_a_peer_gives_batches_without_an_end(row: str, tree: Path, kept_globals: None) -> None:
    """More of them than one pass over the files holds."""
    torch.set_num_threads(1)
    make = loader_peers.full_decode if row == "full decode" else loader_peers.PEERS[row].make
    assert [*islice(make(tree, 1 if row == "full decode" else 0), 2)] == [128, 128]


def test_our_feed_is_measured_through_the_settings(tree: Path, kept_globals: None) -> None:
    """A form is named as a user names it; its window holds whole batches."""
    found = loader_measures.form("processes", str(tree), 0, 0.0, side=32)
    assert found["images"] == 128 and found["wall_s"] > 0


def test_pixels_are_held_against_pils(tree: Path, kept_globals: None) -> None:
    """Flat pictures are the same however they are resized; every image is looked at where there are few."""
    found = loader_measures.pixels(str(tree))
    assert found["images"] == 130 and found["largest"] <= 1.0


def test_a_ratio_needs_a_round_with_both() -> None:
    """Rows of different rounds, as after a failure, are in the table and not against each other."""
    lines = [turn("jpeg", "threads", 1.0, 0), turn("jpeg", "pytorch/examples", 3.0, 1)]
    assert held(*lines) == []
    assert "| threads          |" in loader_page.show([MACHINE, *lines])


def test_a_part_without_rows_has_no_least() -> None:
    """Nothing measured is no figure."""
    assert Part().least(["threads"], loader_page.cpu_ms) is None
