"""What the user reads while a run goes on: lines, tables, warnings and bars on standard output; all
but bars in the log too.

Warnings come here by logging: ``logging.getLogger("wellfed").warning`` anywhere is printed once and
logged once. Text is escaped, so that a file's name can neither drive the terminal nor be read as
rich's markup.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from harness.runtime.errors import printable
from harness.runtime.folder import LOGGER

_log = logging.getLogger(LOGGER)
_console = Console(soft_wrap=True, highlight=False)  # asks for sys.stdout at each use
_quiet = False
_busy = False  # a progress() or a live_table() is open
Item = TypeVar("Item")


def set_quiet(quiet: bool) -> None:
    """Print nothing from now on, or again; the log is written in any case."""
    global _quiet
    _quiet = quiet


def say(text: str, *, stands_out: bool = False) -> None:
    """Print one line, and log it; one that ``stands_out`` is bold on a terminal, and broken between
    words.
    """
    line = printable(text)
    _log.info("%s", line)
    _print(line, "bold" if stands_out else "", wraps=stands_out)


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; every row has as many cells as there are columns."""
    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


class LiveTable:
    """A table whose rows come one by one, with a line under it that says what is being done now.

    On a terminal ``live`` draws it anew for each; where there is none, a row is a line, padded to
    ``widths``.
    """

    def __init__(
        self, title: str, columns: Sequence[str], widths: Sequence[int], live: Live | None
    ) -> None:
        names = list(map(printable, columns))
        self._widths, self._live = (
            [max(len(name), width) for name, width in zip(names, widths, strict=True)],
            live,
        )
        self._grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in names:
            self._grid.add_column(Text(name))
        self._title = printable(title)
        self._line(self._title)
        self._line(self._padded(names))
        self.status("")

    def add(self, row: Sequence[str]) -> None:
        """Add a row, which has as many cells as there are columns."""
        cells = list(map(printable, row))
        self._grid.add_row(*map(Text, cells))
        self._line(self._padded(cells))
        self.status("")

    def status(self, text: str) -> None:
        """Say what is being done now, on a terminal alone; the next row takes it away."""
        if self._live:
            below = [Text(printable(text), "dim")] if text else []
            self._live.update(Group(Text(self._title), self._grid, *below), refresh=True)

    def _padded(self, cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)
        ).rstrip()

    def _line(self, line: str) -> None:
        _log.info("%s", line)
        if self._live is None:
            _print(line)


@contextmanager
def live_table(
    title: str, columns: Sequence[str], widths: Sequence[int] | None = None
) -> Iterator[LiveTable]:
    """Show a table that grows, inside the block: drawn anew on a terminal, a line for each row in a
    pipe and in the log.

    Where a ``progress`` or another live table is open it is lines too; a ``progress`` inside it
    shows nothing. ``widths`` are the columns' least widths in lines, which are written before the
    rows to come are known.
    """
    global _busy
    was_busy, least = _busy, widths or [0] * len(columns)
    _busy = True
    try:
        if was_busy or _quiet or not _on_terminal():
            yield LiveTable(title, columns, least, None)
            return
        # drawn when told, not by a thread of rich's: that would run inside what is being measured
        with Live(console=_console, auto_refresh=False) as live:
            shown = LiveTable(title, columns, least, live)
            try:
                yield shown
            finally:
                shown.status("")
    finally:
        _busy = was_busy


class Bar:
    """Progress of long work, which ``show`` lets the user see."""

    def __init__(
        self, description: str, total: int | None, unit: str, show: Callable[[Bar], object]
    ) -> None:
        self.done, self.total = 0, total
        self._description, self._unit, self._show = printable(description), unit, show
        self._note = ""

    def advance(self, n: int = 1) -> None:
        """Note ``n`` more units done."""
        self.done += n
        self._show(self)

    def describe(self, text: str) -> None:
        """Say what is being done now."""
        self._description = printable(text)
        self._show(self)

    def note(self, text: str) -> None:
        """Take what the work shows so far, to be shown after the counts from the next ``advance``
        on; empty: nothing.
        """
        self._note = printable(text)

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``, each of which is a unit of the work, done when the next one is asked
        for.
        """
        for item in items:
            yield item
            self.advance()

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.counts, self._note)))

    @property
    def counts(self) -> str:
        """What is being done, and how much of it is done."""
        counts = [n for n in (self.done, self.total) if n is not None]
        shown, unit = (
            ([f"{n / 1e6:.1f}" for n in counts], "MB")
            if self._unit == "B"
            else (map(str, counts), self._unit)
        )
        return f"{self._description}: {' of '.join(shown)} {unit}"


class _Lines:
    """A line after 5 s, then at most every tenth of the work and every 5 s, and one at the end.

    Work under a second has none.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._said_done = now, 0
        self._began = self._said = now()

    def __call__(self, bar: Bar) -> None:
        is_tenth = (bar.done - self._said_done) * 10 >= (bar.total or 1)
        if self._now() - self._said >= 5 and (is_tenth or (bar.done and not self._said_done)):
            self._said, self._said_done = self._now(), bar.done
            _print(str(bar))

    def end(self, bar: Bar) -> None:
        took = self._now() - self._began
        if took >= 1 and bar.done > self._said_done:
            _print(f"{bar.counts} in {took:.0f} s")


@contextmanager
def progress(
    description: str, total: int | None, unit: str, *, now: Callable[[], float] = time.monotonic
) -> Iterator[Bar]:
    """Show how far long work is, inside the block: a bar on a terminal, a few plain lines in a
    pipe.

    Inside another ``progress`` it shows nothing. ``total`` is None where it is not known; ``unit``
    is what is counted, in the plural, or B for bytes, which are shown in millions.
    """
    global _busy
    if _quiet or _busy:
        yield Bar(description, total, unit, lambda bar: None)
        return
    _busy = True
    try:
        if _on_terminal():
            # the bar has the room that the text leaves
            left = TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True))
            columns = TextColumn("{task.description}", markup=False), BarColumn(None), left
            with Progress(*columns, console=_console, transient=True, expand=True) as live:
                bar = Bar(
                    description,
                    total,
                    unit,
                    lambda b: live.update(task, description=str(b), completed=b.done),
                )
                task = live.add_task(str(bar), total=total)
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


def _print(line: str, style: str = "", *, wraps: bool = False) -> None:
    if _quiet:
        return
    try:
        if _on_terminal():
            _console.print(Text(line, style), soft_wrap=not wraps)
        else:
            encoding = sys.stdout.encoding or "utf-8"
            print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except (
        OSError
    ):  # the reader (head, less), the terminal or the disk's room has gone; training has not
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _print(f"warning: {printable(record.getMessage())}", "yellow")


_log.addHandler(_Warnings(logging.WARNING))
