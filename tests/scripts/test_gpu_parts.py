"""The parts of the GPU check: on the CPU, on an emulated GPU, and
what is made of what they raise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulator import EmulatedDevice, emulated

from harness.data import datasets
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime.errors import LoaderError
from scripts import (
    bench_pinned_copy,
    differential,
    gpu_feeds,
    gpu_loaders,
    gpu_overlap,
    gpu_parts,
    gpu_tests,
    gpu_unsettled,
)
from scripts.bench_loop import make_batches
from scripts.gpu_options import Options, Row, Said, SkippedError

CPU = torch.device("cpu")


def answers(name: str, place: Path, device: torch.device = CPU, left_s: float = 60.0) -> list[Row]:
    """All that a part says."""
    said: list[Row] = []
    gpu_parts.answer_for(name, Options(device, True, place, time.monotonic() + left_s), said.append)
    return said


def rows(said: list[Row]) -> list[Row]:
    return [answer["row"] for answer in said if "row" in answer]


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to copy, to compute and to measure."""
    for module in (gpu_parts, gpu_unsettled):
        monkeypatch.setattr(
            module, "make_batches", lambda count, size, side, pin: make_batches(count, 2, 16, pin)
        )
    monkeypatch.setattr(bench_pinned_copy, "WORK_SIDE", 16)
    monkeypatch.setattr(bench_pinned_copy, "MIB", 2**10)
    monkeypatch.setattr(differential, "LOADS", ((0.5, 0.0), (2.0, 0.5)))
    monkeypatch.setattr(differential, "_ROUNDS", 1)
    for name, value in {
        "_CALLS": 5,
        "_LAUNCHES": 50,
        "_PREFETCHERS": 2,
        "BUSY_S": 1e-3,
        "_MIB": 2**10,
    }.items():
        monkeypatch.setattr(gpu_unsettled, name, value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """An emulated GPU on the wall clock."""
    with emulated(EmulatedDevice(), monkeypatch) as device:
        yield device


@pytest.mark.parametrize(
    ("part", "count"),
    [("elapsed", 3), ("reserved", 2), ("events", 6), ("finish", 2), ("staging", 3), ("copies", 13)],
)
def test_on_a_gpu_a_part_measures(
    part: str, count: int, tmp_path: Path, gpu: EmulatedDevice, little: None
) -> None:
    """What it does with streams, events and copies runs on the emulated one; each measurement is a
    row that JSON holds.
    """
    said = answers(part, tmp_path)
    assert (len(rows(said)), list(said[-1])) == (count, ["ok"])
    assert json.dumps(gpu_parts.plain(rows(said)))


@pytest.mark.parametrize("part", ["stall", "prefetcher"])
def test_on_a_gpu_the_prefetcher_feeds(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: EmulatedDevice, little: None
) -> None:
    """The clock is compared, and a copy hidden, where a step is but 4 ms of the device; values are
    right.
    """
    monkeypatch.setattr(gpu_parts, "Step", lambda *_: lambda images, labels: gpu.delay(4e-3))
    said = answers(part, tmp_path)
    assert rows(said) and "ok" in said[-1]
    assert not [answer for answer in said if "values" in answer.get("wrong", "")]


@pytest.mark.parametrize("part", ["reserved", "finish", "copies"])
def test_without_a_gpu_a_part_does_what_a_cpu_can(part: str, tmp_path: Path, little: None) -> None:
    """It measures, and says that this is nothing of a GPU."""
    said = answers(part, tmp_path)
    assert rows(said) and said[-1]["ok"].endswith(
        "this shows that the part runs, and nothing of a GPU"
    )


@pytest.mark.parametrize(
    "part",
    ["elapsed", "events", "staging", "stall_compiled", "launches_compiled", "feeds_compiled"],
)
def test_without_a_gpu_some_parts_say_why_not(part: str, tmp_path: Path) -> None:
    """What a CPU can show nothing of is skipped with its reason."""
    assert [
        text.startswith("no CUDA device: ") for text in answers(part, tmp_path)[-1].values()
    ] == [True]


@pytest.mark.parametrize(
    "part", ["pytest", "pinning", "prefetcher", "stall", "demand", "launches", "feeds", "peers"]
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_other_part_runs_on_a_cpu(part: str, tmp_path: Path) -> None:
    """In a process of its own, as on a GPU, to its end."""
    command = [sys.executable, "-m", "scripts.gpu_parts", part, "600", str(tmp_path), "--quick"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(gpu_parts.ROOT),
        "WELLFED_CACHE": str(tmp_path / "cache"),
    }
    # a part ends with whoever holds its standard input
    with subprocess.Popen(
        command, cwd=gpu_parts.ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        said = [*map(json.loads, child.stdout)]
    assert list(said[0]) == ["machine"] and list(said[-1]) == ["ok"] and rows(said)


def test_a_part_ends_with_the_check_that_started_it(tmp_path: Path) -> None:
    """Once nobody holds the other end of its standard input, it kills
    itself and all of its group.
    """
    command = [sys.executable, "-c", "from scripts import gpu_parts; gpu_parts._end_with(0)"]
    environment = {**os.environ, "PYTHONPATH": str(gpu_parts.ROOT)}
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, start_new_session=True
    )
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(100) == -9


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (SkippedError("no CUDA device: why"), {"skipped": "no CUDA device: why"}),
        (OSError("no\nspace"), {"failed": "OSError: no\nspace"}),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            {"failed": "OutOfMemoryError: CUDA out of memory"},
        ),
    ],
    ids=["skipped", "an error", "out of memory"],
)
def test_what_a_part_raises_is_told(
    raised: Exception,
    said: Row,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Behind the rows that it had; an error's traceback is printed."""

    def broken(o: Options) -> Said:
        yield {"number": 1}
        yield {"wrong": "off by 2"}
        raise raised

    monkeypatch.setattr(gpu_parts, "PARTS", {"one": broken})
    assert answers("one", tmp_path) == [{"row": {"number": 1}}, {"wrong": "off by 2"}, said]
    assert ("Traceback" in capsys.readouterr().err) == ("failed" in said)


def test_what_became_of_each_test_is_told(tmp_path: Path) -> None:
    """Those that ran, were skipped, failed or could not be imported, with what they said; a setup
    that went well is none.
    """
    place = tmp_path / "told"
    file = os.open(place, os.O_WRONLY | os.O_CREAT)
    told = gpu_tests.Told(file)
    for when, outcome, words in (
        ("setup", "passed", None),
        ("call", "passed", None),
        ("call", "failed", "assert 1 == 2"),
        ("setup", "skipped", ("tests/x.py", 3, "Skipped: no CUDA device")),
    ):
        report = SimpleNamespace(
            nodeid="tests/x.py::test",
            when=when,
            outcome=outcome,
            passed=outcome == "passed",
            duration=0.1,
            longrepr=words,
        )
        told.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    told.pytest_collectreport(
        SimpleNamespace(nodeid="tests/y.py", failed=True, outcome="failed", longrepr="ImportError")
    )  # type: ignore[arg-type]
    os.close(file)
    said = map(json.loads, place.read_text().splitlines())
    assert [(row["outcome"], row["said"]) for row in said] == [
        ("passed", ""),
        ("failed", "assert 1 == 2"),
        ("skipped", ("Skipped: no CUDA device")),
        ("failed", "ImportError"),
    ]


@pytest.mark.parametrize("slow", ["copy", "step"])
def test_right_values_pass_and_wrong_ones_do_not(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race check is silent about a right prefetcher and names the slow side of one that gives
    other values.
    """
    assert gpu_overlap.wrong_values(CPU, slow) == []
    monkeypatch.setattr(
        gpu_overlap,
        "DataPrefetcher",
        lambda *a, **k: ((i + (i.max() == 7), n) for i, n in DataPrefetcher(*a, **k)),
    )
    assert gpu_overlap.wrong_values(CPU, slow) == [f"wrong values where the {slow} is slow"]


def test_workers_that_are_not_missed_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feed that goes on without its workers, and one that gives the error."""

    def broken() -> Iterator[int]:
        yield 1
        raise LoaderError("a worker died")

    monkeypatch.setattr(gpu_unsettled, "_PASSES_S", 0.05)
    assert gpu_unsettled._killed((), iter(lambda: time.sleep(0.01), 0)) == ""
    assert gpu_unsettled._killed((), broken()) == "a worker died"


@pytest.mark.parametrize(
    ("demand", "wrong"),
    [(960, []), (1200, ["the tuner's demand is 1.20 times what data=fake reaches"])],
)
def test_demand_is_compared_with_a_run_without_loading(
    demand: int,
    wrong: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: EmulatedDevice,
) -> None:
    """The images are made first; then come the runs without data, tuned and untuned, and what the
    tuner said is judged.
    """
    asked = []

    def train(overrides: list[str], run_folder: Path, limit_s: float) -> Row:
        asked.append(
            (run_folder.name, "data=fake" in overrides, "loader.autotune=true" in overrides)
        )
        return {"images/s": 1000, "demand": demand if "loader.autotune=true" in overrides else 0}

    monkeypatch.setattr(gpu_parts, "train", train)
    monkeypatch.setattr(datasets, "load", lambda *_: asked.append(("images", False, False)))
    said = answers("demand", tmp_path)
    assert asked == [
        ("images", False, False), ("fake-0", True, False), ("tuned-0", False, True),
        ("untuned-0", False, False),
    ]  # fmt: skip
    assert said[-1]["ok"].endswith(f"the tuner says that the step takes {demand}")
    assert [answer["wrong"] for answer in said if "wrong" in answer] == wrong


@pytest.fixture
def one_core(
    monkeypatch: pytest.MonkeyPatch, gpu: EmulatedDevice
) -> list[tuple[list[str], int | None]]:
    """What was run on a machine of one core, where SPDL fails; no image is made."""
    asked: list[tuple[list[str], int | None]] = []

    def run(
        arguments: list[str], limit_s: float, cores: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        asked.append((arguments[1:], cores))
        if arguments[1] == "SPDL":
            return subprocess.CompletedProcess(arguments, 3, "", "no such thing")
        rate = 1000.0 if arguments[1] == gpu_loaders.NONE else 995.0
        return subprocess.CompletedProcess(
            arguments, 0, f'a warning\n{{"images_per_s": {rate}, "decoder": ""}}\n', ""
        )

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(gpu_parts, "_run", run)
    monkeypatch.setattr(datasets, "load", lambda *_: None)
    monkeypatch.setattr(gpu_loaders, "peers", lambda: ["pytorch/examples", "SPDL"])
    return asked


def test_loaders_run_in_processes_of_their_own(
    tmp_path: Path, one_core: list[tuple[list[str], int | None]]
) -> None:
    """Each on the cores that it is to have; the last line that one prints is its rate, and one that
    fails says why.
    """
    said = answers("peers", tmp_path, CPU, 900)
    root = str(gpu_feeds.shapes(tmp_path, 1280).root)
    assert one_core == [
        ([name, root, "1"], 1) for name in ("no loading", "pytorch/examples", "SPDL")
    ]
    assert said[-1] == {
        "ok": "pytorch/examples: 1 cores reach 0.99; SPDL: none of these reach 0.99"
    }
    assert {"wrong": "SPDL on 1 cores: gpu_loaders.py ended with 3: no such thing"} in said


def test_a_compiled_network_is_asked_for(
    tmp_path: Path, one_core: list[tuple[list[str], int | None]]
) -> None:
    """Also where nothing is loaded."""
    answers("feeds_compiled", tmp_path, CPU, 900)
    assert [arguments[0] for arguments, _ in one_core] == ["no loading", "threads", "processes"]
    assert all(arguments[-1] == "--compile" for arguments, _ in one_core)


def test_loaders_without_time_are_not_measured(
    tmp_path: Path, one_core: list[tuple[list[str], int | None]]
) -> None:
    """The part says so, and nothing is called measured."""
    said = answers("peers", tmp_path, CPU, 30)
    assert said == [
        {"skipped": "no time was left for a loader; name this group alone with --group"}
    ]


def test_a_process_gets_so_many_cores(tmp_path: Path) -> None:
    """And this one has all of its own again."""
    allowed = os.sched_getaffinity(0)
    done = gpu_parts._run(["-c", "import os; print(len(os.sched_getaffinity(0)))"], 60, cores=1)
    assert (done.stdout.strip(), os.sched_getaffinity(0)) == ("1", allowed)


def test_a_process_that_takes_too_long_is_not_waited_for() -> None:
    """Nor are those that it has left behind with its output open."""
    code = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(25)']); time.sleep(60)"
    )
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_parts._run(["-c", code], 2)
    assert time.monotonic() - begin < 20


@pytest.mark.slow
def test_train_gives_the_report_and_says_what_failed(tmp_path: Path) -> None:
    """A small run's figures are read back; the text of a refusal is in the error."""
    tiny = [
        "data=fake",
        "data.image_size=32",
        "data.generate.classes=10",
        "data.generate.train_images=256",
        "trainer.epochs=9",
    ]
    small = [
        *tiny,
        "data.generate.val_images=8",
        "checkpoint.enabled=false",
        "trainer.max_steps=9",
        "trainer.max_steps=3",
    ]
    report: dict[str, Any] = gpu_parts.train(small, tmp_path / "run", 100)
    assert report["images/s"] > 0 and report["demand"] == 0
    with pytest.raises(RuntimeError, match="train.py ended with 2: .*loader.batch_size=0"):
        gpu_parts.train(["loader.batch_size=0"], tmp_path / "refused", 100)
    with pytest.raises(RuntimeError, match="train.py took more than 0 s"):
        gpu_parts.train(small, tmp_path / "late", 0.01)


def test_a_failed_test_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a row; one that failed, and pytest's own bad end, are told."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_tests.py").write_text(
        """print('{"test": "a", "outcome": "passed"}')
print('{"test": "b", "outcome": "failed"}')
raise SystemExit(1)"""
    )
    monkeypatch.setattr(gpu_parts, "ROOT", tmp_path)
    said = answers("pytest", tmp_path)
    assert [row["test"] for row in rows(said)] == ["a", "b"]
    assert said[2:4] == [{"wrong": "b failed"}, {"wrong": "pytest ended with 1"}]
    assert said[-1]["ok"].startswith("1 passed, 1 failed")
