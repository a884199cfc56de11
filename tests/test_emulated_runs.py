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
from harness.config import Config, ModelConfig
from harness.report import evidence
from harness.training import engine, models
from harness.training.evaluate import Evaluation
from harness.training.evaluate import evaluate as engine_evaluate

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

    def __init__(self, device: EmulatedDevice, classes: int, side: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * side**2, classes)
        self._device = device

    def forward(self, images: Tensor) -> Tensor:
        self._device.launch(STEP_S, launch_s=5e-3, kernels=4)
        result: Tensor = self.layer(images.flatten(1))
        return result


@pytest.fixture
def run(
    composed: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Runs on a device; the report. Nothing that a run starts is left behind."""

    def run(*overrides: str, **device_is: float) -> dict[str, Any]:
        device = EmulatedDevice(**device_is)  # type: ignore[arg-type]

        def build(model: ModelConfig, classes: int, **how: Any) -> Network:
            return Network(device, classes, how["image_size"])

        def evaluate(*given: Any) -> Evaluation:
            result = engine_evaluate(*given)
            # to read of a GPU is to wait for it; this one's tensors are there at once
            device.synchronize()
            return result

        monkeypatch.setattr(engine, "evaluate", evaluate)
        # this machine's other programs
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


@pytest.mark.parametrize(
    "form",
    [
        "threads",
        *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form != "threads"),
    ],
)
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


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_copies_that_take_longer_than_steps_are_a_stall(run: Run, ahead: bool) -> None:
    """Beside the step, or before it without ``loader.device_prefetch``."""
    slow = BATCH * 3 * SIDE**2 / (1.5 * STEP_S)
    prefetch = f"loader.device_prefetch={str(ahead).lower()}"
    report = run(*FORMS["threads"], prefetch, pinned_per_s=slow)
    assert report["shares"]["exposed_copy"] > 0.2
    assert report["verdict"]["bottleneck"] == "copy"


def test_an_update_of_two_batches_takes_two_batches(run: Run) -> None:
    report = run(*FORMS["threads"], "trainer.accumulate_steps=2")
    assert report["steps"] == 2 * 11
    assert report["step_ms"]["median"] > 2 * 900 * STEP_S
