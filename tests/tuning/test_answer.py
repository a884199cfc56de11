"""What tuning tells: that it can be typed, run, read, stored and recalled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from reports import OPEN, report, side, workers
from torch.utils.data import DataLoader

from harness.config import Config
from harness.data.datasets import FakeDataset, Splits
from harness.feed.base import FeedSettings
from harness.feed.feeds import Feeds
from harness.monitor.writer import RunWriter
from harness.runtime.distributed import World
from harness.runtime.files import from_json
from harness.runtime.limits import Limits
from harness.tuning.measures import TuningReport

LIMITS = Limits(8.0, 2**30, None, 1024)


@pytest.mark.parametrize(
    ("settings", "val"),
    [
        pytest.param(workers(3), samples.settings(3, batch_size=64), id="workers"),
        pytest.param(samples.settings(0), samples.settings(0), id="no workers"),
        pytest.param(
            samples.settings(2, prefetch_factor=5),
            samples.settings(1, batch_size=9, prefetch_factor=7),
            id="validation of its own",
        ),
        pytest.param(
            samples.settings(3, backend="threads", persistent_workers=True), None, id="threads"
        ),
        pytest.param(dataclasses.replace(workers(3), backend="arrays"), None, id="arrays"),
    ],
)
def test_the_override_gives_the_choice(
    composed: Callable[..., Config], settings: FeedSettings, val: FeedSettings | None
) -> None:
    """Typed on the command line it gives the very settings that were chosen, for training and
    validation.
    """
    val = val or dataclasses.replace(settings, persistent_workers=False)
    config = composed(
        *report(settings=settings, val=val).override.split(),
        f"loader.batch_size={settings.batch_size}",
        f"loader.timeout_s={settings.timeout_s}",
    )
    splits = Splits(FakeDataset(8, 4), FakeDataset(4, 4), ("a", "b"), "fake", "")
    feeds = Feeds(splits, config, World(0, 1, 0, 1, torch.device("cpu")))
    assert feeds.settings(LIMITS) == settings
    assert feeds.val_settings(settings) == val


@pytest.mark.parametrize("backend", ["threads", "arrays"])
def test_a_form_that_torch_has_not_has_no_line_in_code(backend: str) -> None:
    """It has the words of the command line alone."""
    assert report(settings=dataclasses.replace(workers(3), backend=backend)).dataloader == ""


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
    # torch has False where nothing can stay
    own = [getattr(settings, name) or None for name in names]
    assert [getattr(loader, name) or None for name in names] == own


def test_the_user_reads_the_outcome() -> None:
    """Before and after, the sentence, both ways to get it again, what was refused, the notes."""
    own = report()
    lines = own.lines()
    for text in (own.sentence, own.override, own.dataloader, "/dev/shm is full", own.notes[0]):
        assert sum(text in line for line in lines) == 1
    rows = {line.split()[0]: line.split() for line in lines[2:4]}
    assert rows["before"][1:6] == ["240", "±5%", "62%", "210.0", "MB"]
    assert rows["after"][1:6] == ["620", "±5%", "1%", "1.6", "GB"]


def test_what_was_not_measured_is_a_dash() -> None:
    """A search without steps has no waiting."""
    shown = report(search="grid", demand=None, before=side(workers(1))).lines()
    assert shown[2].split()[:4] == ["before", "-", "-", "-"]


def test_the_title_says_how_the_answer_came() -> None:
    """A search that was cut short, and an answer that was remembered, are told."""
    titles = {report(**how).lines()[0] for how in ({}, {"complete": False}, {"reused": True})}
    assert len(titles) == 3


def test_the_summary_is_for_the_report() -> None:
    """Plain values; what was not measured is None."""
    found = report(before=side(workers(1))).summary()
    assert found["sentence"]
    assert {name: found[name] for name in found if name != "sentence"} == {
        "seconds": 9.23,
        "chosen": "num_workers=3 pin_memory=false prefetch_factor=2",
        "reused": False,
        "complete": True,
        "before_images_per_s": None,
        "after_images_per_s": 620.0,
    }


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(report(), id="open interval"),
        pytest.param(report(0, demand=None, trials=(), notes=()), id="nothing measured"),
        pytest.param(report(after=side(workers(3), OPEN)), id="open interval of a side"),
        pytest.param(
            report(settings=dataclasses.replace(workers(3), backend="threads")),
            id="another backend",
        ),
    ],
)
def test_an_answer_can_be_recalled(original: TuningReport) -> None:
    """Through JSON and back it is the same."""
    recalled = from_json(TuningReport, json.loads(json.dumps(original.to_plain(), allow_nan=False)))
    assert recalled == original


def test_everything_is_written(tmp_path: Path) -> None:
    """tuning.json is strict JSON and holds all that is needed to recall the answer, and the two
    lines to type.
    """
    own = report()
    with RunWriter(tmp_path, tensorboard=False) as writer:
        own.publish(writer)

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    written = json.loads((tmp_path / "tuning.json").read_text(), parse_constant=refuse)
    for name in ("override", "dataloader", "sentence", "ceiling"):
        assert written.pop(name) == getattr(own, name)
    assert written.pop("settings")["num_workers"] == 3
    assert from_json(TuningReport, written) == own
    assert written["trials"][0]["rate"] == {"images_per_s": 55.0, "low": 0.0, "high": None}
