"""Signals: a flag, a second one that acts, and handlers that come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from harness.runtime import signals
from harness.runtime.errors import Interrupted

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in (*NUMBERS, signal.SIGUSR1)}
    yield
    signals._received.clear()
    for number, handler in former.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_sets_a_flag(number: signal.Signals) -> None:
    """Nothing happens at the signal; check() raises Interrupted with the exit code of that signal."""
    with signals.caught():
        signals.check()
        assert signals.received() == 0
        send(number)
        assert signals.received() == number
        with pytest.raises(Interrupted, match=f"stopped by signal {int(number)}") as caught:
            signals.check()
    assert (caught.value.signum, caught.value.exit_code) == (number, 128 + number)


def test_signals_within_a_second_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's signal that parents pass on comes more than once: up to a second after the first it counts as that one."""
    clock = iter([100.0, 100.5, 101.0])
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with signals.caught():
        send(signal.SIGINT)
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert signals.received() == signal.SIGINT
    assert next(clock, None) is None


@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_acts_at_once(number: signal.Signals) -> None:
    """More than a second after the first, a signal ends the process as it would without any handler."""
    script = (
        "import os, itertools, types\n"
        "from harness.runtime import signals\n"
        "signals.time = types.SimpleNamespace(monotonic=itertools.count(0.0, 1.5).__next__)\n"
        "with signals.caught():\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    print('first', flush=True)\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    print('second', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (-number, "first\n")


def test_handlers_come_back() -> None:
    """After the block, also one that raises, the former handlers are in place."""
    former = [signal.getsignal(number) for number in NUMBERS]

    def fail_inside() -> None:
        with signals.caught():
            assert [signal.getsignal(number) for number in NUMBERS] != former
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [signal.getsignal(number) for number in NUMBERS] == former


def test_a_new_block_begins_without_a_signal() -> None:
    """What an earlier block received is forgotten."""
    with signals.caught():
        send(signal.SIGTERM)
    with signals.caught():
        signals.check()


def test_another_thread_changes_no_handler() -> None:
    """Python lets the main thread alone set handlers; elsewhere the block does nothing."""
    former, seen = signal.getsignal(signal.SIGINT), []

    def inside() -> None:
        with signals.caught():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [former]


def test_a_worker_is_deaf() -> None:
    """A worker ignores SIGINT, SIGTERM and SIGUSR1."""
    signals.ignored_in_worker()
    for number in (*NUMBERS, signal.SIGUSR1):
        assert signal.getsignal(number) == signal.SIG_IGN
        send(number)
