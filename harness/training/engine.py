"""The run: epochs of steps, evaluations and checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import torch

from harness.config import Config, Mode
from harness.feed.interface import Feed
from harness.feed.order import Order
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator
from harness.runtime.distributed import World
from harness.runtime.errors import DataError, Interrupted, LoaderError, NonFiniteError
from harness.runtime.folder import LOGGER
from harness.training.epoch import Lead, Shown
from harness.training.evaluate import Evaluation, evaluate
from harness.training.profile import Trace
from harness.training.saving import Boundary, Place, Saves
from harness.training.step import Step, device_batches
from harness.watch.board import Value, stages
from harness.watch.console import progress, say
from harness.watch.evidence import RankFigures
from harness.watch.figures import Tag, by_tag
from harness.watch.peaks import MemoryWatch
from harness.watch.spans import named
from harness.watch.stages import StageTotals
from harness.watch.station import Watch

_AS_IT_IS = nullcontext()

_log = logging.getLogger(LOGGER)


@dataclass(slots=True)
class Outcome:
    """How a run went.

    Attributes:
        status: completed, idle (there was nothing left to train), interrupted or failed.
        evaluation: the last one, if there was one.
        skipped: updates left out for a non-finite gradient.
        turns_ms: for each evaluation with an epoch after it, the waits for its first batch and for
            that epoch's.
        ranks: every rank's figures at the end of a completed run of several.
    """

    status: str = "failed"
    evaluation: Evaluation | None = None
    skipped: int = 0
    turns_ms: list[tuple[float, float]] = field(default_factory=list)
    ranks: tuple[RankFigures, ...] = ()


class Engine:
    """Trains on ``feed`` and evaluates on ``val_feed``.

    Args:
        config: the run's settings.
        world: this rank.
        step: trains its state, whose epoch and step say where to go on.
        feed: the training feed.
        val_feed: the validation feed.
        watch: what the run is watched with.
        place: where the run's files go, and the classes that a checkpoint records.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        step: Step,
        feed: Feed,
        val_feed: Feed,
        watch: Watch,
        place: Place,
    ) -> None:
        self.config, self.world, self.step, self.watch, self.place = (
            config,
            world,
            step,
            watch,
            place,
        )
        self.state = step.state
        self.feed, self.val_feed = feed, val_feed
        self.outcome = Outcome()
        assert isinstance(feed.order, Order)  # a probe has no end
        self.order = feed.order
        self.saves = Saves(config, world, self.state, self.order, place)
        self.train_batches = step.batches(feed, watch.clock)
        self.val_batches = device_batches(val_feed, config, world.device)
        self.memory = MemoryWatch(accelerator.of(world.device))
        self._worked: StageTotals | None = None  # by the feed's workers up to the window before
        self._looked_s = time.perf_counter()
        self.worker_s = 0.0  # seconds of the feed's workers so far, at work or not
        self._boundary = Boundary(config, world, self.state.step)
        self._whole = True  # no update is under way
        self._logged_step = self.state.step
        self._epoch = Shown()
        self._told = ""  # of the last window, beside the bar
        self._starting = True  # no step has ended yet
        self._trace = Trace(
            config.profile.steps if world.is_main else None, place.folder, watch.clock.pause
        )

    def fit(self) -> Outcome:
        """Train to the last epoch or step; the outcome is also in ``self.outcome`` when an error
        ends the run.
        """
        config, state = self.config, self.state
        with self._ending():
            evaluation = None
            if state.pending:  # a signal came before or during the evaluation
                evaluation = self.evaluate(state.epoch - (state.samples == 0))
                self._save(evaluation)
            done = self._is_done()
            if done and evaluation is None:
                say(
                    f"nothing left to train: {state.epoch} epochs and {state.step} steps are done; "
                    "raise trainer.epochs"
                )
                self.outcome.status = "idle"
                return self.outcome
            while not done:
                epoch = state.epoch
                due = self._train_epoch(epoch)
                done = self._is_done()
                if evaluation is not None:
                    self._note_turn()
                if not state.pending:
                    say(f"epoch {epoch + 1}: training: {self._epoch}")
                evaluation = (
                    self.evaluate(epoch, None if done else state.epoch) if state.pending else None
                )
                if done or due or (epoch + 1) % config.checkpoint.every_epochs == 0:
                    self._save(evaluation)
            if self.world.size > 1:
                self.outcome.ranks = tuple(self.world.gathered(self._own_figures()))
            self.outcome.status = "completed"
        return self.outcome

    def evaluate_only(self) -> Outcome:
        """Evaluate what the state holds."""
        with self._ending():
            self.evaluate(max(0, self.state.epoch - 1))
            self.outcome.status = "completed"
        return self.outcome

    def evaluate(self, epoch: int, following: int | None = None) -> Evaluation:
        """Evaluate once, log it and give the validation feed's workers back.

        Meanwhile the training feed makes the first batches of the ``following`` epoch.
        """
        if following is not None:
            self.train_batches.close()  # it is through; only then can the feed begin anew
            self.feed.prime(following)
        name = f"epoch {epoch + 1}" if self.config.mode is Mode.train else "evaluation"
        bar = progress(f"{name}: evaluating", len(self.val_feed), "batches")
        # a graph of its own would be compiled while training waits, for longer than a pass without
        # gradients lasts
        with self._aside("evaluate"), self._eagerly(), bar as shown:
            self.world.copy_from_first(
                self.state.network.buffers()
            )  # each rank has norms' statistics of its own
            result = evaluate(
                self.state.network, shown.over(self.val_batches), self.world, self.step.autocast
            )
            self.val_batches.close()
            self.val_feed.close()
        self.state.pending = False
        self.state.best_top1 = max(result.top1, self.state.best_top1 or 0.0)
        self.outcome.evaluation = result
        values: dict[str, Value] = {
            Tag.VAL_TOP1: result.top1,
            Tag.VAL_TOP5: result.top5,
            Tag.VAL_LOSS: result.loss,
        }
        self._write(epoch, {**values, **self.memory.evaluated()})
        accuracy = f"top-1 {result.top1:.4f}, top-5 {result.top5:.4f}, loss {result.loss:.4f}"
        trained = f"; training: {self._epoch}" if self._epoch.steps else ""
        say(f"{name}: {accuracy} on {result.images} validation images{trained}")
        return result

    def close(self) -> None:
        """End the feeds' threads and workers."""
        for batches, feed in ((self.train_batches, self.feed), (self.val_batches, self.val_feed)):
            batches.close()
            feed.close()
        self._trace.close()

    @contextmanager
    def _aside(self, name: str) -> Iterator[None]:
        """A block whose time and load are not the training's."""
        sampler = self.watch.sampler
        with (
            self.watch.clock.pause(name),
            named(name),
            sampler.aside() if sampler else nullcontext(),
        ):
            yield

    def _eagerly(self) -> AbstractContextManager[None]:
        """A block in which the network runs without torch.compile, whose graph is kept for whole
        batches of training.
        """
        return (
            torch.compiler.set_stance("force_eager")
            if self.config.trainer.compile
            else nullcontext()
        )

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Save what an error leaves whole, and close the feeds whatever ends the block."""
        try:
            yield
        except Exception as error:
            expected = isinstance(error, Interrupted | DataError | LoaderError)
            if isinstance(error, Interrupted):
                self.outcome.status = "interrupted"
            # at another error the other ranks would not answer
            if (
                self._whole
                and not isinstance(error, NonFiniteError)
                and (expected or self.world.size == 1)
            ):
                with nullcontext() if expected else suppress(Exception):
                    if self.state.step > self._logged_step:
                        self._close_window(self.state.epoch)
                    self.saves.save(at_once=True)
            raise
        finally:
            with closing(self.saves):
                self.close()

    def _train_epoch(self, epoch: int) -> bool:
        """Train to the end of the epoch, or to trainer.max_steps; whether a checkpoint is due then."""
        state, order, accumulate = self.state, self.order, self.config.trainer.accumulate_steps
        self.feed.set_epoch(epoch)
        state.network.train()
        self.watch.clock.start_epoch()
        batches, count = iter(self.train_batches), len(self.feed)
        whole = self.feed.settings.batch_size * self.world.size
        left, steps_left, due = count, self._steps_left(count), False
        evaluated = (epoch + 1) % self.config.trainer.eval_every_epochs == 0 or self._is_last(
            epoch, count
        )
        lead = Lead(steps_left) if evaluated else None
        self._epoch = Shown()
        if self._starting:
            say(
                f"training: {steps_left} steps in epoch {epoch + 1}, {whole * accumulate} images "
                "each; first step ..."
            )
        with progress(
            f"epoch {epoch + 1}/{self.config.trainer.epochs}", steps_left, "steps"
        ) as bar:
            while steps_left:
                if lead is not None and lead.due(steps_left):
                    self.val_feed.prime(0)
                parts = min(accumulate, left)
                self._one_step(batches, parts)
                left, steps_left = left - parts, steps_left - 1
                if left > 1:
                    state.samples += parts * whole
                elif left:
                    state.samples = order.taken(epoch, count - left)
                else:
                    state.epoch, state.samples = epoch + 1, 0
                state.pending = evaluated and not steps_left
                bar.advance(1)
                due = self._between_steps(epoch, last=not steps_left)
                bar.note(self._told)
        return due

    def _between_steps(self, epoch: int, last: bool) -> bool:
        """Log and save what is due after a step, which may be the ``last`` one before an evaluation
        saves; whether it was due.

        Raises:
            Interrupted: any rank heard a signal.
            DiskError: the last checkpoint could not be written.
        """
        step = self.state.step
        self.saves.check()
        signum, due = self._boundary.ask(step)
        if last or due or signum or step % self.config.watch.window_steps == 0:
            with named("close window"):
                self._close_window(epoch)
        if signum:
            raise Interrupted(signum)
        if due and not last:
            self._save(None)
        return due

    def _one_step(self, batches: DataPrefetcher, parts: int) -> None:
        clock, images_seen = self.watch.clock, 0
        with self._trace.step(self.state.step + 1):
            for part in range(parts):
                with clock.waiting(), named("wait for data"):
                    images, labels = next(batches)
                count = labels.shape[0]
                whole = count == self.feed.settings.batch_size
                self._whole = False
                with clock.computing(), _AS_IT_IS if whole else self._eagerly():
                    self.step(images, labels, part=part, parts=parts)
                images_seen += count
            self._whole = True
            clock.step(images_seen)
        if self._starting and self.watch.sampler is not None:
            self.watch.sampler.restart()
        self._starting = False

    def _close_window(self, epoch: int) -> None:
        """Log the window.

        Here, and where a checkpoint is made, a training step waits for the device.
        """
        steps, self._logged_step = self.state.step - self._logged_step, self.state.step
        self.watch.clock.settle()
        figures, lr = self.step.read(), float(self.state.schedule.get_last_lr()[0])
        window = self.watch.clock.close_window()
        self.outcome.skipped += figures.skipped
        latest = Shown()
        for shown in (latest, self._epoch):
            shown.add(steps, figures.loss, lr, window, self.world.size)
        self._told = str(latest)
        values: dict[str, Value] = {Tag.LOSS: figures.loss, Tag.LR: lr}
        if window is not None:
            values |= by_tag(window.of_ranks(self.world.size)) | self._stages()
            for look in self.watch.on_window:
                look(self.watch.clock, window)
        with self.watch.clock.noted("logging"):
            self._write(epoch, {**values, **self.memory.trained(self.state.step)})
        if figures.skipped:
            _log.warning(
                "step %d: %d updates skipped, a loss or gradient was not finite",
                self.state.step,
                figures.skipped,
            )
        if figures.worst_streak > self.config.trainer.max_nonfinite_steps:
            raise NonFiniteError(
                f"step {self.state.step}: {figures.worst_streak} updates in a row had a non-finite "
                "loss or gradient "
                f"(trainer.max_nonfinite_steps={self.config.trainer.max_nonfinite_steps}); lower "
                "optim.lr, set "
                "optim.clip_norm=1 or use trainer.precision=fp32"
            )

    def _write(self, epoch: int, figures: dict[str, Value]) -> None:
        if self.watch.board is not None:
            sampled = self.watch.sampler.read() if self.watch.sampler is not None else {}
            self.watch.board.scalars(self.state.step, {**figures, **sampled}, epoch=epoch + 1)

    def _stages(self) -> dict[str, Value]:
        """What the training feed's workers did since the last call."""
        since_s, self._looked_s = self._looked_s, time.perf_counter()
        workers = self.feed.settings.num_workers
        if self.feed.meter is None:
            return {}
        before, self._worked = self._worked, self.feed.meter.read()
        worker_s = max(1, workers) * (self._looked_s - since_s)
        self.worker_s += worker_s
        return {Tag.NUM_WORKERS: workers, **stages(self._worked.since(before), worker_s)}

    def _own_figures(self) -> RankFigures:
        """What tells this rank from the others."""
        total = self.watch.clock.total()
        host, mean_ms = total.shares.get("host"), 1e3 * total.elapsed_s / max(1, total.steps)
        return RankFigures(
            rank=self.world.rank,
            step_ms=total.step_ms.median if total.step_ms else 0.0,
            stalled_ms=(total.stall_fraction or 0.0) * mean_ms,
            host_ms=None if host is None else host * mean_ms,
            forward_ms=self.step.forward_ms,
        )

    def _steps_left(self, batches: int) -> int:
        """Steps that ``batches`` are good for and trainer.max_steps allows."""
        steps, limit = (
            math.ceil(batches / self.config.trainer.accumulate_steps),
            self.config.trainer.max_steps,
        )
        return steps if limit is None else max(0, min(steps, limit - self.state.step))

    def _is_last(self, epoch: int, batches: int) -> bool:
        """Whether the run ends with ``epoch``, of which so many ``batches`` are about to begin."""
        limit, steps = (
            self.config.trainer.max_steps,
            math.ceil(batches / self.config.trainer.accumulate_steps),
        )
        return epoch + 1 == self.config.trainer.epochs or (
            limit is not None and limit <= self.state.step + steps
        )

    def _is_done(self) -> bool:
        """Whether trainer.epochs or trainer.max_steps ends the run here."""
        return self.state.epoch >= self.config.trainer.epochs or not self._steps_left(1)

    def _note_turn(self) -> None:
        waits_s = self.val_batches.first_wait_s, self.train_batches.first_wait_s
        if waits_s[0] is not None and waits_s[1] is not None:
            self.outcome.turns_ms.append((1e3 * waits_s[0], 1e3 * waits_s[1]))

    def _save(self, evaluation: Evaluation | None) -> None:
        with self._aside("checkpoint"):
            self.saves.save(evaluation.top1 if evaluation else None)
