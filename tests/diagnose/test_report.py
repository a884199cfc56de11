"""What a diagnosis tells, on the console, in a file, and as a line to paste."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import samples

from harness.config import Config
from harness.diagnose.fetch import Fetch
from harness.diagnose.report import Diagnosis, command, sentence
from harness.diagnose.runs import Runs
from harness.diagnose.whatif import Bound, Facts, WhatIf
from harness.tuning.figures import Rate, SampleCost, Trial
from harness.watch.bottleneck import Bottleneck
from harness.watch.stages import StageCost, StageTotals

OWN = samples.settings(2, batch_size=10)
STAGES = StageTotals(100, 10, 0.5, {"read": StageCost(0.1, 0.01), "decode": StageCost(0.4, 0.4)})


def facts(delivered: float | None = 200.0, fetch_per_s: float | None = None) -> Facts:
    return Facts(
        settings=OWN, cores=2, cores_from="affinity", on_cpu=False, overlaps=False,
        demand=Rate.exactly(1000), step_cpu_s=0.0,
        cost=SampleCost(0.005, 0.0041, 0.0), stages=STAGES,
        delivered=None if delivered is None else Rate.exactly(delivered), fetch_per_s=fetch_per_s,
    )  # fmt: skip


def diagnosis(fetch: Fetch | None = None) -> Diagnosis:
    cost = SampleCost(0.005, 0.0041, 0.0)
    loading = Trial(OWN, "supply", Rate.exactly(400), 100, cost=cost)
    runs = Runs(
        demand=Rate.exactly(1000),
        step_cpu_s=0.0,
        loading=loading,
        stages=STAGES,
        delivered=Rate.exactly(200),
        fetch=fetch,
    )
    return Diagnosis(
        bottleneck="decode", ceiling=5.0, measured=True, sentence="Decode-bound.",
        command="python train.py",
        settings=OWN, runs=runs, what_ifs=(WhatIf("1 more core", 300.0, 1.5),),
        notes=("P was not measured: why",), seconds=20.0,
    )  # fmt: skip


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
            (), "neighbours", "cuda", "python train.py mode=diagnose", id="once more, without them"
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
    assert command(config, overridden, bottleneck, device, 1) == line


def test_the_line_for_torchrun(composed: Callable[..., Config]) -> None:
    """It starts as many ranks on this node as there were."""
    config = composed("dist=torchrun")
    line = command(config, ("dist=torchrun",), "decode", "cuda", 4)
    assert line == "torchrun --nproc-per-node=4 train.py dist=torchrun loader.autotune=true"


def test_half_precision_is_not_advised_twice(composed: Callable[..., Config]) -> None:
    """Who has bf16 and channels_last is told nothing more."""
    config = composed("trainer.precision=bf16", "trainer.channels_last=true")
    assert command(config, (), "compute", "cuda", 1) == "python train.py"


def test_the_sentence() -> None:
    """The class, why, both rates, the ceiling; a figure that was reckoned is called so; slow cold
    files are named.
    """
    found = Bound("decode", "Decoding takes 4 of the 5 ms of a sample")
    told = sentence(facts(), found)
    assert told == (
        "Decode-bound. Decoding takes 4 of the 5 ms of a sample. The step could take 1000 images/s "
        "and gets 200. Faster "
        "loading gives at most 5.00x."
    )
    assert "would get by arithmetic 400" in sentence(facts(None), found)
    assert "cold from storage arrive at 50 a second" in sentence(facts(fetch_per_s=50.0), found)
    assert "cold" not in sentence(facts(fetch_per_s=500.0), found)


def test_the_sentence_of_an_uneven_measurement() -> None:
    """What was measured stands with its interval, no class and no ceiling; the way out is to try
    again.
    """
    uneven = dataclasses.replace(
        facts(), demand=Rate(0.403, 0.0, 1.24), delivered=Rate(0.39, 0.35, 0.43)
    )
    told = sentence(uneven, Bound("unknown", "Why"))
    assert told == (
        "Unknown. Why. The step could take 0.403 ±154% images/s and gets 0.39 ±10%. Try again when "
        "the machine is quiet."
    )
    unmeasured = sentence(dataclasses.replace(uneven, delivered=None), Bound("unknown", "Why"))
    assert "takes 0.403" not in unmeasured and "and gets" not in unmeasured


def test_the_sentence_beside_other_programs() -> None:
    """What they took, and what was measured beside them with its interval: no ceiling."""
    told = sentence(facts(), Bound("neighbours", "Other programs took 1.5 of the 2 cores"))
    assert told == (
        "Held back by other programs. Other programs took 1.5 of the 2 cores. The step could take "
        "about 1000 images/s "
        "and gets about 200. Try again when the machine is quiet."
    )


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The stages, the changes, the notes, the sentence; the last line is the one to paste."""
    diagnosis().publish(None, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == ["Decode-bound.", "next:", "python train.py"]
    assert "decode  decode   4   4" in lines
    assert any(line.split() == ["1", "more", "core", "300", "1.50x"] for line in lines)
    assert "note: P was not measured: why" in lines


def test_the_file_holds_it_all(tmp_path: Path) -> None:
    """Whole, without what was not measured."""
    diagnosis(Fetch(10, 1000, 0.5, 2)).publish(tmp_path, None)
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert found["bottleneck"] == "decode" and found["ceiling"] == 5.0
    assert found["runs"]["fetch"] == {"files": 10, "size_bytes": 1000, "seconds": 0.5, "readers": 2}
    assert "warm" not in found["runs"]
    assert found["stages"][0] == {
        "name": "read",
        "group": "storage",
        "wall_ms": 1.0,
        "cpu_ms": pytest.approx(0.1),
    }
    assert found["what_ifs"] == [{"change": "1 more core", "images_per_s": 300.0, "speedup": 1.5}]


def test_a_full_disk_does_not_end_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file is lost, with a warning that says where the diagnosis is to be had."""
    diagnosis().publish(tmp_path / "gone", None)
    assert "it is printed above" in capsys.readouterr().out
