"""When a run's state is saved, and what the ranks agree on between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from harness.config import Config, Mode, to_plain
from harness.feed.order import Order
from harness.runtime import signals
from harness.runtime.distributed import World
from harness.runtime.errors import DiskError
from harness.runtime.workers import give_way
from harness.training import saver
from harness.training.checkpoint import Record
from harness.training.state import TrainState


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's files go, and the names of the classes, which its checkpoints record."""

    folder: Path
    classes: tuple[str, ...]


class Boundary:
    """What all ranks agree on between two steps: to end at a signal, to save."""

    def __init__(
        self, config: Config, world: World, step: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._world = world
        self._now = now
        # when the ranks last told each other, and the step at which they will again
        self._asked = step
        self._asked_s = now()
        self._next = step + 1
        self._saved_s = now()

    def ask(self, step: int) -> tuple[int, bool]:
        """Returns the number of a signal, or 0, and whether to save, after ``step`` updates.

        Every rank must ask after each step. Several ranks tell each other once a window, and once a
        second where steps are slow.
        """
        wanted = self._config.checkpoint
        signum = signals.received()
        due = False
        if wanted.enabled and wanted.every_minutes is not None:
            due = self._now() - self._saved_s >= 60 * wanted.every_minutes
        # ranks must not part: what one of them knows waits for all
        if self._world.size > 1 and step < self._next:
            signum = 0
            due = False
        elif self._world.size > 1:
            step_s = (self._now() - self._asked_s) / max(1, step - self._asked)
            heard, saves, step_s = self._world.largest(signum, due, max(1e-6, step_s))
            signum = int(heard)
            due = bool(saves)
            self._asked = step
            self._asked_s = self._now()
            window = self._config.watch.window_steps
            self._next = step + max(1, min(window - step % window, int(1 / step_s)))
        if due:
            self._saved_s = self._now()
        # all ranks count alike
        if wanted.enabled and wanted.every_steps is not None:
            due = due or step % wanted.every_steps == 0
        return signum, due


class Saves:
    """Writes the state of a run into its folder, once each, on the first rank.

    A thread writes, one save at a time. What is there at first is not written: it is nothing yet,
    or comes from a checkpoint. An error of a save is raised once: by the next ``save``, ``check``
    or ``close``.
    """

    def __init__(
        self, config: Config, world: World, state: TrainState, order: Order, place: Place
    ) -> None:
        self._config = config
        self._ranks = world.size
        self._state = state
        self._order = order
        self._classes = list(place.classes)
        self._folder = place.folder / "checkpoints"
        self._writes = config.checkpoint.enabled and config.mode is Mode.train and world.is_main
        if self._writes:
            saver.finish(self._folder, config.checkpoint.keep_last)
        self._thread = ThreadPoolExecutor(1, "checkpoint", give_way)
        self._last: Future[Record] | None = None
        self._memory = BytesIO()
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
        facts = {
            "settings": to_plain(self._config),
            "classes": self._classes,
            "ranks": self._ranks,
            "length": self._order.length,
            "stop": self._order.stop(state.epoch),
        }
        self._last = self._thread.submit(
            saver.save,
            self._folder,
            saver.packed(state.to_dict(facts), self._memory),
            step=state.step,
            epoch=state.epoch,
            top1=top1,
            keep_last=self._config.checkpoint.keep_last,
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
