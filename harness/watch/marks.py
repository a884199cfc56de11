"""Names for stretches of the run in a profiler's trace; next to free while nothing records.

Light: feeds import it, and torch is touched by whoever records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Mark = Callable[[str], AbstractContextManager[Any]]

_NOTHING = nullcontext()
_mark: Mark | None = None  # of the recording that runs


def named(name: str) -> AbstractContextManager[Any]:
    """A block that a trace shows as ``name``, in the thread that runs it."""
    return _NOTHING if _mark is None else _mark(name)


def record(mark: Mark | None) -> None:
    """From now on ``mark`` makes the blocks of all threads; None: nothing records."""
    global _mark
    _mark = mark
