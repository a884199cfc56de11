"""The GPU check: its parts on the CPU, on a fake CUDA, and what it makes of failures."""

import json
import os
import subprocess
import time
from pathlib import Path

import fake_cuda
import pytest
import torch

from harness.data import datasets
from harness.feed.prefetcher import DataPrefetcher
from scripts import bench_pinned_copy, gpu_check, gpu_feeds, gpu_loaders, gpu_overlap
from scripts.gpu_check import Finding, Options


@pytest.fixture
def on_cpu(tmp_path: Path) -> Options:
    return Options(None, True, tmp_path, time.monotonic() + 60)


def test_without_a_gpu_parts_run_or_say_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts that need a device name their reason, nothing fails, and both files are written."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    parts = "pytest,stall_compiled,copies,resnet50,launches,feeds,feeds_compiled,peers"
    assert gpu_check.main(["--parts", parts, "--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert [part["status"] for part in found] == ["skipped"] * 8
    assert all(part["found"].startswith("no CUDA device: ") for part in found)
    assert (tmp_path / "gpu_check.md").read_text().rstrip() == capsys.readouterr().out.rstrip()


def test_a_failing_part_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its error is recorded, the next part runs, and the exit code is 1."""

    def broken(o: Options) -> Finding:
        raise OSError("no\nspace")

    monkeypatch.setattr(gpu_check, "PARTS", {"one": broken, "two": lambda o: Finding("fine")})
    assert gpu_check.main(["--parts", "one,two", "--out", str(tmp_path)]) == 1
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert [(part["status"], part["found"]) for part in parts] == [("failed", "OSError: no space"), ("ok", "fine")]
    assert "Traceback" in capsys.readouterr().err


def test_a_wrong_result_fails_the_part(on_cpu: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that ran and found something wrong has failed, and its text says what."""
    monkeypatch.setattr(gpu_check, "PARTS", {"one": lambda o: Finding("ran", problems=["off by 2"])})
    part = gpu_check.run_part("one", on_cpu)
    assert (part["status"], part["found"]) == ("failed", "ran; off by 2")


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names what there is."""
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--parts", "stal"])
    assert "--parts: unknown: stal; there are pytest, prefetcher" in capsys.readouterr().err


@pytest.mark.parametrize("slow", ["copy", "step"])
def test_right_values_pass_and_wrong_ones_do_not(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race check is silent about a right prefetcher and names the slow side of one that gives other values."""
    cpu = torch.device("cpu")
    assert gpu_overlap.wrong_values(cpu, slow) == []
    monkeypatch.setattr(
        gpu_overlap, "DataPrefetcher", lambda *a, **k: ((i + (i.max() == 7), n) for i, n in DataPrefetcher(*a, **k))
    )
    assert gpu_overlap.wrong_values(cpu, slow) == [f"wrong values where the {slow} is slow"]


def test_copies_summarises_both_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part's code runs on a fake device and names both rates and both shares."""
    monkeypatch.setattr(bench_pinned_copy, "WORK_SIDE", 16)
    found = gpu_check.check_copies(Options(fake_cuda.install(monkeypatch), True, tmp_path, 0.0))
    assert found.summary.startswith("pageable ") and "on a side stream" in found.summary
    assert len(found.rows) == 13


def test_resnet50_reads_every_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part makes the images first, then runs without data, untuned and tuned, and reads their reports."""
    asked = []

    def train(overrides: list[str], run_folder: Path, limit_s: float) -> gpu_check.Row:
        asked.append((run_folder.name, "data=fake" in overrides, "loader.autotune=true" in overrides))
        loader = {"num_workers": 8, "pin_memory": True}
        spread = {"median": 1.0, "p95": 2.0}
        return {"images_per_s": 9.6, "step_ms": spread, "stall_fraction": 0.0, "data_wait_fraction": 0.0, "loader": loader}

    monkeypatch.setattr(gpu_check, "train", train)
    monkeypatch.setattr(datasets, "load", lambda *_: asked.append(("images", False, False)))
    found = gpu_check.check_resnet50(Options(torch.device("cpu"), True, tmp_path, 0.0))
    assert asked == [
        ("images", False, False), ("fake-0", True, False), ("untuned-0", False, False), ("tuned-0", False, True),
    ]  # fmt: skip
    assert found.summary == "images/s: fake 10, untuned 10, tuned 10"


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int | None]]:
    """What was run on a machine of one core, where SPDL fails; no image is made."""
    asked: list[tuple[list[str], int | None]] = []

    def run(arguments: list[str], limit_s: float, cores: int | None = None) -> subprocess.CompletedProcess[str]:
        asked.append((arguments[1:], cores))
        if arguments[1] == "SPDL":
            return subprocess.CompletedProcess(arguments, 3, "", "no such thing")
        rate = 1000.0 if arguments[1] == gpu_loaders.NONE else 995.0
        return subprocess.CompletedProcess(arguments, 0, f'a warning\n{{"images_per_s": {rate}, "decoder": ""}}\n', "")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(gpu_check, "_run", run)
    monkeypatch.setattr(datasets, "load", lambda *_: None)
    monkeypatch.setattr(gpu_loaders, "peers", lambda: ["pytorch/examples", "SPDL"])
    return asked


def test_loaders_run_in_processes_of_their_own(tmp_path: Path, one_core: list[tuple[list[str], int | None]]) -> None:
    """Each on the cores that it is to have; the last line that one prints is its rate, and one that fails says why."""
    found = gpu_check.check_peers(Options(torch.device("cpu"), True, tmp_path, time.monotonic() + 900))
    root = str(gpu_feeds.shapes(tmp_path, 1280).root)
    assert one_core == [([name, root, "1"], 1) for name in ("no loading", "pytorch/examples", "SPDL")]
    assert found.summary == "pytorch/examples: 1 cores reach 0.99; SPDL: none of these reach 0.99"
    assert found.problems == ["SPDL on 1 cores: gpu_loaders.py ended with 3: no such thing"]


def test_a_compiled_network_is_asked_for(tmp_path: Path, one_core: list[tuple[list[str], int | None]]) -> None:
    """Also where nothing is loaded."""
    gpu_check.check_feeds_compiled(Options(torch.device("cpu"), True, tmp_path, time.monotonic() + 900))
    assert [arguments[0] for arguments, _ in one_core] == ["no loading", "threads", "processes"]
    assert all(arguments[-1] == "--compile" for arguments, _ in one_core)


def test_a_part_without_time_is_skipped(tmp_path: Path, one_core: list[tuple[list[str], int | None]]) -> None:
    """It says how to run it, and nothing is called measured."""
    options = Options(torch.device("cpu"), True, tmp_path, time.monotonic() + 100)
    assert gpu_check.run_part("peers", options)["status"] == "skipped" and one_core == []


@pytest.mark.slow
def test_train_gives_the_report_and_says_what_failed(tmp_path: Path) -> None:
    """A small run's figures are read back; the text of a refusal is in the error."""
    tiny = ["data=fake", "data.image_size=32", "data.generate.classes=10", "data.generate.train_images=256", "trainer.epochs=9"]
    small = [*tiny, "data.generate.val_images=8", "checkpoint.enabled=false", "trainer.max_steps=9", "trainer.max_steps=3"]
    report = gpu_check.train(small, tmp_path / "run", 100)
    assert report["steps"] == 3
    assert gpu_check._figures(report)["images/s"] > 0
    with pytest.raises(RuntimeError, match="train.py ended with 2: .*loader.batch_size=0"):
        gpu_check.train(["loader.batch_size=0"], tmp_path / "refused", 100)
