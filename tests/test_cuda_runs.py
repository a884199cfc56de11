"""Whole runs on CUDA: tuned before training, fed from a side stream, with the GPU's figures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from archives import write_cifar10
from commands import python, ran, run_here, trained
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.config import Config
from harness.runtime.accelerator import Cuda
from harness.training.engine import Engine
from harness.tuning import tuner

pytestmark = [
    pytest.mark.cuda_order,
    pytest.mark.usefixtures("kept_globals"),
    pytest.mark.timeout(300),
]

# of each window
TAGS = {
    *(f"gpu/{name}" for name in ("utilization", "memory_used_bytes", "power_w")),
    *(f"time/{name}_ms/median" for name in ("step", "data_wait", "copy", "compute")),
    "stall/data_fraction",
    "stall/data_wait_fraction",
}
# steps that take longer than watch.sample_s, so that each window has a sample
WINDOW = 50


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The user's sentence, with a small archive in the place of the published one."""
    root = tmp_path_factory.mktemp("cifar")
    md5 = write_cifar10(root, rows=320)
    return [
        "data=cifar10", "loader.autotune=true", f"data.root={root}", f"data.md5={md5}",
        "model=small", "trainer.epochs=1",
        "loader.batch_size=16", "tuner.budget_s=2", f"watch.window_steps={WINDOW}",
        "watch.sample_s=0.1",
    ]  # fmt: skip


def check(folder: Path, steps: int) -> None:
    """Checks that a run has tuned, and has logged the tags in each of its windows."""
    report = json.loads((folder / "report.json").read_text())
    assert (report["status"], report["steps"]) == ("completed", steps)
    assert report["tuning"]["seconds"] > 0
    # seen from the device's own events
    assert report["stall_basis"] == "device"
    events = EventAccumulator(str(folder)).Reload()
    for tag in TAGS:
        logged = {event.step for event in events.Scalars(tag)}
        assert logged >= {*range(WINDOW, steps + 1, WINDOW)}, tag
    assert max(event.value for event in events.Scalars("gpu/utilization")) > 0


@pytest.fixture
def made_up() -> None:
    """GPUs as a test wants them."""
    if "LD_PRELOAD" not in os.environ:
        pytest.skip("the GPUs are real")


@pytest.mark.slow
@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        pytest.param(
            {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_TENANTS": "0:1:30:60,1:2:20:10"},
            "cuda:2",
            id="idle",
        ),
        pytest.param({"FAKE_CUDA_MAJOR": "7"}, "ConfigError", id="without kernels"),
    ],
)
def test_a_run_takes_a_gpu_that_it_can_use(gpus: dict[str, str], expected: str) -> None:
    """As NVML tells of tenants, and torch of its kernels."""
    code = """from harness.runtime import distributed, errors
try:
    print(distributed.choose_device("auto", 0, 1, distributed.gpus_for(1)))
except errors.ConfigError as error:
    print(type(error).__name__)"""
    done = python(code, **gpus)
    assert done.stdout.split() == [expected], done.stderr


def test_a_tuned_run_trains_from_the_side_stream(
    overrides: list[str],
    composed: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stage ends before the first step; a prefetcher's copies never go to the loop's stream."""
    seen: list[str] = []

    def traced(owner: Any, name: str, told: Callable[..., str]) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            seen.append(told(*arguments))
            done = function(*arguments, **named)
            seen.append(f"{name} ends")
            return done

        monkeypatch.setattr(owner, name, call)

    def stream(own: Cuda, _: Any) -> str:
        return "side" if own.stream() == own.side_stream() else "current"

    traced(tuner, "tuned", lambda *_: "tuned")
    traced(Engine, "fit", lambda *_: "fit")
    traced(Engine, "_one_step", lambda *_: "step")
    traced(Cuda, "copy", stream)
    run_here(composed(*overrides), tmp_path)
    tuned, fit, first = (seen.index(name) for name in ("tuned ends", "fit", "step"))
    assert seen[0] == "tuned" and tuned < fit < first
    last = len(seen) - 1 - seen[::-1].index("step")
    assert seen.count("step") == 100
    assert seen[first:last].count("side") >= 90 and "current" not in seen[fit:last]
    check(tmp_path, 100)


@pytest.mark.slow
def test_a_sweep_of_tuned_runs(overrides: list[str], tmp_path: Path) -> None:
    done = trained(tmp_path, *overrides, "-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    for name in ("0", "1"):
        check(tmp_path / name, 100)


@pytest.mark.slow
@pytest.mark.usefixtures("made_up")
def test_two_ranks_have_a_gpu_each(overrides: list[str], tmp_path: Path) -> None:
    """Started by torchrun; the figures are those of the first rank's GPU."""
    torchrun = (Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=2")
    done = ran(
        *torchrun, "train.py", *overrides, "dist.backend=gloo", f"hydra.run.dir={tmp_path}",
        FAKE_CUDA_DEVICES="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(tmp_path, 50)
