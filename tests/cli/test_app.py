"""The front door and the command, in a checkout, an editable installation and a wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ran, trained

from harness import __version__
from harness.cli import compose

ROOT = Path(__file__).parents[2]
# Nothing that matters to the installation; every test of it uses the same few steps.
SMALL = (
    "data=digits",
    "trainer.epochs=1",
    "trainer.max_steps=3",
    "loader.num_workers=1",
    "device=cpu",
)

MINE = """
import torch
from torch import nn

class Points:
    classes = ("dark", "light")

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.rand(3, 16, 16) * (i % 2), i % 2

def open_splits(data, seed):
    return Points(), Points()

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
"""


def done(cwd: Path, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A whole command, which succeeds and prints no error."""
    found = ran(*command, cwd=cwd, timeout_s=200, **environment)
    assert (found.returncode, found.stderr) == (0, ""), found.stderr + found.stdout
    return found


def installed(target: Path, *what: str | Path) -> Path:
    """``target`` with the project installed in it, and nothing else: no index is asked."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    options = ("--quiet", "--offline", "--no-deps", "--python", sys.executable, "--target", target)
    done(ROOT, "uv", "pip", "install", *options, *what)
    return target


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel puts into an environment."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    folder = tmp_path_factory.mktemp("wheel")
    done(ROOT, "uv", "build", "--quiet", "--offline", "--wheel", "--out-dir", folder)
    (built,) = folder.glob("*.whl")
    return installed(folder / "site", built)


def test_the_front_door_is_light() -> None:
    """Importing it imports no torch; an unknown name is an error."""
    code = (
        "import sys, wellfed; assert 'torch' not in sys.modules\n"
        "from wellfed import DataPrefetcher, StepClock, tune\n"
        "assert not hasattr(wellfed, 'tun')"
    )
    done(ROOT, sys.executable, "-c", code)


@pytest.mark.parametrize(
    "first",
    [
        "import harness.feed.order",
        "import wellfed.feed.order",
        # as earlier versions pickled it
        r"import wellfed, pickle; pickle.loads(b'charness.feed.order\nOrder\n.')",
    ],
)
def test_no_class_has_two_names(first: str) -> None:
    """Whichever name is imported first, both are one package."""
    code = (
        f"{first}\nimport importlib, harness.feed.order, wellfed.feed.order\n"
        "assert harness is wellfed and harness.feed.order.Order is wellfed.feed.order.Order\n"
        "assert wellfed.feed.order.Order.__module__ == 'wellfed.feed.order'\n"
        "assert importlib.reload(harness.feed.order).__name__ == 'wellfed.feed.order'"
    )
    done(ROOT, sys.executable, "-c", code)


def test_a_package_named_harness_is_the_users(tmp_path: Path) -> None:
    """It is imported in a folder that has one, and nothing of ours by its name."""
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("OURS = False\n")
    code = (
        # behind the checkout, as a network's module is looked for
        f"import sys; sys.path[:1] = []; sys.path += [{str(tmp_path)!r}]\n"
        "import wellfed.feed.order, harness; assert not harness.OURS\n"
        "try: import harness.feed\nexcept ModuleNotFoundError: pass\nelse: raise SystemExit(1)"
    )
    done(tmp_path, sys.executable, "-c", code)


@pytest.mark.parametrize(
    "command",
    [("train.py",), ("-m", "wellfed"), ("-m", "harness")],
    ids=["script", "module", "earlier"],
)
def test_the_command_says_its_version(command: tuple[str, ...]) -> None:
    """It is the project's, not Hydra's."""
    assert done(ROOT, sys.executable, *command, "--version").stdout.startswith(
        f"wellfed {__version__}, torch "
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [("--config-path here", "{cwd}/here"), ("-cp=here a=1", "{cwd}/here"), ("-cp /x", "/x")],
)
def test_other_settings_are_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, found: str
) -> None:
    """A folder of settings is looked for where the user is."""
    monkeypatch.chdir(tmp_path)
    assert compose.prepared(given.split()).config_path == found.format(cwd=tmp_path)


def test_a_mistake_in_a_part_of_ones_own_is_one_line(tmp_path: Path) -> None:
    """Exit code 2, and nothing but the line on standard error."""
    (tmp_path / "mine.py").write_text("def build(num_classes):\n    return num_classes / 0\n")
    found = trained(tmp_path, *SMALL, "model.name=mine:build")
    said = (
        "error: model.name=mine:build: failed with ZeroDivisionError: division by zero "
        "(mine.py:2)\n"
    )
    assert (found.returncode, found.stderr) == (2, said)


@pytest.mark.slow
@pytest.mark.timeout(400)
class TestInstalled:
    """What is installed, used from an empty folder."""

    def test_a_wheel_takes_one_name(self, wheel: Path) -> None:
        """Beside its metadata there is ``wellfed``, with conf/ in it."""
        names = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
        assert names - {".lock", "bin"} == {"wellfed"}
        assert {path.name for path in wheel.glob("wellfed/conf/*/digits.yaml")} == {"digits.yaml"}

    def test_an_editable_installation_has_the_front_door(self, tmp_path: Path) -> None:
        """``wellfed`` is the checkout's folder ``harness``, and the command runs."""
        target = installed(tmp_path / "site", "--editable", ROOT)
        (paths,) = target.glob("*.pth")
        here = {"PYTHONPATH": f"{target}:{paths.read_text().strip()}"}
        code = "from wellfed.clock import clock; print(clock.__file__, clock.StepClock.__module__)"
        shown = done(tmp_path, sys.executable, "-c", code, **here).stdout
        assert shown == f"{ROOT}/harness/clock/clock.py wellfed.clock.clock\n"
        assert (
            "loader.num_workers="
            in done(tmp_path, target / "bin" / "wellfed", "--help", **here).stdout
        )

    def test_the_wheel_is_all_that_a_user_needs(self, wheel: Path, tmp_path: Path) -> None:
        """All commands, with nothing of the checkout."""
        command = wheel / "bin" / "wellfed"
        here = {"PYTHONPATH": str(wheel)}
        assert done(tmp_path, command, "--version", **here).stdout.startswith(
            f"wellfed {__version__}, torch "
        )
        assert "loader.num_workers=" in done(tmp_path, command, "--help", **here).stdout
        said = done(tmp_path, command, *SMALL, "run.name=first", **here).stdout
        assert "run folder     outputs/first" in said
        assert json.loads((tmp_path / "outputs/first/report.json").read_text())["steps"] == 3
        saved = ("--config-path", "outputs/first/.hydra", "--config-name", "config")
        done(tmp_path, command, *saved, "run.name=again", **here)
        done(tmp_path, command, "-m", *SMALL, "loader.num_workers=0,1", "run.name=sweep", **here)
        assert len(list(tmp_path.glob("multirun/sweep/*/report.json"))) == 2
        parts = (
            "data=own",
            "data.name=mine:open_splits",
            "data.image_size=16",
            "model.name=mine:build",
        )
        (tmp_path / "mine.py").write_text(MINE)
        done(tmp_path, command, *parts, *SMALL[1:], "run.name=own", **here)
        assert json.loads((tmp_path / "outputs/own/report.json").read_text())["steps"] == 1
        assert done(tmp_path, command, "page", "multirun/sweep", **here).stdout.endswith("2 runs\n")
        assert "num_workers" in done(tmp_path, command, "compare", "multirun/sweep", **here).stdout
