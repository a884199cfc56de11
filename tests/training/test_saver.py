"""Saving: under a free name, and whole whenever it ends."""

from __future__ import annotations

import builtins
import errno
import os
import re
import shutil
import stat
import subprocess
import sys
from collections import OrderedDict
from contextlib import nullcontext, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import disk
import killed
import pytest
import torch
from checkpoints import commit

from harness.runtime.errors import CheckpointError, DiskError
from harness.training import checkpoint_read


def state(value: float = 1.0) -> dict[str, Any]:
    """A small state."""
    return {"model": {"w": torch.full((5000,), value)}}


def save(
    folder: Path, step: int, top1: float | None = None, keep_last: int = 2
) -> checkpoint_read.Record:
    """Save a small state, which holds its step."""
    whole = {**state(step), "step": step, "epoch": 1}
    return commit(folder, whole, top1, keep_last)


def names(folder: Path) -> list[str]:
    """All that lies in ``folder``."""
    return sorted(path.name for path in folder.iterdir())


def test_what_is_packed_comes_back(tmp_path: Path) -> None:
    """Shared tensors stay shared, views keep strides and values, a network its metadata."""
    shared = torch.arange(6.0)
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    numbers = torch.randn(3, dtype=torch.complex64)
    model = OrderedDict(a=shared, b=shared[2:4], c=images, d=torch.zeros(0), e=numbers.conj())
    model._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    given = {"model": model, "numbers": [1, (2, None)], "text": "x", "step": 1, "epoch": 1}
    written = checkpoint_read.read(commit(tmp_path, given).path).state
    found = written["model"]
    assert list(found) == list(model) and found._metadata == model._metadata
    assert all(torch.equal(found[key], model[key]) for key in model)
    assert found["c"].stride() == images.stride()
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
    assert (written["numbers"], written["text"]) == ([1, (2, None)], "x")


def test_a_committed_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    """The same step takes the next free name; a tie keeps the earlier best."""
    paths = [save(tmp_path, 5, 0.5, keep_last=12).path for _ in range(11)]
    assert [path.name for path in paths[:3]] == ["step-5.pt", "step-5.2.pt", "step-5.3.pt"]
    assert [record.path for record in checkpoint_read.records(tmp_path)] == paths
    assert (tmp_path / "last.pt").resolve() == paths[-1] and (
        tmp_path / "best.pt"
    ).resolve() == paths[0]
    assert checkpoint_read.read(tmp_path).record.path.name == "step-5.11.pt"
    assert save(tmp_path, 6, keep_last=2).path.name == "step-6.pt"
    assert [record.path.name for record in checkpoint_read.records(tmp_path)] == [
        "step-5.pt",
        "step-5.11.pt",
        "step-6.pt",
    ]


def test_what_is_no_checkpoint_is_left_and_does_not_stop_a_save(tmp_path: Path) -> None:
    """A folder in the place of a record takes that name; others' files stay."""
    (tmp_path / "step-6.json").mkdir()
    (tmp_path / "step-by-step.pt").write_text("mine")
    assert save(tmp_path, 6).path.name == "step-6.2.pt"
    save(tmp_path, 7)
    assert {"step-6.json", "step-by-step.pt"} <= set(names(tmp_path))


def test_files_that_a_kill_left_go(tmp_path: Path) -> None:
    """Temporary files, and files without a record, go with the next save."""
    save(tmp_path, 1)
    for name in (".step-2.pt.ab.tmp", "step-2.pt", "step-3.pt", "step-1.2.pt"):
        (tmp_path / name).write_text("x")
    save(tmp_path, 3)
    assert names(tmp_path) == ["last.pt", "step-1.json", "step-1.pt", "step-3.json", "step-3.pt"]


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_what_was_whole(tmp_path: Path) -> None:
    """SIGKILL around each call to the disk leaves a whole newest checkpoint, and both pointers."""
    path = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, killed.__file__, "save", tmp_path],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        timeout=100,
    )
    events = tmp_path.joinpath("events").read_text().splitlines()
    calls = {"mkdir", "open", "write", "fsync", "replace", "symlink", "unlink"}
    assert {f"before {call}" for call in calls} | {
        f"after {call}" for call in calls - {"mkdir"}
    } <= set(events)
    assert len(events) > 35


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1, the best, 2 and 3."""
    for step, top1 in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(tmp_path, step, top1)
    return tmp_path


def whole(folder: Path) -> list[str]:
    """The names of the committed checkpoints, each of which is read."""
    committed = checkpoint_read.records(folder)
    assert [checkpoint_read.read(record.path).state["model"]["w"][0] for record in committed] == [
        r.step for r in committed
    ]
    return [record.path.name for record in committed]


def test_a_disk_that_is_full_anywhere_leaves_all_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for a part of a save: the error has the way out, no half file stays."""
    before = names(saved)
    size = saved.joinpath("step-3.pt").stat().st_size + 100
    room = 0

    class Full(FileIO):
        def write(self, data: Any) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            put = super().write(bytes(data)[:room])
            room -= put or 0
            return put or 0

    real = builtins.open

    def opened(path: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
        if mode == "xb":
            return BufferedWriter(Full(path, mode))
        return real(path, mode, *given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", opened)
        for offset in range(20):
            room = offset * size // 19
            with pytest.raises(
                DiskError,
                match="step-4.*: the checkpoint cannot be saved: No space left.*resume=auto",
            ):
                save(saved, 4)
            assert names(saved) == before and whole(saved) == [
                "step-1.pt",
                "step-2.pt",
                "step-3.pt",
            ]
    save(saved, 4)
    assert whole(saved) == ["step-1.pt", "step-3.pt", "step-4.pt"]


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "code",
    [errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOSPC],
    ids=errno.errorcode.get,
)
def test_a_disk_that_fails_anywhere_leaves_all_whole(
    saved: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    lasting: bool,
) -> None:
    """An error of any call, once or from then on: what was whole stays so."""
    failed: set[str] = set()
    for number in range(1, 100):
        folder = tmp_path_factory.mktemp("disk") / "checkpoints"
        left = number
        shutil.copytree(saved, folder, symlinks=True)

        def tell(when: str, name: str) -> None:
            nonlocal left
            left -= when == "before"
            if when == "before" and (left == 0 or (left < 0 and lasting)):
                failed.add(name)
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            disk.tell_calls(tell, patched.setattr)
            said = pytest.raises(
                DiskError, match=f"{re.escape(str(folder))}.*{os.strerror(code)}; earlier ones"
            )
            with suppress(pytest.fail.Exception), said:
                save(folder, 4)
        assert {"step-1.pt", "step-3.pt"} <= set(whole(folder))
        assert lasting or "unlink" in failed or not list(folder.glob(".*"))
        save(folder, 5)
        assert (
            whole(folder)[0] == "step-1.pt"
            and not list(folder.glob(".*"))
            and len(names(folder)) == 8
        )
        if left > 0:
            break
    assert failed == {"mkdir", "open", "write", "fsync", "replace", "symlink", "unlink"}


@pytest.mark.parametrize(
    "code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS], ids=errno.errorcode.get
)
def test_without_links_pointers_hold_names(
    saved: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Where no link can be made, last.pt and best.pt are read all the same."""

    def refuse(*given: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "symlink", refuse)
    save(saved, 4)
    for name, step in (("last.pt", 4), ("best.pt", 1)):
        assert (saved / name).read_text() == f"step-{step}.pt" and not (saved / name).is_symlink()
        assert checkpoint_read.read(saved / name).record.path == saved / f"step-{step}.pt"
        assert checkpoint_read.read(saved / name, foreign=True).state["model"]["w"][0] == step
    monkeypatch.undo()
    save(saved, 5)
    assert (saved / "last.pt").is_symlink() and checkpoint_read.read(
        saved / "last.pt"
    ).record.step == 5


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_link_to_a_damaged_record_is_an_error(saved: Path, damage: str) -> None:
    """A named best.pt is never another one in silence."""
    record = saved / "step-1.json"
    if damage == "changed":
        record.write_bytes(record.read_bytes().replace(b"0.9", b"0.8"))
    else:
        record.unlink()
    with pytest.raises(CheckpointError, match=r"step-1\.json "):
        checkpoint_read.read(saved / "best.pt")


@pytest.mark.parametrize(
    ("code", "tolerated"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)]
)
def test_a_folder_need_not_be_synced(
    saved: Path, monkeypatch: pytest.MonkeyPatch, code: int, tolerated: bool
) -> None:
    """A mount that cannot sync folders is used; a failing disk is an error."""
    fsync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    with nullcontext() if tolerated else pytest.raises(DiskError, match=os.strerror(code)):
        save(saved, 4)
    assert ("step-4.pt" in whole(saved)) is tolerated
