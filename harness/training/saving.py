"""When a run's state is saved: packed in memory between two steps, and written by a thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from harness.config import Config, Mode, to_plain
from harness.feed.order import Order
from harness.runtime import signals
from harness.runtime.distributed import World
from harness.runtime.errors import DiskError
from harness.runtime.workers import give_way
from harness.training import checkpoint
from harness.training.state import TrainState


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's files go, and the names of the classes, which its checkpoints record."""

    folder: Path
    classes: tuple[str, ...]


class Boundary:
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


class Saves:
    """Writes the state of a run into its folder, once each, on the first rank.

    A thread writes, one save at a time. What is there at first is not written: it is nothing yet,
    or comes from a checkpoint. An error of a save is raised once: by the next ``save``, ``check``
    or ``close``.
    """

    def __init__(
        self, config: Config, world: World, state: TrainState, order: Order, place: Place
    ) -> None:
        self._state = state
        self._order = order
        self._facts = {
            "settings": to_plain(config),
            "classes": list(place.classes),
            "ranks": world.size,
            "length": order.length,
        }
        self._folder = place.folder / "checkpoints"
        self._keep_last = config.checkpoint.keep_last
        self._writes = config.checkpoint.enabled and config.mode is Mode.train and world.is_main
        if self._writes:
            # what a killed save has left, and has left undone
            checkpoint.clear(self._folder)
            # pointers that cannot be moved now are moved by the next save, and not believed here
            with suppress(OSError):
                checkpoint.mark(self._folder, checkpoint.records(self._folder))
        self._thread = ThreadPoolExecutor(1, "checkpoint", give_way)
        self._last: Future[checkpoint.Record] | None = None
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
            self._wait()
        except DiskError:
            # what went wrong with the one before is no reason not to try the last one
            if not at_once:
                raise
        if self._saved == (state.step, state.pending):
            return
        saved = state.to_dict({**self._facts, "stop": self._order.stop(state.epoch)})
        file = checkpoint.packed(saved, self._file)
        self._last = self._thread.submit(
            checkpoint.commit, self._folder, file, state.step, state.epoch, top1, self._keep_last
        )
        self._saved = (state.step, state.pending)
        if at_once:
            self._wait()

    def check(self) -> None:
        """Returns at once.

        Raises:
            DiskError: the last state could not be written.
        """
        if self._last is not None and self._last.done():
            self._wait()

    def close(self) -> None:
        """Waits until all is on the disk.

        Raises:
            DiskError: it could not be written.
        """
        self._thread.shutdown()
        self._wait()

    def _wait(self) -> None:
        """Waits for the save under way; if it fails, its state is not saved."""
        last = self._last
        self._last = None
        try:
            if last is not None:
                last.result()
        except DiskError:
            self._saved = None
            raise
