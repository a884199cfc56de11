"""What comes from the environment is used, and not written down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_here
from hydra import compose
from pictures import write_tree

from harness import config as schema
from harness.cli.compose import cli_overrides
from harness.config import Config
from harness.training import checkpoint_read

Composed = Callable[..., Config]
SECRET = "hunter2hunter2"
OTHERS = (
    "data=imagefolder", "data.image_size=16", "loader.batch_size=8", "device=cpu",
    "trainer.num_threads=1", "trainer.epochs=2", "run.name=x",
)  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes of eight images to train and two to validate, in a folder with a secret name."""
    return write_tree(tmp_path / SECRET, (16, 16), "png", train=8, val=2)


@pytest.mark.usefixtures("kept_globals")
def test_a_secret_is_in_no_file_of_a_run(
    composed: Composed, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the checkpoints' settings nor in TensorBoard's, report.json or the page."""
    monkeypatch.setenv("TOKEN", SECRET)
    hidden = Path(str(tree).replace(SECRET, "${oc.env:TOKEN}"))
    typed = (f"data.root={hidden}", *OTHERS)
    config = composed(*typed)
    assert config.data.root == str(tree)
    folder = tmp_path / "x"
    run_here(config, folder, *typed)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".pt", ".json", ".html", ".jsonl", ".log"}
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    # and a run that goes on finds what it means
    found = checkpoint_read.read(folder).state["settings"]
    assert found["data"]["root"] == str(hidden)
    assert schema.from_plain(found) == config
    longer = composed(*typed, "resume=auto", "trainer.epochs=3")
    run_here(longer, folder, *typed)
    assert SECRET not in (folder / "train.log").read_text()


def test_what_was_typed_is_told_as_it_was_typed(
    composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overrides, and settings that refer to others."""
    monkeypatch.setenv("TOKEN", SECRET)
    typed = ["run.name=${oc.env:TOKEN}", "data.root=/data/${run.name}", "seed=${oc.env:SEED}"]
    monkeypatch.setenv("SEED", "7")
    config = composed(*typed)
    assert (config.data.root, config.seed) == (f"/data/{SECRET}", 7)
    assert schema.shown(config.data.root) == "/data/${run.name}"
    plain = schema.to_plain(config)
    assert (plain["run"]["name"], plain["data"]["root"]) == ("${oc.env:TOKEN}", "/data/${run.name}")
    chosen = compose("config", overrides=typed, return_hydra_config=True).hydra
    assert cli_overrides(chosen) == tuple(typed)
