"""What tuning tells: that it can be typed, run, read, stored and recalled."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from reports import OPEN, rate, report, workers
from torch.utils.data import DataLoader

from harness.config import Config, LoaderConfig
from harness.feed.interface import FeedSettings, train_settings, val_settings, with_backend
from harness.runtime.files import typed
from harness.runtime.limits import Limits
from harness.tuning.answer import Side, TuningReport
from harness.watch.board import Board

LIMITS = Limits(8.0, 2**30, None, 1024)


class Pages:
    """A board that keeps what it is given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def write(self, name: str, text: str) -> None:
        self.given[name] = json.loads(text)

    def text(self, tag: str, lines: list[str]) -> None:
        self.given[tag] = lines


@pytest.mark.parametrize(
    ("settings", "val", "expected"),
    [
        pytest.param(
            workers(3),
            samples.settings(3, batch_size=64),
            "loader.backend=processes loader.num_workers=3 loader.prefetch_factor=2 "
            "loader.pin_memory=false loader.persistent_workers=true",
            id="workers",
        ),
        pytest.param(
            samples.settings(0),
            samples.settings(0),
            "loader.backend=processes loader.num_workers=0 loader.pin_memory=false",
            id="no workers",
        ),
        pytest.param(
            samples.settings(2, prefetch_factor=5),
            samples.settings(1, batch_size=9, prefetch_factor=7),
            "loader.backend=processes loader.num_workers=2 loader.prefetch_factor=5 "
            "loader.pin_memory=false loader.persistent_workers=false "
            "loader.val.batch_size=9 loader.val.num_workers=1 "
            "loader.val.prefetch_factor=7",
            id="validation of its own",
        ),
    ],
)
def test_the_override_gives_the_choice(
    composed: Callable[..., Config], settings: FeedSettings, val: FeedSettings, expected: str
) -> None:
    """Typed on the command line it gives the very settings that were chosen, for training and
    validation.
    """
    override = report(settings=settings, val=val).override
    assert override == expected
    loader = composed(
        *override.split(),
        f"loader.batch_size={settings.batch_size}",
        f"loader.timeout_s={settings.timeout_s}",
    ).loader
    assert train_settings(loader, LIMITS, pinnable=True) == settings
    assert val_settings(loader, settings) == val


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        pytest.param(
            with_backend(workers(3), "threads"),
            "loader.backend=threads loader.num_workers=3 loader.prefetch_factor=2 "
            "loader.pin_memory=false "
            "loader.persistent_workers=true",
            id="threads",
        ),
        pytest.param(
            with_backend(workers(3), "arrays"),
            "loader.backend=arrays loader.pin_memory=false",
            id="arrays, which have no workers",
        ),
        pytest.param(
            workers(0),
            "loader.backend=processes loader.num_workers=0 loader.pin_memory=false",
            id="processes",
        ),
    ],
)
def test_the_override_names_the_form(
    composed: Callable[..., Config], chosen: FeedSettings, expected: str
) -> None:
    """Typed it is a setting that a run takes."""
    val = val_settings(LoaderConfig(), chosen)
    assert report(settings=chosen, val=val).override == expected
    loader = composed(*expected.split()).loader
    assert (loader.backend.name if loader.backend else "processes") == chosen.backend


@pytest.mark.parametrize("form", ["threads", "arrays"])
def test_a_form_that_torch_has_not_has_no_line_in_code(form: str) -> None:
    """It has the words of the command line alone."""
    own = report(settings=with_backend(workers(3), form))
    assert own.dataloader == ""
    assert [line.partition(":")[0] for line in own.lines() if line.startswith("the same")] == [
        "the same without tuning"
    ]


@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create"
)  # more workers than some machines have cores
@pytest.mark.parametrize(
    "settings", [workers(3), samples.settings(0)], ids=["workers", "no workers"]
)
def test_the_torch_line_is_python(settings: FeedSettings) -> None:
    """It builds a DataLoader with the settings that were chosen."""
    line = report(settings=settings).dataloader
    loader: DataLoader[Any] = eval(line, {"DataLoader": DataLoader, "dataset": torch.arange(100)})
    names = ("batch_size", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
    assert [getattr(loader, name) for name in names] == [getattr(settings, name) for name in names]


def test_the_user_reads_the_outcome() -> None:
    """Before and after, the sentence, both ways to get it again, what was refused and why, and the
    notes.
    """
    own = report()
    assert own.lines() == [
        "tuner=auto: 4 measurements in 9.2 s",
        "        images/s  waiting  memory    setting",
        "before  240 ±5%   62%      210.0 MB  num_workers=1 pin_memory=false prefetch_factor=2",
        "after   620 ±5%   1%       1.6 GB    num_workers=3 pin_memory=false prefetch_factor=2",
        "Training gets 620 images/s instead of 240.",
        f"the same without tuning: {own.override}",
        f"the same in code: {own.dataloader}",
        (
            "refused num_workers=8 pin_memory=false prefetch_factor=2: worker 7 exited: /dev/shm "
            "is "
            "full"
        ),
        "note: pin_memory has no use without an accelerator",
    ]


def test_what_was_not_measured_is_a_dash() -> None:
    """A search without steps says that its rates are the loader's alone, and has no waiting."""
    shown = report(search="grid", demand=None, before=Side(workers(1), None, None, None)).lines()
    assert "images/s (loader alone)" in shown[1]
    assert shown[2].split()[:4] == ["before", "-", "-", "-"]


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"complete": False}, "tuner=auto: 4 measurements in 9.2 s, the time was over"),
        ({"reused": True, "seconds": 0.3}, "tuner=auto: remembered from an earlier run, 0.3 s"),
    ],
    ids=["budget", "remembered"],
)
def test_the_title_says_how_the_answer_came(changes: dict[str, Any], title: str) -> None:
    """A search that was cut short, and an answer that was remembered, are told."""
    assert report(**changes).lines()[0] == title


def test_the_summary_is_for_the_report() -> None:
    """Plain values; what was not measured is None."""
    assert report(before=Side(workers(1), None, None, None)).summary() == {
        "seconds": 9.23,
        "chosen": "num_workers=3 pin_memory=false prefetch_factor=2",
        "reused": False,
        "before_images_per_s": None,
        "after_images_per_s": 620.0,
        "sentence": "Training gets 620 images/s instead of 240.",
    }


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(report(), id="open interval"),
        pytest.param(
            report(0, demand=None, ceiling=None, trials=(), notes=()), id="nothing measured"
        ),
        pytest.param(
            report(after=Side(workers(3), OPEN, None, None)), id="open interval of a side"
        ),
        pytest.param(
            report(settings=dataclasses.replace(workers(3), backend="threads")), id="another form"
        ),
    ],
)
def test_an_answer_can_be_recalled(original: TuningReport) -> None:
    """Through JSON and back it is the same."""
    recalled = typed(TuningReport, json.loads(json.dumps(original.to_plain(), allow_nan=False)))
    assert recalled == original


@pytest.mark.parametrize(
    "damage",
    [{"search": None, "extra": 1}, {"settings": {"num_workers": 1}}],
    ids=["unknown", "missing"],
)
def test_an_answer_of_another_version_is_refused(damage: dict[str, Any]) -> None:
    """Fields that this version does not know, or lacks, are an error and no guess."""
    with pytest.raises(ValueError, match="does not fit"):
        typed(TuningReport, report().to_plain() | damage)


def test_everything_is_written(tmp_path: Path) -> None:
    """tuning.json is strict JSON and holds all that is needed to recall the answer, and the two
    lines to type.
    """
    own = report()
    with Board(tmp_path, tensorboard=False) as board:
        own.publish(board)

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    written = json.loads((tmp_path / "tuning.json").read_text(), parse_constant=refuse)
    assert (written.pop("override"), written.pop("dataloader")) == (own.override, own.dataloader)
    assert typed(TuningReport, written) == own
    assert written["trials"][0]["rate"] == {"images_per_s": 55.0, "low": 0.0, "high": None}


def test_a_full_disk_costs_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, no half-made file, and the run goes on."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    board = Board(tmp_path, tensorboard=False)
    with caplog.at_level(logging.WARNING), board:
        report().publish(board)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/tuning.json: No space left on device; figures are lost until it can be "
        "written, training goes on"
    ]
    assert list(tmp_path.iterdir()) == []


def test_publishing_goes_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """The console, tuning.json, and TensorBoard's text."""
    pages = Pages()
    own = report()
    own.publish(pages)  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == own.lines()
    assert list(pages.given) == ["tuning.json", "tuning"]
    assert pages.given["tuning"] == own.lines()


def test_a_rank_without_a_board_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no file."""
    monkeypatch.chdir(tmp_path)
    report().publish(None)
    assert list(tmp_path.iterdir()) == []


def test_a_real_board_takes_the_pages(tmp_path: Path) -> None:
    """The text fits the event file."""
    with Board(tmp_path, tensorboard=True) as board:
        report().publish(board)
        assert board.dropped == 0


def test_an_open_interval_is_not_shown_as_one() -> None:
    """The mean stands alone where a single block was seen."""
    assert "inf" not in "".join(
        report(before=Side(workers(1), OPEN, None, None), demand=rate(1.0)).lines()
    )
    assert math.isinf(OPEN.high)
