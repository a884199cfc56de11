"""``report.html``: whole, small, complete in itself, and never the end of a run."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

from harness.report.page.__main__ import main
from harness.report.page.document import (
    ASSETS,
    SCRIPTS,
    bundle,
    run_name,
    write_report,
    write_sweep,
)
from harness.report.page.runs import read_run


def embedded(html: str) -> dict[str, list[Any]]:
    """The data that a page carries."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.S)
    assert found
    data: dict[str, list[Any]] = json.loads(found[1])
    return data


def test_a_long_run_fits_in_a_megabyte(tmp_path: Path) -> None:
    """20,000 steps and all their spikes are less than 1 MB."""
    write_report(runs.long_run(tmp_path))
    html = (tmp_path / "report.html").read_text()
    assert len(html.encode()) < 1_000_000
    (run,) = embedded(html)["runs"]
    assert {spike["step"] for spike in run["course"]["spikes"]} == set(runs.SPIKES)


def test_a_sweep_fits_in_a_megabyte(tmp_path: Path) -> None:
    """Many long runs have fewer points each, and every spike all the same."""
    first = runs.long_run(tmp_path / "0", steps=4_000)
    for job in range(1, 24):
        shutil.copytree(first, tmp_path / str(job))
    path, count, notes = write_sweep(tmp_path)
    assert count == 24 and not notes and path.stat().st_size < 1_000_000
    assert all(run["course"]["spike_count"] == 1 for run in embedded(path.read_text())["runs"])


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """No address but SVG's name is in it, and its policy forbids all else."""
    write_report(runs.cpu_run(tmp_path))
    html = (tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\"'\s]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html and "script-src 'sha256-" in html


def test_text_from_files_cannot_end_its_element(tmp_path: Path) -> None:
    """Markup in a report stays data."""
    runs.write(tmp_path, report=runs.report(error="</script><script>alert(1)</script><!--"))
    write_report(tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert html.count("<script") == 2 and "alert(1)</script>" not in html
    assert embedded(html)["runs"][0]["report"]["error"].startswith("</script>")


def test_no_script_makes_markup_of_text() -> None:
    """Elements are made one by one; nothing parses a text as markup or as a program."""
    for name in (*SCRIPTS, "tab.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(",
            (ASSETS / name).read_text(),
        )


def test_every_script_is_served_and_bundled() -> None:
    """Each script imports only what one before it exports, as the bundle knows imports."""
    exported: dict[str, set[str]] = {}
    for name in SCRIPTS:
        text = (ASSETS / name).read_text()
        imports = re.findall(r'^import \{ (.*) \} from "\./(.*)";$', text, re.M)
        assert len(imports) == len(re.findall(r"^import", text, re.M))
        assert all(set(names.split(", ")) <= exported[source] for names, source in imports)
        exported[name] = set(re.findall(r"^export (?:async )?(?:function|const) (\w+)", text, re.M))
    assert {path.name for path in ASSETS.glob("*.js")} == {*SCRIPTS, "tab.js"}
    assert not re.search(r"^\s*(import|export) ", bundle(), re.M)


@pytest.mark.parametrize("make", [runs.interrupted, runs.damaged], ids=["interrupted", "damaged"])
def test_a_bad_folder_has_a_page_too(tmp_path: Path, make: object) -> None:
    """The page says what is missing."""
    folder = make(tmp_path / "run")  # type: ignore[operator]
    write_report(folder)
    assert embedded((folder / "report.html").read_text())["runs"][0]["notes"]


def test_a_page_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The old page stays whole, no temporary file is left, and the run's end is not disturbed."""
    runs.cpu_run(tmp_path)
    (tmp_path / "report.html").write_text("before")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with caplog.at_level(logging.WARNING, "wellfed"):
        write_report(tmp_path)
    assert "No space left" in caplog.text and (tmp_path / "report.html").read_text() == "before"
    assert not list(tmp_path.glob(".report.html*"))


def test_the_command_writes_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says which file it wrote and of how many runs."""
    assert main([str(runs.sweep(tmp_path))]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}: 6 runs\n"
    assert [
        run["name"] for run in embedded((tmp_path / "report.html").read_text())["runs"]
    ] == list("012345")


def test_a_run_that_cannot_be_told_ends_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out with a note, on the page and on the console."""
    runs.sweep(tmp_path)
    read = read_run

    def refuse(folder: Path, name: str, **options: int) -> dict[str, Any]:
        if name == "3":
            raise RuntimeError("never thought of")
        return read(folder, name, **options)

    monkeypatch.setattr("harness.report.page.runs.read_run", refuse)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    note = "run 3 cannot be shown: RuntimeError: never thought of"
    assert (said.out, said.err) == (f"{tmp_path / 'report.html'}: 5 runs\n", f"note: {note}\n")
    assert embedded((tmp_path / "report.html").read_text())["notes"] == [note]


def test_the_command_names_a_folder_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the folder and what is looked for, with exit code 2."""
    assert main([str(tmp_path)]) == 2
    assert re.fullmatch(
        rf"error: {re.escape(str(tmp_path))} contains no run .*report\.json .*metrics\.jsonl.*\n",
        capsys.readouterr().err,
    )


def test_a_name_cannot_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters of a folder's name come back escaped."""
    assert main([str(tmp_path / "\x1b[31m")]) == 2
    assert "\\x1b[31m" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["document", "plugin"])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    """A page is written, and TensorBoard starts with the tab, without torch, numpy or Hydra."""
    code = (
        f"import sys, harness.report.page.{module}; print({{'torch', 'numpy', 'hydra'}} & "
        "set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("outputs/2026-11-22/05-51-05", "2026-11-22/05-51-05"),
        ("multirun/2026-11-22/05-51-05/3", "2026-11-22/05-51-05/3"),
        ("outputs/first", "first"),
        ("elsewhere/05-51-05", "05-51-05"),
    ],
)
def test_a_run_is_named_as_tensorboard_names_it(tmp_path: Path, folder: str, name: str) -> None:
    """The date of a run without a name of its own is in its title."""
    assert run_name(tmp_path / folder) == name
