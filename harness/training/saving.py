"""When a run's state is saved, and what the ranks agree on between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.config import Config, Mode, to_plain
from harness.feed.order import Order
from harness.runtime import signals
from harness.runtime.distributed import World
from harness.runtime.errors import DiskError
from harness.training import saver
from harness.training.checkpoint import Record
from harness.training.state import TrainState

# how soon ranks tell each other of a signal
_HEARD_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's files go, and the names of the classes, which its checkpoints record."""

    folder: Path
    classes: tuple[str, ...]


class Boundary:
    """What all ranks agree on between two steps: whether a signal ends the run there, whether it is
    time to save.
    """

    def __init__(
        self, config: Config, world: World, step: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        minutes = config.checkpoint.every_minutes if config.checkpoint.enabled else None
        self._world = world
        self._now = now
        self._window = config.watch.window_steps
        self._every_s = None if minutes is None else 60 * minutes
        self._every_steps = config.checkpoint.every_steps if config.checkpoint.enabled else None
        self._asked = step
        self._asked_s = now()
        self._next = step + 1
        self._saved_s = now()

    def ask(self, step: int) -> tuple[int, bool]:
        """The number of a signal, or 0, and whether to save, after ``step`` updates; every rank
        must ask after each.

        Several ranks tell each other once a window, and once a second where steps are slow.
        """
        signum = signals.received()
        due = self._every_s is not None and self._now() - self._saved_s >= self._every_s
        if self._world.size > 1:
            signum, due = self._told(step, signum, due) if step >= self._next else (0, False)
        if due:
            self._saved_s = self._now()
        return signum, due or (self._every_steps is not None and step % self._every_steps == 0)

    def _told(self, step: int, signum: int, due: bool) -> tuple[int, bool]:
        own_s = (self._now() - self._asked_s) / max(1, step - self._asked)
        heard, saves, step_s = self._world.largest(signum, due and self._world.is_main, own_s)
        self._asked = step
        self._asked_s = self._now()
        self._next = step + max(
            1, min(self._window - step % self._window, int(_HEARD_S / max(1e-6, step_s)))
        )
        return int(heard), bool(saves)


class Saves:
    """Writes the state of a run into its folder, on the first rank; at most once in any one state.

    What is there at first is not written: it is nothing yet, or comes from a checkpoint.
    """

    def __init__(
        self, config: Config, world: World, state: TrainState, order: Order, place: Place
    ) -> None:
        self._config = config
        self._ranks = world.size
        self._state = state
        self._order = order
        self._place = place
        # what was written last, once this is closed
        self.last: Path | None = None
        self._folder = place.folder / "checkpoints"
        self._saver: saver.Saver | None = None
        if config.checkpoint.enabled and config.mode is Mode.train and world.is_main:
            self._saver = saver.Saver(self._folder, config.checkpoint.keep_last)
        self._saved: tuple[int, bool] | None = self._mark()

    def save(self, top1: float | None = None, *, at_once: bool = False) -> None:
        """Begin to write the state as it is between two updates; ``top1`` is of its evaluation,
        0..1.

        At the end of a run it is written ``at_once``: nothing goes on for which the thread that
        writes should give way.

        Raises:
            DiskError: the save before could not be written.
        """
        if self._saver is None:
            return
        if at_once:
            # what went wrong with the one before is no reason not to try this one
            with suppress(DiskError), self._noted():
                self._saver.wait()
        if not self.unsaved:
            return
        order = self._order
        state = self._state
        facts = {
            "settings": to_plain(self._config),
            "classes": list(self._place.classes),
            "ranks": self._ranks,
            "length": order.length,
            "stop": order.stop(state.epoch),
        }
        write: Callable[..., Record | None] = self._saver.save
        if at_once:
            write = partial(saver.save, self._folder, keep_last=self._config.checkpoint.keep_last)
        with self._noted():
            record = write(state.to_dict(facts), step=state.step, epoch=state.epoch, top1=top1)
        self.last = record.path if record else None
        self._saved = self._mark()

    def check(self) -> None:
        """Return at once.

        Raises:
            DiskError: the last state could not be written.
        """
        if self._saver is not None and self._saver.failed:
            with self._noted():
                self._saver.wait()

    def close(self) -> None:
        """Wait until all is on the disk.

        Raises:
            DiskError: it could not be written.
        """
        if self._saver is not None:
            with self._noted():
                self._saver.close()
            newest = self._saver.wait()
            self.last = self.last or (newest.path if newest else None)

    @property
    def unsaved(self) -> bool:
        """Whether the state is none that was given to be written, or writing it failed."""
        return self._mark() != self._saved

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except DiskError:
            self._saved = None
            raise

    def _mark(self) -> tuple[int, bool]:
        return self._state.step, self._state.pending
