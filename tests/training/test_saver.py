"""Saving: in the background, under a free name, and whole whenever it ends."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runtime.errors import DiskError
from harness.training import checkpoint, saver
from harness.training.saver import Saver


def state(value: float = 1.0) -> dict[str, Any]:
    """A small state."""
    return {"model": {"w": torch.full((5000,), value)}}


def save(folder: Path, step: int, top1: float | None = None, keep_last: int = 2) -> checkpoint.Record:
    """Save a small state, which holds its step."""
    return saver.save(folder, state(step), step=step, epoch=1, top1=top1, keep_last=keep_last)


def names(folder: Path) -> list[str]:
    """All that lies in ``folder``."""
    return sorted(path.name for path in folder.iterdir())


def test_a_state_may_change_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given is saved, though training has gone on before the first byte is written; a second save waits."""
    go, commit = threading.Event(), saver.save

    def later(*given: Any, **facts: Any) -> checkpoint.Record:
        assert go.wait(10)
        return commit(*given, **facts)

    monkeypatch.setattr(saver, "save", later)
    background, given = Saver(tmp_path, 2), state(1.0)
    assert background.wait() is None
    background.save(given, step=1, epoch=1, top1=None)
    given["model"]["w"].fill_(2.0)
    background.check()
    assert not tmp_path.joinpath("step-1.pt").exists()
    go.set()
    background.save(given, step=2, epoch=1, top1=None)
    record = background.wait()
    background.close()
    assert record is not None and record == background.wait()
    assert [checkpoint.read(tmp_path / f"step-{step}.pt")[1]["model"]["w"][0] for step in (1, 2)] == [1.0, 2.0]


def test_a_copy_is_as_its_source(tmp_path: Path) -> None:
    """Shared tensors stay shared and are copied once, views keep their strides, and metadata of a network stays."""
    shared, images = torch.arange(6.0), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    model = OrderedDict(a=shared, b=shared[2:4], c=images, d=torch.zeros(0))
    model._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    copied = saver._on_host({"model": model, "numbers": [1, (2, None)], "text": "x"}, {})
    found = copied["model"]
    assert list(found) == ["a", "b", "c", "d"] and found._metadata == model._metadata
    assert all(torch.equal(found[key], model[key]) for key in model) and found["c"].stride() == images.stride()
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr() != shared.data_ptr()
    assert copied["numbers"] == [1, (2, None)] and copied["text"] == "x"


@pytest.mark.parametrize("ask", ["save", "check", "wait", "close"])
def test_an_error_in_the_background_is_raised_once(tmp_path: Path, ask: str) -> None:
    """The next call of any kind raises what went wrong, and then saving goes on."""
    tmp_path.joinpath("taken").write_text("")
    background = Saver(tmp_path / "taken", 2)
    background.save(state(), step=1, epoch=1, top1=None)
    while not background._last.done():  # type: ignore[union-attr]
        pass
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: background.save(state(), step=2, epoch=1, top1=None),
        "check": background.check,
        "wait": background.wait,
        "close": background.close,
    }
    with pytest.raises(DiskError, match="taken: cannot save the checkpoint: .*; earlier ones are whole: make room or mend"):
        calls[ask]()
    background.check()
    assert background.wait() is None
    if ask != "close":
        tmp_path.joinpath("taken").unlink()
        background.save(state(), step=3, epoch=1, top1=None)
        background.close()
        assert checkpoint.read(tmp_path / "taken")[0].step == 3


def test_a_committed_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    """The same step takes the next free name, counts as newer, and all names serve for reading; a tie keeps the earlier."""
    paths = [save(tmp_path, 5, 0.5, keep_last=12).path for _ in range(11)]
    assert [path.name for path in paths[:3]] == ["step-5.pt", "step-5.2.pt", "step-5.3.pt"]
    assert [record.path for record in checkpoint.records(tmp_path)] == paths
    assert (tmp_path / "last.pt").resolve() == paths[-1] and (tmp_path / "best.pt").resolve() == paths[0]
    found = checkpoint.newest(tmp_path)
    assert found is not None and found[0].path.name == "step-5.11.pt"
    assert save(tmp_path, 6, keep_last=2).path.name == "step-6.pt"
    assert [record.path.name for record in checkpoint.records(tmp_path)] == ["step-5.pt", "step-5.11.pt", "step-6.pt"]


def test_what_is_no_checkpoint_is_left_and_does_not_stop_a_save(tmp_path: Path) -> None:
    """A folder in the place of a record takes that name; files of others' names stay."""
    (tmp_path / "step-6.json").mkdir()
    (tmp_path / "step-by-step.pt").write_text("mine")
    assert save(tmp_path, 6).path.name == "step-6.2.pt"
    save(tmp_path, 7)
    assert {"step-6.json", "step-by-step.pt"} <= set(names(tmp_path))


def test_files_that_a_kill_left_go(tmp_path: Path) -> None:
    """Temporary files, and files whose record was not written or is deleted, go with the next save."""
    save(tmp_path, 1)
    for name in (".step-2.pt.ab.tmp", "step-2.pt", "step-1.2.pt"):
        (tmp_path / name).write_text("x")
    save(tmp_path, 3)
    assert names(tmp_path) == ["last.pt", "step-1.json", "step-1.pt", "step-3.json", "step-3.pt"]


class Disk:
    """A disk that fails with ``code`` at the call ``at`` of those that write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, at: int, only: str | None = None) -> None:
        self.calls: list[str] = []
        self.code, self.at, self.only = code, at, only
        for name in ("fsync", "replace", "unlink", "symlink", "mkdir"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))
        write = saver._Hashing.write.__wrapped__ if hasattr(saver._Hashing.write, "__wrapped__") else None
        del write
        former = saver.BufferedWriter.write
        monkeypatch.setattr(saver._Hashing, "_put", self._failing("write", former), raising=False)

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **more: Any) -> Any:
            if self.only in (None, name):
                self.calls.append(name)
                if len(self.calls) == self.at:
                    raise OSError(self.code, os.strerror(self.code))
            return call(*given, **more)

        return wrapped
