"""The tuner's memory: an answer comes back to runs alike, for a while, whole or not at all."""

from __future__ import annotations

import json
import logging
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import oddities
import pytest
import torch
from oddities import Plant

from harness.config import Config, Crop, Precision, StartMethod
from harness.runtime.distributed import World
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits
from harness.tuning import tuner
from harness.tuning.tuner import TuningCache, fingerprint

LIMITS = Limits(cores=4.0, memory_bytes=2**30, shm_bytes=2**30, open_files=1024)
DAY_S = 24 * 3600.0


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningCache:
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path))
    return TuningCache({"cores": 4, "ranks": (1, 1)})


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was warned of so far."""
    caplog.set_level(logging.WARNING, LOGGER)
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_was_kept_is_recalled_by_runs_alike(one: TuningCache) -> None:
    """Another run with the same fingerprint has the answer, whatever the order of its keys; another
    fingerprint has not.
    """
    one.keep({"num_workers": 3, "rates": [1.5, 2.5]})
    assert TuningCache({"ranks": [1, 1], "cores": 4}).recall() == {
        "num_workers": 3,
        "rates": [1.5, 2.5],
    }
    assert TuningCache({"ranks": [1, 1], "cores": 8}).recall() is None


def test_an_answer_that_was_changed_is_none(one: TuningCache) -> None:
    """Although it reads well; and so is one of another run under this one's name."""
    one.keep({"num_workers": 3})
    kept = one.path.read_bytes()
    one.path.write_bytes(kept.replace(b" 3}", b" 4}"))
    assert one.recall() is None
    other = TuningCache({"cores": 8})
    other.path.write_bytes(kept)
    assert other.recall() is None


def test_an_answer_can_be_forgotten(one: TuningCache) -> None:
    """After ``forget`` there is none; to forget twice is no error."""
    one.keep({"num_workers": 3})
    one.forget()
    one.forget()
    assert one.recall() is None


@pytest.mark.parametrize(("days", "there"), [(29.9, True), (30.1, False), (-30.1, False)])
def test_an_answer_is_good_for_thirty_days(
    one: TuningCache, days: float, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one is not taken, nor one from a future that only a wrong clock can have seen."""
    one.keep({"num_workers": 3})
    later = time.time() + days * DAY_S
    monkeypatch.setattr(time, "time", lambda: later)
    assert (one.recall() is not None) == there


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[" * 100_000, b"\xff\n\x00", b"0\n{}"],
    ids=["empty", "no digest", "deep", "no text", "another digest"],
)
def test_a_damaged_file_is_removed_with_one_warning(
    one: TuningCache, content: bytes, warnings: Callable[[], list[str]]
) -> None:
    """What cannot be read is no answer, now or later."""
    one.path.parent.mkdir()
    one.path.write_bytes(content)
    assert one.recall() is None
    assert one.recall() is None
    (said,) = warnings()
    assert said.startswith(f"{one.path} ")
    assert not one.path.exists()


@pytest.mark.timeout(20)
@oddities.every
def test_an_odd_file_gives_way_with_one_warning(
    one: TuningCache, plant: Plant, warnings: Callable[[], list[str]]
) -> None:
    """Whatever lies in the answer's place is no answer, and the next one is kept in its place."""
    oddities.put(plant, one.path)
    assert one.recall() is None
    assert len(warnings()) == 1 and warnings()[0].startswith(f"{one.path} ")
    one.keep({"num_workers": 3})
    assert one.recall() == {"num_workers": 3}
    assert oddities.untouched(one.path) and len(warnings()) == 1


def test_a_cache_that_cannot_be_used_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """With a file where the folder should be, all goes on, without a memory."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path / "file"))
    lost = TuningCache({})
    assert lost.recall() is None
    lost.keep({"num_workers": 3})
    lost.forget()
    (said,) = warnings()
    assert said.startswith(str(lost.path)) and "WELLFED_CACHE" in said


def test_the_memory_lies_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is below the folder that WELLFED_CACHE names."""
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path))
    TuningCache({}).keep({})
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "tuning"]


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is looked at once."""
    monkeypatch.setattr(
        tuner, "environment", lambda device_name: {"device": device_name, "usable_cores": 9.0}
    )


def of(changes: Mapping[str, object] | None = None, **other: Any) -> dict[str, Any]:
    """The fingerprint of a run with these settings changed, by dotted name."""
    config = Config()
    for name, value in (changes or {}).items():
        group, _, setting = name.rpartition(".")
        setattr(operator.attrgetter(group)(config) if group else config, setting, value)
    facts = {"data": {"images": 10}, "limits": LIMITS, "world": ranks(4, 2), "device_name": "cpu"}
    return fingerprint(config, **(facts | other))


def ranks(size: int, local_size: int) -> World:
    return World(0, size, 0, local_size, torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 5, "optim.lr": 0.3, "trainer.epochs": 3, "schedule.gamma": 0.5},
        {"loader.num_workers": 3, "loader.prefetch_factor": 5, "loader.pin_memory": True},
        {"loader.persistent_workers": False, "loader.val.num_workers": 2},
        {"run.name": "other", "data.mirror": "http://127.0.0.1", "tuner.fresh": True},
    ],
    ids=["how it learns", "what is searched", "what the user set of it", "names"],
)
@pytest.mark.usefixtures("fixed")
def test_what_changes_no_cost_is_not_in_the_fingerprint(changes: dict[str, object]) -> None:
    """Runs of a sweep over these tune once; free memory changes from minute to minute."""
    busy = replace(LIMITS, memory_bytes=1, shm_bytes=1, files_open=9)
    assert of(changes, limits=busy) == of()


@pytest.mark.usefixtures("fixed")
def test_what_changes_a_cost_changes_the_fingerprint() -> None:
    """What a sample or a step costs, how it is searched for, the machine, the data, the ranks."""
    settings = {
        "data.image_size": 96,
        "augment.hflip": 0.1,
        "augment.crop": Crop.center,
        "loader.batch_size": 32,
        "loader.start_method": StartMethod.spawn,
        "model.name": "resnet18",
        "optim.name": "adamw",
        "optim.freeze": "all_but_head",
        "trainer.precision": Precision.bf16,
        "trainer.channels_last": True,
        "trainer.compile": True,
        "trainer.accumulate_steps": 2,
        "tuner.budget_s": 7.0,
    }
    other = {
        "data": {"images": 11},
        "limits": replace(LIMITS, cores=2.0),
        "device_name": "H100",
    }
    found = [of({name: value}) for name, value in settings.items()]
    found += [of(**{name: value}) for name, value in other.items()]
    found += [of(world=ranks(8, 2)), of(world=ranks(4, 4))]
    assert all(each != of() for each in found)


def test_the_fingerprint_of_this_machine() -> None:
    """It has versions and hardware, stays from one look to the next, and can be stored."""
    found = of()
    assert found == of() == json.loads(json.dumps(found))
    assert {"torch", "torchvision", "python", "wellfed", "cpu", "ram_bytes"} <= found[
        "machine"
    ].keys()
    assert found["machine"]["usable_cores"] == 4.0


def test_another_code_of_the_data_path_is_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of every module that a sample goes through count; those of the loop do not."""
    for room in ("data", "feed", "training"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("1")
    monkeypatch.setattr(tuner, "__file__", str(tmp_path / "tuning" / "memory.py"))
    digests = [of()["sources"]]
    for room in ("data", "feed", "training"):
        (tmp_path / room / "a.py").write_text("2")
        digests.append(of()["sources"])
    assert digests[0] != digests[1] != digests[2] == digests[3]
