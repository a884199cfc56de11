"""What the user reads while a run goes on: lines, tables, warnings and bars on standard output; all but bars in the log too.

Warnings come here by logging: ``logging.getLogger("wellfed").warning`` anywhere is printed once and logged once. Text is
escaped, so that a file's name can neither drive the terminal nor be read as rich's markup.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from harness.runtime.errors import printable
from harness.runtime.folder import LOGGER

_log = logging.getLogger(LOGGER)
_console = Console(soft_wrap=True, highlight=False)  # asks for sys.stdout at each use
_quiet = False
_busy = False  # a progress() is open


def set_quiet(quiet: bool) -> None:
    """Print nothing from now on, or again; the log is written in any case."""
    global _quiet
    _quiet = quiet


def say(text: str) -> None:
    """Print one line, and log it."""
    line = printable(text)
    _log.info("%s", line)
    _print(line)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and log it; every row has as many cells as there are columns."""
    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    say(title)
    for row in cells:
        say("  ".join(map(str.ljust, row, widths)).rstrip())


class Bar:
    """Progress of long work, which ``show`` lets the user see."""

    def __init__(self, description: str, total: int | None, unit: str, show: Callable[[Bar], object]) -> None:
        self.done, self.total = 0, total
        self._description, self._unit, self._show = printable(description), unit, show

    def advance(self, n: int = 1) -> None:
        """Note ``n`` more units done."""
        self.done += n
        self._show(self)

    def describe(self, text: str) -> None:
        """Say what is being done now."""
        self._description = printable(text)
        self._show(self)

    def __str__(self) -> str:
        counts = [n for n in (self.done, self.total) if n is not None]
        shown, unit = ([f"{n / 1e6:.1f}" for n in counts], "MB") if self._unit == "B" else (map(str, counts), self._unit)
        return f"{self._description}: {' of '.join(shown)} {unit}"


class _Lines:
    """A line at most every tenth of the work and every 5 s, and one at the end; none for work under a second."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._said_done = now, 0
        self._began = self._said = now()

    def __call__(self, bar: Bar) -> None:
        if self._now() - self._said >= 5 and (bar.done - self._said_done) * 10 >= (bar.total or 1):
            self._said, self._said_done = self._now(), bar.done
            _print(str(bar))

    def end(self, bar: Bar) -> None:
        took = self._now() - self._began
        if took >= 1 and bar.done > self._said_done:
            _print(f"{bar} in {took:.0f} s")


@contextmanager
def progress(description: str, total: int | None, unit: str, *, now: Callable[[], float] = time.monotonic) -> Iterator[Bar]:
    """Show how far long work is, inside the block: a bar on a terminal, a few plain lines in a pipe.

    Inside another ``progress`` it shows nothing. ``total`` is None where it is not known; ``unit`` is what is counted, in the
    plural, or B for bytes, which are shown in millions.
    """
    global _busy
    if _quiet or _busy:
        yield Bar(description, total, unit, lambda bar: None)
        return
    _busy = True
    try:
        if _on_terminal():
            columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
            with Progress(*columns, console=_console, transient=True) as live:
                task = live.add_task("", total=total)
                bar = Bar(description, total, unit, lambda b: live.update(task, description=str(b), completed=b.done))
                bar.advance(0)
                yield bar
        else:
            lines = _Lines(now)
            bar = Bar(description, total, unit, lines)
            yield bar
            lines.end(bar)
    finally:
        _busy = False


def _on_terminal() -> bool:
    return sys.stdout.isatty() and not _console.is_dumb_terminal


def _print(line: str) -> None:
    if _quiet:
        return
    try:
        if _on_terminal():
            _console.print(Text(line))
        else:
            encoding = sys.stdout.encoding or "utf-8"
            print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # the reader (head, less) has gone; training has not
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _print(f"warning: {printable(record.getMessage())}")


_log.addHandler(_Warnings(logging.WARNING))
