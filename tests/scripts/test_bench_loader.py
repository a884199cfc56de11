"""The benchmark of the loaders: what it counts, that it goes there and back and on where it
stopped.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from harness.feed.interface import HostBatch
from scripts import bench_loader, loader_data, loader_measures, loader_peers, loader_runs
from scripts.bench_loader import PARTS, Row, Setup
from scripts.bench_tuner import Results
from scripts.loader_data import many_files
from scripts.loader_runs import MEASURES
from scripts.loader_turn import FailedError


def test_a_window_counts_what_comes_after_the_first_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a batch a second: two are skipped, 2.5 s ask for three more, and turns of two make four of
    it.
    """
    clock = [0.0]

    def batches() -> Iterator[int]:
        for number in count():
            clock[0] += 1.0
            yield 10 + number

    monkeypatch.setattr(loader_measures.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loader_measures, "_processor_s", lambda tree: 3 * clock[0])
    found = loader_measures.window(batches(), 2.5, skip=2, cycle=2)
    assert found == {"images": 12 + 13 + 14 + 15, "cpu_s": 12.0, "wall_s": 4.0}


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Small settings over data that nobody makes."""
    monkeypatch.setattr(bench_loader, "jpegs", lambda folder: folder / "jpeg")
    monkeypatch.setattr(bench_loader, "cifar_like", lambda folder: None)
    return Setup("abc1234", tmp_path, 2, 0.1, 10, ("cifar", "small_shm"))


@pytest.mark.parametrize("part", PARTS)
def test_every_row_can_be_asked_for(part: str, setup: Setup) -> None:
    """Names are unique, and each measurement takes the arguments that it is given."""
    rows = [*PARTS[part](setup)]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        back = {"back": True} if row.measure == "paced" else {}
        measures = {**MEASURES, "many": bench_loader.many}
        inspect.signature(measures[row.measure]).bind(
            **json.loads(json.dumps(row.arguments)), **back
        )


def test_rounds_go_there_and_back_and_on_where_they_stopped(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is noted and tried again in the next run, nothing else of that commit with these
    settings is; what is wanted once is measured once.
    """
    asked: list[str] = []
    broken = ["b"]

    def ask(measure: str, cache: str, **arguments: Any) -> dict[str, Any]:
        asked.append(measure)
        if measure in broken:
            raise FailedError("out of order.")
        return {"images": 1}

    monkeypatch.setattr(bench_loader, "ask", ask)
    monkeypatch.setitem(
        PARTS, "cache", lambda setup: iter((Row("a", "a"), Row("b", "b"), Row("c", "c", once=True)))
    )
    results = Results(tmp_path / "results.jsonl")
    assert bench_loader.run("cache", setup, 2, results, float("inf"))
    assert asked == ["a", "b", "c", "b", "a"]
    assert results.has(kind="missing", row="b", reason="out of order")
    broken.clear()
    assert not bench_loader.run("cache", setup, 2, results, 0.0)
    assert bench_loader.run("cache", setup, 2, results, float("inf"))
    assert asked[5:] == ["b", "b"]
    for name, value in (("commit", "def5678"), ("workers", 3), ("seconds", 1.0)):
        asked.clear()
        assert bench_loader.run("cache", replace(setup, **{name: value}), 1, results, float("inf"))
        assert asked == ["a", "b", "c"], name


def test_the_arguments_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown part is refused with the known ones."""
    with pytest.raises(SystemExit, match="2"):
        bench_loader.main(["--part", "jpegs"])
    assert "--part: unknown: jpegs; there are jpeg, filters, " in capsys.readouterr().err


def test_many_files_come_and_go(tmp_path: Path) -> None:
    """As many as are wanted, in folders of a thousand, each of which has one for validation; none
    stays.
    """
    with many_files(tmp_path, 1005) as root:
        files = [file.parent.parent.name for file in root.rglob("*.jpg")]
        assert (files.count("train"), files.count("val")) == (1005, 2)
    assert not any(tmp_path.iterdir())


def test_no_file_of_the_index_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is there while it is asked for, with a cache of its own, and gone when a measurement
    fails.
    """
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
    with pytest.raises(
        OSError, match="files are wanted, the file system has room for .*; set --folder or --files"
    ):
        many_files(tmp_path, 10**15).__enter__()


def test_files_have_imagenets_mean_size() -> None:
    """Of twenty sizes the common ones are as many as they are common: 461 x 396 in the mean."""
    sizes = np.array(loader_data._SIZES)
    assert sizes.mean(axis=0).tolist() == pytest.approx([461, 396], abs=1)


def test_apex_collates_pixels_as_they_are() -> None:
    """Its batch holds what torch's own would, in bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), np.uint8)
    images, labels = loader_peers._fast_collate(
        [(Image.fromarray(image), label) for label, image in enumerate(pixels)]
    )
    assert torch.equal(
        images, default_collate([torch.from_numpy(image).permute(2, 0, 1) for image in pixels])
    )
    assert labels.tolist() == [0, 1]


def test_a_missing_peer_says_how_to_have_it() -> None:
    """One whose module is not there, or not even the package that it lies in; a version that none
    can tell is no error.
    """
    peer = loader_peers.Peer(
        "", lambda root, workers: iter(()), "some-loader", "no_such_package.loader"
    )
    assert peer.missing() == "no module no_such_package.loader: add --with some-loader"
    assert peer.version() == "no_such_package.loader of a distribution that is not some-loader"
    assert loader_peers.PEERS["Apex"].missing() is None


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Small pictures, just more than a batch."""
    for split, number in (("train", 130), ("val", 2)):
        for index in range(number):
            folder = tmp_path / "tree" / split / f"class{index % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (index, 100, 200)).save(
                folder / f"{index:03d}.jpg", quality=95
            )
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


class Passes:
    """A feed of two batches a pass that says of which pass they are."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 2

    def set_epoch(self, epoch: int) -> None:
        """Note the pass."""
        self.seen.append(epoch)

    def __iter__(self) -> Iterator[HostBatch]:
        for number in range(2):
            values = torch.full((10 + number,), self.seen[-1])
            yield HostBatch(values.view(-1, 1, 1, 1), values, values)

    def close(self) -> None:
        """Nothing to end."""


def test_a_cache_is_measured_over_the_whole_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that fills it; later passes are a window of their own, and its pixels are
    digested afterwards.
    """
    feed = Passes()
    made = SimpleNamespace(train=lambda settings: feed)
    monkeypatch.setattr(loader_measures, "feeds", lambda *wanted: nullcontext((made, None)))
    monkeypatch.setattr(loader_measures, "_processor_s", lambda tree: float(feed.seen[-1]))
    found = loader_measures.passes("threads", "root", 2, 0.0, "ram")
    # begins with pass 0's last batch, ends with pass 1's
    assert (found["images"], found["cpu_s"]) == (
        21,
        1.0,
    )
    assert (found["later"]["images"], found["later"]["cpu_s"]) == (21, 1.0)
    assert feed.seen == [0, 1, 2, 1]


def test_the_way_to_the_first_batch_begins_with_a_loader_that_is_made() -> None:
    """Nothing is listed or made any more; a loader's memory is counted when its workers have made
    three batches each.
    """
    asked: list[str] = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            asked.append("iter")
            for number in count():
                asked.append(f"batch {number}")
                yield number

    found = loader_runs._started(Loader(), workers=1)
    assert asked == ["iter", *(f"batch {number}" for number in range(4))]
    assert found["first_s"] > 0 and found["memory_mb"] > 1


def test_pixels_are_held_against_pils(tree: Path, kept_globals: None) -> None:
    """Flat pictures are the same however they are resized; every image is looked at where there are
    few.
    """
    found = loader_measures.pixels(str(tree))
    assert found["images"] == 130 and found["largest"] <= 1.0
