"""Decides when to save and writes checkpoints atomically.

The state is serialized in memory between two steps. A thread writes the state, then its record;
each is written under a temporary name, synced and renamed. Only then are old checkpoints deleted.
Nothing is read back, because that would test the page cache, not the disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
    """Lets all ranks agree between steps to stop on a signal, save, or end at the time limit.

    Attributes:
        is_over: whether ``trainer.max_hours`` hours have passed since ``began_s``, as measured by
            ``now``.
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
        # time and step of the last exchange between ranks, and the step of the next one
        self._asked = step
        self._asked_s = now()
        self._next = step + 1
        self._saved_s = now()
        self._ends_s = began_s + 3600 * (config.trainer.max_hours or math.inf)
        self.is_over = False

    def ask(self, step: int) -> tuple[int, bool]:
        """Returns the signal number, or 0, and whether to save, after ``step`` updates.

        Every rank must call this after each step. Ranks communicate once per window, or once per
        second if steps are slow.
        """
        wanted = self._config.checkpoint
        signum = due = 0.0
        # ranks must not diverge: no rank acts before all agree
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
        # the step is the same on all ranks
        due = due or step % (wanted.every_steps or math.inf) == 0
        return int(signum), bool(due) and wanted.enabled


class CheckpointWriter:
    """Writes each of a run's states to its folder once, on the first rank.

    A thread writes one save at a time. The initial state is not written, because it is untrained or
    comes from a checkpoint. A save error is raised once, by the next ``save``, ``check`` or
    ``close``.
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
        self._facts = {
            # converted once because that is slow
            "settings": to_plain(config),
            "classes": [*classes],
            "ranks": state.world.size,
            "length": order.length,
            "lanes": str(order.lanes or "uniform"),
        }
        self._folder = folder / "checkpoints"
        self._writes = (
            config.checkpoint.enabled and config.mode is Mode.train and state.world.is_main
        )
        # only this run writes to the folder
        self._past: list[Record] = []
        if self._writes:
            # clean up after a save that was killed
            clear(self._folder)
            self._past = records(self._folder)
            # the next save retries this; this run does not read the pointers
            with suppress(OSError):
                mark(self._folder, self._past)
        self._thread = ThreadPoolExecutor(1, "checkpoint", lower_priority)
        self._last: Future[list[Record]] | None = None
        self._file = BytesIO()
        # the last state submitted, unless its save failed
        self._saved: tuple[int, bool] | None = (state.step, state.pending)

    def save(self, top1: float | None = None, *, at_once: bool = False) -> None:
        """Starts writing the state between two updates; if ``at_once``, waits for it to finish.

        ``top1`` is the validation accuracy of the state, 0..1.

        Raises:
            DiskError: the previous save failed, or, if ``at_once``, this one failed.
        """
        state = self._state
        if not self._writes:
            return
        try:
            self.check(waits=True)
        except DiskError:
            # try the last save even if the previous one failed
            if not at_once:
                raise
        if self._saved == (state.step, state.pending):
            return
        # Reused memory is faster. The last save may come from another thread while the previous
        # one hangs.
        file = BytesIO() if at_once else self._file
        file.seek(0)
        # the file's digest makes PyTorch's slower checksums redundant; torch 2.5 cannot omit them
        use_checksums = getattr(torch.serialization, "set_crc32_options", lambda _: None)
        use_checksums(False)
        try:
            # "stop" is the end of this epoch's order across all ranks
            torch.save(state.to_dict({**self._facts, "stop": self._order.taken(state.epoch)}), file)
        finally:
            use_checksums(True)
        file.truncate()
        facts = state.step, state.epoch, top1, state.config.checkpoint.keep_last
        self._last = self._thread.submit(commit, self._folder, self._past, file, *facts)
        self._saved = (state.step, state.pending)
        if at_once:
            self.check(waits=True)

    def check(self, *, waits: bool = False) -> None:
        """Checks for errors from the last save; if ``waits``, waits for it to finish.

        Raises:
            DiskError: the last save failed.
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
        """Waits until all saves are on disk.

        Raises:
            DiskError: the last save failed.
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
    """Commits a serialized ``state``, updates the pointers and deletes old checkpoints.

    The file is named after ``step``. Returns the remaining checkpoints from ``past``, followed by
    this one.

    Raises:
        DiskError: a file could not be written; earlier checkpoints remain intact.
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
        # resuming from an earlier step abandons later checkpoints
        line = [*(old for old in there if old.step <= step), record]
        stay = [*mark(folder, line), *line[-keep_last:]]
        for old in there:
            if old not in stay:
                old.path.with_suffix(".json").unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(
            f"{error.filename or path}: the checkpoint cannot be saved: {error.strerror or error}; "
            "earlier ones are intact; free up space or fix the disk, then use resume=auto"
        ) from error
    finally:
        clear(folder)
    return [old for old in line if old in stay]


def mark(folder: Path, past: list[Record]) -> Collection[Record]:
    """Points ``last.pt`` and ``best.pt`` to the newest and the best in ``past``, oldest first.

    Each pointer is replaced atomically, so it always exists. Returns their targets.
    """
    found = pointed(past)
    for name, record in found.items():
        write_whole(folder / name, os.fsencode(record.path.name), links=True)
    return found.values()


def clear(folder: Path) -> None:
    """Deletes temporary files and checkpoint files without a record.

    Only one run owns the folder, so no other save can be in progress.
    """
    # leftovers are harmless; a later save deletes them
    with suppress(OSError):
        for path in folder.glob(".*.tmp"):
            path.unlink()
        for path in folder.glob("step-*.pt"):
            if order(path) != UNNAMED and not path.with_suffix(".json").exists():
                path.unlink()
