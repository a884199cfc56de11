"""Imported by the fork server alone, which then says nothing of a trainer that was killed."""

from __future__ import annotations

import sys
import traceback
from pickle import UnpicklingError
from types import TracebackType


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    last = traceback.extract_tb(trace)[-1:]
    # a trainer that died while it sent a worker's work; its end is told by others
    cut = issubclass(kind, EOFError | UnpicklingError)
    if not (cut and last and "multiprocessing" in last[0].filename):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _told
