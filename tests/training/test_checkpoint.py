"""Saving and reading checkpoints: whole or not at all, and never damaged in silence."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import oddities
import pytest
import torch
from checkpoints import commit
from oddities import Plant
from torch import nn

from harness.runtime.errors import CheckpointError
from harness.training import checkpoint_read, models, weights


def state(value: float = 1.0) -> dict[str, Any]:
    """A small state of the kinds that a run saves."""
    return {
        "model": {"w": torch.full((50, 20), value)},
        "epoch": 3,
        "random": {"python": random.getstate()},
    }


def save(
    folder: Path, step: int, top1: float | None = None, keep_last: int = 2
) -> checkpoint_read.Record:
    """Save a small state."""
    return commit(folder, {**state(step), "step": step, "epoch": step // 10}, top1, keep_last)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """What a network like the file's takes of it."""
    found = checkpoint_read.read(path, foreign=True)
    network = nn.Module()
    for key in ("a", "v", "w"):
        network.register_buffer(key, torch.zeros(50, 20))
    given, _ = weights.find(found.state, network, found.where)
    models.refuse_misfits(given, given, found.where, "itself")
    return given


@pytest.mark.parametrize("what", ["open_regular", "read_regular"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO], ids=["passing", "lasting"])
def test_what_may_be_read_the_next_time_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    """An older checkpoint serves for a lost one, not for one that passingly fails."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    real = getattr(checkpoint_read, what)

    def fails(path: Path, *rest: Any) -> Any:
        if path.name.startswith("step-2"):
            raise OSError(number, os.strerror(number))
        return real(path, *rest)

    monkeypatch.setattr(checkpoint_read, what, fails)
    if number == errno.EIO:
        assert checkpoint_read.read(tmp_path).record.step == 1
    else:
        with pytest.raises(
            CheckpointError,
            match=r"step-2\.\w+ .*Too many open files",
        ):
            checkpoint_read.read(tmp_path)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    """Tensors and plain containers come back equal, with the facts of the record."""
    saved = save(tmp_path, 10, 0.5)
    found = checkpoint_read.read(saved.path)
    assert found.record == saved
    assert torch.equal(found.state["model"]["w"], state(10)["model"]["w"])
    assert found.state["random"]["python"] == state()["random"]["python"]


def test_links_point_at_the_newest_and_the_best(tmp_path: Path) -> None:
    """last.pt is the newest, best.pt the most accurate; ties keep the earlier, NaN loses."""
    for step, top1 in ((1, 0.2), (2, 0.9), (3, 0.9), (4, float("nan")), (5, None)):
        save(tmp_path, step, top1)
    assert (tmp_path / "last.pt").resolve().name == "step-5.pt"
    assert (tmp_path / "best.pt").resolve().name == "step-2.pt"


def test_old_ones_go_but_the_best_stays(tmp_path: Path) -> None:
    """The newest keep_last and the best are kept, each with its record, and nothing else."""
    for step, top1 in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        save(tmp_path, step, top1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.pt",
        "last.pt",
        "step-1.json",
        "step-1.pt",
        "step-3.json",
        "step-3.pt",
        "step-4.json",
        "step-4.pt",
    ]


def test_what_a_resume_left_behind_goes(tmp_path: Path) -> None:
    """A save after a resume from an earlier step drops the records of later steps."""
    for step in (10, 20, 30):
        save(tmp_path, step, top1=step / 100, keep_last=5)
    save(tmp_path, 15, top1=0.01)
    assert (tmp_path / "last.pt").resolve().name == "step-15.pt"
    assert [record.step for record in checkpoint_read.records(tmp_path)] == [10, 15]
    assert (tmp_path / "best.pt").resolve().name == "step-10.pt"


def test_a_file_without_its_record_does_not_exist(tmp_path: Path) -> None:
    """The record is the commit: a file that has none is not resumed."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-2.json").unlink()
    assert checkpoint_read.read(tmp_path).record.step == 1


def test_when_all_are_damaged_nothing_is_started_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With every checkpoint damaged the newest is an error, not an empty answer."""
    for step in (1, 2):
        save(tmp_path, step).path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="every checkpoint is damaged: .*step-2.pt"):
        checkpoint_read.read(tmp_path)
    # there is none to fall back to
    assert not caplog.messages
    (tmp_path / "none").mkdir()
    with pytest.raises(checkpoint_read.NoCheckpoint):
        checkpoint_read.read(tmp_path / "none")


class Canary:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    """A pickle that calls os.system is refused without a way round, and nothing ran."""
    path = tmp_path / "evil.pt"
    canary = tmp_path / "canary"
    torch.save({"model": Canary(canary)}, path)
    with pytest.raises(
        CheckpointError, match="contains more than tensors and plain containers"
    ) as caught:
        read_weights(path)
    assert not canary.exists()
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"<html>", b"\xff\xd8\xff\xe0", pickle.dumps({"a": 1})],
    ids=["html", "jpeg", "pickle"],
)
def test_other_files_are_no_checkpoints(tmp_path: Path, content: bytes) -> None:
    """A file of another kind is refused by its kind."""
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        read_weights(path)


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ("{", r"step-1\.json .*JSONDecodeError"),
        ('{"schema": 1}', r"step-1\.json .*KeyError"),
        (
            json.dumps({"schema": 99, "step": 1, "epoch": 1, "top1": None, "sha256": ""}),
            "written by a newer version",
        ),
    ],
    ids=["cut", "fields", "newer"],
)
def test_a_bad_record_is_named(tmp_path: Path, manifest: str, text: str) -> None:
    """A record that cannot be understood is refused with the reason."""
    path = save(tmp_path, 1).path
    path.with_suffix(".json").write_text(manifest)
    with pytest.raises(CheckpointError, match=text):
        checkpoint_read.read(path)


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    """A zip archive that torch did not write is refused."""
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello", "world")
    with pytest.raises(CheckpointError, match="not a checkpoint .*hello"):
        read_weights(path)


def test_a_packed_checkpoint_is_refused_unread(tmp_path: Path) -> None:
    """Torch packs nothing, and a small file could take all memory."""
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in parts.items():
            packed.writestr(name, content + bytes(1 << 20))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        read_weights(tmp_path / "x.pt")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".json", ".pt"])
@oddities.every
def test_an_odd_checkpoint_is_named_and_the_one_before_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, plant: Plant
) -> None:
    """Anything in the place of a record or file: one warning, no wait."""
    save(tmp_path, 1)
    path = save(tmp_path, 2).path.with_suffix(suffix)
    oddities.put(plant, path)
    assert checkpoint_read.read(tmp_path).record.step == 1
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0]
    assert oddities.untouched(path)
    assert [record.step for record in checkpoint_read.records(tmp_path)] == (
        [1] if suffix == ".json" else [1, 2]
    )


def rewrite(record: Path, change: dict[str, Any]) -> None:
    """Put ``change`` into a record of schema 1, which had no digest of its own."""
    facts = json.loads(record.read_text())
    del facts["digest"]
    record.write_text(json.dumps(facts | {"schema": 1} | change))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": -5},
        {"schema": "1"},
        {"step": 9},
        {"step": -2},
        {"step": "2"},
        {"step": 10**400},
        {"epoch": -1},
        {"epoch": None},
        {"top1": "0.5"},
        {"top1": math.inf},
        {"sha256": None},
        {"sha256": "\x1b[2J"},
    ],
    ids=str,
)
def test_an_odd_record_is_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    """A record with other types, or of another step than its name says, is refused."""
    save(tmp_path, 1)
    record = save(tmp_path, 2).path.with_suffix(".json")
    rewrite(record, change)
    assert checkpoint_read.read(tmp_path).record.step == 1
    assert caplog.messages[0].startswith(f"{record} is not a checkpoint record: ")


def test_a_record_without_a_number_for_top1_is_unrated(tmp_path: Path) -> None:
    """NaN is no accuracy, and no damage either."""
    record = save(tmp_path, 2, top1=0.5).path.with_suffix(".json")
    rewrite(record, {"top1": math.nan})
    assert [found.top1 for found in checkpoint_read.records(tmp_path)] == [None]


FIRST_SCHEMA = '{"schema": 1, "step": 2, "epoch": 0, "top1": 0.5, "sha256": "%s"}'


def test_a_record_of_the_first_schema_is_read(tmp_path: Path) -> None:
    """What an earlier version committed is resumed, and a save beside it counts it."""
    save(tmp_path, 1)
    path = save(tmp_path, 2).path
    path.with_suffix(".json").write_text(
        FIRST_SCHEMA % hashlib.sha256(path.read_bytes()).hexdigest()
    )
    record = checkpoint_read.read(path).record
    assert (record.step, record.top1) == (2, 0.5)
    save(tmp_path, 3)
    assert [found.step for found in checkpoint_read.records(tmp_path)] == [2, 3]
    assert (tmp_path / "best.pt").resolve() == path


def damaged(data: bytes, kind: str, rng: random.Random) -> bytes:
    """``data`` with a bit flipped, cut off anywhere, or with a block of zeros."""
    at = rng.randrange(len(data))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    while not any(data[at : at + 512]):
        at = rng.randrange(len(data))
    return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]


@pytest.mark.parametrize(
    ("suffix", "kind", "times"),
    [
        (".pt", "flip", 400),
        (".pt", "cut", 200),
        (".pt", "zeros", 200),
        (".json", "flip", 200),
        (".json", "cut", 200),
    ],
)
def test_all_damage_is_found_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, kind: str, times: int
) -> None:
    """Any lost bit, end or block: one warning names the file, the checkpoint before serves."""
    save(tmp_path, 1)
    path = save(tmp_path, 2, 0.5).path.with_suffix(suffix)
    data = path.read_bytes()
    rng = random.Random(0)
    for _ in range(times):
        path.write_bytes(damaged(data, kind, rng))
        assert checkpoint_read.read(tmp_path).record.step == 1
        assert len(caplog.messages) == 1 and str(path) in caplog.messages[0]
        with pytest.raises(CheckpointError, match=r"step-2\."):
            checkpoint_read.read(path.with_suffix(".pt"))
        caplog.clear()


def test_a_newer_record_is_not_deleted(tmp_path: Path) -> None:
    """A checkpoint of a later version is refused by its schema, and stays."""
    newer = save(tmp_path, 1).path
    newer.with_suffix(".json").write_text('{"schema": 3}')
    with pytest.raises(CheckpointError, match="written by a newer version"):
        checkpoint_read.read(newer)
    for step in (2, 3, 4):
        save(tmp_path, step)
    assert newer.exists() and newer.with_suffix(".json").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("sparse", "w is not a dense CPU tensor"),
        ("meta", "w is not a dense CPU tensor"),
        ("beyond its storage", "w is not a dense CPU tensor"),
    ],
)
def test_weights_that_are_no_plain_tensors_are_refused(
    tmp_path: Path, layout: str, text: str
) -> None:
    """A tensor without numbers, or larger than its file, is refused before it is used."""
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.zeros(3, device="meta"),
        "beyond its storage": torch.zeros(1).expand(10**12),
    }[layout]
    torch.save({"model": {"a": torch.zeros(3), "w": odd}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=f"x.pt: .*{text}"):
        read_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    """They are read, with one line that names the first tensor."""
    torch.save(
        {"a": torch.zeros(3), "w": torch.tensor([1.0, value]), "v": torch.tensor([value])},
        tmp_path / "x.pt",
    )
    assert set(read_weights(tmp_path / "x.pt")) == {"a", "w", "v"}
    (warned,) = caplog.messages
    assert warned.startswith(f"{tmp_path / 'x.pt'}: w ") and "NaN" in warned
