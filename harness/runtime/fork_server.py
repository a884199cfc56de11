"""Imported by the fork server alone, which then says nothing of a trainer that was killed."""

from __future__ import annotations

import sys
from pickle import UnpicklingError
from types import TracebackType


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # a worker whose trainer died while it started it; the trainer's end is told by others
    if not issubclass(kind, EOFError | UnpicklingError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _told
