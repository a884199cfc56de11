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
from rich.table import Table
from rich.text import Text

from harness.runtime.errors import printable
from harness.runtime.folder import LOGGER

_log = logging.getLogger(LOGGER)
_console = Console(soft_wrap=True, highlight=False)  # asks for sys.stdout at each use
_quiet = False
_busy = False  # a progress() is open


def set_quiet(quiet: bool) -> None:
    """Print nothing from now on (every rank but 0), or again; the log is written in any case."""
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
    assert all(len(row) == len(columns) for row in cells)
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    for line in (printable(title), *lines):
        _log.info("%s", line)
    if not _on_terminal():
        for line in (printable(title), *lines):
            _print(line)
    elif not _quiet:
        drawn = Table(title=Text(printable(title)), title_justify="left")
        for name in cells[0]:
            drawn.add_column(Text(name))
        for row in cells[1:]:
            drawn.add_row(*(Text(cell) for cell in row))
        _console.print(drawn)


class Bar:
    """Progress that nobody sees: on other ranks, and inside another progress."""

    def advance(self, n: int = 1) -> None:
        """Note ``n`` more units done."""

    def describe(self, text: str) -> None:
        """Say what is being done now."""


class _LiveBar(Bar):
    def __init__(self, live: Progress, description: str, total: int | None, unit: str) -> None:
        self._live, self._total, self._unit, self._done = live, total, unit, 0
        self._task = live.add_task(_unmarked(description), total=total, counted="")
        self.advance(0)

    def advance(self, n: int = 1) -> None:
        self._done += n
        self._live.update(self._task, advance=n, counted=_counted(self._done, self._total, self._unit))

    def describe(self, text: str) -> None:
        self._live.update(self._task, description=_unmarked(text))


class _LineBar(Bar):
    """A line at most every tenth of the work and every 5 s, and one at the end; none for work under a second."""

    def __init__(self, description: str, total: int | None, unit: str, now: Callable[[], float]) -> None:
        self._description, self._total, self._unit, self._now = description, total, unit, now
        self._done = self._said_done = 0
        self._began = self._said = now()

    def advance(self, n: int = 1) -> None:
        self._done += n
        if self._now() - self._said >= 5 and (self._done - self._said_done) * 10 >= (self._total or 0):
            self._say("")

    def describe(self, text: str) -> None:
        self._description = text

    def end(self) -> None:
        took = self._now() - self._began
        if took >= 1 and self._done > self._said_done:
            self._say(f" in {took:.0f} s")

    def _say(self, suffix: str) -> None:
        self._said, self._said_done = self._now(), self._done
        _print(f"{printable(self._description)}: {_counted(self._done, self._total, self._unit)}{suffix}")


@contextmanager
def progress(description: str, total: int | None, unit: str, *, now: Callable[[], float] = time.monotonic) -> Iterator[Bar]:
    """Show how far long work is, inside the block: a bar on a terminal, a few plain lines in a pipe.

    Inside another ``progress`` it shows nothing.

    Args:
        description: what is being done.
        total: units in all; None: not known.
        unit: what is counted, in the plural; B for bytes, which are shown in millions.
        now: a monotonic clock in seconds.
    """
    global _busy
    if _quiet or _busy:
        yield Bar()
        return
    _busy = True
    try:
        if _on_terminal():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counted]}"))
            with Progress(*columns, TimeRemainingColumn(), console=_console, transient=True) as live:
                yield _LiveBar(live, description, total, unit)
        else:
            lines = _LineBar(description, total, unit, now)
            yield lines
            lines.end()
    finally:
        _busy = False


def _counted(done: int, total: int | None, unit: str) -> str:
    if unit == "B":
        return f"{done / 1e6:.1f} MB" if total is None else f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
    return f"{done} {unit}" if total is None else f"{done} of {total} {unit}"


def _unmarked(text: str) -> str:
    return printable(text).replace("[", r"\[")


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
