"""What a diagnosis tells, on the console, in a file, and as a line to paste."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import samples
import torch
from evidences import evidence

from harness.clock.stages import StageCost, StageTotals
from harness.config import Config
from harness.diagnose.diagnosis import command, lines
from harness.monitor.writer import RunWriter, publish
from harness.report.evidence import Bottleneck
from harness.report.verdict import Change, Verdict
from harness.runtime.distributed import World

SHARES = evidence()
OWN = samples.settings(2, batch_size=10)
STAGES = StageTotals(100, 0.5, {"read": StageCost(0.1, 0.01), "decode": StageCost(0.4, 0.4)})


def ranks(count: int) -> World:
    """The first of ``count`` on one node."""
    return World(0, count, 0, count, torch.device("cpu"))


def tell(writer: RunWriter | None) -> None:
    """Publishes a diagnosis."""
    found = {
        "bottleneck": "decode",
        "ceiling": 5.0,
        "sentence": "Decode-bound.",
        "command": "python train.py",
        "settings": OWN,
        "stages": STAGES.rows(),
        "what_ifs": [{"change": "1 more core", "images_per_s": 300.0, "speedup": 1.5}],
        "notes": ["not measured: reading cold files (why)"],
    }
    publish("diagnosis", lines(found), found, writer)


@pytest.fixture(autouse=True)
def without_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the commands be Python's, as without ``uv run``."""
    monkeypatch.delenv("UV", raising=False)


@pytest.mark.parametrize(
    ("overridden", "bottleneck", "device", "line"),
    [
        pytest.param(
            ("mode=diagnose", "data=imagefolder", "data.root=/my images/é"),
            "decode",
            "cpu",
            "python train.py data=imagefolder 'data.root=/my images/é' loader.autotune=true",
            id="the user's own stay, quoted",
        ),
        pytest.param(
            ("loader.autotune=false", "mode=diagnose"),
            "workers",
            "cuda",
            "python train.py loader.autotune=true",
            id="what is changed is not said twice",
        ),
        pytest.param(
            (),
            "compute",
            "cuda",
            "python train.py trainer.precision=bf16 trainer.channels_last=true",
            id="compute on a GPU",
        ),
        pytest.param((), "compute", "cpu", "python train.py", id="compute on a CPU"),
        pytest.param(
            ("--config-name=mine", "++mode=diagnose", "+loader.autotune=false", "~data.root"),
            "decode",
            "cpu",
            "python train.py --config-name=mine '~data.root' loader.autotune=true",
            id="flags and signs of Hydra",
        ),
        pytest.param(
            ("mode=diagnose", "optim.lr=0.2"),
            "unknown",
            "cpu",
            "python train.py optim.lr=0.2 mode=diagnose",
            id="once more",
        ),
        pytest.param(
            (), "neighbors", "cuda", "python train.py mode=diagnose", id="once more, without them"
        ),
        pytest.param(
            (),
            "neighbors",
            "cpu",
            "python train.py trainer.num_threads=1 mode=diagnose",
            id="once more, beside them",
        ),
        pytest.param(
            ("optim.lr=0.2",), "balanced", "cpu", "python train.py optim.lr=0.2", id="balanced"
        ),
    ],
)
def test_the_line_to_paste(
    composed: Callable[..., Config],
    overridden: tuple[str, ...],
    bottleneck: Bottleneck,
    device: str,
    line: str,
) -> None:
    """It trains with the user's settings and those that help most."""
    config = composed("trainer.channels_last=false")
    change: Change = {"loader.num_workers": 3}
    if bottleneck in ("balanced", "compute"):
        faster: Change = {"trainer.precision": "bf16", "trainer.channels_last": True}
        change = faster if device == "cuda" else {}
    elif bottleneck == "neighbors":
        change = {"trainer.num_threads": 1} if device == "cpu" else {}
    found = Verdict(bottleneck, SHARES, change)
    assert command(config, overridden, found, ranks(1)) == line


def test_the_line_for_a_smaller_copy(composed: Callable[..., Config]) -> None:
    """Where decoding is the bottleneck and no setting helps, but a smaller copy does."""
    config = composed("data=imagefolder", "data.root=/my images/")
    found = Verdict("decode", replace(SHARES, shrinks=13.6))
    line = command(config, (), found, ranks(1))
    assert line == "wellfed shrink '/my images/' '/my images-small'"
    more = replace(found, change={"loader.num_workers": 3})
    assert command(config, (), more, ranks(1)).endswith("loader.autotune=true")


def test_the_line_for_torchrun(composed: Callable[..., Config]) -> None:
    """It starts as many ranks on this node as there were."""
    config = composed("dist=torchrun")
    line = command(config, ("dist=torchrun",), Verdict("decode", SHARES), ranks(4))
    assert line == "torchrun --nproc-per-node=4 train.py dist=torchrun loader.autotune=true"


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The stages, the changes, the notes, the sentence; the last line is the one to paste."""
    tell(None)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == ["Decode-bound.", "next:", "python train.py"]
    assert "decode  decode   4   4" in printed
    assert any(line.split() == ["1", "more", "core", "about", "300", "1.50x"] for line in printed)
    assert "note: not measured: reading cold files (why)" in printed


def test_the_file_holds_it_all(tmp_path: Path) -> None:
    """Whole, as plain values."""
    with RunWriter(tmp_path, tensorboard=False) as writer:
        tell(writer)
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert found["bottleneck"] == "decode" and found["ceiling"] == 5.0
    assert found["settings"]["num_workers"] == 2
    assert found["stages"][0] == {
        "name": "read",
        "group": "storage",
        "wall_ms": 1.0,
        "cpu_ms": pytest.approx(0.1),
    }
    assert found["what_ifs"] == [{"change": "1 more core", "images_per_s": 300.0, "speedup": 1.5}]


def test_a_full_disk_does_not_end_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file is lost, with a warning; the diagnosis is printed."""
    with RunWriter(tmp_path / "gone", tensorboard=False) as writer:
        tell(writer)
    printed = capsys.readouterr().out
    assert "diagnosis.json: No such file or directory" in printed
    assert "Decode-bound." in printed
