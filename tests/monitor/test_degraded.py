"""Runs whose figures fail train to the end; their report leaves out what was lost."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest

from harness.cli import job
from harness.clock.figures import Tag
from harness.config import Config
from harness.monitor import monitor
from harness.monitor.device import GpuSensor, Sensor
from harness.monitor.host import Sampler
from harness.monitor.tree import Tree

Composed = Callable[..., Config]
ReportOf = Callable[..., tuple[dict[str, Any], list[str]]]
GPU_TAGS = {Tag.GPU_UTILIZATION, Tag.GPU_MEMORY_USED_BYTES, Tag.GPU_POWER_W}

pytestmark = pytest.mark.usefixtures("kept_globals")


class NVMLError(Exception):
    """What the stand-in raises, as the library does."""


def nvml(refused: tuple[str, ...] = (), fails_at: int | None = None) -> SimpleNamespace:
    """Returns a library of one GPU that refuses some calls, and fails from one reading on."""
    readings = 0

    def answer(name: str, value: object = None) -> Callable[..., object]:
        def call(*_: object) -> object:
            nonlocal readings
            readings += name == "UtilizationRates"
            if name in refused or (fails_at is not None and readings >= fails_at):
                raise NVMLError("Not Supported" if name in refused else "GPU is lost")
            return value

        return call

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_ERROR_NOT_SUPPORTED="Not Supported",
        nvmlInit=lambda: None,
        nvmlShutdown=answer("Shutdown"),
        nvmlDeviceGetCount=answer("Count", 1),
        nvmlDeviceGetHandleByIndex=str,
        nvmlDeviceGetName=str,
        nvmlSystemGetDriverVersion=answer("DriverVersion", "570.1"),
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlGpmQueryDeviceSupport=lambda handle: SimpleNamespace(isSupportedDevice=0),
        nvmlDeviceGetUtilizationRates=answer("UtilizationRates", SimpleNamespace(gpu=40)),
        nvmlDeviceGetMemoryInfo=answer("MemoryInfo", SimpleNamespace(used=2**30)),
        nvmlDeviceGetPowerUsage=answer("PowerUsage", 100_000),
    )


@pytest.fixture
def report_of(composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReportOf:
    """Runs two steps that are looked at three times before; returns report and missing figures.

    ``gpu`` asks that NVML's figures be taken, though the run is on the CPU.
    """

    def sampler(gpu: bool, sensors: Sequence[Sensor], interval_s: float) -> Sampler:
        found = Sampler([*sensors, GpuSensor("of-the-test")] if gpu else sensors, interval_s)
        for _ in range(3):
            found.look()
        return found

    def run(gpu: bool = False) -> tuple[dict[str, Any], list[str]]:
        monkeypatch.setattr(
            monitor, "Sampler", lambda sensors, interval_s: sampler(gpu, sensors, interval_s)
        )
        config = composed(
            "data=digits",
            "device=cpu",
            "loader.num_workers=0",
            "loader.batch_size=8",
            "trainer.max_steps=2",
            "trainer.num_threads=1",
        )
        job.main_worker(0, job.Job(config, tmp_path, ()))
        report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
        assert (report["status"], report["steps"]) == ("completed", 2)
        return report, re.findall(
            r"\bno (?:gpu/|host/|GPU ).*", (tmp_path / "train.log").read_text()
        )

    return run


@pytest.mark.parametrize(
    ("library", "kept", "lost"),
    [
        pytest.param(None, set(), ["GPU"], id="no NVML"),
        pytest.param(
            nvml(fails_at=2),
            GPU_TAGS,
            ["gpu/utilization", "gpu/memory_used_bytes", "gpu/power_w"],
            id="NVML fails midway",
        ),
        pytest.param(
            nvml(refused=("UtilizationRates", "PowerUsage")),
            {Tag.GPU_MEMORY_USED_BYTES},
            ["gpu/utilization", "gpu/power_w"],
            id="a MIG instance",
        ),
    ],
)
def test_nvml_costs_its_figures_and_no_more(
    report_of: ReportOf,
    monkeypatch: pytest.MonkeyPatch,
    library: SimpleNamespace | None,
    kept: set[Tag],
    lost: list[str],
) -> None:
    """The run ends as any other; the log names what was lost."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    report, missing = report_of(gpu=True)
    assert GPU_TAGS & set(report["sampled"]) <= kept
    assert Tag.RAM_USED_BYTES in report["sampled"]
    assert [text.split()[1] for text in missing if "sm_utilization" not in text] == lost


def test_without_permissions_a_run_has_no_figures_of_the_machine(
    report_of: ReportOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither psutil nor /proc may be read, the log names what is lost."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise psutil.AccessDenied(msg="hidden")

    for name in ("cpu_times", "virtual_memory", "disk_io_counters", "Process"):
        monkeypatch.setattr(psutil, name, refuse)
    monkeypatch.setattr(Tree, "_read", refuse)
    report, missing = report_of()
    tags = set(re.findall(r"host/\w+", " ".join(missing)))
    assert tags == {
        "host/cpu_fraction", "host/machine_cpu_cores", "host/ram_used_bytes",
        "host/disk_read_bytes_per_s", "host/own_cpu_cores", "host/major_faults_per_s",
        "host/own_read_bytes_per_s", "host/own_storage_bytes_per_s", "host/own_queued_threads",
    }  # fmt: skip
    assert not {*tags, "host/others_cpu_cores"} & set(report.get("sampled", {}))
    assert "ram_bytes" not in report["environment"]


def test_a_machine_without_proc_trains(
    report_of: ReportOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each file that is missing in /proc is named once, and the other figures stay."""
    whole = monitor.HostSensor
    monkeypatch.setattr(monitor, "HostSensor", lambda cores: whole(root=tmp_path / "empty"))
    report, missing = report_of()
    assert Tag.RAM_USED_BYTES in report["sampled"]
    assert not {
        tag
        for tag in report["sampled"]
        if "own_" in tag or "memory_stall" in tag or "throttled" in tag
    }
    assert len(missing) == 2
