"""Comparing runs: the table, the JSON, what is not compared, and the exit codes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import oddities
import pytest
from commands import ran
from oddities import Plant
from omegaconf import OmegaConf

from harness.report.compare import __main__ as compare_runs

MakeRun = Callable[..., Path]


def tree(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` by dotted name; a None takes the key away."""
    made = json.loads(json.dumps(base))
    for path, value in changes.items():
        *groups, key = path.split(".")
        place = made
        for name in groups:
            place = place[name]
        place.pop(key) if value is None else place.update({key: value})
    return made


REPORT = {
    "status": "completed",
    "steps": 400,
    "world_size": 1,
    "images_per_s": 200.0,
    "step_ms": {"median": 320.0, "p95": 350.0, "max": 500.0},
    "stall_fraction": 0.10,
    "stall_basis": "device",
    "goodput": {"fraction": 0.8, "busy_s": 80.0, "wall_s": 100.0, "rest": []},
    "top1": 0.91,
    "loader": {"batch_size": 64, "num_workers": 1, "pin_memory": False, "prefetch_factor": 2},
    "verdict": {"bottleneck": "decode", "ceiling": 1.11, "sentence": "Decoding holds training up."},
    "environment": {"torch": "2.15.0", "cpu": "AMD EPYC", "cores": 2},
}
SETTINGS = {
    "run": {"name": None},
    "seed": 0,
    "loader": {"num_workers": None, "batch_size": 64},
    "optim": {"lr": 0.1},
}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run's folder under ``outputs``, with changes by dotted name."""

    def make(name: str, settings: dict[str, Any] | None = None, **report: Any) -> Path:
        folder = tmp_path / "outputs" / name
        (folder / ".hydra").mkdir(parents=True)
        changes = {key.replace("__", "."): value for key, value in report.items()}
        (folder / "report.json").write_text(json.dumps(tree(REPORT, changes)))
        OmegaConf.save(
            tree(SETTINGS, {"run.name": name, **(settings or {})}),
            folder / ".hydra" / "config.yaml",
        )
        return folder

    return make


def compare(
    capsys: pytest.CaptureFixture[str], *arguments: Path | str
) -> tuple[int, str, list[str]]:
    """The exit code, what was printed, and the lines on standard error."""
    code = compare_runs.main([*map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err.splitlines()


def cells(said: str, place: int = 0) -> list[dict[str, str]]:
    """The rows of a table, by column."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in said.split("\n\n")[place].splitlines()
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_runs_are_set_against_the_first_one(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures with ratios or differences, the verdict, and the one setting that differs."""
    before = make_run("before")
    after = make_run(
        "after",
        {"loader.num_workers": 2},
        images_per_s=300.0,
        step_ms__median=240.0,
        stall_fraction=0.02,
        goodput__fraction=0.9,
        top1=0.9,
        verdict__bottleneck="compute",
        loader__num_workers=2,
    )
    code, said, errors = compare(capsys, before, after)
    assert (code, errors) == (0, [])
    names = ("run", "status", "steps", "images/s", "median step ms", "p95 ms", "stall", "goodput",
             "top-1", "verdict")  # fmt: skip
    rows = [
        ("before", "completed", "400", "200", "320", "350", "10.0%", "80.0%", "91.0%", "decode"),
        ("after", "completed", "400", "300 (1.5x)", "240 (0.75x)", "350 (1x)",
         "2.0% (-8.0 points)", "90.0% (+10.0 points)", "90.0% (-1.0 points)", "compute"),
    ]  # fmt: skip
    assert cells(said) == [dict(zip(names, row, strict=True)) for row in rows]
    assert cells(said, 1) == [
        {"setting": "loader.num_workers", "before": "null", "after": "2"},
        {"setting": "used.num_workers", "before": "1", "after": "2"},
    ]


def test_what_the_loader_used_is_told_once(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column that would repeat a setting that was asked for is left out."""
    one = make_run("one", {"loader.batch_size": 32}, loader__batch_size=32)
    said = compare(capsys, one, make_run("two"))[1]
    assert "loader.batch_size" in said and "used." not in said


def test_a_watched_script_differs_in_no_setting(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a script without settings, only those that differ among runs are listed."""
    script = make_run("script")
    shutil.rmtree(script / ".hydra")
    runs = make_run("one", {"loader.batch_size": 32}), make_run("two")
    said = compare(capsys, *runs, script)[1]
    assert [row["setting"] for row in cells(said, 1)] == ["loader.batch_size"]


def test_a_diagnosis_among_runs_is_passed_over(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """What mode=diagnose left is a note, first or not; alone it is an error."""
    runs = [make_run(name) for name in "bc"]
    diagnosis = runs[0].parent / "a"
    (diagnosis / ".hydra").mkdir(parents=True)
    (diagnosis / ".hydra/config.yaml").write_text("mode: diagnose\n")
    for folders in ([runs[0].parent], [diagnosis, *runs]):
        code, said, errors = compare(capsys, *folders, "--fail-beyond", "speed=0.9")
        assert (code, errors, [row["run"] for row in cells(said)]) == (0, [], ["b", "c"])
        assert f"- {os.path.relpath(diagnosis)}: " in said
    (note,) = json.loads(compare(capsys, runs[0].parent, "--json")[1])["notes"]
    assert os.path.relpath(diagnosis) in note
    assert compare(capsys, diagnosis)[0] == 2


def test_a_sweep_stands_for_its_jobs_in_order(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Job 10 comes after job 2, and what is no run is passed over."""
    for job in (10, 2, 0):
        make_run(f"sweep/{job}", {"optim.lr": job / 10})
    sweep = make_run("alone").parent / "sweep"
    (sweep / "notes").mkdir()
    (sweep / "multirun.yaml").write_text("hydra: {}\n")
    said = compare(capsys, sweep)[1]
    assert cells(said, 1) == [{"setting": "optim.lr", "0": "0.0", "2": "0.2", "10": "1.0"}]
    rows = cells(compare(capsys, sweep.parent / "alone", sweep)[1])
    assert [row["run"] for row in rows] == ["alone", "sweep/0", "sweep/2", "sweep/10"]


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_a_run_that_did_not_complete_is_not_compared(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    """It is listed without any ratio; a limit cannot be judged."""
    whole = make_run("whole")
    broken = make_run("broken", status=status, error="the disk is full", images_per_s=20.0)
    code, said, _ = compare(capsys, whole, broken)
    row = cells(said)[1]
    assert code == 0
    assert (row["status"], row["images/s"], row["stall"]) == (status, "20", "10.0%")
    assert f"- broken: {status}: the disk is full" in said
    for pair in ((whole, broken), (broken, whole)):
        code, _, errors = compare(capsys, *pair, "--fail-beyond", "speed=0.95")
        assert code == 2
        said = f"error: {pair[1].name}: speed=0.95 cannot be judged against {pair[0].name}: both "
        assert [error[: len(said)] for error in errors] == [said]


def test_an_absent_figure_is_absent(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a dash and no ratio, in JSON no key; a limit on it is an error."""
    full = make_run("full")
    bare = make_run("bare", goodput=None, top1=None)
    rows = cells(compare(capsys, bare, full)[1])
    assert (rows[0]["goodput"], rows[1]["goodput"]) == ("-", "80.0%")
    found = json.loads(compare(capsys, full, bare, "--json")[1])["runs"][1]
    assert "top1" not in found["figures"] and "goodput_fraction" not in found["against_first"]
    code, _, errors = compare(capsys, full, bare, "--fail-beyond", "top1=-0.01")
    assert code == 2
    assert [error.partition(": both")[0] for error in errors] == [
        "error: bare: top1=-0.01 cannot be judged against full"
    ]


@pytest.mark.parametrize(
    ("limit", "shown"),
    [("stall=+0.5", "10.0%"), ("goodput=-0.5", "80.0%")],
    ids=["stall", "goodput"],
)
def test_figures_from_different_clocks_are_not_compared(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], limit: str, shown: str
) -> None:
    """A device's beside a host's is a row, and no limit can be judged by it."""
    pair = make_run("gpu"), make_run("cpu", stall_basis="host")
    code, said, errors = compare(capsys, *pair, "--fail-beyond", limit)
    assert cells(said)[1][limit.partition("=")[0]] == shown
    assert cells(said, 1) == [{"setting": "stall_basis", "gpu": "device", "cpu": "host"}]
    assert code == 2 and "by the same clock" in errors[0]


def test_other_machines_and_versions_are_noted(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each difference is a row."""
    runs = [
        make_run(name, environment__torch="2.16.0" if name == "e" else "2.15.0") for name in "abcde"
    ]
    said = compare(capsys, *runs)[1]
    versions = dict.fromkeys("abcd", "2.15.0") | {"e": "2.16.0"}
    assert cells(said, 1) == [{"setting": "environment.torch", **versions}]


@pytest.mark.parametrize(
    ("limit", "report"),
    [
        pytest.param("speed=0.95", {"images_per_s": 189.0}, id="slower"),
        pytest.param("step=1.05", {"step_ms__median": 340.0}, id="longer_steps"),
        pytest.param("p95=1.1", {"step_ms__p95": 400.0}, id="longer_tail"),
        pytest.param("stall=+0.05", {"stall_fraction": 0.16}, id="more_stall"),
        pytest.param("goodput=-0.1", {"goodput__fraction": 0.6}, id="less_goodput"),
        pytest.param("top1=-0.01", {"top1": 0.89}, id="less_accurate"),
        pytest.param("speed=1.1", {"images_per_s": 210.0}, id="too_little_gain"),
    ],
)
def test_a_regression_fails(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], limit: str, report: dict[str, float]
) -> None:
    """Exit code 1, and a line with the run and the limit."""
    main = make_run("main")
    change = make_run("change", **report)
    code, said, errors = compare(capsys, main, change, "--fail-beyond", limit)
    assert code == 1 and "change" in said
    assert len(errors) == 1 and errors[0].startswith("regression: change: ")
    assert errors[0].endswith(f"beyond {limit}")
    same = make_run("same", **({"images_per_s": 230.0} if limit == "speed=1.1" else {}))
    assert compare(capsys, main, same, "--fail-beyond", limit)[::2] == (0, [])


def test_on_the_limit_is_within(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """0.15 - 0.10 is 0.05, whatever floating point says."""
    pair = make_run("a"), make_run("b", stall_fraction=0.15, top1=0.90, images_per_s=190.0)
    assert compare(capsys, *pair, "--fail-beyond", "stall=+0.05", "top1=-0.01", "speed=0.95")[
        ::2
    ] == (0, [])


def test_every_run_and_every_limit_is_judged(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """A regression wins the exit code; limits may come in several options."""
    runs = (
        make_run("a"),
        make_run("b", images_per_s=100.0),
        make_run("c", stall_fraction=0.5),
        make_run("d", top1=None),
    )
    limits = ("--fail-beyond", "speed=0.9", "--fail-beyond", "stall=+0.1", "top1=-0.1")
    code, _, errors = compare(capsys, *runs, *limits)
    assert code == 1
    assert [error.split(": ")[:2] for error in errors] == [
        ["error", "d"],
        ["regression", "b"],
        ["regression", "c"],
    ]


@pytest.mark.parametrize(
    "limit", ["speed", "fps=0.9", "speed=95", "speed=-0.05", "top1=0.9", "stall=+5", "step=nan"]
)
def test_a_limit_that_cannot_be_meant_is_refused(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    """No value, an unknown figure, a percentage, an absolute value: exit code 2 and the limit."""
    with pytest.raises(SystemExit) as ended:
        compare_runs.main([str(make_run("a")), "--fail-beyond", limit])
    assert ended.value.code == 2
    assert f"{limit}: " in capsys.readouterr().err


def test_one_run_has_nothing_to_be_compared_with(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown, but a limit on it would never fail, and is refused."""
    alone = make_run("alone")
    assert compare(capsys, alone)[0] == 0
    assert compare(capsys, alone, "--fail-beyond", "speed=0.9")[0] == 2


ALIASES = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join(9 * [f'*{a}'])}]\n" for a, b in pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("report.json", None),
        ("report.json", '{"status": "comp'),
        (".hydra/config.yaml", "a: [1"),
        (".hydra/config.yaml", ALIASES),
    ],
    ids=["missing", "cut off", "settings", "aliases"],
)
def test_a_damaged_run_is_an_error_beside_the_others(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], file: str, content: str | None
) -> None:
    """Exit code 2 with the file, while the other runs are shown all the same."""
    good = make_run("good")
    bad = make_run("bad")
    if content is None:
        (bad / file).unlink()
    else:
        (bad / file).write_text(content)
    code, said, errors = compare(capsys, good, bad)
    assert code == 2
    assert len(errors) == 1 and os.path.relpath(bad / file) in errors[0]
    assert [(row["run"], row["status"], row["images/s"]) for row in cells(said)] == [
        ("good", "completed", "200"),
        ("bad", "unreadable", "-"),
    ]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        pytest.param({"images_per_s": "much", "stall_fraction": True, "steps": None}, 0, id="text"),
        pytest.param({"images_per_s": float("nan")}, 0, id="no number"),
        pytest.param({"verdict": "decode"}, 2, id="another shape"),
        pytest.param({"step_ms": 7}, 2, id="no spread"),
    ],
)
def test_odd_reports_are_no_reason_to_break(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], code: int
) -> None:
    """A figure that is none counts as absent; a report of another shape is unreadable."""
    pair = make_run("odd", **changes), make_run("good")
    assert compare(capsys, *pair)[0] == code
    found = json.loads(compare(capsys, *pair, "--json")[1])["runs"]
    assert [run["status"] for run in found] == ["unreadable" if code else "completed", "completed"]


def test_a_name_cannot_drive_the_terminal(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters are printed as escapes, and a bar does not end a cell."""
    said = compare(capsys, make_run("a\x1b[2J|b"))[1]
    assert "a\\x1b[2J/b" in said


@pytest.mark.parametrize(
    "make",
    [lambda path: None, Path.touch, lambda path: (path / "notes").mkdir(parents=True)],
    ids=["absent", "a file", "no run"],
)
def test_a_folder_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object]
) -> None:
    """Exit code 2 with the folder's name, and nothing on standard output."""
    make(tmp_path / "typo")
    code, said, errors = compare(capsys, tmp_path / "typo")
    assert (code, said) == (2, "") and str(tmp_path / "typo") in errors[0]


def test_json_holds_what_programs_need(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures with units in their names, changes, verdict, settings, judgment."""
    pair = (
        make_run("a"),
        make_run("b", {"loader.num_workers": 4, "optim.lr": 0.2}, images_per_s=150.0),
    )
    code, said, _ = compare(capsys, *pair, "--json", "--fail-beyond", "speed=0.9")
    found = json.loads(said)
    assert code == 1
    assert found["runs"][1]["figures"] == {
        "images_per_s": 150.0,
        "step_ms_median": 320.0,
        "step_ms_p95": 350.0,
        "stall_fraction": 0.1,
        "goodput_fraction": 0.8,
        "top1": 0.91,
    }
    assert found["runs"][1]["against_first"]["images_per_s"] == 0.75
    assert found["runs"][1]["verdict"]["sentence"] == "Decoding holds training up."
    assert [run["settings"] for run in found["runs"]] == [
        {"loader.num_workers": None, "optim.lr": 0.1},
        {"loader.num_workers": 4, "optim.lr": 0.2},
    ]
    assert len(found["beyond_limits"]) == 1 and found["not_judged"] == []


def test_it_starts_without_torch(make_run: MakeRun) -> None:
    """As a command it answers before torch would be imported."""
    begin = "import sys; from harness.report.compare.__main__ import main"
    code = f"{begin}; main([{str(make_run('a'))!r}]); sys.exit('torch' in sys.modules)"
    done = ran(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "images/s" in done.stdout


@pytest.mark.timeout(20)
@pytest.mark.parametrize("file", ["report.json", ".hydra/config.yaml"])
@oddities.every
def test_an_odd_file_is_an_error_beside_the_others(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], file: str, plant: Plant
) -> None:
    """Nothing is waited for, no link is followed, and the other run is shown."""
    good = make_run("good")
    bad = make_run("bad")
    oddities.put(plant, bad / file)
    code, said, errors = compare(capsys, good, bad)
    assert code in (0, 2) and len(errors) == (code == 2)
    assert cells(said)[0]["run"] == "good"
    assert oddities.SECRET.strip() not in said + "".join(errors)
    if file == "report.json":
        assert code == 2 and os.path.relpath(bad / file) in errors[0]
