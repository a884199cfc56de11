"""TraceML beside us: without TraceML that is said, and what is made of runs and turns."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from scripts import bench_traceml
from scripts.bench_traceml import Said, cost_rows, listen_to, show

SUMMARY = {
    "text": "| TraceML Run Summary |\n|  Verdict: INPUT-BOUND  (CRITICAL)      |\n"
    "|  Why: Input Wait took 98% of Step Time.   |\n|  Next: Increase workers.    |\n",
    "primary_diagnosis": {
        "evidence": {
            "step_time_ms": 72.77,
            "input_wait_ms": 71.14,
            "compute_ms": 1.19,
            "h2d_ms": None,
        }
    },
}


def test_without_traceml_the_way_to_it_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 and the command that brings it along, before anything is run."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "traceml_ai" else find(name)
    )
    assert bench_traceml.main([]) == 2
    assert (
        "TraceML is not installed here; run it with uv run --with traceml-ai"
        in capsys.readouterr().err
    )


def test_traceml_is_quoted_word_for_word(tmp_path: Path) -> None:
    """Verdict, reason and advice without the box around them; figures as far as there are any."""
    (tmp_path / "logs" / "run").mkdir(parents=True)
    (tmp_path / "logs" / "run" / "final_summary.json").write_text(json.dumps(SUMMARY))
    assert bench_traceml.theirs(tmp_path) == (
        "INPUT-BOUND (CRITICAL) Input Wait took 98% of Step Time. Increase workers.",
        "step time 72.8, input wait 71.1, compute 1.2 ms a step",
    )


def test_traceml_is_launched_as_it_documents(tmp_path: Path) -> None:
    """``traceml run SCRIPT``, with what is ours behind ``--args``; the bare loop is a script of
    Python's.
    """
    line = bench_traceml.command("traceml", "slow_read", tmp_path, "--steps", "3")
    assert line[1:3] == ["run", str(bench_traceml.LOOP)]
    assert line[line.index("--args") :] == [
        "--args", "--side", "traceml", "--plant", "slow_read", "--folder", str(tmp_path), "--steps",
        "3",
    ]  # fmt: skip
    assert bench_traceml.command("bare", "nothing", tmp_path)[:2] == [
        sys.executable,
        str(bench_traceml.LOOP),
    ]


def test_costs_are_paired_differences_to_the_bare_loop() -> None:
    """What all turns of a round share falls out; the control is a row of its own."""
    drift = [1e-3 * number for number in range(1, 6)]
    longer = {"bare": 0.0, "control": 0.0, "traceml": 300e-6, "clock": 50e-6, "watch": 60e-6}
    rows = cost_rows({
        2.0: {
            name: [(wall + more, wall + 2 * more) for wall in drift]
            for name, more in longer.items()
        }
    })  # fmt: skip
    assert [str(row["us a step longer"]) for row in rows] == [
        "+0 [+0, +0]",
        "+300 [+300, +300]",
        "+50 [+50, +50]",
        "+60 [+60, +60]",
    ]
    assert [str(row["us of a processor more"]) for row in rows][1:] == [
        "+600 [+600, +600]",
        "+100 [+100, +100]",
        "+120 [+120, +120]",
    ]
    assert [row["of the step"] for row in rows] == ["0.00%", "10.00%", "1.67%", "2.00%"]
    assert {row["n"] for row in rows} == {5}


def test_the_page_names_versions_plants_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes, costs, what was planted, how many steps and turns, machine and versions."""
    version = bench_traceml.metadata.version
    monkeypatch.setattr(
        bench_traceml.metadata,
        "version",
        lambda name: "9.9" if name == "traceml-ai" else version(name),
    )
    turns = {name: [(1e-3, 1e-3)] * 4 for name in ("bare", *bench_traceml.COSTS)}
    said = [Said("TraceML", "slow_read", "INPUT-BOUND", "input 98%", 20.0, 40.0)]
    page = " ".join(show(said, {2.0: turns}, 300).split())
    for text in (
        "traceml-ai 9.9",
        "INPUT-BOUND",
        "300 steps",
        "turns of 2000, 400, 40 steps",
        "torch ",
        "slow read: 4 ms in a sample's read",
    ):
        assert text in page
    assert not page.count("{")


@pytest.mark.slow
def test_the_project_names_what_was_planted() -> None:
    """A whole run of ours with slow reads, as the page has it: storage, by its stages."""
    said = listen_to("harness", "slow_read", 30)
    assert said.words.startswith("storage: ") and "Reading takes " in said.words, said.words
    assert "starved" in said.figures and said.command_s > said.loop_s


@pytest.mark.slow
def test_loops_take_turns_and_end(tmp_path: Path) -> None:
    """A stopped loop goes on where it was told to, gives a time for each turn, and leaves no
    process behind.
    """
    side = bench_traceml.Side("clock", tmp_path, 20, 0.0)
    try:
        side.begin()
        turns = [side.turn() for _ in range(3)]
    finally:
        side.end()
    assert all(0 < wall_s < 5 and cpu_s >= 0 for wall_s, cpu_s in turns)
    assert side.process.returncode == 0
    assert (tmp_path / "clock" / "metrics.jsonl").read_text().count("\n") == 6


def test_a_loop_that_does_not_begin_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded, and its process is ended."""
    monkeypatch.setattr(bench_traceml, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(
        bench_traceml, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    side = bench_traceml.Side("bare", tmp_path, 20, 0.0)
    with pytest.raises(TimeoutError):
        side.begin()
    side.end()
    assert side.process.returncode is not None
