"""Run folders as they may be found: whole, growing, damaged."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import oddities
import pytest
import runs
from oddities import Plant

from harness.report.page.runs import find_runs, read_run


def test_a_whole_run_has_no_notes(tmp_path: Path) -> None:
    """Report, course and tuning are there, and nothing is said to be missing."""
    run = read_run(runs.long_run(tmp_path / "run", steps=100), "run")
    assert run["report"]["verdict"]["bottleneck"] == "decode" and run["tuning"]["search"] == "auto"
    assert (len(run["course"]["steps"]), run["latest"], run["notes"]) == (10, False, [])


def test_a_growing_run_is_told_by_its_last_window(tmp_path: Path) -> None:
    """Without a report the page has the latest figures and says so."""
    run = read_run(runs.interrupted(tmp_path / "run"), "run")
    assert run["latest"] and run["report"]["steps"] == 100 and run["report"]["images_per_s"] > 0
    assert [note.split(":")[0] for note in run["notes"]] == ["report.json is missing"]


def test_a_report_that_the_run_has_left_behind_is_told(tmp_path: Path) -> None:
    """A run that went on from a checkpoint has a course beyond its last report."""
    runs.cpu_run(tmp_path, steps=200)
    runs.write(tmp_path, report=runs.report(steps=100))
    run = read_run(tmp_path, "run")
    (note,) = run["notes"]
    assert re.fullmatch(r"report\.json .* step 100; .* to step 200", note)


def test_damage_is_named_by_file(tmp_path: Path) -> None:
    """Each damaged file has its note, and what can be read is shown."""
    run = read_run(runs.damaged(tmp_path / "run"), "run")
    notes = " | ".join(run["notes"])
    for text in (
        "metrics.jsonl has 2 ",
        "report.json is damaged",
        "tuning.json is damaged: not written by a run",
    ):
        assert text in notes
    assert run["course"]["windows"] == 1 and run["tuning"] is None


def test_pictures_have_no_room_in_a_page_of_many_runs(tmp_path: Path) -> None:
    """A run of its own has its mistakes; what does not fit is told."""
    run = read_run(runs.with_mistakes(tmp_path, ["cat", "dog"]), "run")
    assert run["mistakes"]["classes"]["class"] == ["cat", "dog"] and len(run["first_batch"]) == 1
    run = read_run(tmp_path, "run", buckets=60)
    assert (run["mistakes"], run["first_batch"], run["notes"]) == (None, None, [])
    (tmp_path / "mistakes.json").write_text("[]")
    (tmp_path / "first_batch.json").write_text("[")
    damaged = [note.split(":")[0] for note in read_run(tmp_path, "run")["notes"]]
    assert damaged == ["mistakes.json is damaged", "first_batch.json is damaged"]


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    """Nothing there is nothing shown, without an error."""
    run = read_run(tmp_path, "run")
    assert (run["report"], run["course"], run["config"]) == ({}, None, None)
    assert [note.split(" ")[0] for note in run["notes"]] == ["metrics.jsonl", "report.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("[1, 2]", "not written by a run", id="no-object"),
        pytest.param("[" * 200_000, "nested too deeply", id="nested-too-deep"),
        pytest.param('{"a":' * 700 + "1" + "}" * 700, "nested too deeply", id="nested-deep"),
        pytest.param("{", "Expecting", id="cut-off"),
        pytest.param(" " * (16 * 2**20 + 1), "more than 16 MiB", id="too-large"),
    ],
)
def test_any_contents_of_a_report_are_survived(tmp_path: Path, text: str, reason: str) -> None:
    """A report that cannot be used is a note."""
    (tmp_path / "report.json").write_text(text)
    assert any(reason in note for note in read_run(tmp_path, "run")["notes"])


def test_a_pipe_in_place_of_a_report_does_not_hang(tmp_path: Path) -> None:
    """Only plain files are opened."""
    os.mkfifo(tmp_path / "report.json")
    assert any(
        "report.json cannot be read: not a regular file" in note
        for note in read_run(tmp_path, "run")["notes"]
    )


def test_runs_are_found_in_natural_order(tmp_path: Path) -> None:
    """Job 10 comes after job 9; checkpoints, hidden folders and links are passed over."""
    for name in ("10", "9", "b/c", ".hidden", "9/checkpoints/x"):
        runs.write(tmp_path / "root" / name, report={})
    runs.write(tmp_path / "elsewhere", report={})
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    assert list(find_runs(tmp_path / "root")) == ["9", "10", "b/c"]


def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    """A run may be called trace, or lie below a folder called checkpoints."""
    for name in ("trace", "checkpoints/1", "trace/checkpoints/x"):
        runs.write(tmp_path / name, report={})
    assert list(find_runs(tmp_path)) == ["checkpoints/1", "trace"]


def test_a_run_inside_a_run_is_found(tmp_path: Path) -> None:
    """``run.name=a`` and ``run.name=a/b`` are two runs; checkpoints are not looked into."""
    for name in ("a", "a/b", "a/checkpoints/c"):
        runs.write(tmp_path / name, report={})
    assert list(find_runs(tmp_path)) == ["a", "a/b"]


def test_a_run_folder_is_its_own_run(tmp_path: Path) -> None:
    """The root itself is named after its folder."""
    assert list(find_runs(runs.write(tmp_path / "mine", report={}))) == ["mine"]


def test_the_configuration_is_shown_as_it_was_saved(tmp_path: Path) -> None:
    """What Hydra saved is text for the page."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("seed: 1\n")
    assert read_run(tmp_path, "run")["config"] == "seed: 1\n"


def test_all_that_is_read_can_be_sent(tmp_path: Path) -> None:
    """No NaN reaches the page, whose reader would refuse it; what is null is absent."""
    shares = {"compute": float("inf"), "copy": 10**400, "host": 1.0}
    runs.write(tmp_path, report={"images_per_s": float("nan"), "top1": None, "shares": shares})
    run = read_run(tmp_path, "run")
    assert run["report"] == {"shares": {"host": 1.0}} and json.dumps(run, allow_nan=False)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["report.json", "metrics.jsonl", "tuning.json", ".hydra/config.yaml"]
)
@oddities.every
def test_an_odd_file_is_a_note_at_most(tmp_path: Path, name: str, plant: Plant) -> None:
    """No odd file is waited for, and no link out of the folder is shown."""
    runs.damaged(tmp_path / "run")
    oddities.put(plant, tmp_path / "run" / name)
    shown = json.dumps(read_run(tmp_path / "run", "run"), allow_nan=False)
    assert oddities.SECRET.strip() not in shown


@pytest.mark.timeout(20)
@oddities.special
def test_a_configuration_that_is_no_file_is_told(tmp_path: Path, plant: Plant) -> None:
    """The page says why it is not there."""
    oddities.put(plant, tmp_path / ".hydra" / "config.yaml")
    run = read_run(tmp_path, "run")
    assert run["config"] is None
    assert any(note.startswith(".hydra/config.yaml cannot be read: ") for note in run["notes"])


def test_a_configuration_below_a_link_is_not_shown(tmp_path: Path) -> None:
    """Nor is one in a folder that is a link."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text(oddities.SECRET)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".hydra").symlink_to(tmp_path / "other")
    assert read_run(tmp_path / "run", "run")["config"] is None


def test_a_link_and_an_endless_line_are_not_read(tmp_path: Path) -> None:
    """A run folder from elsewhere shows no other file, and costs no memory."""
    (tmp_path / "elsewhere.json").write_text('{"steps": 7}')
    run = tmp_path / "run"
    run.mkdir()
    (run / "report.json").symlink_to(tmp_path / "elsewhere.json")
    with open(run / "metrics.jsonl", "wb") as file:
        file.truncate(1 << 40)
    found = read_run(run, "run")
    assert found["report"] == {} and found["course"] is None
