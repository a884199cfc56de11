"""What Python's garbage collector costs. Light: the standard library alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import get_ident


class Collections:
    """Adds up the seconds of Python's garbage collections in ``thread``, where that is not None; one of ``gc.callbacks``."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.thread: int | None = None
        self.now, self._began = now, 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Take the start or the stop of a collection."""
        if get_ident() == self.thread:
            if phase == "start":
                self._began = self.now()
            else:
                self.seconds += self.now() - self._began
