"""Names blocks in the step loop for a profiler's trace.

This file imports only the standard library; the recorder imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Mark = Callable[[str], AbstractContextManager[Any]]

_NOTHING = nullcontext()
# the active recording's mark
_mark: Mark | None = None


def named(name: str) -> AbstractContextManager[Any]:
    """Returns a block that a trace shows as ``name``; costs almost nothing without recording."""
    return _NOTHING if _mark is None else _mark(name)


def record(mark: Mark | None) -> None:
    """Sets the function ``mark``, which creates blocks in all threads; None stops recording."""
    global _mark
    _mark = mark
