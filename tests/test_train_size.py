"""Training images of another size than evaluated ones, and of a size by epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pytest
from run_state import digest, logged

from harness.config import Config, ConfigError, train_size
from harness.data import datasets
from harness.training import checkpoint_read

Composed = Callable[..., Config]
COMMON = (
    "data=digits", "trainer.num_threads=1", "device=cpu", "augment.crop=pad", "run.name=x",
    "loader.num_workers=0", "trainer.epochs=3",
)  # fmt: skip
SIZES = ("data.train_size=[16,24,32]", "data.train_size_epochs=[0,1,2]")
run = partial(commands.run_here, stopped=True)

# fits images of one size
FIXED = """
from torch import nn

def build(num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))
"""
# gives images as they are
OWN = """
import torch

class Noise(torch.utils.data.Dataset):
    classes = ["a", "b"]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(3, 32, 32), index % 2

def open_splits(data, seed):
    return Noise(), Noise()
"""


def test_a_size_holds_from_its_epoch_on(composed: Composed) -> None:
    """A number and a list; null is what is evaluated."""
    sizes = [
        [train_size(composed(*COMMON, *typed).data, epoch) for epoch in range(4)]
        for typed in ((), ("data.train_size=24",), ("data.train_size=[24]",), SIZES)
    ]
    assert sizes == [[32] * 4, [24] * 4, [24] * 4, [16, 24, 32, 32]]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (("data.train_size=7",), "data.train_size=7"),
        (("data.train_size=abc",), "data.train_size=abc"),
        (("data.train_size=[16,24]",), "data.train_size_epochs=null"),
        (("data.train_size=[16,24]", "data.train_size_epochs=[1,2]"), "data.train_size_epochs="),
        (("data.train_size=[16,24]", "data.train_size_epochs=[0,2,4]"), "data.train_size_epochs="),
        (("data.train_size_epochs=[0,2]",), "data.train_size_epochs=[0,2]"),
        (("data=fake", "data.train_size=16"), "data.train_size=16"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    composed: Composed, typed: tuple[str, ...], names: str
) -> None:
    """By the setting's name."""
    with pytest.raises(ConfigError) as refused:
        composed("data=digits", *typed)
    assert str(refused.value).startswith(names) and ConfigError.exit_code == 2


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (("model.name=mine:build", "data.train_size=24"), "data.train_size=24"),
        (("model.name=mine:build", *SIZES), "data.train_size="),
        (("data=own", "data.name=own:open_splits", "data.train_size=24"), "data.train_size=24"),
    ],
)
@pytest.mark.usefixtures("kept_globals")
def test_what_takes_one_size_is_refused_before_training(
    composed: Composed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: tuple[str, ...],
    names: str,
) -> None:
    """A network of one size, and a Dataset that resizes for itself."""
    (tmp_path / "mine.py").write_text(FIXED)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = composed(*COMMON, *typed, "data.image_size=32")
    with pytest.raises(ConfigError) as refused:
        run(config, tmp_path / "x")
    text = str(refused.value)
    assert names in text and "\n" not in text and not (tmp_path / "x/checkpoints").exists()


@pytest.mark.slow
def test_a_command_that_is_refused_ends_with_2(tmp_path: Path) -> None:
    """Typed as a number; the line names the network and the size."""
    (tmp_path / "mine.py").write_text(FIXED)
    done = commands.trained(
        tmp_path, *COMMON, "model.name=mine:build", "data.train_size=24", timeout_s=280
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "mat1 and mat2" in last and "data.train_size=24" in last


def test_crops_of_all_sizes_show_the_same_parts(composed: Composed) -> None:
    """A center crop's shorter side grows with the size, whatever size came before."""
    config = composed("data=digits", "augment=center", "data.eval_resize=40")
    images = datasets.load(config.data, config.augment, 0).train
    assert isinstance(images, datasets.ImageDataset)
    sized = images.sized(16)
    assert (sized.image_size, sized.transform.size, sized.transform.resize) == (16, 16, 20)
    assert sized.sized(32).transform == images.transform


@pytest.mark.slow
@pytest.mark.parametrize(
    "crop",
    [
        ("augment.crop=pad",),
        ("augment=center", "data.eval_resize=40"),
    ],
    ids=["pad", "center"],
)
@pytest.mark.usefixtures("kept_globals")
def test_stops_around_a_change_of_size_change_nothing(
    composed: Composed,
    tmp_path: Path,
    stop_at: Callable[[int | None], None],
    crop: tuple[str, ...],
) -> None:
    """Stopped within epochs and at their ends, resumed with other backends: one hash."""
    typed = (*COMMON, *SIZES, *crop)
    run(composed(*typed), tmp_path / "whole")
    ways = {
        9: "loader.backend=arrays",
        22: "loader.backend=threads",
        30: "loader.backend=arrays",
        44: "loader.backend=threads",
    }
    for step, way in ways.items():
        stop_at(step)
        workers = () if "arrays" in way else ("loader.num_workers=2",)
        run(composed(*typed, "resume=auto", way, *workers), tmp_path / "parts")
        assert checkpoint_read.read(tmp_path / "parts").record.step == step
    stop_at(None)
    run(composed(*typed, "resume=auto"), tmp_path / "parts")
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    whole = {line["step"]: line for line in logged(tmp_path / "whole") if "val/top1" in line}
    parts = [line for line in logged(tmp_path / "parts") if "val/top1" in line]
    assert [whole[line["step"]] for line in parts] == parts and len(parts) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        ("loader.backend=processes", "loader.num_workers=2"),
        ("loader.backend=processes", "loader.num_workers=2", "trainer.eval_every_epochs=3"),
        ("loader.backend=threads", "loader.num_workers=2"),
        ("loader.backend=arrays",),
    ],
)
@pytest.mark.usefixtures("kept_globals")
def test_no_backend_changes_training(
    composed: Composed, tmp_path: Path, way: tuple[str, ...]
) -> None:
    """All through a whole run; whether an evaluation comes before a change does not matter."""
    run(composed(*COMMON, *SIZES), tmp_path / "whole")
    run(composed(*COMMON, *SIZES, *way), tmp_path / "other")
    assert digest(tmp_path / "other") == digest(tmp_path / "whole")


@pytest.mark.usefixtures("kept_globals")
def test_the_report_has_each_size(
    composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Throughput and stall by size; the run's own figures are of all sizes together."""
    found = run(composed(*COMMON, *SIZES), tmp_path)
    sizes = found["sizes"]
    assert [part["size"] for part in sizes] == [16, 24, 32]
    assert [part["epochs"] for part in sizes] == [1, 1, 1]
    assert all(part["images_per_s"] > 0 and 0 <= part["stall_fraction"] <= 1 for part in sizes)
    rates = [part["images_per_s"] for part in sizes]
    assert min(rates) < found["images_per_s"] < max(rates)
    told = capsys.readouterr().out
    assert [told.count(f"{size} px from epoch {epoch}") for size, epoch in ((24, 2), (32, 3))] == [
        1,
        1,
    ]
    assert "sizes" not in run(composed(*COMMON, "trainer.max_steps=2"), tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.usefixtures("kept_globals")
def test_the_tuner_has_an_answer_for_each_size(
    composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remembered by size: a run of one of the sizes alone finds its own; training is the same."""
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path / "cache"))
    tuned = (*COMMON, "loader.autotune=true", "tuner.budget_s=1")
    found = run(composed(*tuned, *SIZES), tmp_path / "first")
    run(composed(*COMMON, *SIZES), tmp_path / "plain")
    assert digest(tmp_path / "first") == digest(tmp_path / "plain")
    kept = [*(tmp_path / "cache/tuning").glob("*.json")]
    again = run(composed(*tuned, *SIZES), tmp_path / "again")
    sound = len(kept) == 3
    assert not found["tuning"]["reused"] and again["tuning"]["reused"] is sound
    assert len(found["sizes"]) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_change_the_size_together(tmp_path: Path) -> None:
    """Stopped within an epoch and at a change, and resumed: one hash."""
    typed = (
        *COMMON[:-1], *SIZES, "trainer.epochs=3", "dist=spawn", "dist.nprocs=2",
    )  # fmt: skip

    def command(name: str, *more: str) -> Any:
        done = commands.trained(tmp_path, *typed, f"run.name={name}", *more, timeout_s=280)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "outputs" / name / "report.json").read_text())

    whole = command("whole")
    assert [part["size"] for part in whole["sizes"]] == [16, 24, 32]
    for steps in (11, 15):
        command("parts", "resume=auto", f"trainer.max_steps={steps}")
    command("parts", "resume=auto")
    outputs = tmp_path / "outputs"
    assert digest(outputs / "parts") == digest(outputs / "whole")
