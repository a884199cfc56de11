"""The tab in TensorBoard, as its server asks for it."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import runs
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import EnvironBuilder

from harness.report.page import runs as page_runs
from harness.report.page.plugin import StallsPlugin


def plugin(logdir: object = None) -> StallsPlugin:
    return StallsPlugin(TBContext(logdir=logdir and str(logdir)))


def ask(of: StallsPlugin, route: str, query: str = "") -> tuple[str, dict[str, str], bytes]:
    """Status, headers and body."""
    told: dict[str, Any] = {}

    def start(status: str, headers: list[tuple[str, str]]) -> None:
        told.update(status=status, headers=dict(headers))

    environ = EnvironBuilder(query_string=query).get_environ()
    body = b"".join(of.get_plugin_apps()[route](environ, start))
    return told["status"], told["headers"], body


def test_it_is_installed_as_a_tab() -> None:
    """TensorBoard finds it by its entry point."""
    (found,) = [
        entry
        for entry in metadata.entry_points(group="tensorboard_plugins")
        if entry.name == "data_stalls"
    ]
    assert found.load() is StallsPlugin
    assert StallsPlugin(TBContext()).frontend_metadata().tab_name == "Data stalls"


def test_runs_are_listed_and_told(tmp_path: Path) -> None:
    """The list has every run with few points, the run itself as many as a wide chart shows."""
    runs.long_run(tmp_path / "a/long")
    runs.cpu_run(tmp_path / "b")
    here = plugin(tmp_path)
    listed = json.loads(ask(here, "/runs")[2])
    assert [(run["name"], len(run["course"]["steps"])) for run in listed["runs"]] == [
        ("a/long", 60),
        ("b", 40),
    ]
    status, headers, body = ask(here, "/run", "name=a%2Flong")
    assert (status, len(json.loads(body)["course"]["steps"])) == ("200 OK", 400)
    assert (headers["Content-Type"], headers["X-Content-Type-Options"]) == (
        "application/json; charset=utf-8",
        "nosniff",
    )


def test_a_run_that_goes_on_is_read_anew(tmp_path: Path) -> None:
    """What a run has written since the last look is shown."""
    runs.interrupted(tmp_path / "run")
    here = plugin(tmp_path)
    before = json.loads(ask(here, "/run", "name=run")[2])
    runs.write(tmp_path / "run", report=runs.report())
    after = json.loads(ask(here, "/run", "name=run")[2])
    assert (before["latest"], after["latest"], after["report"]["status"]) == (
        True,
        False,
        "completed",
    )


def test_a_run_is_read_again_only_where_a_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file counts that is older than another, and one of the same time and another length."""
    folder = runs.cpu_run(tmp_path / "run")
    read: list[int] = []
    own = page_runs.read_run

    def noting(folder: Path, name: str, buckets: int) -> dict[str, Any]:
        read.append(buckets)
        return own(folder, name, buckets)

    monkeypatch.setattr(page_runs, "read_run", noting)
    apps = plugin(tmp_path).get_plugin_apps()

    def look() -> list[int]:
        read.clear()
        for route, query in (("/runs", ""), ("/run", "name=run")):
            apps[route](EnvironBuilder(query_string=query).get_environ(), lambda *_: None)
        return [*read]

    assert (look(), look()) == ([60, 400], [])
    (folder / "tuning.json").write_text("{}")
    os.utime(folder / "tuning.json", (1.0, 1.0))
    assert (look(), look()) == ([60, 400], [])
    (folder / "tuning.json").write_text("{ }")
    os.utime(folder / "tuning.json", (1.0, 1.0))
    assert look() == [60, 400]


@pytest.mark.parametrize(
    "name", ["../outside", "..%2Foutside", "/etc", "a/../../outside", "%00", "", "a/."]
)
def test_a_name_never_leaves_the_logdir(tmp_path: Path, name: str) -> None:
    """Only a run that is listed can be asked for."""
    runs.write(tmp_path / "outside", report={"status": "secret"})
    runs.write(tmp_path / "logs" / "a", report={})
    status, _, body = ask(plugin(tmp_path / "logs"), "/run", f"name={name}")
    assert status == "404 NOT FOUND" and b"secret" not in body


@pytest.mark.parametrize("file", ["tab.js", "page.js", "page.css"])
def test_the_page_is_served(file: str, tmp_path: Path) -> None:
    """Scripts and style come with a type that browsers run."""
    status, headers, body = ask(plugin(tmp_path), f"/{file}")
    assert status == "200 OK" and body and headers["Content-Type"].startswith("text/")


def test_an_odd_report_hides_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity among the settings is left out; what cannot be told is a note."""
    runs.write(tmp_path / "a", report={"loader": {"timeout_s": float("inf"), "num_workers": 2}})
    runs.write(tmp_path / "b", report={})
    assert [run["report"] for run in json.loads(ask(plugin(tmp_path), "/runs")[2])["runs"]] == [
        {"loader": {"num_workers": 2}},
        {},
    ]
    read = page_runs.run_json
    monkeypatch.setattr(
        page_runs,
        "run_json",
        lambda folder, name, *more: read(folder if name == "b" else 1 / 0, name, *more),
    )
    os.utime(tmp_path / "a" / "report.json", (0, 0))
    listed = json.loads(ask(plugin(tmp_path), "/runs")[2])
    assert [run["name"] for run in listed["runs"]] == ["b"]
    assert listed["notes"] == ["run a cannot be shown: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("logdir", [None, "", "/nowhere/at/all", "gs://bucket/runs", "s3://bucket"])
def test_any_logdir_is_answered(logdir: str | None) -> None:
    """No folder, a missing one and a remote one give an empty list, with the reason where no folder
    of this machine is named.
    """
    here = plugin(logdir)
    status, _, body = ask(here, "/runs")
    assert (status, json.loads(body)["runs"]) == ("200 OK", [])
    assert bool(json.loads(body)["notes"]) == (logdir != "/nowhere/at/all")


def test_an_error_is_told_in_the_tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody thought of stops neither TensorBoard nor the other tabs."""

    def fail(*_: object) -> None:
        raise RuntimeError("never thought of")

    monkeypatch.setattr("harness.report.page.runs.find_runs", fail)
    here = plugin(tmp_path)
    status, _, body = ask(here, "/runs")
    assert (status, json.loads(body)) == (
        "500 INTERNAL SERVER ERROR",
        {"error": "RuntimeError: never thought of"},
    )


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorBoard reads its flag; a path stays whole, comma and all."""
    monkeypatch.setenv("HOME", str(tmp_path))
    runs.write(tmp_path / "a,b" / "0", report={})
    assert [run["name"] for run in json.loads(ask(plugin("~/a,b"), "/runs")[2])["runs"]] == ["0"]
