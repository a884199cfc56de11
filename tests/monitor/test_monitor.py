"""What a run is watched with, and the refusal of a GPU that torch cannot use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from harness.config import Config, ConfigError
from harness.monitor import monitor
from harness.monitor.device import Sensor
from harness.runtime.distributed import World

CPU = World(0, 1, 0, 1, torch.device("cpu"))


def test_a_gpu_that_torch_cannot_use_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names driver, GPU and build; device=cpu, a hidden GPU or none goes on."""
    monkeypatch.setattr(monitor, "nvml_sees_gpu", lambda: ("550.54", ["NVIDIA Test GPU"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"device=auto: the driver \(550\.54\) has NVIDIA Test GPU, but torch .* device=cpu",
    ):
        monitor.refuse_hidden_gpu(Config())
    monitor.refuse_hidden_gpu(Config(device="cpu"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monitor.refuse_hidden_gpu(Config())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(monitor, "nvml_sees_gpu", lambda: None)
    monitor.refuse_hidden_gpu(Config())


@pytest.mark.parametrize(
    ("world", "known"),
    [(CPU, True), (World(0, 2, 0, 2, torch.device("cpu")), False)],
    ids=["one", "two"],
)
def test_ranks_of_one_machine_are_no_strangers(
    world: World, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others take is looked at where there is one rank."""
    asked = []
    monkeypatch.setattr(monitor, "HostSensor", lambda cores: asked.append(cores) or Sensor())
    with monitor.watched(Config(), world, tmp_path, 0.0):
        pass
    assert [cores is not None for cores in asked] == [known]


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    """Other ranks have a clock and nothing else; no thread is left behind the block."""
    before = threading.active_count()
    with monitor.watched(Config(), World(1, 2, 1, 2, torch.device("cpu")), tmp_path, 0.0) as watch:
        assert (watch.writer, watch.sampler) == (None, None)
    with monitor.watched(Config(), CPU, tmp_path, 0.0) as watch:
        assert watch.writer is not None
        assert watch.sampler is not None
    assert threading.active_count() == before
