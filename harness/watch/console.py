"""What the user reads while a run goes on: lines, tables, warnings and bars.

All go to standard output, and all but bars to the log too. Warnings come here by logging:
``logging.getLogger("wellfed").warning`` anywhere is printed once and logged once. Text is escaped,
so that a file's name can neither drive the terminal nor be read as rich's markup.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from harness.runtime.errors import printable
from harness.runtime.folder import log


class _Output:
    """Standard output as it is at each use; nothing once it is broken."""

    def __getattr__(self, name: str) -> Any:
        # a bar puts its own in place, which writes here
        found = getattr(getattr(sys.stdout, "rich_proxied_file", sys.stdout), name)
        return partial(_lasting, found) if callable(found) else found


def _lasting(call: Callable[..., Any], *arguments: object) -> Any:
    try:
        return call(*arguments)
    except OSError:
        # the reader (head, less), the terminal or the disk's room has gone; training has not
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_output: Any = _Output()
_console = Console(file=_output, soft_wrap=True, highlight=False)
_quiet = False
# a progress() or a live_table() is open
_busy = False
Item = TypeVar("Item")
# adds a row to a table, which has as many cells as there are columns
AddRow = Callable[[Sequence[str]], None]


@contextmanager
def speaking(speaks: bool) -> Iterator[None]:
    """Print nothing inside the block, unless it ``speaks``; the log is written in any case."""
    global _quiet
    _quiet = not speaks
    try:
        yield
    finally:
        _quiet = False


def say(text: str, *, stands_out: bool = False) -> None:
    """Print one line, and log it.

    One that ``stands_out`` is bold on a terminal, and broken between words.
    """
    line = printable(text)
    log.info("%s", line)
    _print(line, "bold" if stands_out else "", wraps=stands_out)


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; every row has as many cells as there are columns."""
    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


@contextmanager
def live_table(title: str, columns: Sequence[str]) -> Iterator[AddRow]:
    """Show a table that grows inside the block, line by line, by what is yielded.

    A ``progress`` inside the table shows nothing. A column is as wide as its heading, which may end
    with spaces: a line is written before the rows to come are known.
    """
    global _busy
    was_busy = _busy
    _busy = True

    def add(row: Sequence[str]) -> None:
        say("  ".join(map(str.ljust, map(printable, row), map(len, columns))).rstrip())

    try:
        say(title)
        add(columns)
        yield add
    finally:
        _busy = was_busy


@dataclass(slots=True)
class Bar:
    """Progress of long work; ``show``, if set, is called after each advance."""

    description: str
    total: int | None
    unit: str
    done: int = 0
    show: Callable[[], object] | None = None
    _note: str = ""

    def advance(self, n: int = 1) -> None:
        """Note ``n`` more units done."""
        self.done += n
        if self.show:
            self.show()

    def note(self, text: str) -> None:
        """Show ``text`` after the counts, from the next ``advance`` on; empty: nothing."""
        self._note = printable(text)

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``; an item is done when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.counts, self._note)))

    @property
    def counts(self) -> str:
        """What is being done, and how much of it is done."""
        counts = [str(n) for n in (self.done, self.total) if n is not None]
        unit = self.unit
        if unit == "B":
            unit = "MB"
            counts = [f"{int(n) / 1e6:.1f}" for n in counts]
        return f"{printable(self.description)}: {' of '.join(counts)} {unit}"


@contextmanager
def progress(
    description: str, total: int | None, unit: str, *, now: Callable[[], float] = time.monotonic
) -> Iterator[Bar]:
    """Show how far the block's work is: a bar on a terminal, else a few lines.

    The lines: one after 5 s, then at most every tenth of the work and every 5 s, and one at the
    end; none for work under a second. Inside another ``progress`` nothing is shown. ``total`` is
    None where it is not known; ``unit`` is what is counted, in the plural, or B for bytes, which
    are shown in millions.
    """
    global _busy
    bar = Bar(description, total, unit)
    if _quiet or _busy:
        yield bar
        return
    _busy = True
    try:
        if _on_terminal():
            # the bar has the room that the text leaves
            left = TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True))
            columns = TextColumn("{task.description}", markup=False), BarColumn(None), left
            with Progress(*columns, console=_console, transient=True, expand=True) as live:
                task = live.add_task(str(bar), total=total)
                bar.show = lambda: live.update(task, description=str(bar), completed=bar.done)
                yield bar
            return
        began = said = now()
        said_done = 0

        def show() -> None:
            nonlocal said, said_done
            is_tenth = (bar.done - said_done) * 10 >= (total or 1)
            if now() - said >= 5 and (is_tenth or not said_done):
                said = now()
                said_done = bar.done
                _print(str(bar))

        bar.show = show
        yield bar
        took = now() - began
        if took >= 1 and bar.done > said_done:
            _print(f"{bar.counts} in {took:.0f} s")
    finally:
        _busy = False


def _on_terminal() -> bool:
    return sys.stdout.isatty() and not _console.is_dumb_terminal


def _print(line: str, style: str = "", *, wraps: bool = False) -> None:
    if _quiet:
        return
    if _on_terminal():
        _console.print(Text(line, style), soft_wrap=not wraps)
    else:
        encoding = sys.stdout.encoding or "utf-8"
        text = line.encode(encoding, "backslashreplace").decode(encoding)
        print(text, file=_output, flush=True)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _print(f"warning: {printable(record.getMessage())}", "yellow")


log.addHandler(_Warnings(logging.WARNING))
