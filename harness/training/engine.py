"""The run: epochs of steps, evaluations and checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.config import Config, to_plain
from harness.feed.interface import Feed
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import signals
from harness.runtime.distributed import World
from harness.runtime.errors import Interrupted, NonFiniteError
from harness.runtime.folder import LOGGER
from harness.training import checkpoint
from harness.training.evaluate import Evaluation, evaluate
from harness.training.profile import Trace
from harness.training.state import TrainState
from harness.training.step import DTYPES, Step
from harness.watch.board import Figure, timings
from harness.watch.clock import StepClock
from harness.watch.console import progress, say
from harness.watch.station import Watch
from harness.watch.tags import Tag

_log = logging.getLogger(LOGGER)


@dataclass(slots=True)
class Outcome:
    """How a run went.

    Attributes:
        status: completed, idle (there was nothing left to train), interrupted or failed.
        evaluation: the last one, if there was one.
        skipped: updates left out for a non-finite gradient.
    """

    status: str = "failed"
    evaluation: Evaluation | None = None
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's files go, and the names of the classes that its checkpoints record."""

    folder: Path
    classes: tuple[str, ...]


class Engine:
    """Trains ``state`` on ``feed`` and evaluates it on ``val_feed``.

    Args:
        config: the run's settings.
        world: this rank.
        state: what is trained; its epoch and step say where to go on.
        feed: the training feed.
        val_feed: the validation feed.
        watch: what the run is watched with.
        place: where the run's files go, and the classes that a checkpoint records.
    """

    def __init__(
        self, config: Config, world: World, state: TrainState, feed: Feed, val_feed: Feed, watch: Watch, place: Place
    ) -> None:
        self.config, self.world, self.state, self.watch, self.place = config, world, state, watch, place
        self.feed, self.val_feed = feed, val_feed
        self.outcome = Outcome()
        self.epoch_open = False
        self.step = Step(state, config, world)
        self.train_batches = self._prefetcher(feed, watch.clock)
        self.val_batches = self._prefetcher(val_feed, None)
        self.steps_per_epoch = math.ceil(len(feed) / config.trainer.accumulate_steps)
        self._trace = Trace(config.profile.steps if world.is_main else None, place.folder)

    def fit(self) -> Outcome:
        """Train to the last epoch or step; the outcome is also in ``self.outcome`` when an error ends the run."""
        config, state = self.config, self.state
        with self._ending():
            if state.epoch >= config.trainer.epochs or self._finished():
                say(f"nothing left to train: {state.epoch} epochs and {state.step} steps are done; raise trainer.epochs")
                self.outcome.status = "idle"
                return self.outcome
            for epoch in range(state.epoch, config.trainer.epochs):
                self._train_epoch(epoch)
                finished = self._finished()
                last = finished or epoch + 1 == config.trainer.epochs
                evaluation = None
                if last or (epoch + 1) % config.trainer.eval_every_epochs == 0:
                    evaluation = self.evaluate(epoch)
                if last or (epoch + 1) % config.checkpoint.every_epochs == 0:
                    self._save(evaluation)
                if finished:
                    break
            self.outcome.status = "completed"
        return self.outcome

    def evaluate_only(self) -> Outcome:
        """Evaluate what the state holds."""
        with self._ending():
            self.evaluate(max(0, self.state.epoch - 1))
            self.outcome.status = "completed"
        return self.outcome

    def evaluate(self, epoch: int) -> Evaluation:
        """Evaluate once, log it and give the validation feed's workers back."""
        with self.watch.clock.pause("evaluate"):
            self.world.copy_from_first(self.state.network.buffers())  # each rank has norms' statistics of its own
            result = evaluate(self.state.network, self.val_batches, self.world, self.step.autocast)
            self.val_batches.close()
            self.val_feed.close()
        self.outcome.evaluation = result
        self._write(epoch, {Tag.VAL_TOP1: result.top1, Tag.VAL_TOP5: result.top5, Tag.VAL_LOSS: result.loss})
        say(f"epoch {epoch + 1}: top-1 {result.top1:.4f}, loss {result.loss:.4f} on {result.images} validation images")
        return result

    def close(self) -> None:
        """End the feeds' threads and workers."""
        self._trace.close()
        for batches, feed in ((self.train_batches, self.feed), (self.val_batches, self.val_feed)):
            batches.close()
            feed.close()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Note an interruption, and close the feeds whatever ends the block."""
        try:
            yield
        except Interrupted:
            self.outcome.status = "interrupted"
            raise
        finally:
            self.close()

    def _prefetcher(self, feed: Feed, clock: StepClock | None) -> DataPrefetcher:
        config = self.config
        return DataPrefetcher(
            feed,
            self.world.device,
            mean=config.data.mean,
            std=config.data.std,
            dtype=DTYPES[config.trainer.precision],
            channels_last=config.trainer.channels_last,
            clock=clock,
            ahead=None if config.loader.device_prefetch else False,
        )

    def _train_epoch(self, epoch: int) -> None:
        self.feed.set_epoch(epoch)
        self.state.network.train()
        self.watch.clock.start_epoch()
        batches, left = iter(self.train_batches), len(self.feed)
        with progress(f"epoch {epoch + 1}/{self.config.trainer.epochs}", self.steps_per_epoch, "steps") as bar:
            while left and not self._finished():
                parts = min(self.config.trainer.accumulate_steps, left)
                self._one_step(batches, parts)
                left -= parts
                bar.advance(1)
                if self.state.step % self.config.watch.window_steps == 0 or not left or self._finished():
                    self._close_window(epoch)
                elif self.world.size == 1:
                    signals.check()
        self.epoch_open = left > 0
        if not self.epoch_open:
            self.state.epoch = epoch + 1

    def _one_step(self, batches: DataPrefetcher, parts: int) -> None:
        clock, images_seen = self.watch.clock, 0
        self._trace.before(self.state.step)
        for part in range(parts):
            with clock.waiting():
                images, labels = next(batches)
            with clock.computing():
                self.step(images, labels, part=part, parts=parts)
            images_seen += len(labels)
        clock.step(images_seen)

    def _close_window(self, epoch: int) -> None:
        """Log the window. Here, and only here, a training step waits for the device and for the other ranks."""
        figures = self.step.read()
        window = self.watch.clock.close_window()
        signum = self.world.largest(signals.received())
        self.outcome.skipped += figures.skipped
        values: dict[str, Figure] = {Tag.LOSS: figures.loss, Tag.LR: float(self.state.schedule.get_last_lr()[0])}
        if window is not None:
            values |= timings(window)
            if window.images_per_s is not None:
                values[Tag.IMAGES_PER_S] = window.images_per_s * self.world.size
        self._write(epoch, values)
        if figures.skipped:
            _log.warning("step %d: %d updates skipped, a loss or gradient was not finite", self.state.step, figures.skipped)
        if figures.worst_streak > self.config.trainer.max_nonfinite_steps:
            raise NonFiniteError(
                f"step {self.state.step}: {figures.worst_streak} updates in a row had a non-finite loss or gradient "
                f"(trainer.max_nonfinite_steps={self.config.trainer.max_nonfinite_steps}); lower optim.lr, set "
                "optim.clip_norm=1 or use trainer.precision=fp32"
            )
        if signum:
            raise Interrupted(signum)

    def _write(self, epoch: int, figures: dict[str, Figure]) -> None:
        if self.watch.board is not None:
            sampled = self.watch.sampler.read() if self.watch.sampler is not None else {}
            self.watch.board.scalars(self.state.step, {**figures, **sampled}, epoch=epoch + 1)

    def _finished(self) -> bool:
        limit = self.config.trainer.max_steps
        return limit is not None and self.state.step >= limit

    def _save(self, evaluation: Evaluation | None) -> None:
        """Save a finished epoch; one that trainer.max_steps cut short could not be resumed exactly."""
        if not self.config.checkpoint.enabled:
            return
        if self.epoch_open:
            say("no checkpoint: trainer.max_steps ended the epoch before its end, and it could not be resumed exactly")
            return
        with self.watch.clock.pause("checkpoint"):
            if self.world.is_main:
                checkpoint.save(
                    self.place.folder / "checkpoints",
                    self.state.to_dict(to_plain(self.config), self.place.classes),
                    step=self.state.step,
                    epoch=self.state.epoch,
                    top1=evaluation.top1 if evaluation else None,
                    keep_last=self.config.checkpoint.keep_last,
                )
            self.world.barrier()
