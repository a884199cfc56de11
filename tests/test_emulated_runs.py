"""Whole runs of train.py on an emulated GPU, by the wall clock: real workers, feeds, steps and
reports; made-up kernels.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import planted_data
import pytest
import samples
from emulator import EmulatedDevice, emulated
from torch import Tensor, nn

from harness import job
from harness.config import Config, ModelConfig
from harness.data import datasets
from harness.training import engine, models
from harness.training.evaluate import Evaluation
from harness.training.evaluate import evaluate as engine_evaluate
from harness.tuning.session import Tuned
from harness.watch import evidence
from harness.watch.figures import Tag
from harness.watch.host import HostSource

Composed = Callable[..., Config]
BATCH = 64
SIDE = 16
STEP_S = 50e-3
LAUNCH_S = 5e-3
KERNELS = 4
TAKES = BATCH / STEP_S  # images/s of the device
SMALL = (
    f"data.image_size={SIDE}",
    f"loader.batch_size={BATCH}",
    "trainer.epochs=2",
    "trainer.num_threads=1",
)

pytestmark = [
    pytest.mark.usefixtures("kept_globals"),
    # by the wall clock: another program on the machine may spoil a run
    pytest.mark.flaky(reruns=2),
]


class Network(nn.Module):
    """One layer, which learns, and the kernels of a large network."""

    def __init__(self, device: EmulatedDevice, step_s: float, classes: int, side: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * side**2, classes)
        self._device, self._step_s = device, step_s

    def forward(self, images: Tensor) -> Tensor:
        self._device.launch(self._step_s, LAUNCH_S, KERNELS)
        result: Tensor = self.layer(images.flatten(1))
        return result


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs on a device; the report. Nothing that a run starts is left behind."""

    def run(
        *overrides: str,
        device: EmulatedDevice | None = None,
        step_s: float = STEP_S,
        seen: bool = False,
    ) -> dict[str, Any]:
        device = device or EmulatedDevice()

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
        config = composed("data=digits", *SMALL, *overrides)
        folder = tmp_path / "run"
        folder.mkdir()
        with emulated(device, monkeypatch):
            job.main_worker(0, job.Job(config, folder, ()))
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        assert report["status"] == "completed"
        return report

    # other tests' errors may still hold what they had
    before = {*threading.enumerate(), *samples.left_behind()}
    yield run
    assert samples.comes_true(lambda: {*threading.enumerate(), *samples.left_behind()} <= before)


FORMS = {
    "processes": ("loader.backend=processes", "loader.num_workers=2"),
    "threads": ("loader.backend=threads", "loader.num_workers=1"),
    "arrays": ("loader.backend=arrays",),
    "made on the device": (
        "data=fake", "data.generate.classes=10", "data.generate.train_images=1280",
        "data.generate.val_images=64",
    ),
}  # fmt: skip


def log(folder: Path) -> str:
    """The run's log."""
    return (folder / "run/train.log").read_text()


@pytest.mark.parametrize("form", FORMS)
def test_a_run_with_a_fast_loader_is_the_devices(run: Run, tmp_path: Path, form: str) -> None:
    """The device's own rate, its clock, its memory, the page, and a verdict that the network sets
    the pace.
    """
    report = run(*FORMS[form])
    assert (report["stall_basis"], report["verdict"]["bottleneck"]) == ("device", "compute")
    assert sum(report["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert report["images_per_s"] == pytest.approx(TAKES, rel=0.1)
    peaks = report["gpu_memory"]
    assert (
        form == "made on the device"
        or 0 < peaks["training_bytes"] <= peaks["reserved_bytes"] < peaks["total_bytes"]
    )
    assert report["verdict"]["sentence"] in (tmp_path / "run/report.html").read_text()
    assert (tmp_path / "run/checkpoints/last.pt").exists()
    assert "WARNING" not in log(tmp_path)


@pytest.mark.parametrize("backend", [pytest.param("processes", marks=pytest.mark.slow), "threads"])
def test_copies_that_take_longer_than_steps_are_a_stall(run: Run, backend: str) -> None:
    """A third of the time where a copy takes half as long again as a step."""
    device = EmulatedDevice(pinned_per_s=BATCH * 3 * SIDE**2 / (1.5 * STEP_S))
    report = run(f"loader.backend={backend}", "loader.num_workers=1", device=device)
    assert report["stall_fraction"] == pytest.approx(1 / 3, abs=0.1)
    assert report["verdict"]["bottleneck"] == "copy"


@pytest.mark.parametrize("backend", ["processes", pytest.param("threads", marks=pytest.mark.slow)])
def test_a_loader_that_is_too_slow_is_a_stall(
    run: Run, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Of two workers that read half as fast as the device trains: what the device lost, by its own
    rate, is the stall.
    """
    read_s = 2 * 2 / TAKES
    monkeypatch.setattr(
        datasets, "load", lambda *_: planted_data.images(planted_data.SlowDisk(read_s))
    )
    report = run(
        f"loader.backend={backend}",
        "loader.num_workers=2",
        "trainer.max_steps=25",
        "checkpoint.enabled=false",
    )
    assert (
        0.4
        < report["stall_fraction"]
        == pytest.approx(1 - report["images_per_s"] / TAKES, abs=0.05)
    )
    assert report["verdict"]["bottleneck"] in ("storage", "workers")


@pytest.mark.parametrize(
    "read_s",
    [
        pytest.param(0.0, id="images at hand"),
        pytest.param(1e-3, id="slow disk", marks=pytest.mark.slow),
    ],
)
def test_a_tuned_run_ends_with_an_answer_that_holds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_s: float
) -> None:
    """A search that its budget ends says so; with images at hand the device then waits as little as
    was predicted.
    """
    found: list[Tuned] = []
    monkeypatch.setattr(
        "harness.tuning.session.Tuned",
        lambda *given, **more: found.append(Tuned(*given, **more)) or found[-1],
    )
    if read_s:
        monkeypatch.setattr(
            datasets, "load", lambda *_: planted_data.images(planted_data.SlowDisk(read_s))
        )
    run(
        "loader.autotune=true",
        "tuner.budget_s=4",
        "tuner.live=false",
        "trainer.max_steps=110",
        "trainer.epochs=9",
        step_s=20e-3,
    )
    tuning = json.loads((tmp_path / "run/tuning.json").read_text())
    assert tuning["complete"] != ("the time was over" in log(tmp_path))
    assert [tuned.checked for tuned in found] == [True]
    if not read_s:  # the made-up disk's sleeps last longer where this machine has other work
        assert "WARNING" not in log(tmp_path)


@pytest.mark.parametrize(
    ("read_s", "follows"),
    [
        pytest.param(0.0, False, id="device full"),
        pytest.param(4e-3, True, id="late files", marks=pytest.mark.slow),
    ],
)
def test_threads_follow_the_devices_stall(
    run: Run, monkeypatch: pytest.MonkeyPatch, read_s: float, follows: bool
) -> None:
    """More threads where the device waits for late files, and no change where the host waits for
    the device.
    """
    if read_s:
        monkeypatch.setattr(
            datasets, "load", lambda *_: planted_data.images(planted_data.SlowDisk(read_s))
        )
    chosen = (
        "loader.backend=threads",
        "loader.num_workers=1",
        "loader.autotune=true",
        "tuner.budget_s=0.1",
    )
    follow = (
        *chosen,
        "tuner.live=true",
        "trainer.max_steps=60",
        "trainer.epochs=20",
        "checkpoint.enabled=false",
    )
    report = run(*follow, step_s=20e-3)
    changes = report["tuning"].get("changes", [])
    assert [change["before"] for change in changes[:1]] == [1] * follows
    assert (report["loader"]["num_workers"] > 1) == follows


def test_an_update_of_two_batches_takes_two_batches(run: Run) -> None:
    """Half as many steps, each of them twice as long, and as many images/s."""
    report = run("loader.backend=threads", "loader.num_workers=1", "trainer.accumulate_steps=2")
    assert report["steps"] == 2 * 11
    assert report["step_ms"]["median"] == pytest.approx(2e3 * STEP_S, rel=0.1)
    assert report["images_per_s"] == pytest.approx(TAKES, rel=0.1)
    assert report["verdict"]["bottleneck"] == "compute"


def test_without_a_thread_copies_are_exposed(run: Run) -> None:
    """Where each batch is moved when it is asked for, its copy is a stall, and nothing else is."""
    device = EmulatedDevice(pinned_per_s=BATCH * 3 * SIDE**2 / (0.5 * STEP_S))
    report = run(
        "loader.backend=threads",
        "loader.num_workers=1",
        "loader.device_prefetch=false",
        device=device,
    )
    assert report["shares"]["exposed_copy"] == pytest.approx(1 / 3, abs=0.07)
    assert report["images_per_s"] == pytest.approx(TAKES / 1.5, rel=0.1)
    assert report["verdict"]["bottleneck"] == "copy"


@pytest.mark.parametrize("queued", [0.05, 1.2], ids=["no thread waits", "threads wait"])
def test_neighbours_that_do_no_harm_are_not_accused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: float
) -> None:
    """Others have most of the processors, and the device is busy all the same."""
    seen = {Tag.OTHERS_CPU_CORES: 1.5, Tag.QUEUED_THREADS: queued, Tag.CPU_CORES: 0.4}
    monkeypatch.setattr(HostSource, "sample", lambda source: dict(seen))
    report = run(*FORMS["threads"], seen=True)
    assert report["sampled"][Tag.OTHERS_CPU_CORES] == 1.5
    assert report["verdict"]["bottleneck"] == "compute"
    assert "other programs" not in log(tmp_path).lower()
