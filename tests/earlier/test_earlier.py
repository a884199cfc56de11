"""What earlier versions showed still works: their run folders, settings, commands and imports.

``943a066.tar.xz`` holds images that the commit drew, and the run folder that it wrote after one
epoch on them. ``943a066.json`` holds what README and ``--help`` showed, and what the commit got
when it evaluated and resumed the checkpoint. ``e818d66.tar.xz`` and ``.json`` are of the same
images: the run stopped within its last epoch and has an average of the weights, and the commit
predicted with its checkpoint too. Most weights are rounded, to 0 in the second archive, and the
record sealed anew by the commit, so that the archives are small.
"""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import wellfed
from omegaconf import DictConfig, OmegaConf

from harness.cli import job
from harness.config import Config, ConfigError, load, to_plain
from harness.report.compare.__main__ import main as compare
from harness.report.page.__main__ import main as page
from harness.runtime import errors

HERE = Path(__file__).parent
COMMITS = ("943a066", "e818d66")
EVERY = {commit: json.loads((HERE / f"{commit}.json").read_text()) for commit in COMMITS}
THEN = EVERY["943a066"]
LATER = EVERY["e818d66"]
Composed = Callable[..., Config]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the images and the run folders that the earlier versions wrote."""
    folder = tmp_path_factory.mktemp("earlier")
    for commit in COMMITS:
        with tarfile.open(HERE / f"{commit}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    (folder / "run").rename(folder / COMMITS[0])
    return folder


@pytest.fixture(params=COMMITS)
def earlier(runs: Path, request: pytest.FixtureRequest) -> Path:
    """The run folder that an earlier version wrote."""
    return runs / str(request.param)


def typed(run: Path) -> list[str]:
    """What the command line of a run set."""
    return list(OmegaConf.load(run / ".hydra/overrides.yaml"))


@pytest.fixture
def beside(runs: Path, monkeypatch: pytest.MonkeyPatch, kept_globals: None) -> None:
    """Works in the folder in which the images lie, as the earlier runs did."""
    monkeypatch.chdir(runs)


def done(config: Config, folder: Path) -> Path:
    """The folder of a run in this process."""
    folder.mkdir()
    job.main_worker(0, job.Job(config, folder, ()))
    return folder


def report(folder: Path) -> dict[str, Any]:
    """The report in a run's folder."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def keys(found: dict[str, Any]) -> set[str]:
    """The names in a report and in its sections."""
    inner = (
        f"{name}.{key}" for name, part in found.items() if isinstance(part, dict) for key in part
    )
    return {*found, *inner}


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("name", ["best.pt", "last.pt", ""])
def test_a_checkpoint_is_evaluated(
    earlier: Path, tmp_path: Path, composed: Composed, name: str
) -> None:
    """The same top-1, top-5 and loss as then, from a checkpoint and from the run's folder."""
    path = earlier / "checkpoints" / name if name else earlier
    config = composed(*typed(earlier), "mode=evaluate", f"resume={path}")
    found = report(done(config, tmp_path / "run"))
    then = EVERY[earlier.name]["evaluated"]
    assert {key: found[key] for key in then} == pytest.approx(then, rel=1e-4)


@pytest.mark.usefixtures("beside")
def test_a_run_is_resumed(earlier: Path, tmp_path: Path, composed: Composed) -> None:
    """The last epoch ends as it did then, and report and metrics have every key of then."""
    checkpoint = earlier / "checkpoints/last.pt"
    then = EVERY[earlier.name]
    config = composed(*typed(earlier), *then["resume"], f"resume={checkpoint}")
    found = report(done(config, tmp_path / "run"))
    assert {key: found[key] for key in then["resumed"]} == pytest.approx(then["resumed"], rel=1e-4)
    # what was sampled, and whether there is a ceiling, depend on how long the run took
    lost = {key for key in keys(report(earlier)) - keys(found) if not key.startswith("sampled")}
    assert lost <= {"verdict.ceiling"}
    lines = [
        set().union(*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
        for folder in (earlier, tmp_path / "run")
    ]
    assert not {tag for tag in lines[0] - lines[1] if not tag.startswith("host/")}


@pytest.mark.usefixtures("beside")
def test_a_checkpoint_predicts(runs: Path, tmp_path: Path, composed: Composed) -> None:
    """Each image has the class and the probability of then."""
    config = composed(
        "mode=predict", f"resume={runs / 'e818d66'}", "data.root=images/val", "device=cpu"
    )
    with (done(config, tmp_path / "run") / "predictions.csv").open() as file:
        found = {row["path"]: row for row in csv.DictReader(file)}
    assert {path: row["class_1"] for path, row in found.items()} == {
        path: name for path, (name, _) in LATER["predicted"].items()
    }
    assert [float(row["probability_1"]) for row in found.values()] == pytest.approx(
        [probability for _, probability in LATER["predicted"].values()], rel=1e-4
    )


@pytest.mark.parametrize("name", ["", "checkpoints/best.pt"])
def test_a_checkpoint_is_loaded(runs: Path, name: str) -> None:
    """``wellfed.load`` gives the logits of then."""
    net = wellfed.load(runs / "e818d66" / name)
    with torch.inference_mode():
        logits = net.model(net.transform(runs / "images/val/arrow/0000009.jpg")[None])[0]
    assert dict(zip(net.classes, logits.tolist(), strict=True)) == pytest.approx(
        LATER["loaded"], rel=1e-4
    )


def test_its_settings_start_again(earlier: Path) -> None:
    """The settings that the run kept are settings of today, each value as it was."""
    kept = OmegaConf.load(earlier / ".hydra/config.yaml")
    assert isinstance(kept, DictConfig)
    again = to_plain(load(kept))

    def same(old: Any, new: Any) -> None:
        if isinstance(old, dict):
            for name, value in old.items():
                same(value, new[name])
        else:
            assert new == old

    same(OmegaConf.to_container(kept), again)


def test_the_page_and_the_table_show_it(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``report.html`` is written from what the run left; the table has its speed."""
    assert page([str(earlier)]) == 0
    assert json.dumps(report(earlier)["images_per_s"]) in (earlier / "report.html").read_text()
    assert compare([str(earlier)]) == 0
    assert "images/s" in capsys.readouterr().out


def test_every_setting_is_there(composed: Composed) -> None:
    """All settings of then, each with its value of then, make a config."""

    def override(name: str, value: Any) -> str:
        if value is None:
            return f"{name}=null"
        return f"{name}={json.dumps(value).replace(chr(34), '').replace(' ', '')}"

    composed(*(override(name, value) for name, value in THEN["settings"].items()))


@pytest.mark.parametrize(
    "choice", [f"{group}={name}" for group, names in THEN["choices"].items() for name in names]
)
def test_every_choice_composes(composed: Composed, choice: str) -> None:
    """Each file of a group, and each experiment."""
    more = ("data.root=FOLDER",) if choice.startswith(("data=image", "experiment=image")) else ()
    composed(choice, *more)


@pytest.mark.parametrize("command", THEN["commands"])
def test_every_command_composes(composed: Composed, command: str) -> None:
    """The overrides that README named."""
    composed(*command.split())


@pytest.mark.parametrize("name", THEN["imports"])
def test_every_import_works(name: str) -> None:
    """What README told people to import."""
    module, attribute = name.split(":")
    assert hasattr(import_module(module), attribute)


@pytest.mark.parametrize(("name", "code"), THEN["exit_codes"].items())
def test_exit_codes_are_the_same(name: str, code: int) -> None:
    """People's job scripts look at them."""
    assert getattr(errors, name).exit_code == code


def test_other_exit_codes_are_the_same() -> None:
    """Wrong settings, and no memory."""
    codes = [errors.described(error) for error in (ConfigError("x"), MemoryError())]
    assert [found[1] for found in codes if found] == [2, 8]
