"""What the user reads: in a pipe, on a terminal, on other ranks."""

import contextlib
import logging
import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest
from model_time import Hand

from harness.monitor import console
from harness.runtime.folder import LOGGER


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, LOGGER)
    return caplog


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """The clock of progress."""
    clock = Hand()
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=clock))
    return clock


def on_terminal(code: str) -> str:
    """What a program prints on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environ = {"TERM": "xterm", **os.environ, "COLUMNS": "80"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environ
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:
            # Linux's end of a terminal
            pass
        os.close(ours)
    assert process.returncode == 0, seen.decode()
    return seen.decode()


def test_a_line_is_printed_once_and_logged_once(
    capsys: pytest.CaptureFixture[str], log: pytest.LogCaptureFixture
) -> None:
    """say() is one line on standard output and one record in the log."""
    console.say("run folder: outputs/x")
    assert capsys.readouterr() == ("run folder: outputs/x\n", "")
    assert [(record.levelname, record.getMessage()) for record in log.records] == [
        ("INFO", "run folder: outputs/x")
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("[red]no markup[/red] [link=x]", "[red]no markup[/red] [link=x]", id="markup"),
        pytest.param("a\x1b[2Jb\rc\nd", "a\\x1b[2Jb\\rc\\nd", id="control characters"),
        pytest.param("Zürich 東京", "Zürich 東京", id="letters"),
        pytest.param("bad \udcff name", "bad \\udcff name", id="undecodable name"),
    ],
)
def test_text_from_outside_is_only_text(
    capsys: pytest.CaptureFixture[str], text: str, shown: str
) -> None:
    """Neither markup nor control characters in a name have an effect."""
    console.say(text)
    assert console.aligned(["a"], [[text]]) == ["a", shown]
    with console.progress(text, 3, "files") as bar:
        bar.advance()
    assert capsys.readouterr().out.splitlines() == [shown]


def test_markup_is_only_text_on_a_terminal_too() -> None:
    """On a terminal too no control character comes from outside."""
    seen = on_terminal(
        "import time; from itertools import count\n"
        "from harness.monitor.console import say, progress\n"
        "time.monotonic = count().__next__\n"
        "text = '[red]x[/red] \\x1b[2J[/]'\n"
        "say(text); say(text)\n"
        "with progress(text, 9, 'files') as bar:\n"
        "    bar.note(text); bar.advance(2)\n"
    )
    assert "\x1b[2J" not in seen
    assert seen.count("[red]x[/red] \\x1b[2J[/]") >= 3
    assert "2 of 9 files" in seen and seen.count("\r\x1b[K") == 4


def test_a_long_line_on_a_terminal_is_not_broken() -> None:
    """A path can be copied from the terminal in one piece."""
    assert "x" * 300 in on_terminal("from harness.monitor.console import say; say('x' * 300)")


def test_a_warning_from_anywhere_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The project's warnings go through logging; the user sees each once."""
    logging.getLogger(LOGGER).warning("%d files left out: %s", 3, "\x1b[2J")
    assert capsys.readouterr() == ("warning: 3 files left out: \\x1b[2J\n", "")


def test_other_ranks_are_silent_and_still_log(
    capsys: pytest.CaptureFixture[str], log: pytest.LogCaptureFixture
) -> None:
    """A quiet rank prints nothing at all; its log has every line."""
    with console.speaking(False):
        console.say("hello")
        console.live_table("live", ["b"])(["2"])
        logging.getLogger(LOGGER).warning("careful")
        with console.progress("work", 10, "steps") as bar:
            bar.advance(10)
    assert capsys.readouterr() == ("", "")
    assert [record.getMessage() for record in log.records] == ["hello", "live", "b", "2", "careful"]


def test_a_table_has_columns() -> None:
    """Each is as wide as its longest cell."""
    lines = console.aligned(["num_workers", "images/s"], [["0", "1200"], ["16", "9"]])
    assert lines == ["num_workers  images/s", "0            1200", "16           9"]


def test_short_work_in_a_pipe_says_nothing(capsys: pytest.CaptureFixture[str], hand: Hand) -> None:
    """Work of less than a second leaves no lines."""
    with console.progress("quick", 100, "files") as bar:
        for _ in range(100):
            hand.now += 0.009
            bar.advance(1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("unit_s", "expected"),
    [
        pytest.param(0.03125, ["100 of 100 files in 3 s"], id="3 s"),
        pytest.param(
            0.25,
            [*(f"{n} of 100 files" for n in (20, 40, 80)), "100 of 100 files in 25 s"],
            id="25 s",
        ),
        pytest.param(
            60.0,
            [*(f"{2**n} of 100 files" for n in range(7)), "100 of 100 files in 6000 s"],
            id="long",
        ),
    ],
)
def test_long_work_in_a_pipe_says_a_few_lines(
    capsys: pytest.CaptureFixture[str], hand: Hand, unit_s: float, expected: list[str]
) -> None:
    """A line after 5 s, then when the time has doubled; the last tells the end."""
    with console.progress("unpacking", 100, "files") as bar:
        for _ in range(100):
            hand.now += unit_s
            bar.advance(1)
    out = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("unpacking: ") for line in out] == expected


def test_what_work_shows_so_far_stands_after_its_counts(
    capsys: pytest.CaptureFixture[str], hand: Hand
) -> None:
    """A window's loss and speed are printed once; the last line has the time that it took."""
    with console.progress("epoch 1/5", 8, "steps") as bar:
        for loss in (0.9, 0.8, 0.7, None, None, None, None, None):
            hand.now += 6
            bar.advance()
            if loss:
                bar.note(f"loss {loss}")
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/5: 1 of 8 steps", "epoch 1/5: 2 of 8 steps, loss 0.9",
        "epoch 1/5: 4 of 8 steps, loss 0.7", "epoch 1/5: 8 of 8 steps in 48 s",
    ]  # fmt: skip


def test_a_bar_goes_over_items(capsys: pytest.CaptureFixture[str], hand: Hand) -> None:
    """An item is done when the next one is asked for; what is not asked for is not done."""
    with console.progress("evaluating", 3, "batches") as bar:
        for item in bar.over("abc"):
            hand.now += 2
            if item == "c":
                break
    assert bar.done == 2
    assert capsys.readouterr().out == "evaluating: 2 of 3 batches in 6 s\n"


def test_styles_are_for_terminals() -> None:
    """A warning and the verdict are seen among many lines; a pipe has plain ones."""
    code = (
        "import logging; from harness.monitor.console import say; say('verdict', stands_out=True)\n"
        "logging.getLogger('wellfed').warning('careful')"
    )
    seen = on_terminal(code)
    assert "\x1b[1mverdict\x1b[0m" in seen and "\x1b[33mwarning: careful\x1b[0m" in seen
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert piped.stdout == "verdict\nwarning: careful\n"


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, "\x1b[1;31merror:\x1b[0m no such folder"),
        ({"NO_COLOR": "1"}, "error: no such folder"),
        ({"TERM": "dumb"}, "error: "),
    ],
    ids=["color", "not wanted", "not known"],
)
def test_errors_have_a_color_on_a_terminal_that_has_some(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str], shown: str
) -> None:
    """The last line of a failed run is seen."""
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    code = "from harness.runtime.errors import DataError, tell; tell([DataError('no such folder')])"
    assert on_terminal(code).strip().startswith(shown)


def test_bytes_of_unknown_total_are_millions(
    capsys: pytest.CaptureFixture[str], hand: Hand
) -> None:
    """A download without a length still says how far it is."""
    with console.progress("download", None, "B") as bar:
        for _ in range(3):
            hand.now += 6.0
            bar.advance(1_500_000)
    assert capsys.readouterr().out.splitlines() == [
        "download: 1.5 MB",
        "download: 3.0 MB",
        "download: 4.5 MB in 18 s",
    ]


def test_progress_inside_progress_is_silent(capsys: pytest.CaptureFixture[str], hand: Hand) -> None:
    """One thing at a time is shown: the outer one, also after the inner one has ended."""
    with console.progress("outer", 2, "parts") as outer:
        with console.progress("inner", 2, "files") as inner:
            hand.now += 10
            inner.advance(2)
        outer.advance(2)
    assert capsys.readouterr().out.splitlines() == ["outer: 2 of 2 parts in 10 s"]


def test_progress_ends_with_its_exception(capsys: pytest.CaptureFixture[str], hand: Hand) -> None:
    """Failed work does not say that it is done, and the next progress shows again."""
    with contextlib.suppress(KeyError), console.progress("failing", 4, "files") as bar:
        hand.now += 3
        bar.advance(1)
        raise KeyError
    with console.progress("next", 4, "files") as bar:
        hand.now += 3
        bar.advance(4)
    assert capsys.readouterr().out.splitlines() == ["next: 4 of 4 files in 3 s"]


def test_a_live_table_in_a_pipe_is_lines(
    capsys: pytest.CaptureFixture[str], log: pytest.LogCaptureFixture
) -> None:
    """Title and header at once, each row when it comes, padded; all in the log."""
    shown = console.live_table("Trials", ["num_workers", "images/s  ", "note"])
    assert capsys.readouterr().out.splitlines() == ["Trials", "num_workers  images/s    note"]
    shown(["4", "1200 ±3%", "[b]\r"])
    assert capsys.readouterr().out.splitlines() == ["4            1200 ±3%    [b]\\r"]
    assert [record.getMessage() for record in log.records] == [
        "Trials",
        "num_workers  images/s    note",
        "4            1200 ±3%    [b]\\r",
    ]


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    """`train.py | head -1` goes on training."""
    code = (
        "import sys; from harness.monitor.console import say\n"
        "for line in range(20000): say('line %d' % line)\n"
        "sys.stderr.write('done')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"done"
    assert process.returncode == 0


def test_a_full_disk_under_the_output_does_not_end_the_run() -> None:
    """`train.py > log` goes on training where the log's disk is full."""
    code = (
        "import sys; from harness.monitor.console import say\nsay('a'); say('b'); "
        "sys.stderr.write('done')"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=True
        )
    assert done.stderr == b"done"


def test_a_terminal_without_unicode_gets_escapes() -> None:
    """Letters that the output's encoding lacks are escaped and do not raise."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from harness.monitor.console import say; say('Z\\u00fcrich \\u6771')",
        ],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert done.stdout == b"Z\\xfcrich \\u6771\n"
