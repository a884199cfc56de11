"""Processes of a run: the first error comes home, and nobody is left behind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jobs
import psutil
import pytest
from commands import python
from samples import is_alive

from harness.runtime import launch, signals
from harness.runtime.launch import ProcessError, run_processes


@pytest.fixture(autouse=True)
def _nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    yield
    signals._received.clear()
    assert multiprocessing.active_children() == []


def test_every_process_runs_once(tmp_path: Path) -> None:
    """work(i, job) runs in count processes, each with its own i."""
    run_processes(jobs.note, tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}


def test_the_first_error_ends_the_others(tmp_path: Path) -> None:
    """The text and the exit code are those of the process that failed; one that goes on is ended
    after the grace.
    """
    with pytest.raises(ProcessError, match="^loader.num_workers: no more$") as caught:
        run_processes(jobs.first_fails, tmp_path, 2, grace_s=0.5)
    assert caught.value.exit_code == 6
    assert not psutil.pid_exists(int((tmp_path / "0").read_text()))


def test_the_cause_is_told_and_not_its_echo(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that was killed is named, also where another noticed it first."""
    monkeypatch.setattr(launch, "_GRACE_S", 5.0)
    with pytest.raises(ProcessError, match=r"^rank1 was killed by signal 9") as error:
        run_processes(jobs.lose_the_other, tmp_path, 2)
    assert error.value.exit_code == 137
    assert "Traceback" not in capfd.readouterr().err


def test_a_start_method_that_others_do_not_know_is_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a job of joblib, whose own start method new processes do not know, they start all the
    same.
    """
    former = multiprocessing.get_start_method()
    default = multiprocessing.context._default_context  # type: ignore[attr-defined]
    monkeypatch.setattr(default, "_actual_context", type("Loky", (), {"_name": "loky"})())
    try:
        run_processes(jobs.note, tmp_path, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["0"]
    finally:
        multiprocessing.set_start_method(former, force=True)


def test_an_unknown_error_shows_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """A fault of ours is told with its type, exit code 1, and the traceback on standard error."""
    with pytest.raises(ProcessError, match="^ZeroDivisionError: division by zero$") as caught:
        run_processes(jobs.divide, 0, 1)
    assert caught.value.exit_code == 1
    assert "in divide" in capfd.readouterr().err


def test_a_save_that_failed_after_a_signal_is_told(tmp_path: Path) -> None:
    """The rank that could not save counts, though another one ended by the signal before it."""
    with (
        signals.handle_signals(),
        pytest.raises(ProcessError, match="^checkpoints: no room$") as caught,
    ):
        run_processes(jobs.fail_to_save, tmp_path, 2)
    assert caught.value.exit_code == 7


def test_a_process_ends_as_python_ends_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Threads are waited for, callbacks are called and what was printed is written, though the
    interpreter stays as it is.
    """
    run_processes(jobs.leave_things, tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["callback", "thread"]
    assert capfd.readouterr().out == "written"


@pytest.mark.parametrize(
    ("code", "text", "exit_code"),
    [
        (-9, r"^rank0 was killed by signal 9 \(SIGKILL\)$", 137),
        (5, "^rank0 .* code 5$", 5),
    ],
    ids=["killed", "ended"],
)
def test_a_process_that_says_nothing_is_told_by_its_end(
    code: int, text: str, exit_code: int
) -> None:
    """Without an error to tell, the text says how the process ended."""
    with pytest.raises(ProcessError, match=text) as caught:
        run_processes(jobs.die, code, 1)
    assert caught.value.exit_code == exit_code


def test_a_signal_is_passed_on() -> None:
    """A signal to the parent alone reaches the processes, and its exit code comes home."""
    with (
        signals.handle_signals(),
        pytest.raises(ProcessError, match="^stopped by SIGTERM$") as caught,
    ):
        run_processes(jobs.interrupt_parent, None, 1)
    assert caught.value.exit_code == 143


STARTED = """
import os
import jobs
from multiprocessing.context import SpawnProcess
from harness.runtime import launch, signals
start = SpawnProcess.start
SpawnProcess.start = lambda process: (os.kill(os.getpid(), 15), start(process))
with signals.handle_signals(grace_s=0):
    try:
        launch.run_processes(jobs.say_pid_and_stay, None, 1)
    except launch.ProcessError as error:
        print(error.exit_code)
"""


def test_a_signal_while_processes_start_cuts_no_start_short() -> None:
    """The processes start, are then told to end, and the signal's exit code comes home."""
    done = python(STARTED)
    assert (done.returncode, done.stdout.splitlines()[-1:], done.stderr) == (0, ["143"], "")


@pytest.mark.parametrize("stage", ["in a block", "at exit"])
def test_a_signal_that_is_passed_on_cuts_nothing_short(tmp_path: Path, stage: str) -> None:
    """A process that ends by the group's signal clears up, though its parent passes the same signal
    on meanwhile.
    """
    with signals.handle_signals(), pytest.raises(ProcessError, match="^stopped by SIGTERM$"):
        run_processes(jobs.clear_up, (tmp_path, stage), 1)
    assert (tmp_path / "cleared").exists()


def test_no_process_outlives_a_killed_parent() -> None:
    """Within one second of the parent's SIGKILL its processes are gone."""
    script = (
        "import jobs\nfrom harness.runtime.launch import "
        "run_processes\nrun_processes(jobs.say_pid_and_stay, None, 1)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 1.0
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(child)


def test_a_command_begins_before_anything_is_imported() -> None:
    """The time that libraries take to be imported is part of a run."""
    code = "import time, harness; took_s = time.perf_counter() - harness.BEGAN_S; import torch"
    code += "; print(took_s < 0.5 * (time.perf_counter() - harness.BEGAN_S))"
    assert python(code).stdout == "True\n"


@pytest.mark.parametrize(
    ("called", "ranks", "words"),
    [
        pytest.param("train.py", None, "python train.py", id="a checkout's script"),
        pytest.param("/a/train.py", None, "python /a/train.py", id="another folder's"),
        pytest.param("/a/_submit.py", None, "python train.py", id="a launcher's"),
        pytest.param("/a/bin/wellfed", None, "wellfed", id="the command"),
        pytest.param(
            "/a/train.py",
            "--nproc-per-node=2",
            "torchrun --nproc-per-node=2 /a/train.py",
            id="ranks",
        ),
        pytest.param(
            "/a/harness/__main__.py",
            "--nproc-per-node=2",
            "torchrun --nproc-per-node=2 -m wellfed",
            id="installed ranks",
        ),
    ],
)
def test_a_run_is_started_again_as_it_was(
    monkeypatch: pytest.MonkeyPatch, called: str, ranks: str | None, words: str
) -> None:
    """What to paste names the script in a checkout, and the command where that was typed."""
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr(sys, "argv", [called, "data=digits"])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert launch.command(ranks) == words.split()
    if ranks is None:
        # the environment's own commands are not on the shell's path
        monkeypatch.setenv("PATH", "/nowhere")
        assert launch.command()[0] == sys.executable
        project = Path(sys.prefix).parent
        monkeypatch.setenv("UV", "uv")
        monkeypatch.chdir(project)
        assert launch.command() == ["uv", "run", words.split()[-1]]
        monkeypatch.chdir("/")
        assert launch.command()[2:4] == ["--project", str(project)]
