"""Loops of other people's packages, watched and with our callbacks.

Each package has a dependency group of its own: ``uv run --group lightning pytest -m slow
tests/hooks/test_frameworks.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pictures import noise
from PIL import Image
from watched_runs import LOOPS, anew, both, loaders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# script, package: updates, loaders (if it trains, passes, batches)
SCRIPTS = {
    "lightning_module.py": ("lightning", 24, {(True, 2, 24), (False, 3, 8)}),
    "hf_trainer.py": ("transformers", 12, {(True, 2, 24), (False, 2, 6)}),
    "accelerate_loop.py": ("accelerate", 12, {(True, 2, 24), (False, 2, 6)}),
    "timm_loop.py": ("timm", 12, {(True, 2, 12), (False, 2, 4)}),
}
CALLBACKS = ("lightning_module.py", "hf_trainer.py")


def need(name: str) -> None:
    """Skips where the package of a script is not installed."""
    package = SCRIPTS[name][0]
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: uv sync --group {package}")


def untimed(text: str) -> str:
    """What a script prints, but for Hugging Face's times."""
    return re.sub(r"'\w+_(runtime|per_second)': '[^']*'", "", text)


def told(report: dict[str, Any]) -> set[tuple[bool, int, int]]:
    """If each loader trains, its passes and batches."""
    return {each[1:] for each in loaders(report)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_watched(tmp_path: Path, name: str) -> None:
    """The same numbers, weights and exit code; the evaluation's loader does not train."""
    need(name)
    rest: tuple[Path, ...] = ()
    if name == "timm_loop.py":
        rest = (tmp_path / "tree",)
        for part, count in (("train", 12), ("val", 4)):
            for i in range(4 * count):
                path = rest[0] / part / f"class{i % 4}" / f"{i}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(noise(64, 64)).save(path)
    found = both(tmp_path, anew, LOOPS / name, *rest)
    assert found.alone.returncode == found.watched.returncode == 0, found.watched.stderr
    assert untimed(found.watched.stdout) == untimed(found.alone.stdout)
    report = found.report
    assert report is not None, found.watched.stderr
    assert (report["status"], report["steps"], report["epochs"]) == (
        "completed",
        SCRIPTS[name][1],
        2,
    )
    assert told(report) == SCRIPTS[name][2]
    assert all(each["where"].startswith(f"{name}:") for each in report["loaders"])
    assert report["pauses_s"]["evaluate"] > 0 and report["images_per_s"] > 0


def digest(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a script's output: its weights and random state."""
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback(tmp_path: Path, name: str) -> None:
    """It leaves the weights as they are, and a report."""
    need(name)
    alone = anew(str(LOOPS / name), cwd=tmp_path)
    watched = anew(str(LOOPS / name), "callback", cwd=tmp_path)
    assert watched.returncode == 0, watched.stderr
    assert untimed(watched.stdout) == untimed(alone.stdout)
    assert len(digest(watched)) == 64
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["status"], report["steps"]) == ("completed", SCRIPTS[name][1])
    assert told(report) == SCRIPTS[name][2]
    assert "\nwellfed: verdict " in watched.stderr


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_and_an_error(tmp_path: Path, name: str) -> None:
    """The report says that the training failed."""
    need(name)
    done = anew(str(LOOPS / name), "callback", "error", cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: loss is not finite" in done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["status"], report["epochs"]) == ("failed", 0)
    assert report["steps"] == (5 if name == "lightning_module.py" else 2)


def test_lightning_ends_by_itself_at_sigterm(tmp_path: Path) -> None:
    """Its handler calls the one that it finds, and decides."""
    need("lightning_module.py")
    found = both(tmp_path, anew, LOOPS / "lightning_module.py", "SIGTERM")
    assert found.equal()["status"] == "interrupted"
    assert "Received SIGTERM" in found.watched.stderr


def test_a_callback_within_a_watched_script(tmp_path: Path) -> None:
    """The report is that of ``wellfed watch``, and the script goes on as without."""
    need("hf_trainer.py")
    found = both(tmp_path, anew, LOOPS / "hf_trainer.py", "callback")
    assert found.watched.returncode == 0 and found.watched.stderr.count("wellfed: verdict") == 1
    assert found.report and found.report["steps"] == 12
