"""Runs whose figures fail train to the end; their report leaves out what was lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from harness.cli import job
from harness.config import Config
from harness.monitor import monitor
from harness.monitor.device import Sensor
from harness.monitor.host import Sampler
from harness.monitor.tree import Tree


@pytest.mark.usefixtures("kept_globals")
def test_without_permissions_a_run_has_no_figures_of_the_machine(
    composed: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither psutil nor /proc may be read, the log names what is lost."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise psutil.AccessDenied(msg="hidden")

    def sampler(sensors: Sequence[Sensor], interval_s: float) -> Sampler:
        found = Sampler(sensors, interval_s)
        for _ in range(3):
            found.look()
        return found

    for name in ("cpu_times", "virtual_memory", "disk_io_counters", "Process"):
        monkeypatch.setattr(psutil, name, refuse)
    monkeypatch.setattr(Tree, "_read", refuse)
    monkeypatch.setattr(monitor, "Sampler", sampler)
    config = composed(
        "data=digits",
        "device=cpu",
        "loader.num_workers=0",
        "loader.batch_size=8",
        "trainer.max_steps=2",
        "trainer.num_threads=1",
    )
    job.main_worker(0, job.Job(config, tmp_path, ()))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["status"], report["steps"]) == ("completed", 2)
    missing = re.findall(r"(?:gpu|host)/.* disabled", (tmp_path / "train.log").read_text())
    tags = set(re.findall(r"host/\w+", " ".join(missing)))
    assert tags == {
        "host/cpu_fraction", "host/machine_cpu_cores", "host/ram_used_bytes",
        "host/disk_read_bytes_per_s", "host/own_cpu_cores", "host/major_faults_per_s",
        "host/own_read_bytes_per_s", "host/own_storage_bytes_per_s", "host/own_queued_threads",
    }  # fmt: skip
    assert not {*tags, "host/others_cpu_cores"} & set(report.get("sampled", {}))
    assert "ram_bytes" not in report["environment"]
