"""Prints a run's lines, tables, warnings and progress bars.

Everything goes to standard output and, except for progress bars, also to the log. Warnings arrive
through logging: ``logging.getLogger("wellfed").warning`` is printed and logged once. Control
characters are escaped.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from ..runtime.errors import draws, printable
from ..runtime.folder import log

# carriage return, and clear the line
_ERASE = "\r\x1b[K"
_quiet = False
# whether a progress() block is open
_busy = False
Item = TypeVar("Item")
# adds a row with one cell per column to a table
AddRow = Callable[[Sequence[str]], None]


@contextmanager
def speaking(speaks: bool) -> Iterator[None]:
    """Print inside the block only if ``speaks`` is true; always write to the log."""
    global _quiet
    _quiet = not speaks
    try:
        yield
    finally:
        _quiet = False


def say(text: str, *, stands_out: bool = False) -> None:
    """Print and log one line, in bold on a terminal if ``stands_out`` is set."""
    line = printable(text)
    log.info("%s", line)
    _print(line, "\x1b[1m" if stands_out else "")


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with one cell per column in every row."""
    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def live_table(title: str, columns: Sequence[str]) -> AddRow:
    """Start a table that grows line by line; return a function that adds a row.

    Columns are as wide as their headings, padded with spaces if needed, because later rows are not
    known.
    """

    def add(row: Sequence[str]) -> None:
        say("  ".join(map(str.ljust, map(printable, row), map(len, columns))).rstrip())

    say(title)
    add(columns)
    return add


@dataclass(slots=True)
class Bar:
    """Progress of long work: a line that changes on a terminal; otherwise, a few lines."""

    description: str
    total: int | None
    unit: str
    # seconds from the start to the next line; infinite to show nothing
    due_s: float = math.inf
    done: int = 0
    began_s: float = 0.0
    _note: str = ""

    def advance(self, n: int = 1) -> None:
        """Add ``n`` finished units."""
        self.done += n
        took_s = time.monotonic() - self.began_s
        if took_s < self.due_s:
            return
        live = draws(sys.stdout)
        # the end has a line of its own
        if self.done == self.total and not live:
            return
        text = ", ".join(filter(None, (str(self), self._note)))
        if not live:
            self.due_s = 2 * took_s
            _print(text)
            # the next line has its own numbers, or none
            self._note = ""
            return
        self.due_s = took_s + 0.1
        if left := (self.total or self.done) - self.done:
            text += f", {left * took_s / max(1, self.done):.0f} s left"
        _write(_ERASE + text[: shutil.get_terminal_size().columns - 1])

    def note(self, text: str) -> None:
        """Show ``text`` after the counts from the next ``advance`` on; empty to show nothing."""
        self._note = printable(text)

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``; an item is done when the next one is requested."""
        for item in items:
            yield item
            self.advance()

    def __str__(self) -> str:
        counts = [str(n) for n in (self.done, self.total) if n is not None]
        unit = self.unit
        if unit == "B":
            unit = "MB"
            counts = [f"{int(n) / 1e6:.1f}" for n in counts]
        return f"{printable(self.description)}: {' of '.join(counts)} {unit}"


@contextmanager
def progress(description: str, total: int | None, unit: str) -> Iterator[Bar]:
    """Show the block's progress: a line that changes on a terminal; otherwise, a few lines.

    Lines appear after 5, 10, 20, 40 s and so on, and at the end; none if it takes under a second.
    Nothing is shown inside another ``progress``. ``total`` is None if unknown; ``unit`` is a plural
    noun, or B for bytes, shown in millions.
    """
    global _busy
    bar = Bar(description, total, unit)
    if _quiet or _busy:
        yield bar
        return
    _busy = True
    live = draws(sys.stdout)
    bar.due_s = 0.1 if live else 5.0
    bar.began_s = time.monotonic()
    try:
        yield bar
        took_s = time.monotonic() - bar.began_s
        if not live and took_s >= 1:
            _print(f"{bar} in {took_s:.0f} s")
    finally:
        _busy = False
        if live:
            _write(_ERASE)


def _print(line: str, style: str = "") -> None:
    if _quiet:
        return
    if draws(sys.stdout):
        # overwrite a possible bar, which is redrawn
        line = f"{_ERASE}{style}{line}\x1b[0m"
    _write(f"{line}\n")


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except OSError:
        # the reader (head, less), terminal or disk space is gone, but training continues
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _print(f"warning: {printable(record.getMessage())}", "\x1b[33m")


log.addHandler(_Warnings(logging.WARNING))
