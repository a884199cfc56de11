"""What goes to Weights & Biases, and that training goes on whatever the service does."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.cli import job
from harness.config import Config, ConfigError, Wandb
from harness.monitor import wandb_writer
from harness.monitor.wandb_writer import WandbWriter
from harness.monitor.writer import RunWriter


class Service(ModuleType):
    """Stands for the package: keeps what it is told, and fails or hangs where it is asked to."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.trouble: Callable[[str], object] = lambda call: None
        self.step = 0
        self.logged_in = True
        self.url: str | None = None
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] = {}
        self.ended: list[int] = []
        self.Settings = SimpleNamespace
        self.Image = lambda pixels, caption: (pixels.shape, caption)

    def setup(self, settings: Any) -> None:
        self.trouble("setup")

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt
        return self.logged_in

    def init(self, **given: Any) -> Service:
        self.trouble("init")
        self.inits.append(given)
        self.id = given["id"] or f"made{len(self.inits)}"
        last = given["dir"] / "wandb" / "latest-run"
        last.parent.mkdir(exist_ok=True)
        last.unlink(missing_ok=True)
        last.symlink_to(f"offline-run-20261124_130000-{self.id}")
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.trouble("log")
        self.step = step
        self.logged.append((step, figures))

    def finish(self, exit_code: int) -> None:
        self.trouble("finish")
        self.ended.append(exit_code)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """The package, as a run imports it."""
    made = Service()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def settings(mode: Wandb = Wandb.offline) -> Config:
    config = Config()
    config.watch.wandb = mode
    return config


def writer(folder: Path, mode: Wandb = Wandb.offline, resumed: int | None = None) -> RunWriter:
    writer = WandbWriter(folder, settings(mode), resumed is not None)
    return RunWriter(folder, tensorboard=False, resumed_step=resumed, wandb=writer)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_figures_images_text_and_report_arrive(service: Service, tmp_path: Path) -> None:
    """Windows and images as history, text and the report as summary; the run has the folder's name
    and all settings, its files are in the folder, and it ends well.
    """
    with writer(tmp_path) as written:
        written.scalars(10, {"train/loss": 0.5, "val/top1": None})
        written.scalars(10, {"val/top1": 0.25}, epoch=1)
        written.images("val/mistakes", np.zeros((2, 3, 4, 5), np.uint8), ["cat", "dog"])
        written.text("verdict", ["Storage-bound.", "Try: threads."])
        written.report({"top1": 0.25, "verdict": {"bottleneck": "storage"}})
    assert service.logged == [
        (10, {"train/loss": 0.5}),
        (10, {"val/top1": 0.25}),
        (10, {"val/mistakes": [((4, 5, 3), "cat"), ((4, 5, 3), "dog")]}),
    ]
    assert service.summary == {
        "text/verdict": "Storage-bound.\nTry: threads.",
        "top1": 0.25,
        "verdict": {"bottleneck": "storage"},
    }
    (init,) = service.inits
    assert (init["name"], init["dir"], init["mode"]) == (tmp_path.name, tmp_path, "offline")
    assert init["config"]["optim"]["lr"] == 0.1
    assert init["resume"] is None
    assert init["settings"].console == "off"
    assert service.ended == [0]


def test_a_run_that_goes_on_goes_on_there(service: Service, tmp_path: Path) -> None:
    """By what W&B left in the folder; steps that are there already are not sent again. A run that
    begins again in a folder, or goes on in another one, is a new one.
    """
    for resumed, folder in ((None, "x"), (20, "x"), (None, "x"), (20, "y")):
        (tmp_path / folder).mkdir(exist_ok=True)
        service.logged = []
        with writer(tmp_path / folder, resumed=resumed) as written:
            for step in (10, 30) if resumed is None else (25, 30, 35):
                written.scalars(step, {"train/loss": 1.0})
        if resumed is not None and folder == "x":
            assert [step for step, _ in service.logged] == [30, 35]
        service.step = 0 if folder == "y" or resumed is not None else 30
    given = [(init["id"], init["resume"]) for init in service.inits]
    assert given == [(None, None), ("made1", "allow"), (None, None), (None, None)]


def test_an_error_is_told_there(service: Service, tmp_path: Path) -> None:
    """A run that a signal or an error ends has not ended well."""
    with pytest.raises(KeyboardInterrupt), writer(tmp_path):
        raise KeyboardInterrupt
    assert service.ended == [1]


@pytest.mark.parametrize("call", ["setup", "init", "log", "finish"])
def test_what_fails_there_is_one_warning(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Whatever fails, the files are whole and nothing is raised."""

    def fail(name: str) -> None:
        if name == call:
            raise RuntimeError("connection\nrefused")

    service.trouble = fail
    with writer(tmp_path) as written:
        for step in (10, 20):
            written.scalars(step, {"train/loss": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    (line,) = warnings(caplog)
    assert line.startswith("watch.wandb: ") and "connection\\nrefused" in line


def test_a_missing_login_is_told_with_the_way_out(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is asked for a key in the middle of a run. Offline needs none."""
    service.logged_in = False
    with writer(tmp_path, Wandb.online):
        pass
    (line,) = warnings(caplog)
    assert "wandb login" in line
    with writer(tmp_path):
        pass
    assert service.ended == [0]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_service_that_hangs_costs_a_bounded_time(
    service: Service,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Only the end waits, and no longer than it may."""
    monkeypatch.setattr(wandb_writer, "_BEGIN_S", 0.05)
    monkeypatch.setattr(wandb_writer, "_END_S", 0.05)
    free = threading.Event()
    service.trouble = lambda name: name == call and free.wait(60)
    written = writer(tmp_path)
    written_by = written._wandb._thread  # type: ignore[union-attr]
    for step in range(100):
        written.scalars(step, {"train/loss": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 100
    written.close()
    assert warnings(caplog)[-1].startswith("watch.wandb: ")
    free.set()
    written_by.join(30)


def test_a_run_writes_there_too(
    service: Service, composed: Callable[..., Config], tmp_path: Path, kept_globals: None
) -> None:
    """The figures of metrics.jsonl, pictures and the report."""
    config = composed(
        "data=digits",
        "device=cpu",
        "trainer.max_steps=3",
        "watch.wandb=online",
        "watch.wandb_project=mine",
        "loader.num_workers=0",
    )
    service.url = "https://example.org/run"
    job.main_worker(0, job.Job(config, tmp_path, ()))
    assert service.inits[0]["project"] == "mine"
    assert service.logged[-1][0] == 3
    assert {"train/loss", "val/top1"} <= {tag for _, figures in service.logged for tag in figures}
    report = json.loads((tmp_path / "report.json").read_text())
    assert service.summary["top1"] == report["top1"]
    assert service.summary["verdict"]["sentence"] == report["verdict"]["sentence"]
    assert service.ended == [0]


def test_settings_from_the_environment_are_sent_as_they_were_written(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composed: Any
) -> None:
    """A secret is in nothing that is sent."""
    monkeypatch.setenv("TOKEN", "hidden")
    config = composed("data=imagefolder", "data.root=/data/${oc.env:TOKEN}", "watch.wandb=offline")
    assert config.data.root == "/data/hidden"
    WandbWriter(tmp_path, config, False).close(failed=False)
    assert service.inits[0]["config"]["data"]["root"] == "/data/${oc.env:TOKEN}"
    assert "hidden" not in repr(service.inits)


def test_without_the_package_the_setting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded; a folder of offline runs is no package."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(job.schema, "check_names", lambda config: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"watch.wandb=offline needs wandb: pip install"):
            job.check(settings())
        (tmp_path / "wandb").mkdir(exist_ok=True)
    (tmp_path / "wandb" / "__init__.py").touch()
    sys.path_importer_cache.clear()
    job.check(settings())
    job.check(Config())
