"""One try of the attack on calls: what is called, and how its end is judged."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from harness.runtime.errors import described, printable, tell

# a line of a refusal
_LONG = 600


@dataclass(frozen=True)
class End:
    """How a try ended.

    Attributes:
        refused: the one line that refused it, or "" where it was accepted.
        wrong: what makes a defect of it, if anything does.
        note: what is worth a look and no defect.
    """

    refused: str = ""
    wrong: str = ""
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One try.

    Attributes:
        said: what reproduces it, in one line.
        run: does it; raises what nobody has foreseen.
    """

    said: str
    run: Callable[[], End]


def refused(error: BaseException, names: tuple[str, ...] = ()) -> End:
    """Returns the end that ``error`` is, as the command tells it.

    An error without a line of its own is raised again. A line that has none of ``names`` is noted.
    """
    known = described(error)
    if known is None:
        raise error
    # as the command prints it
    with quiet() as text:
        tell([error])
    line = text.getvalue().removesuffix("\n")
    if line != printable(line):
        return End(line, wrong=f"more than one line, or control characters: {line!r:.300}")
    note = ""
    if len(line) > _LONG:
        note = f"a line of {len(line):,} characters: {line[:80]!r}"
    elif names and not any(name in line for name in names):
        note = f"names none of {', '.join(names)}: {line!r:.300}"
    return End(line, note=note)


@contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keeps what is printed in the block, and gives it."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        yield text


@contextmanager
def inside() -> Iterator[Path]:
    """Makes a folder and works in it for the block."""
    former = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(former)
