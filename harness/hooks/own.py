"""Watches the user's own loop: one loader (``watched``) or one block (``watching``)."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from ..report.statement import Statement
from . import patches
from .session import Session

Batch = TypeVar("Batch")
# holds the session that ``watched`` began
_until_exit = ExitStack()
atexit.register(_until_exit.close)


@contextmanager
def watching(
    out: str | Path | None = None, *, name: str | None = None, tensorboard: bool = True
) -> Iterator[Session]:
    """Watches all training in the block, and reports at its end, however it ends.

    Loaders, optimizer steps and copies are detected as by ``wellfed watch``. Training itself does
    not change. Within an outer watch, only the outer one reports.

    Args:
        out: folder for the report; None for ``outputs/<date>/<time>``.
        name: the run's name in the report; None for the script's name.
        tensorboard: whether to write an event file.
    """
    _until_exit.close()
    if Session.running is not None:
        yield Session.running
        return
    place = None if out is None else Path(out)
    session = Session(name or sys.argv[0], place, tensorboard)
    with session.watching():
        yield session


class Watched(Generic[Batch]):
    """An iterable of batches that measures the loop over it."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._loader = loader
        self._session: Session | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        self._session = _running()
        if isinstance(self._loader, DataLoader):
            return iter(self._loader)
        found: Iterator[Batch] = patches.iterate(lambda own: _Batches(iter(own._loader)), self)
        return found

    def verdict(self) -> Statement:
        """Returns the bottleneck of the steps so far, and what to try."""
        return (self._session or _running()).verdict()


class _Batches(Iterator[Batch]):
    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __next__(self) -> Batch:
        batch: Batch = patches.fetch(lambda own: next(own._batches), self)
        return batch


def watched(loader: Iterable[Batch]) -> Watched[Batch]:
    """Returns ``loader``, watched: ``for batch in wellfed.watched(loader)``.

    Prints lines at the end of each pass, and reports at the end of the process or notebook cell, or
    before a ``watching`` block. The loader may be a ``DataLoader`` or any other iterable; a torch
    optimizer must step in the same thread.
    """
    return Watched(loader)


def _running() -> Session:
    """Returns the running session, or a new one."""
    if Session.running is not None:
        return Session.running
    session = Session(sys.argv[0], None)
    session.tells_passes = True
    _until_exit.enter_context(session.watching())
    shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
    if shell:

        def end(cell: Any) -> None:
            shell.events.unregister("post_run_cell", end)
            error = cell.error_in_exec
            _until_exit.__exit__(error and type(error), error, None)

        shell.events.register("post_run_cell", end)
    return session
