"""Signals: a flag, a second one that acts, and handlers that come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from commands import python

from harness.runtime import signals
from harness.runtime.errors import Interrupted

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    signals._received.clear()
    for number, handler in former.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def named(number: signal.Signals) -> str:
    """What a user knows the signal by."""
    return "Ctrl-C" if number == signal.SIGINT else number.name


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_sets_a_flag(number: signal.Signals) -> None:
    """Nothing happens at the signal; check() raises Interrupted with the
    exit code of that signal.
    """
    with signals.handle_signals():
        signals.check()
        assert signals.received() == 0
        send(number)
        assert signals.received() == number
        with pytest.raises(Interrupted, match=f"^stopped by {named(number)}$") as caught:
            signals.check()
    assert caught.value.exit_code == 128 + number


def ended(script: str) -> tuple[int, str, str]:
    """Exit code and output of a process in which signals are caught and ``script`` runs."""
    head = [
        "import os, time",
        "from harness.runtime import signals",
        "with signals.handle_signals():",
    ]
    text = "\n".join(
        [*head, *(f"    {line}" for line in script.splitlines()), "print('through', flush=True)"]
    )
    process = python(text)
    return process.returncode, process.stdout, process.stderr


def test_signals_within_a_second_are_one() -> None:
    """A group's signal that parents pass on comes more than once: up to a second after the first it
    counts as that one.
    """
    code, output, _ = ended(
        "os.kill(os.getpid(), 2)\nos.kill(os.getpid(), "
        "15)\ntime.sleep(0.3)\nprint(signals.received())"
    )
    assert (code, output) == (0, "2\nthrough\n")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_acts_at_once(number: signal.Signals) -> None:
    """More than a second after the first, a signal ends the process, wherever it is."""
    stuck = (
        "import threading\nsignals._SAME_S = 0.1\nkill = lambda: os.kill(os.getpid(), "
        "NUMBER)\nkill()\n"
    )
    stuck += (
        "print('first', flush=True)\nthreading.Timer(0.5, kill).start()\nthreading.Event().wait()"
    )
    code, output, error = ended(stuck.replace("NUMBER", str(int(number))))
    assert (code, output) == (128 + number, "first\n")
    assert error == f"error: stopped by {named(number)}, the second signal; not saving\n"


def test_a_second_signal_acts_where_nobody_reads() -> None:
    """`train.py 2>&1 | tee log`: Ctrl-C ends tee too."""
    script = (
        "r, w = os.pipe()\nos.dup2(w, "
        "2)\nos.close(r)\nsignals.set_grace(0.2)\nos.kill(os.getpid(), 15)\ntime.sleep(20)"
    )
    assert ended(script)[:2] == (143, "")


def test_the_end_of_the_grace_acts() -> None:
    """A process that has not ended within its grace is ended where it stands, with the code of the
    signal.
    """
    code, output, error = ended("signals.set_grace(0.5)\nos.kill(os.getpid(), 15)\ntime.sleep(20)")
    assert (code, output) == (143, "")
    assert error == "error: stopped by SIGTERM, not saved within checkpoint.grace_s=0.5\n"


def test_another_thread_saves_while_the_main_one_waits() -> None:
    """A main thread that nothing wakes is not waited for: the rescue is the last thing done."""
    script = (
        "signals.set_grace(0.5)\n"
        "signals.set_rescue(lambda: print('saved', flush=True) or ', saved')\n"
        "os.kill(os.getpid(), 15)\ntime.sleep(20)"
    )
    assert ended(script)[:2] == (143, "saved\n")


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(
            "try:\n    os.kill(os.getpid(), 2)\nexcept BaseException:\n    time.sleep(20)",
            id="where errors are caught",
        ),
        pytest.param(
            "weakref.finalize(set(), os.kill, os.getpid(), 2)\ntime.sleep(20)",
            id="where errors are ignored",
        ),
    ],
)
def test_nothing_is_waited_for_where_nothing_is_lost(stage: str) -> None:
    """Without a grace the first signal ends the process wherever it is; what is to be done at its
    end is done.
    """
    head = (
        "import atexit, weakref\nsignals.set_grace(0)\natexit.register(print, 'cleared', "
        "flush=True)\n"
    )
    assert ended(head + stage)[:2] == (130, "cleared\n")


def test_a_wait_in_c_code_ends_too() -> None:
    """As one for another rank that is gone, in which Python's handlers are not called: what is to
    be done is done.
    """
    script = (
        "import atexit, ctypes, signal, threading\nsignals._START_S = 0.2\nsignals.set_grace(0)\n"
        "atexit.register(print, 'cleared', flush=True)\nsignal.pthread_sigmask(signal.SIG_BLOCK, "
        "{2})\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), 2)).start()\nctypes.CDLL(None).sleep(20)"
    )
    assert ended(script)[:2] == (130, "cleared\n")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    """As nohup has SIGHUP, and a shell's background SIGINT, when the process starts."""
    script = (
        "import os\nfrom harness.runtime import signals\nwith signals.handle_signals(grace_s=0):\n"
        f"    os.kill(os.getpid(), {int(number)})\n    print(signals.received())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )
    assert (process.returncode, process.stdout) == (0, "0\n")


def test_a_launcher_s_own_handler_stays() -> None:
    """A handler that was there before is called, and ends nothing here."""
    script = (
        "import os, signal\nfrom harness.runtime import signals\n"
        "signal.signal(signal.SIGUSR2, lambda *_: print('theirs', flush=True))\n"
        "with signals.handle_signals(grace_s=0):\n    os.kill(os.getpid(), signal.SIGUSR2)\n    "
        "print(signals.received())\n"
    )
    process = python(script)
    assert (process.returncode, process.stdout) == (0, "theirs\n0\n")


@pytest.mark.parametrize(("passed_s", "late"), [(0.0, False), (1700.0, False), (1801.0, True)])
def test_a_wait_for_a_batch_may_take_half_of_the_grace(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, late: bool
) -> None:
    """The step that a batch belongs to can be finished where the batch comes; one that does not
    come is given up in time.
    """
    monkeypatch.setattr(signals, "_grace_s", 3600.0)
    monkeypatch.setattr(signals, "_received", [(15, time.monotonic() - passed_s)])
    assert signals.late() == late
    with pytest.raises(Interrupted) if late else nullcontext():
        signals.check_wait()


def test_handlers_come_back() -> None:
    """After the block, also one that raises, the former handlers are in place."""
    former = [signal.getsignal(number) for number in NUMBERS]

    def fail_inside() -> None:
        with signals.handle_signals():
            assert [signal.getsignal(number) for number in NUMBERS] != former
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [signal.getsignal(number) for number in NUMBERS] == former


def test_a_worker_is_deaf() -> None:
    """A worker ignores the signals that end a run."""
    signals.ignored_in_worker()
    for number in NUMBERS:
        assert signal.getsignal(number) == signal.SIG_IGN
        send(number)
