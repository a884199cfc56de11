"""The benchmark of pinned copies: what it says without a GPU, and that its GPU code runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulator import EmulatedDevice, emulated
from torch.utils.data import DataLoader

from scripts import bench_pinned_copy


def test_without_a_gpu_it_says_what_it_cannot_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's memory is measured, each part that needs a GPU is
    named, and the exit code is 0.
    """
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    out = tmp_path / "copies.json"
    assert bench_pinned_copy.main(["--sizes", "1", "-n", "2", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Host memory alone" in said
    assert "cannot show\n- a: " in said and "\n- b: " in said and "\n- c: " in said
    (rows,) = json.loads(out.read_text())["tables"].values()
    assert [(row["MiB"], row["host to host ms"]["n"]) for row in rows] == [(1, 2)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(bench_pinned_copy, "WORK_SIDE", 16)
    with emulated(EmulatedDevice(), monkeypatch) as gpu:
        yield gpu.device


def test_plain_copies_has_a_row_for_each_size_and_way(device: torch.device) -> None:
    """Part a runs all five ways for every size."""
    rows = bench_pinned_copy.plain_copies(device, [1, 2], n=2)
    assert [row["MiB"] for row in rows] == [1] * 5 + [2] * 5
    assert all(row["done after ms"].n == 2 for row in rows)


def test_loop_copies_runs_every_way(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part b runs each loop over a loader, and the prefetcher's; pinning by the loader is left out
    here.
    """
    plain = {"pin_memory": False, "persistent_workers": False, "multiprocessing_context": None}
    monkeypatch.setattr(
        bench_pinned_copy, "DataLoader", lambda data, **made: DataLoader(data, **{**made, **plain})
    )
    rows = bench_pinned_copy.loop_copies(device, batch_size=1, workers=0, work_ms=0.01, n=1)
    assert len(rows) == 8
    assert all(row["batch ms"].median > 0 for row in rows)


def test_overlap_says_which_share_is_hidden(device: torch.device) -> None:
    """Part c gives a share for every way that has both the copy and the work, and none for the
    parts alone.
    """
    rows = bench_pinned_copy.overlap(device, 1, n=2)
    assert [row["hidden"].endswith("%") for row in rows] == [False] * 3 + [True] * 5
