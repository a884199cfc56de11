"""Faults of disks, files and folders that the tests of one room do not show."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import disk
import pytest
import torch
from checkpoints import commit
from commands import trained
from PIL import Image
from run_state import lines
from torch import nn

from harness.config import Config, ConfigError, DataConfig, to_plain
from harness.data.decode import DecodeError, decode
from harness.data.storage import FolderSource
from harness.monitor.writer import RunWriter
from harness.report.page.course import read_windows
from harness.runtime import folder as folder_room
from harness.runtime.errors import CheckpointError
from harness.runtime.folder import own
from harness.training import checkpoint_read
from harness.training.models import take_over

OPTIONS = DataConfig()


def save(folder: Path, step: int) -> checkpoint_read.Record:
    """Saves a small state, which holds its step."""
    state = {"model": {"w": torch.full((9,), float(step))}, "step": step, "epoch": 1}
    return commit(folder, state)


def held(path: Path) -> int:
    """The step that the weights of a checkpoint are of, which is the record's."""
    found = checkpoint_read.read(path)
    assert found.record is not None and (found.state["model"]["w"] == found.record.step).all()
    return found.record.step


def picture(mode: str = "RGB", kind: str = "JPEG") -> bytes:
    """An image of noise."""
    noise = Image.frombytes("RGB", (48, 32), random.Random(0).randbytes(48 * 32 * 3))
    buffer = io.BytesIO()
    noise.convert(mode).save(buffer, kind)
    return buffer.getvalue()


def test_a_save_reaches_the_disk_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, then its name, then the record, then its name: each synced before what follows."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    fsync = os.fsync
    replace = os.replace
    unlink = os.unlink
    calls: list[str] = []

    def name(path: Path) -> str:
        return "folder" if path == tmp_path else path.name.removeprefix(".").split(".")[0]

    def synced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        calls.append(f"sync {name(path)}{'.json' * ('.json' in path.name)}")
        fsync(handle)

    def replaced(source: Path, target: Path) -> None:
        # on another device than the folder's the new name would not come in one step
        assert Path(source).parent == Path(target).parent == tmp_path
        calls.append(f"name {Path(target).name}")
        replace(source, target)

    def deleted(path: Path, **more: int) -> None:
        if Path(path).suffix in (".pt", ".json"):
            calls.append("delete")
        unlink(path, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "unlink", deleted)
    save(tmp_path, 3)
    assert calls[:6] == [
        "sync step-3", "name step-3.pt", "sync folder", "sync step-3.json", "name step-3.json",
        "sync folder",
    ]  # fmt: skip
    assert "delete" in calls and calls.index("delete") > calls.index("name last.pt") > 5


def test_a_reader_never_meets_half_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call of a save to the disk the folder and last.pt give a whole checkpoint."""
    save(tmp_path, 1)
    seen: list[tuple[int, int]] = []

    def look(when: str, name: str) -> None:
        with monkeypatch.context() as real:
            for each, call in calls.items():
                real.setattr(os, each, call)
            seen.append((held(tmp_path), held(tmp_path / "last.pt")))

    calls = {name: getattr(os, name) for name in disk.NAMES}
    with monkeypatch.context() as patched:
        disk.tell_calls(look, patched.setattr)
        for step in (2, 3):
            save(tmp_path, step)
    assert len(seen) > 40 and set(seen) == {(1, 1), (2, 2), (3, 3)}
    assert seen == sorted(seen)


def test_a_save_needs_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR may be on another device, full or gone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    save(tmp_path / "checkpoints", 1)
    assert held(tmp_path / "checkpoints") == 1
    assert not (tmp_path / "gone").exists()


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    """The next save is whole, though the run's folder went meanwhile."""
    save(tmp_path / "run/checkpoints", 1)
    for path in (tmp_path / "run/checkpoints").iterdir():
        path.unlink()
    (tmp_path / "run/checkpoints").rmdir()
    (tmp_path / "run").rmdir()
    save(tmp_path / "run/checkpoints", 2)
    assert held(tmp_path / "run/checkpoints") == 2


def test_the_newest_is_told_by_its_step(tmp_path: Path) -> None:
    """A clock that was set back or was never set does not change which one is resumed."""
    for step in (5, 10):
        path = save(tmp_path, step).path
        for file in (path, path.with_suffix(".json")):
            os.utime(file, (1e9 - step * 1e7,) * 2)
    assert held(tmp_path) == 10
    os.utime(save(tmp_path, 11).path, (0, 0))
    assert [record.step for record in checkpoint_read.records(tmp_path)] == [10, 11]


@pytest.mark.parametrize("at_s", [-3600.0, 3600.0, 0.0])
def test_a_clock_that_jumps_spoils_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_s: float
) -> None:
    """Times of the lines come from a clock that only goes forward."""
    with RunWriter(tmp_path, tensorboard=False) as writer:
        writer.scalars(1, {"a": 1.0})
        monkeypatch.setattr("time.time", lambda: at_s)
        writer.scalars(2, {"a": 1.0})
    times = [line["time_s"] for line in lines(tmp_path)]
    assert 0 <= times[0] <= times[1] < 60


def test_what_a_killed_run_left_goes_with_the_next_start(tmp_path: Path) -> None:
    """Half-written files of the run's folder are swept when it is owned again."""
    (tmp_path / ".report.json.1.tmp").write_text("{")
    (tmp_path / "mine.tmp").write_text("mine")
    own(tmp_path)
    folder_room._owned.pop(tmp_path.resolve() / ".lock").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "mine.tmp"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_figures_outlive_their_event_file(tmp_path: Path, damage: str) -> None:
    """metrics.jsonl has every step, and a resumed run writes an event file of its own."""
    with RunWriter(tmp_path, tensorboard=True) as writer:
        for step in (10, 20):
            writer.scalars(step, {"a": 1.0})
    (events,) = tmp_path.glob("events.*")
    data = bytearray(events.read_bytes())
    data[len(data) // 2] ^= 1
    events.write_bytes(data[:-9] if damage == "cut" else data)
    if damage == "gone":
        events.unlink()
    with RunWriter(tmp_path, tensorboard=True, resumed_step=20) as writer:
        writer.scalars(30, {"a": 1.0})
    assert len(list(tmp_path.glob("events.*"))) == 1 + (damage != "gone")
    found = read_windows(tmp_path / "metrics.jsonl")
    assert found.damaged == 0
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["module", "TorchScript", "tar", "gzip"])
def test_what_is_more_than_weights_is_refused(tmp_path: Path, kind: str) -> None:
    """A pickled network, TorchScript and archives are refused by name, and none is run."""
    path = tmp_path / "x.pt"
    if kind == "module":
        torch.save(nn.Linear(2, 2), path)
    elif kind == "TorchScript":
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), str(path))
    elif kind == "tar":
        with tarfile.open(path, "w") as archive:
            archive.addfile(tarfile.TarInfo("weights"))
    else:
        path.write_bytes(gzip.compress(bytes(99)))
    with pytest.raises(CheckpointError, match=rf"x.pt .*({kind}|not a checkpoint|pickled network)"):
        take_over(nn.Linear(2, 2), checkpoint_read.read(path, foreign=True), "model.name=x")


@pytest.mark.parametrize("change", [{"extra": 1}, {"sha256": "0" * 64}], ids=["field", "digest"])
def test_a_changed_record_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """A record with another field, or another digest of its file, is none that was committed."""
    record = save(tmp_path, 1).path.with_suffix(".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"step-1.json .*changed since"):
        checkpoint_read.read(tmp_path / "step-1.pt")


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_a_wrong_suffix_does_no_harm(tmp_path: Path, kind: str) -> None:
    """What a file is decides its content."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.jpg").write_bytes(picture(kind=kind))
    data, _ = FolderSource(tmp_path).read(0)
    assert isinstance(data, bytes) and decode(data, OPTIONS).shape == (32, 48, 3)


def test_classes_that_differ_in_case_are_two(tmp_path: Path) -> None:
    """A and a are two classes, where the file system has both."""
    for name in ("A", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "1.jpg").write_bytes(picture())
    source = FolderSource(tmp_path)
    assert list(source.classes) == sorted(path.name for path in tmp_path.iterdir())


def test_a_png_without_its_end_has_its_pixels() -> None:
    """The last chunk holds no pixel: the image is the same without it."""
    data = picture(kind="PNG")
    assert (decode(data[:-12], OPTIONS) == decode(data, OPTIONS)).all()


def test_a_gray_jpeg_has_three_equal_channels() -> None:
    """Of one channel three are made."""
    pixels = decode(picture("L"), OPTIONS)
    assert (pixels == pixels[:, :, :1]).all() and pixels.std() > 10


def test_a_jpeg_of_twelve_bits_is_refused() -> None:
    """Its depth is named."""
    data = picture().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc1\x00\x11\x0c")
    with pytest.raises(DecodeError, match="12-bit"):
        decode(data, OPTIONS)


def test_of_a_setting_typed_twice_the_last_counts(composed: Callable[..., Config]) -> None:
    """As in every program of Hydra's: resume=auto with another one behind it is that one."""
    config = composed("run.name=x", "resume=auto", "resume=outputs/y")
    assert to_plain(config)["resume"] == "outputs/y"


def test_a_data_root_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """Before anything starts, in one line, and not at the end of a run."""
    root = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    done = trained(tmp_path, "data=imagefolder", f"data.root={root}")
    (line,) = done.stderr.splitlines()
    assert (done.returncode, "data.root=" in line, "Traceback" in line) == (2, True, False)
    assert not (tmp_path / "outputs").exists() and sys.getfilesystemencoding() == "utf-8"


@pytest.mark.parametrize("name", ["x" * 300, "caf\udce9"], ids=["long", "not UTF-8"])
def test_a_name_that_cannot_be_a_folder_is_refused(
    composed: Callable[..., Config], name: str
) -> None:
    """Before anything is made, with what a name may be."""
    with pytest.raises(ConfigError, match=r"^run.name=.*: use up to 200 letters, digits"):
        composed(f"run.name='{name}'")
