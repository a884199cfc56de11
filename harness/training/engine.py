"""The run: epochs of steps, evaluations and checkpoints."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch

from harness.config import Config, Mode
from harness.feed.interface import Backend
from harness.feed.order import Order
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator
from harness.runtime.distributed import World
from harness.runtime.errors import DataError, Interrupted, LoaderError, NonFiniteError
from harness.runtime.folder import log
from harness.training.epoch import EvalWarmup, Shown
from harness.training.evaluate import Evaluation, evaluate
from harness.training.mistakes import Answers, Tally
from harness.training.pictures import show_batch
from harness.training.profile import Trace
from harness.training.replaced import Replaced
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

    Attributes:
        status: completed, idle (there was nothing left to train), interrupted or failed.
        stopped: why a completed run ended before its last epoch or step.
        evaluation: the last one, if there was one.
        answers: all that the network gave in it.
        skipped: updates left out for a non-finite gradient.
        replaced: the samples that could not be read.
        ranks: every rank's figures at the end of a completed run of several.
        worker_s: seconds of the feed's workers so far, at work or not.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        step: Step,
        feed: Backend,
        val_feed: Backend,
        watch: Watch,
        place: Place,
    ) -> None:
        self.config = config
        self.world = world
        self.step = step
        self.state = step.state
        self.feed = feed
        self.val_feed = val_feed
        self.watch = watch
        self.place = place
        self.status = "failed"
        self.stopped: str | None = None
        self.evaluation: Evaluation | None = None
        self.answers: Answers | None = None
        self.skipped = 0
        self.ranks: tuple[RankFigures, ...] = ()
        # a probe has no end
        assert isinstance(feed.order, Order)
        self.order = feed.order
        self.saves = Saves(config, world, self.state, self.order, place)
        self.train_batches = step.batches(feed, watch.clock)
        self.val_batches = device_batches(val_feed, config, world.device)
        feeds = {"training": feed, "validation": val_feed}
        self.replaced = Replaced(config.data, world, place.folder, watch.board, feeds)
        self.memory = MemoryWatch(accelerator.of(world.device))
        self.worker_s = 0.0
        # what the feed's workers did up to the last window
        self._worked: StageTotals | None = None
        self._looked_s = time.perf_counter()
        self._boundary = Boundary(config, world, self.state.step, began_s=watch.course.began_s)
        # no update is under way; no step has ended yet
        self._whole = True
        self._starting = True
        self._logged_step = self.state.step
        self._begin_epoch()
        steps = config.profile.steps if world.is_main else None
        self._trace = Trace(steps, place.folder, watch.clock.pause)

    def fit(self) -> None:
        """Trains to the last epoch or step; ``status`` says how it ended, after an error too."""
        state = self.state
        trainer = self.config.trainer
        with self._ending():
            # a signal came before or during the evaluation
            if state.pending:
                self._save(self.evaluate(state.epoch - (state.samples == 0)))
            elif state.is_done(trainer):
                say(
                    f"nothing left to train after step {state.step}: raise trainer.epochs, "
                    "trainer.max_steps or trainer.patience_epochs"
                )
                self.status = "idle"
                return
            while not self._ends():
                epoch = state.epoch
                due = self._train_epoch(epoch)
                evaluation = None
                if state.pending:
                    evaluation = self.evaluate(epoch)
                else:
                    say(f"epoch {epoch + 1}: training: {self._epoch}")
                every = self.config.checkpoint.every_epochs
                if due or self._ends() or (epoch + 1) % every == 0:
                    self._save(evaluation)
            if not state.is_done(trainer):
                self.stopped = f"trainer.max_hours={trainer.max_hours} are over"
            elif state.stale == trainer.patience_epochs:
                self.stopped = f"top-1 has not risen for {state.stale} epochs"
            if self.world.size > 1:
                # what tells this rank from the others
                total = self.watch.clock.total()
                own = RankFigures.of(self.world.rank, total, self.step.forward_ms)
                self.ranks = tuple(self.world.gathered(own))
            self.status = "completed"

    def _ends(self) -> bool:
        return self._boundary.is_over or self.state.is_done(self.config.trainer)

    def evaluate_only(self) -> None:
        """Evaluates what the state holds."""
        with self._ending():
            self.evaluate(max(0, self.state.epoch - 1))
            self.status = "completed"

    def evaluate(self, epoch: int) -> Evaluation:
        """Evaluates once, logs the result and gives the validation feed's workers back.

        Meanwhile the training feed makes the first batches of the epoch that follows.
        """
        name = "evaluation"
        if self.config.mode is Mode.train:
            name = f"epoch {epoch + 1}"
            if not self._ends():
                # the feed can begin again only once its pass has ended
                self.train_batches.close()
                self.feed.prime(self.state.epoch)
        network = self.state.evaluated
        bar = progress(f"{name}: evaluating", len(self.val_feed), "batches")
        # a graph of its own would be compiled while training waits, for longer than a pass without
        # gradients lasts
        with self._aside("evaluate"), self._eagerly(), bar as shown:
            # each rank has norms' statistics of its own
            self.world.copy_from_first(network.buffers())
            batches = shown.over(self.val_batches)
            tally = Tally(len(self.place.classes))
            result = evaluate(network, batches, self.world, self.step.autocast, tally)
            self.answers = tally.answers(self.world, self.val_feed.order.batches(0))
            self.val_batches.close()
            self.val_feed.close()
        state = self.state
        state.pending = False
        if state.best_top1 is None or result.top1 > state.best_top1:
            state.best_top1 = result.top1
            state.stale = 0
        elif state.samples == 0:
            state.stale += 1
        self.evaluation = result
        figures = {
            Tag.VAL_TOP1: result.top1,
            Tag.VAL_TOP5: result.top5,
            Tag.VAL_LOSS: result.loss,
            **self.memory.read(evaluating=True),
        }
        self._write(epoch, figures)
        trained = f"; training: {self._epoch}" if self._epoch.steps else ""
        say(
            f"{name}: top-1 {result.top1:.4f}, top-5 {result.top5:.4f}, loss {result.loss:.4f} on "
            f"{result.images} images{trained}"
        )
        self.replaced.share()
        return result

    def close(self) -> None:
        """Ends the feeds' threads and workers."""
        for part in (self.train_batches, self.feed, self.val_batches, self.val_feed, self._trace):
            part.close()

    @contextmanager
    def _aside(self, name: str) -> Iterator[None]:
        """A block whose time and load are not the training's."""
        sampler = self.watch.sampler
        aside = sampler.aside() if sampler else nullcontext()
        with self.watch.clock.pause(name), named(name), aside:
            yield

    def _eagerly(self) -> AbstractContextManager[Any]:
        """A block without torch.compile, whose graph is kept for whole batches of training."""
        block: AbstractContextManager[Any] = nullcontext()
        if self.config.trainer.compile:
            block = torch.compiler.set_stance("force_eager")
        return block

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Saves what an error leaves whole, and closes the feeds whatever ends the block."""
        try:
            yield
        except Exception as error:
            if isinstance(error, Interrupted):
                self.status = "interrupted"
            expected = isinstance(error, Interrupted | DataError | LoaderError)
            # at another error the other ranks would not answer; a state that has gone wrong is not
            # saved, and neither is one within an update
            answered = expected or self.world.size == 1
            if self._whole and answered and not isinstance(error, NonFiniteError):
                try:
                    if self.state.step > self._logged_step:
                        self._close_window(self.state.epoch)
                    self.saves.save(at_once=True)
                except Exception:
                    if expected:
                        raise
            raise
        finally:
            with closing(self.saves):
                self.close()

    def _train_epoch(self, epoch: int) -> bool:
        """Trains to the end of the epoch or run; returns whether a checkpoint is due.

        Raises:
            Interrupted: any rank heard a signal.
            DiskError: the last checkpoint could not be written.
        """
        state = self.state
        config = self.config.trainer
        self.feed.set_epoch(epoch)
        self.step.begin_epoch()
        self.watch.clock.start_epoch()
        batches = iter(self.train_batches)
        count = left = len(self.feed)
        steps = math.ceil(count / config.accumulate_steps)
        if config.max_steps is not None:
            steps = min(steps, config.max_steps - state.step)
        # the run ends with this epoch, or within it
        ends = epoch + 1 == config.epochs or state.step + steps == config.max_steps
        evaluated = ends or (epoch + 1) % config.eval_every_epochs == 0
        warm_up = EvalWarmup(steps) if evaluated else None
        self._begin_epoch()
        due = False
        if self._starting:
            images = self.feed.settings.batch_size * self.world.size * config.accumulate_steps
            of = f"{steps} steps in epoch {epoch + 1}, {images} images each"
            say(f"training: {of}; first step ...")
        with progress(f"epoch {epoch + 1}/{config.epochs}", steps, "steps") as bar:
            for steps_left in range(steps, 0, -1):
                if warm_up is not None and warm_up.due(steps_left):
                    self.val_feed.prime(0)
                    warm_up = None
                parts = min(config.accumulate_steps, left)
                self._one_step(batches, parts)
                left -= parts
                self._taken = count - left
                state.samples = self.order.taken(epoch, self._taken)
                if left == 0:
                    state.epoch = epoch + 1
                    state.samples = 0
                last = steps_left == 1
                state.pending = evaluated and last
                bar.advance(1)
                # between two steps: log and save what is due, and hear signals
                self.saves.check()
                signum, due = self._boundary.ask(state.step)
                if self._boundary.is_over:
                    state.pending = last = True
                if last or due or signum or state.step % self.config.watch.window_steps == 0:
                    with named("close window"):
                        bar.note(str(self._close_window(epoch)))
                    self.replaced.share()
                if signum:
                    raise Interrupted(signum)
                # the evaluation comes before the checkpoint of an epoch's end
                if due and not last:
                    self._save(None)
                if last:
                    break
        return due

    def _begin_epoch(self) -> None:
        self._epoch = Shown()
        # batches of the epoch so far
        self._taken = 0
        self._window_began = 0

    def _one_step(self, batches: DataPrefetcher, parts: int) -> None:
        clock = self.watch.clock
        images_seen = 0
        with self._trace.step(self.state.step + 1):
            for part in range(parts):
                with clock.waiting(), named("wait for data"):
                    images, labels = next(batches)
                self._whole = False
                # a short batch would be compiled for itself
                short = len(labels) < self.feed.settings.batch_size
                with clock.computing(), self._eagerly() if short else nullcontext():
                    self.step(images, labels, part=part, parts=parts)
                images_seen += len(labels)
            self._whole = True
            clock.step(images_seen)
        board = self.watch.board
        if self._starting and board is not None:
            # once, between two steps: the host waits for the device
            with self._aside("pictures"):
                show_batch(images[:16], labels[:16], self.config.data, self.place.classes, board)
        if self._starting and self.watch.sampler is not None:
            self.watch.sampler.restart()
        self._starting = False

    def _close_window(self, epoch: int) -> Shown:
        """Logs the window; returns what it showed.

        Here, and where a checkpoint is made, a training step waits for the device.

        Raises:
            NonFiniteError: too many updates in a row were skipped.
        """
        clock = self.watch.clock
        now = self.state.step
        steps = now - self._logged_step
        self._logged_step = now
        clock.settle()
        figures = self.step.read()
        # of the last update: the schedule has made the step to the next one
        schedule = self.state.schedule
        lr = float(schedule.base_lrs[0]) * schedule.lr_lambdas[0](schedule.last_epoch - 1)
        window = clock.close_window()
        self.skipped += figures.skipped
        latest = Shown()
        for shown in (latest, self._epoch):
            shown.add(steps, figures.loss, lr, window, self.world.size)
        values: dict[str, Value] = {Tag.LOSS: figures.loss, Tag.LR: lr}
        if window is not None:
            values |= by_tag(window.of_ranks(self.world.size))
            if self.feed.meter is not None:
                # what the training feed's workers did since the last window
                workers = self.feed.settings.num_workers
                before_s = self._looked_s
                before = self._worked
                self._looked_s = time.perf_counter()
                self._worked = self.feed.meter.read()
                worker_s = max(1, workers) * (self._looked_s - before_s)
                self.worker_s += worker_s
                values[Tag.NUM_WORKERS] = workers
                values |= stages(self._worked.since(before), worker_s)
            for look in self.watch.on_window:
                look(clock, window)
        with clock.noted("logging"):
            self._write(epoch, values | self.memory.read())
        if figures.skipped:
            text = "step %d: %d updates skipped, a loss or gradient was not finite"
            log.warning(text, now, figures.skipped)
        most = self.config.trainer.max_nonfinite_steps
        if figures.worst_streak > most:
            if self.watch.board is not None:
                self.watch.board.write("nonfinite.json", json.dumps(self._window(epoch, steps)))
            raise NonFiniteError(
                f"step {now}: {figures.worst_streak} updates in a row had a non-finite loss or "
                f"gradient (trainer.max_nonfinite_steps={most}); lower optim.lr, set "
                "optim.clip_norm=1 or use trainer.precision=fp32; nonfinite.json has the samples "
                f"of the last {steps} steps"
            )
        self._window_began = self._taken
        return latest

    def _window(self, epoch: int, steps: int) -> dict[str, Any]:
        """Returns which samples the last ``steps`` steps were made of, on all ranks together."""
        order = self.order.indices(epoch) % self.order.length
        batches = range(self._window_began, self._taken + 1)
        ends = [self.order.taken(epoch, batch) for batch in batches]
        return {
            "epoch": epoch + 1,
            "steps": [self.state.step - steps + 1, self.state.step],
            "batches": [order[a:b].tolist() for a, b in itertools.pairwise(ends)],
        }

    def _write(self, epoch: int, figures: Mapping[str, Value]) -> None:
        if self.watch.board is not None:
            sampled = self.watch.sampler.read() if self.watch.sampler is not None else {}
            self.watch.board.scalars(self.state.step, {**figures, **sampled}, epoch=epoch + 1)

    def _save(self, evaluation: Evaluation | None) -> None:
        with self._aside("checkpoint"):
            self.saves.save(evaluation.top1 if evaluation else None)
