"""``with`` blocks of the step loop: named ones for a profiler's trace, and cheap ones for the
clock.

Light: the standard library alone, and torch is touched by whoever records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Mark = Callable[[str], AbstractContextManager[Any]]

_NOTHING = nullcontext()
_mark: Mark | None = None  # of the recording that runs


def named(name: str) -> AbstractContextManager[Any]:
    """Returns a block that a trace shows as ``name``, in the thread that runs it; next to free
    while nothing records.
    """
    return _NOTHING if _mark is None else _mark(name)


def record(mark: Mark | None) -> None:
    """Lets ``mark`` make the blocks of all threads from now on; None: nothing records."""
    global _mark
    _mark = mark


class Block:
    """A ``with`` block at a tenth of what a generator costs.

    ``begin`` says whether it counts; ``end`` is told whether no error ended it.
    """

    __slots__ = ("_begin", "_counts", "_end")

    def __init__(self, begin: Callable[[], bool], end: Callable[[bool], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._counts = self._begin()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._counts:
            self._end(kind is None)
