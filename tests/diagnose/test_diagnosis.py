"""A diagnosis as a whole, with the real step, on real files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from harness.config import Config
from harness.data import datasets
from harness.diagnose import diagnosis as phases
from harness.diagnose.diagnosis import diagnose, fitting_batch
from harness.feed.base import HostBatch
from harness.feed.feeds import Feeds
from harness.monitor.host import Neighbors
from harness.monitor.writer import RunWriter
from harness.runtime import seeding
from harness.runtime.accelerator import Accelerator
from harness.runtime.distributed import World
from harness.runtime.limits import Limits
from harness.training.state import TrainState, make_state
from harness.training.step import Step
from harness.tuning.steps import StepRun
from harness.tuning.training_steps import TrainingBenchmark

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
LIMITS = Limits(cores=2.0, memory_bytes=10**10, shm_bytes=10**9, open_files=10_000)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a fifth of a second, once each; the first of a whole one, in which a batch comes on a
    busy machine too.
    """
    for name in ("_DEMAND_S", "_STEPS_S", "_FETCH_S"):
        monkeypatch.setattr(phases, name, 0.2)
    monkeypatch.setattr(phases, "_LOADING_S", 1.0)
    monkeypatch.setattr(phases, "_ROUNDS", 1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of twenty files of 120 x 90 pixels."""
    for i in range(40):
        folder = tmp_path / "photos" / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((120, 90), 50).convert("RGB").save(folder / f"{i}.jpg")
    return tmp_path / "photos"


def diagnosed(
    config: Config, folder: Path
) -> tuple[dict[str, Any], TrainState, dict[str, torch.Tensor]]:
    """A diagnosis, the state, and the weights as they were."""
    seeding.seed_everything(3)
    splits = datasets.load(config.data, config.augment, config.seed)
    state = make_state(config, len(splits.classes), ALONE, 10)
    before = {name: tensor.clone() for name, tensor in state.network.state_dict().items()}
    trials = TrainingBenchmark(Step(state))
    with RunWriter(folder, tensorboard=False) as writer:
        feeds = Feeds(splits, config, ALONE)
        found = diagnose(feeds, trials, LIMITS, ("data=imagefolder",), writer)
    return (
        found,
        state,
        before,
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("brief", "kept_globals")
def test_a_folder_of_images(
    workers: int,
    photos: Path,
    tmp_path: Path,
    composed: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything is measured and written, the stages are those of image files, and the weights
    stay; steps in bfloat16 are measured where the processor is fast at it.
    """
    half = "bf16" if workers else None
    monkeypatch.setattr(Accelerator, "half_precision", property(lambda _: half))
    config = composed(
        "mode=diagnose",
        "data=imagefolder",
        f"data.root={photos}",
        "data.split_fraction=0.2",
        "data.image_size=32",
        "loader.batch_size=4",
        f"loader.num_workers={workers}",
    )
    found, state, before = diagnosed(config, tmp_path)
    assert ("in_bf16" in found["runs"]) is bool(half)
    changes = [row["change"] for row in found["what_ifs"]]
    # on a busy machine handing batches over may be the limit, which no change of a step lifts
    may_help = found["bottleneck"] not in ("transport", "copy")
    assert ("trainer.precision=bf16" in changes) is bool(half and changes and may_help)
    assert {"delivered", "warm"} <= found["runs"].keys() and (found["ceiling"] or 1) >= 1
    stages = found["stages"]
    assert [stage["name"] for stage in stages][:2] == ["read", "decode"]
    cpu_ms, wall_ms = (sum(stage[name] for stage in stages) for name in ("cpu_ms", "wall_ms"))
    # on a busy machine there is no ceiling
    assert bool(found["what_ifs"]) is (found["bottleneck"] not in ("unknown", "neighbors"))
    got = {row["images_per_s"] / row["speedup"] for row in found["what_ifs"]}
    # each over what steps get
    assert max(got, default=1.0) == pytest.approx(min(got, default=1.0))
    assert None not in found["runs"].values()
    # then a first reading is reckoned with
    assert found["measured"] or (cpu_ms <= 0.5 * wall_ms and workers == 0)
    assert "fetch" in found["runs"] or "reading cold files" in found["notes"][-1]
    # on a busy machine: then no smaller file is said to help
    limited = found["bottleneck"] in ("transport", "copy", "unknown", "neighbors")
    assert any("short side" in row["change"] for row in found["what_ifs"]) is not limited
    assert (
        json.loads((tmp_path / "diagnosis.json").read_text())["settings"]["num_workers"] == workers
    )
    assert state.step == 0 and all(
        torch.equal(before[name], now) for name, now in state.network.state_dict().items()
    )


@pytest.mark.parametrize("others", [1.5, None])
@pytest.mark.usefixtures("brief", "kept_globals")
def test_other_programs_are_warned_of(
    others: float | None,
    photos: Path,
    tmp_path: Path,
    composed: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the answer, where they took processors that the runs wanted; the answer is then that,
    and no ceiling.
    """
    said: list[int] = []
    monkeypatch.setattr(
        Neighbors, "look", lambda self: said.append(len(capsys.readouterr().out)) or others
    )
    config = composed(
        "mode=diagnose",
        "data=imagefolder",
        f"data.root={photos}",
        "data.split_fraction=0.2",
        "data.image_size=32",
        "loader.batch_size=4",
    )
    found, *_ = diagnosed(config, tmp_path)
    warning = "other programs used 1.5 of 2 cores "
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert [text[: len(warning)] for text in warnings] == ([] if others is None else [warning])
    assert found["sentence"] in capsys.readouterr().out and len(said) == 1
    kind = found["bottleneck"]
    untold = found["ceiling"] is None and not found["what_ifs"]
    untold = untold and found["command"].endswith("mode=diagnose")
    told = kind == "neighbors", untold or kind == "unknown"
    assert told == ((True, True) if others else (False, kind == "unknown"))


class Slow:
    """A step that takes so many seconds an image on ``device``."""

    def __init__(self, image_s: float, device: str) -> None:
        self.image_s, self.device = image_s, torch.device(device)

    def demand(self, batch: HostBatch, limit_s: float) -> StepRun:
        count = len(batch.labels)
        return StepRun((count, count), (count * self.image_s,) * 2)


@pytest.mark.parametrize(
    ("image_s", "device", "size"),
    [
        pytest.param(0.01, "cpu", 64, id="fast"),
        pytest.param(0.25, "cpu", 8, id="eight fit into two seconds"),
        pytest.param(5.0, "cpu", 2, id="not even one fits"),
        pytest.param(0.25, "cuda", 64, id="a GPU takes whole batches"),
    ],
)
def test_slow_steps_are_measured_on_fewer_images(
    image_s: float, device: str, size: int, composed: Callable[..., Config]
) -> None:
    """As many as a step of two seconds takes, and a note says so."""
    config = composed("data=fake", "data.image_size=8")
    feeds = Feeds(datasets.load(config.data, config.augment, 0), config, ALONE)
    trainee: Any = Slow(image_s, device)
    found, notes = fitting_batch(feeds, trainee)
    assert found == size
    assert [note.startswith(f"measured with batches of {size} images") for note in notes] == [
        True
    ] * (size < 64)
