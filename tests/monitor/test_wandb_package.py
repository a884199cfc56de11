"""Runs with the package of Weights & Biases itself, offline: ``uv run --group wandb pytest -m slow
tests/monitor/test_wandb_package.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb: uv sync --group wandb"),
]


def run(folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of three steps; its secret is the name of a folder."""
    words = ["data=shapes", "data.generate.train_images=192", "data.generate.val_images=64"]
    words += ["data.root=${oc.env:SECRET}/data", "loader.num_workers=0", "device=cpu"]
    words += ["trainer.epochs=1", "watch.window_steps=1", "run.name=x", *more]
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=folder,
        env={**os.environ, "SECRET": str(folder / "hidden"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def written(folder: Path) -> list[bytes]:
    """What each offline run in the folder has recorded, in order."""
    files = sorted((folder / "outputs" / "x" / "wandb").glob("offline-run-*/*.wandb"))
    return [file.read_bytes() for file in files]


def test_an_offline_run_and_its_going_on(tmp_path: Path) -> None:
    """Both have their figures and report under one name, and no secret."""
    done = run(tmp_path, "watch.wandb=offline", "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, "watch.wandb=offline", "resume=auto")
    assert done.returncode == 0, done.stderr
    first, second = written(tmp_path)
    last = os.readlink(tmp_path / "outputs" / "x" / "wandb" / "latest-run")
    name = last.rpartition("-")[2].encode()
    for record in (first, second):
        assert name in record
        figures = (b"train/loss", b"val/top1", b"val/mistakes", b"global_batch_size")
        for text in (*figures, b"${oc.env:SECRET}/data"):
            assert text in record, text
        assert str(tmp_path / "hidden").encode() not in record
    assert "WARNING" not in (tmp_path / "outputs" / "x" / "train.log").read_text()


@pytest.mark.parametrize(
    ("key", "text"),
    [("", "not logged in; run `wandb login`"), (40 * "a", "watch.wandb: ")],
    ids=["no key", "no service"],
)
def test_without_a_service_training_goes_on(tmp_path: Path, key: str, text: str) -> None:
    """The run is whole, with one warning that names the setting, and without the key."""
    done = run(
        tmp_path,
        "watch.wandb=online",
        WANDB_API_KEY=key,
        WANDB_BASE_URL="http://127.0.0.1:9",
        HOME=str(tmp_path),
        TORCH_HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "outputs" / "x" / "train.log").read_text()
    told = [line for line in log.splitlines() if "WARNING" in line]
    assert len(told) == 1 and text in told[0] and "training continues" in told[0]
    assert "Traceback" not in done.stdout + done.stderr
    for path in (tmp_path / "outputs").rglob("*"):
        assert not key or not path.is_file() or key.encode() not in path.read_bytes(), path
