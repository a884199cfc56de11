"""Decides when to save, and writes checkpoints whole or not at all.

It is packed in memory between two steps and written by a thread: the state first, then its record,
each synced under a temporary name and renamed. What was committed before is deleted only then.
Reading back would show the page cache, not the disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import torch

from ..config import Config, Mode, to_plain
from ..feed.order import Order
from ..runtime import signals
from ..runtime.distributed import World
from ..runtime.errors import DiskError
from ..runtime.files import write_whole
from ..runtime.workers import lower_priority
from .checkpoint_read import UNNAMED, Record, order, pointed, records, sealed
from .state import TrainState


class StopAgreement:
    """What all ranks agree on between two steps: to end at a signal, to save, that time is over.

    Attributes:
        is_over: whether ``trainer.max_hours`` have passed since ``began_s`` on the clock ``now``.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        step: int,
        now: Callable[[], float] = time.perf_counter,
        began_s: float = 0.0,
    ) -> None:
        self._config = config
        self._world = world
        self._now = now
        # when the ranks last told each other, and the step at which they will again
        self._asked = step
        self._asked_s = now()
        self._next = step + 1
        self._saved_s = now()
        self._ends_s = began_s + 3600 * (config.trainer.max_hours or math.inf)
        self.is_over = False

    def ask(self, step: int) -> tuple[int, bool]:
        """Returns the number of a signal, or 0, and whether to save, after ``step`` updates.

        Every rank must ask after each step. Several ranks tell each other once a window, and once a
        second where steps are slow.
        """
        wanted = self._config.checkpoint
        signum = due = 0.0
        # ranks must not part: what one of them knows waits for all
        if step >= self._next:
            now = self._now()
            due = now - self._saved_s >= 60 * (wanted.every_minutes or math.inf)
            step_s = max(1e-6, (now - self._asked_s) / max(1, step - self._asked))
            signum, due, over, step_s = self._world.largest(
                signals.received(), due, now >= self._ends_s, step_s
            )
            self.is_over = bool(over)
            if due:
                self._saved_s = now
            if self._world.size > 1:
                self._asked = step
                self._asked_s = now
                window = self._config.watch.window_steps
                self._next = step + max(1, min(window - step % window, int(1 / step_s)))
        # all ranks count alike
        due = due or step % (wanted.every_steps or math.inf) == 0
        return int(signum), bool(due) and wanted.enabled


class CheckpointWriter:
    """Writes the state of a run into its folder, once each, on the first rank.

    A thread writes, one save at a time. What is there at first is not written: it is nothing yet,
    or comes from a checkpoint. An error of a save is raised once: by the next ``save``, ``check``
    or ``close``.
    """

    def __init__(
        self,
        state: TrainState,
        order: Order,
        folder: Path,
        classes: tuple[str, ...],
    ) -> None:
        config = state.config
        self._state = state
        self._order = order
        # made once: it takes long
        settings = to_plain(config)
        self._facts = {
            "settings": settings,
            "classes": [*classes],
            "ranks": state.world.size,
            "length": order.length,
            "lanes": str(order.lanes or "uniform"),
        }
        self._folder = folder / "checkpoints"
        self._writes = (
            config.checkpoint.enabled and config.mode is Mode.train and state.world.is_main
        )
        # this run alone owns the folder
        self._past: list[Record] = []
        if self._writes:
            # what a killed save has left, and has left undone
            clear(self._folder)
            self._past = records(self._folder)
            # pointers that cannot be moved now are moved by the next save, and not believed here
            with suppress(OSError):
                mark(self._folder, self._past)
        self._thread = ThreadPoolExecutor(1, "checkpoint", lower_priority)
        self._last: Future[list[Record]] | None = None
        self._file = BytesIO()
        # the state that was given to be written, unless that failed
        self._saved: tuple[int, bool] | None = (state.step, state.pending)

    def save(self, top1: float | None = None, *, at_once: bool = False) -> None:
        """Begins to write the state as it is between two updates, or writes it ``at_once``.

        ``top1`` is of its evaluation, 0..1.

        Raises:
            DiskError: the save before could not be written, or this one ``at_once``.
        """
        state = self._state
        if not self._writes:
            return
        try:
            self.check(waits=True)
        except DiskError:
            # what went wrong with the one before is no reason not to try the last one
            if not at_once:
                raise
        if self._saved == (state.step, state.pending):
            return
        # Memory that was filled before is faster. The last save may come from another thread, while
        # the one before hangs.
        file = BytesIO() if at_once else self._file
        file.seek(0)
        # "stop" is where the order of this epoch ends, of all ranks
        # the digest of the whole file makes torch's checksums needless, and they take longer
        with _without_checksums():
            torch.save(state.to_dict({**self._facts, "stop": self._order.taken(state.epoch)}), file)
        file.truncate()
        facts = state.step, state.epoch, top1, state.config.checkpoint.keep_last
        self._last = self._thread.submit(commit, self._folder, self._past, file, *facts)
        self._saved = (state.step, state.pending)
        if at_once:
            self.check(waits=True)

    def check(self, *, waits: bool = False) -> None:
        """Returns at once, unless it ``waits`` for the save under way.

        Raises:
            DiskError: the last state could not be written.
        """
        last = self._last
        if last is None or not (waits or last.done()):
            return
        self._last = None
        try:
            self._past = last.result()
        except DiskError:
            self._saved = None
            self._past = records(self._folder)
            raise

    def close(self) -> None:
        """Waits until all is on the disk.

        Raises:
            DiskError: it could not be written.
        """
        self._thread.shutdown()
        self.check()


def commit(
    folder: Path,
    past: list[Record],
    state: BytesIO,
    step: int,
    epoch: int,
    top1: float | None,
    keep_last: int,
) -> list[Record]:
    """Commits a packed ``state`` under a free name, moves the pointers and drops old ones.

    The name is that of its ``step``. Returns the checkpoints that are there, of those of the
    ``past``; this one is the last.

    Raises:
        DiskError: a file could not be written; what was there before stays whole.
    """
    path = folder / f"step-{step}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if taken := [number for of, number in map(order, folder.glob("step-*")) if of == step]:
            path = folder / f"step-{step}.{1 + max(taken)}.pt"
        with state.getbuffer() as data:
            record = Record(path, step, epoch, top1, hashlib.sha256(data).hexdigest())
            write_whole(path, data)
        write_whole(path.with_suffix(".json"), sealed(record))
        there = [old for old in past if old.path.with_suffix(".json").exists()]
        # those of later steps belong to a past that a resume has left
        line = [*(old for old in there if old.step <= step), record]
        stay = [*mark(folder, line), *line[-keep_last:]]
        for old in there:
            if old not in stay:
                old.path.with_suffix(".json").unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(
            f"{error.filename or path}: cannot save the checkpoint: {error.strerror or error}; "
            "earlier ones are whole: free space or fix the disk, then use resume=auto"
        ) from error
    finally:
        clear(folder)
    return [old for old in line if old in stay]


def mark(folder: Path, past: list[Record]) -> Collection[Record]:
    """Lets ``last.pt`` and ``best.pt`` lead to the newest and the best of ``past``, oldest first.

    Each is swapped in one step so that it is never absent. Returns these two.
    """
    found = pointed(past)
    for name, record in found.items():
        write_whole(folder / name, os.fsencode(record.path.name), links=True)
    return found.values()


def clear(folder: Path) -> None:
    """Deletes what belongs to no checkpoint: temporary files, and files without a record.

    Only one run owns the folder, so no save of another can be under way.
    """
    # what cannot be deleted now is in nobody's way, and goes with a later save
    with suppress(OSError):
        orphans = list(folder.glob(".*.tmp"))
        for path in folder.glob("step-*.pt"):
            if order(path) != UNNAMED and not path.with_suffix(".json").exists():
                orphans.append(path)
        for path in orphans:
            if not path.is_dir():
                path.unlink(missing_ok=True)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Opens a block in which torch.save writes none, from torch 2.6 on."""
    switch = getattr(torch.serialization, "set_crc32_options", lambda _: None)
    switch(False)
    try:
        yield
    finally:
        switch(True)
