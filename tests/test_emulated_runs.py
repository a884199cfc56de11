"""Whole runs of train.py on an emulated GPU with real workers, feeds, steps and reports.

Kernels are made up and time is real: figures are compared by what no other program can change.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import samples
from emulator import EmulatedDevice, emulated
from torch import Tensor, nn

from harness.cli import job
from harness.clock.figures import Tag
from harness.config import Config, ModelConfig
from harness.data import datasets
from harness.monitor.host import HostSensor
from harness.report import evidence
from harness.training import engine, models
from harness.training.evaluate import Evaluation
from harness.training.evaluate import evaluate as engine_evaluate
from scripts.bench.watch import planted_data

BATCH = 64
SIDE = 16
STEP_S = 50e-3
SMALL = (
    f"data.image_size={SIDE}",
    f"loader.batch_size={BATCH}",
    "trainer.epochs=2",
    "trainer.num_threads=1",
)
FORMS = {
    "processes": ("loader.backend=processes", "loader.num_workers=2"),
    "threads": ("loader.backend=threads", "loader.num_workers=1"),
    "arrays": ("loader.backend=arrays",),
    "made on the device": (
        "data=fake", "data.generate.classes=10", "data.generate.train_images=1280",
        "data.generate.val_images=64",
    ),
}  # fmt: skip
Run = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("kept_globals")


class Network(nn.Module):
    """One layer, which learns, and the kernels of a large network."""

    def __init__(self, device: EmulatedDevice, step_s: float, classes: int, side: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * side**2, classes)
        self._device, self._step_s = device, step_s

    def forward(self, images: Tensor) -> Tensor:
        self._device.launch(self._step_s, launch_s=5e-3, kernels=4)
        result: Tensor = self.layer(images.flatten(1))
        return result


@pytest.fixture
def run(
    composed: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Runs on a device; the report. Nothing that a run starts is left behind."""

    def run(
        *overrides: str, step_s: float = STEP_S, seen: bool = False, **device_is: float
    ) -> dict[str, Any]:
        device = EmulatedDevice(**device_is)  # type: ignore[arg-type]

        def build(model: ModelConfig, classes: int, *, image_size: int, filled: bool) -> Network:
            return Network(device, step_s, classes, image_size)

        def evaluate(*given: Any) -> Evaluation:
            result = engine_evaluate(*given)
            # to read of a GPU is to wait for it; this one's tensors are there at once
            device.synchronize()
            return result

        monkeypatch.setattr(engine, "evaluate", evaluate)
        if not seen:  # this machine's other programs
            monkeypatch.setattr(evidence, "taken", lambda sampled: None)
        monkeypatch.setattr(models, "build", build)
        folder = tmp_path / "run"
        folder.mkdir()
        config = composed("data=digits", *SMALL, *overrides)
        with emulated(device, monkeypatch):
            job.main_worker(0, job.Job(config, folder, ()))
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        assert report["status"] == "completed"
        return report

    # other tests' errors may still hold what they had
    before = {*threading.enumerate(), *samples.left_behind()}
    yield run
    assert samples.comes_true(lambda: {*threading.enumerate(), *samples.left_behind()} <= before)


def slow_files(monkeypatch: pytest.MonkeyPatch, read_s: float) -> None:
    slow = planted_data.images(planted_data.SlowDisk(read_s))
    monkeypatch.setattr(datasets, "load", lambda *_: slow)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_with_a_fast_loader_is_the_devices(run: Run, tmp_path: Path, form: str) -> None:
    """By the device's clock, with its memory; steps are as long as the device's."""
    report = run(*FORMS[form])
    assert report["stall_basis"] == "device"
    assert sum(report["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert report["step_ms"]["median"] > 900 * STEP_S
    peaks = report["gpu_memory"]
    assert (
        form == "made on the device"
        or 0 < peaks["training_bytes"] <= peaks["reserved_bytes"] < peaks["total_bytes"]
    )
    assert (tmp_path / "run/report.html").exists()
    assert (tmp_path / "run/checkpoints/last.pt").exists()


@pytest.mark.parametrize("ahead", [True, False])
def test_copies_that_take_longer_than_steps_are_a_stall(run: Run, ahead: bool) -> None:
    """Beside the step, or before it without ``loader.device_prefetch``."""
    slow = BATCH * 3 * SIDE**2 / (1.5 * STEP_S)
    prefetch = f"loader.device_prefetch={str(ahead).lower()}"
    report = run(*FORMS["threads"], prefetch, pinned_per_s=slow)
    assert report["shares"]["exposed_copy"] > 0.2
    assert report["verdict"]["bottleneck"] == "copy"


def test_a_loader_that_is_too_slow_is_a_stall(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that read half as fast as the device trains cost half of the time at least."""
    slow_files(monkeypatch, 4 * STEP_S / BATCH)
    report = run(*FORMS["processes"], "trainer.max_steps=25", "checkpoint.enabled=false")
    assert report["stall_fraction"] > 0.4
    assert report["verdict"]["bottleneck"] in ("storage", "workers")


def test_a_tuned_run_ends_with_an_answer(run: Run, tmp_path: Path) -> None:
    """Whether its budget ended the search stands in ``tuning.json``."""
    run(
        "loader.autotune=true", "tuner.budget_s=4", "tuner.live=false", "trainer.max_steps=60",
        "trainer.epochs=9", step_s=20e-3,
    )  # fmt: skip
    tuning = json.loads((tmp_path / "run/tuning.json").read_text())
    assert tuning["complete"] in (True, False) and tuning["settings"]["num_workers"] >= 0


@pytest.mark.slow
def test_threads_follow_the_devices_stall(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads where the device waits for late files."""
    slow_files(monkeypatch, 4e-3)
    report = run(
        *FORMS["threads"], "loader.autotune=true", "tuner.budget_s=0.1", "tuner.live=true",
        "trainer.max_steps=60", "trainer.epochs=20", "checkpoint.enabled=false", step_s=20e-3,
    )  # fmt: skip
    assert report["tuning"]["changes"][0]["before"] == 1 < report["loader"]["num_workers"]


def test_an_update_of_two_batches_takes_two_batches(run: Run) -> None:
    report = run(*FORMS["threads"], "trainer.accumulate_steps=2")
    assert report["steps"] == 2 * 11
    assert report["step_ms"]["median"] > 2 * 900 * STEP_S


def test_neighbours_that_do_no_harm_are_not_accused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have most of the processors and threads wait, yet the device is busy."""
    seen = {Tag.OTHERS_CPU_CORES: 1.5, Tag.QUEUED_THREADS: 1.2, Tag.CPU_CORES: 0.4}
    monkeypatch.setattr(HostSensor, "sample", lambda source: dict(seen))
    report = run(*FORMS["threads"], seen=True)
    assert report["sampled"][Tag.OTHERS_CPU_CORES] == 1.5
    assert report["verdict"]["bottleneck"] != "neighbours"
