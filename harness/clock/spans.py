"""Names blocks of the step loop in a profiler's trace.

Light: the standard library alone; torch is touched by what records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Mark = Callable[[str], AbstractContextManager[Any]]

_NOTHING = nullcontext()
# of the recording that runs
_mark: Mark | None = None


def named(name: str) -> AbstractContextManager[Any]:
    """Returns a block that a trace shows as ``name``; next to free while nothing records."""
    return _NOTHING if _mark is None else _mark(name)


def record(mark: Mark | None) -> None:
    """Lets ``mark`` make the blocks of all threads from now on; None: nothing records."""
    global _mark
    _mark = mark
