"""Watching a loop of one's own, around its loader or around a block."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wellfed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.hooks import session
from harness.hooks.session import Session

BATCHES = [torch.ones(4, 2)] * 40


def train(batches: Iterator[Tensor] | list[Tensor], epochs: int = 2) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(epochs):
        for batch in batches:
            (batch * weight).sum().backward()
            optimizer.step()


def report(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "report.json").read_text())
    return found


def test_any_iterable_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list of batches is a loader; its verdict can be asked for meanwhile."""
    with wellfed.watching(tmp_path / "run", tensorboard=False):
        batches = wellfed.watched(BATCHES)
        assert len(batches) == 40
        assert batches.verdict().sentence.startswith("Unknown. no torch DataLoader ")
        train(batches)
        assert batches.verdict().bottleneck in ("balanced", "unknown", "host", "compute")
    found = report(tmp_path / "run")
    assert (found["status"], found["steps"], found["epochs"]) == ("completed", 80, 2)
    assert [loader["trains"] for loader in found["loaders"]] == [True]  # type: ignore[attr-defined]
    said = capsys.readouterr()
    assert said.out == "" and "wellfed: verdict" in said.err
    assert Session.running is None


class Wrapper:
    """An iterable around a loader, as timm and Apex have them."""

    def __init__(self, loader: Iterable[Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.loader:
            yield batch + 1


WRAPPED: dict[str, Callable[[Iterable[Tensor]], Iterable[Tensor]]] = {
    "wrapper": Wrapper,
    "two wrappers": lambda loader: Wrapper(wellfed.watched(Wrapper(loader))),
    "prefetcher": lambda loader: wellfed.DataPrefetcher(loader, device="cpu"),
    "generator": lambda loader: (batch for batch in loader),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_loader_is_counted_once(tmp_path: Path, kind: str) -> None:
    """Its batches are those of the DataLoader inside, with its settings."""
    loader: DataLoader[Tensor] = DataLoader(torch.zeros(12, 3, 2, 2), batch_size=3)  # type: ignore[arg-type]
    with wellfed.watching(tmp_path / "run", tensorboard=False):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            for batch in wellfed.watched(WRAPPED[kind](loader)):
                (batch * weight).sum().backward()
                optimizer.step()
                time.sleep(0.01)
    found: Any = report(tmp_path / "run")
    [counted] = found["loaders"]
    assert (counted["batches"], counted["passes"], counted["batch_size"]) == (12, 3, 3)
    assert found["steps"] == 12
    each = found["images_per_s"] * found["step_ms"]["median"] / 1e3
    assert each == pytest.approx(3, rel=0.4)


def test_progress_is_told_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line each time, and nothing of the kind where nobody looks."""
    monkeypatch.setattr(session, "_TELL_S", 0.0)
    for tells in (True, False):
        own = Session("train.py", tmp_path / str(tells), False)
        own.tells, own.window_s = tells, 0.0
        with own.watching():
            train(DataLoader(torch.ones(40, 2), 4))  # type: ignore[arg-type]
        assert ("so far" in capsys.readouterr().err) == tells


def test_a_copy_by_name_is_passed_on(tmp_path: Path) -> None:
    """The arguments of a watched ``Tensor.to`` may have any names that torch gives them."""
    with wellfed.watching(tmp_path / "run", tensorboard=False):
        train(BATCHES, epochs=1)
        assert BATCHES[0].to("cpu", copy=True) is not BATCHES[0]


def test_what_is_watched_already_has_one_report(tmp_path: Path) -> None:
    """An inner block adds nothing and takes nothing away."""
    with (
        wellfed.watching(tmp_path / "outer", tensorboard=False) as outer,
        wellfed.watching(tmp_path / "inner") as inner,
    ):
        assert inner is outer
        train(wellfed.watched(BATCHES))
    assert report(tmp_path / "outer")["steps"] == 80 and not (tmp_path / "inner").exists()


def test_an_error_ends_the_block_with_a_report(tmp_path: Path) -> None:
    """The error is the loop's own."""

    def broken() -> Iterator[Tensor]:
        yield from BATCHES
        raise LookupError("the disk is gone")

    with (
        pytest.raises(LookupError, match="the disk is gone"),
        wellfed.watching(tmp_path / "run", tensorboard=False),
    ):
        train(wellfed.watched(broken()), epochs=1)  # type: ignore[arg-type]
    assert report(tmp_path / "run")["status"] == "failed"


def test_a_folder_that_cannot_be_made_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training is none the worse for it."""
    (tmp_path / "file").write_text("")
    with wellfed.watching(tmp_path / "file" / "run", tensorboard=False):
        train(wellfed.watched(BATCHES))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("wellfed: watching stopped ")
    assert f"{Path('file/run')} " in line and ": Not a directory; " in line


def test_an_earlier_report_stays(tmp_path: Path) -> None:
    """The next one gets a folder beside it."""
    for epochs in (1, 2):
        with wellfed.watching(tmp_path / "run", tensorboard=False):
            train(wellfed.watched(BATCHES), epochs)
    assert [report(tmp_path / name)["steps"] for name in ("run", "run-1")] == [40, 80]


def test_a_function_that_makes_batches(tmp_path: Path) -> None:
    """Wrapped as the report of its steps without a loader says, it is a loader."""
    for name, is_wrapped in (("alone", False), ("wrapped", True)):
        made = iter(BATCHES)
        get_batch = lambda made=made: next(made)
        with wellfed.watching(tmp_path / name, tensorboard=False):
            batches = iter(get_batch, None)
            train(iter(wellfed.watched(batches)) if is_wrapped else batches, epochs=1)
    alone, wrapped = (report(tmp_path / name) for name in ("alone", "wrapped"))
    assert (alone["steps"], alone["loaders"]) == (40, [])
    assert (wrapped["steps"], len(wrapped["loaders"])) == (40, 1)  # type: ignore[arg-type]


def test_a_block_after_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends what ``watched`` began in an earlier cell, and has a report of its own."""
    monkeypatch.chdir(tmp_path)
    train(wellfed.watched(BATCHES), epochs=1)
    with wellfed.watching("block", tensorboard=False):
        train(wellfed.watched(BATCHES))
    (first,) = tmp_path.glob("outputs/*/*/report.json")
    assert (report(first.parent)["steps"], report(tmp_path / "block")["steps"]) == (40, 80)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["to its end", "interrupted"])
def test_a_cell_of_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """Its end is that of what ``watched`` began, each time that it is run."""
    monkeypatch.chdir(tmp_path)
    callbacks: list[Callable[[Any], None]] = []
    events = SimpleNamespace(
        register=lambda _, call: callbacks.append(call),
        unregister=lambda _, call: callbacks.remove(call),
    )
    shell = SimpleNamespace(events=events)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    batches = wellfed.watched(BATCHES)
    for _ in range(2):
        train(batches, epochs=1)
        (end,) = callbacks
        end(SimpleNamespace(error_in_exec=error))
        assert not callbacks and Session.running is None
    found = [report(path.parent) for path in tmp_path.glob("outputs/*/*/report.json")]
    status = "interrupted" if error else "completed"
    assert [(each["steps"], each["status"]) for each in found] == [(40, status)] * 2


def test_a_block_in_a_forked_process(tmp_path: Path) -> None:
    """Has its own report, also where the process that forked it is watched."""
    with wellfed.watching(tmp_path / "parent", tensorboard=False):
        train(wellfed.watched(BATCHES))
        child = os.fork()
        if not child:
            with wellfed.watching(tmp_path / "child", tensorboard=False):
                train(wellfed.watched(BATCHES), epochs=1)
            os._exit(0)
        os.waitpid(child, 0)
    assert report(tmp_path / "child")["steps"] == 40
    assert report(tmp_path / "parent")["steps"] == 80
