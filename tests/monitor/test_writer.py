"""What a run writes, read back as TensorBoard and a reader of JSON would."""

import errno
import io
import json
import logging
import math
import os
import time
import warnings
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oddities
import pytest
import torch
from commands import python
from oddities import Plant
from PIL import Image
from run_state import lines

from harness.clock.figures import Ledger, Spread, Tag
from harness.clock.stages import StageCost, StageTotals
from harness.monitor.writer import RunWriter
from harness.training.engine import listed


def events(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader's own, of its protobuf
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        read.Reload()
    return read


def at(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Has the writer's clock tell these times, one after the other."""
    clock = SimpleNamespace(monotonic=iter(times).__next__, time=time.time)
    monkeypatch.setattr("harness.monitor.writer.time", clock)


def logged(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def test_scalars_reach_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of JSON and an event hold the same tags; a spread is three; None is absent."""
    at(monkeypatch, 5.0, 7.5)
    with RunWriter(tmp_path, tensorboard=True) as writer:
        writer.scalars(
            10,
            {Tag.LOSS: 0.5, "time/step_ms": Spread(1.0, 2.0, 3.0), Tag.GPU_POWER_W: None},
            epoch=2,
        )
    expected = {
        "train/loss": 0.5,
        "time/step_ms/median": 1.0,
        "time/step_ms/p95": 2.0,
        "time/step_ms/max": 3.0,
    }
    assert lines(tmp_path) == [{"step": 10, "epoch": 2, "time_s": 2.5, **expected}]
    assert {tag: logged(tmp_path, tag) for tag in events(tmp_path).Tags()["scalars"]} == {
        tag: [(10, value)] for tag, value in expected.items()
    }


def test_stages_are_told_per_sample_with_how_busy_the_workers_were() -> None:
    """Workers that made batches for 3 of 4 seconds were busy for three quarters."""
    totals = StageTotals(100, 6.0, {"read": StageCost(1.0, 0.1), "decode": StageCost(4.0, 4.0)})
    assert totals.by_tag(8.0) == {
        "stages/read_ms": 10.0,
        "stages/decode_ms": 40.0,
        Tag.BUSY_FRACTION: 0.75,
    }
    assert totals.by_tag(12.0)[Tag.BUSY_FRACTION] == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_value_that_is_not_finite_is_null_in_json(tmp_path: Path, value: float) -> None:
    """The line stays valid JSON, and TensorBoard has the value itself."""
    with RunWriter(tmp_path, tensorboard=True) as writer:
        writer.scalars(1, {"train/loss": value})
    assert lines(tmp_path)[0]["train/loss"] is None
    assert str(logged(tmp_path, "train/loss")[0][1]) == str(value)


def test_without_tensorboard_there_is_no_event_file(tmp_path: Path) -> None:
    """Everything else is written as before, and TensorBoard is not imported."""
    code = (
        "import sys; from pathlib import Path; from harness.monitor.writer import RunWriter\n"
        f"board = RunWriter(Path({str(tmp_path)!r}), tensorboard=False)\n"
        "board.scalars(1, {'a': 1.0}); board.text('t', ['x']); board.hparams({}, {})\n"
        "board.close()\n"
        "sys.exit('tensorboard' in sys.modules or 'torch' in sys.modules)"
    )
    assert python(code).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of the growing file never sees half a line."""
    written: list[bytes] = []
    real = os.write
    monkeypatch.setattr(
        os, "write", lambda handle, data: (written.append(data), real(handle, data))[1]
    )
    with RunWriter(tmp_path, tensorboard=False) as writer:
        writer.scalars(1, {f"tag/{i}": float(i) for i in range(5000)})
        writer.scalars(2, {"a": 1.0})
    assert [data.count(b"\n") for data in written] == [1, 1]
    assert all(data.endswith(b"\n") for data in written)


def test_what_is_written_survives_a_kill(tmp_path: Path) -> None:
    """A process that dies at once loses no figure in either file."""
    code = (
        "import os; from pathlib import Path; from harness.monitor.writer import RunWriter\n"
        f"writer = RunWriter(Path({str(tmp_path)!r}), tensorboard=True)\n"
        "writer.scalars(7, {'a': 1.0}); os._exit(9)"
    )
    assert python(code).returncode == 9
    assert (lines(tmp_path)[0]["step"], logged(tmp_path, "a")) == (7, [(7, 1.0)])


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """Steps after the checkpoint, and a line that was cut off, give way."""
    with RunWriter(tmp_path, tensorboard=True) as writer:
        for step in (10, 20, 30):
            writer.scalars(step, {"a": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "a"')
    with RunWriter(tmp_path, tensorboard=True, resumed_step=20) as writer:
        for step in (30, 40):
            writer.scalars(step, {"a": 2.0})
    expected = [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    assert [(line["step"], line["a"]) for line in lines(tmp_path)] == expected
    assert logged(tmp_path, "a") == expected


Precision = Enum("Precision", ["fp32", "bf16"])


def test_hparams_are_a_row_of_the_run_itself(tmp_path: Path) -> None:
    """Settings and results stand in the run's own file, each column of one type."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    settings = {
        "optim.lr": 0.1,
        "seed": 3,
        "autotune": True,
        "resume": None,
        "precision": Precision.bf16,
        "betas": (0.9, 1),
    }
    with RunWriter(tmp_path, tensorboard=True) as writer:
        writer.scalars(50, {"a": 1.0})
        writer.hparams(settings, {"hparam/top1": 0.9, "hparam/top5": None})
    read = events(tmp_path)
    content = {
        tag: HParamsPluginData.FromString(data)
        for tag, data in read.PluginTagToContent("hparams").items()
    }
    start = content["_hparams_/session_start_info"].session_start_info.hparams
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}
    assert values == {
        "optim.lr": 0.1, "seed": 3.0, "autotune": "true", "resume": "null", "precision": "bf16",
        "betas": "[0.9, 1]"
    }  # fmt: skip
    columns = content["_hparams_/experiment"].experiment.metric_infos
    assert [column.name.tag for column in columns] == ["hparam/top1", "hparam/top5"]
    assert "_hparams_/session_end_info" in content
    assert logged(tmp_path, "hparam/top1") == [(50, pytest.approx(0.9))]
    assert len([path for path in tmp_path.iterdir() if "tfevents" in path.name]) == 1


def test_text_reaches_the_text_page(tmp_path: Path) -> None:
    """What looks like markup in it stays text: TensorBoard shows indented lines as code."""
    with RunWriter(tmp_path, tensorboard=True) as writer:
        writer.text("verdict", ["**fine** <img src=http://f>", "a\nb"])
    read = events(tmp_path)
    assert read.Tensors("verdict/text_summary")[0].tensor_proto.string_val == [
        b"    **fine** <img src=http://f>\n    a\\nb"
    ]


def test_the_report_is_plain_json(tmp_path: Path) -> None:
    """Dataclasses are objects without what is absent; NaN is null; enums are their names."""
    ledger = Ledger()
    ledger.sums["run"]["steps"] = 2
    ledger.count("data_wait_ms", 0.002)
    with RunWriter(tmp_path, tensorboard=False) as writer:
        writer.report(
            {
                "status": "done",
                "total": ledger.window(),
                "loss": math.nan,
                "kind": Precision.fp32,
            }
        )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["status"], report["total"]["steps"], report["loss"], report["kind"]) == (
        "done",
        2,
        None,
        "fp32",
    )
    assert "copy_ms" not in report["total"]
    assert report["total"]["data_wait_ms"]["max"] == 2.0


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write leaves the former report whole and no half-made file beside it."""
    with RunWriter(tmp_path, tensorboard=False) as writer:
        writer.report({"status": "running"})

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        writer.report({"status": "completed"})
    assert json.loads((tmp_path / "report.json").read_text()) == {"status": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert writer.dropped == 1


def test_a_full_disk_costs_figures_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, the loss is counted, and with room again both files go on whole."""
    real = os.write

    def full(handle: int, data: bytes) -> int:
        real(handle, data[:7])
        return 7

    with caplog.at_level(logging.WARNING), RunWriter(tmp_path, tensorboard=True) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            writer.scalars(1, {"a": 1.0})
            writer.scalars(2, {"a": 1.0})
        writer.scalars(3, {"a": 1.0})
    assert writer.dropped == 4
    assert len(caplog.records) == 1
    assert "metrics are lost until it can be written" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == [3]
    assert logged(tmp_path, "a") == [(3, 1.0)]


def test_a_folder_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    """Someone deletes the run's folder: nothing can be written, and nothing is raised."""
    folder = tmp_path / "run"
    folder.mkdir()
    with RunWriter(folder, tensorboard=True) as writer:
        folder.rmdir()
        writer.scalars(1, {"a": 1.0})
        writer.report({})
    assert writer.dropped == 3


def test_a_tensor_is_refused(tmp_path: Path) -> None:
    """A tensor among the figures would be a hidden wait for the device."""
    with RunWriter(tmp_path, tensorboard=False) as writer, pytest.raises(TypeError, match="Tensor"):
        writer.scalars(1, {"train/loss": torch.tensor(1.0)})  # type: ignore[dict-item]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("step", [None, 5], ids=["new", "resumed"])
@oddities.every
def test_odd_metrics_give_way(
    tmp_path: Path, plant: Plant, step: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies in the place of the figures is neither waited for nor kept."""
    path = tmp_path / "metrics.jsonl"
    oddities.put(plant, path)
    with RunWriter(tmp_path, tensorboard=False, resumed_step=step) as writer:
        writer.scalars(6, {Tag.LOSS: 0.5})
    assert [line["step"] for line in lines(tmp_path)] == [6]
    assert writer.dropped == 0 and oddities.untouched(path) and len(caplog.messages) <= 1


@pytest.mark.parametrize(
    "step", ["1e999", "1" + "0" * 400, "null", "true", '"3"', "[3]", "-1", "NaN"]
)
def test_an_odd_step_is_dropped_on_resuming(tmp_path: Path, step: str) -> None:
    """So is a line whose step is none."""
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    RunWriter(tmp_path, tensorboard=False, resumed_step=5).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_resumed_step_is_not_logged_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the resumed step has logged stays; what it lacks is added; the time goes on."""
    at(monkeypatch, 100.0, 107.0, 200.0, 203.0, 204.0, 205.0)
    with RunWriter(tmp_path, tensorboard=True) as writer:
        writer.scalars(5, {Tag.LOSS: 0.5, Tag.VAL_TOP1: 0.25}, epoch=1)
    with RunWriter(tmp_path, tensorboard=True, resumed_step=5) as writer:
        writer.scalars(5, {Tag.VAL_TOP1: 0.25}, epoch=1)
        writer.scalars(5, {Tag.VAL_TOP1: 0.25, Tag.VAL_LOSS: 1.0}, epoch=1)
    told = [{key: line[key] for key in line if key != "epoch"} for line in lines(tmp_path)]
    assert told == [
        {"step": 5, "time_s": 7.0, Tag.LOSS: 0.5, Tag.VAL_TOP1: 0.25},
        {"step": 5, "time_s": 8.0, Tag.VAL_LOSS: 1.0},
    ]
    assert logged(tmp_path, Tag.VAL_TOP1) == [(5, 0.25)]


@pytest.mark.timeout(20)
@oddities.special
def test_an_odd_list_of_bad_samples_gives_way(tmp_path: Path, plant: Plant) -> None:
    """No FIFO is waited for, and what a link leads to keeps what it held."""
    path = tmp_path / "bad_samples.jsonl"
    oddities.put(plant, path)
    assert not listed(tmp_path)
    with RunWriter(tmp_path, tensorboard=False) as writer:
        writer.bad_sample("training", 3, "x.jpg", "why")
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["where"] == "x.jpg"
    assert oddities.untouched(path)


@pytest.mark.parametrize(("count", "side", "size"), [(1, 10, (10, 10)), (24, 32, (256, 96))])
def test_images_are_one_picture(tmp_path: Path, count: int, side: int, size: Any) -> None:
    """Side by side, eight in a row."""
    tiles = np.full((count, 3, side, side), 200, np.uint8)
    with RunWriter(tmp_path, tensorboard=True) as writer:
        writer.scalars(7, {"train/loss": 1.0})
        writer.images("val/mistakes", tiles, ["日本\x1b<b>" * 20] * count)
    (image,) = events(tmp_path).Images("val/mistakes")
    assert (image.step, image.width, image.height) == (7, *size)
    picture = Image.open(io.BytesIO(image.encoded_image_string))
    assert picture.getpixel((5, size[1] - 5)) == (200, 200, 200)
