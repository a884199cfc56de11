"""The GPU check: its parts on the CPU, on a fake CUDA, and what it makes of failures."""

import json
import threading
import time
from pathlib import Path

import fake_cuda
import pytest
import torch

from harness.feed.prefetcher import DataPrefetcher
from harness.watch.clock import StepClock
from scripts import bench_pinned_copy, gpu_check
from scripts.gpu_check import Finding, Options


@pytest.fixture
def on_cpu(tmp_path: Path) -> Options:
    return Options(None, True, tmp_path, time.monotonic() + 60)


def test_without_a_gpu_parts_run_or_say_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts that need a device name their reason, nothing fails, and both files are written."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main(["--parts", "pytest,stall_compiled,copies,resnet50", "--quick", "--out", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert [part["status"] for part in parts] == ["skipped"] * 4
    assert all(part["found"].startswith("no CUDA device: ") for part in parts)
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
    assert gpu_check._wrong_values(cpu, slow) == []
    monkeypatch.setattr(
        gpu_check, "DataPrefetcher", lambda *a, **k: ((i + (i.max() == 7), n) for i, n in DataPrefetcher(*a, **k))
    )
    assert gpu_check._wrong_values(cpu, slow) == [f"wrong values where the {slow} is slow"]


class Mark:
    """An event of an ``InOrder`` device."""

    def __init__(self, device: "InOrder") -> None:
        self.device, self.at = device, 0.0

    def record(self, stream: object = None) -> None:
        self.at = max(self.device.device_s, self.device.host_s)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end_event: "Mark") -> float:
        return 1e3 * (end_event.at - self.at)


class InOrder:
    """A device without a thread and a clock that moves when told: work is done at once, in turn, on a time line of its own."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0

    def event(self) -> Mark:
        return Mark(self)

    def work(self, seconds: float) -> None:
        self.device_s = max(self.device_s, self.host_s) + seconds

    def wait(self) -> None:
        self.host_s = max(self.host_s, self.device_s)


@pytest.mark.parametrize(("blind", "problems"), [(False, 0), (True, 1)], ids=["clock", "blind-clock"])
def test_stalls_are_compared_with_the_differential_method(blind: bool, problems: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that keeps exact time the clock agrees, and a clock that is told of no wait is found out."""
    device = InOrder()

    def batches(sleep_s: float, count: int, clock: StepClock) -> object:
        for _ in range(count):
            device.host_s += sleep_s
            yield None

    rig = gpu_check.Rig(
        clock=lambda: StepClock("cpu", event=device.event, now=lambda: 0.0 if blind else device.host_s),
        batches=batches,  # type: ignore[arg-type]
        launch=lambda batch: device.work(0.01),
        wait=device.wait,
    )
    monkeypatch.setattr(time, "perf_counter", lambda: device.host_s)
    found = gpu_check.compare_stalls(rig, 20, tolerance=0.01)
    assert len(found.problems) == problems
    # 20 steps of 10 ms; batches of 5 ms wait twice, at the windows' ends, the others always, and there for the device too
    assert [row["differential"] for row in found.rows] == ["0.048", "0.375", "0.524", "0.756"]


def test_the_emulated_device_runs_beside_the_host() -> None:
    """Launching returns at once, waiting takes the steps' time, and events give it."""
    rig = gpu_check.emulated_rig(step_s=0.02)
    before = threading.active_count()
    begin = time.perf_counter()
    for _ in range(3):
        rig.launch(None)
    launched = time.perf_counter() - begin
    rig.wait()
    assert launched < 0.02
    assert time.perf_counter() - begin >= 0.06
    assert threading.active_count() == before


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
    found = gpu_check.check_resnet50(Options(torch.device("cpu"), True, tmp_path, 0.0))
    assert asked == [
        ("made", False, False), ("fake-0", True, False), ("untuned-0", False, False), ("tuned-0", False, True),
    ]  # fmt: skip
    assert found.summary == "images/s: fake 10, untuned 10, tuned 10"


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
