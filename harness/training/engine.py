"""Runs epochs: steps, evaluations and checkpoints."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..clock.figures import RankFigures, Tag, by_tag
from ..clock.spans import named
from ..clock.stages import StageTotals
from ..config import Mode, OnError, ScheduleName, train_size
from ..feed.base import Backend, Failure
from ..feed.order import Order
from ..feed.prefetcher import DataPrefetcher
from ..monitor import device
from ..monitor.console import progress, say
from ..monitor.monitor import Monitor
from ..monitor.writer import BAD_SAMPLES, Value
from ..runtime import accelerator, signals, user_code
from ..runtime.errors import DataError, Interrupted, LoaderError, NonFiniteError
from ..runtime.files import read_regular
from ..runtime.folder import log
from . import callbacks, checkpoint_read, checkpoint_write, pictures, profile
from .evaluate import Evaluation, evaluate
from .step import Step, device_batches

# seconds that workers need to have batches ready
_WARM_UP_S = 1.5


def listed(folder: Path) -> set[tuple[str, str]]:
    """Returns the entries of the bad-sample list in ``folder``, by set and index."""
    found = set()
    with suppress(OSError):
        for line in read_regular(folder / BAD_SAMPLES).splitlines():
            # malformed lines are ignored
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                facts = json.loads(line)
                found.add((str(facts["set"]), str(facts["where"])))
    return found


@dataclass(eq=False)
class Engine:
    """Trains on the feed from ``sized`` and evaluates on ``val_feed``.

    Args:
        step: trains its state, starting from the state's epoch and step.
        sized: returns the training feed for an image size in pixels.
        val_feed: the validation feed.
        monitor: the run's monitor.
        folder: the folder for the run's files.
        classes: the class names, recorded in checkpoints.
        callbacks: the user's callbacks by name, if there are any.

    Attributes:
        feed: the training feed, for images of ``size`` pixels.
        parts: results from ``part`` for earlier image sizes.
        status: completed, idle (nothing was left to train), interrupted or failed.
        stopped: the reason why a completed run ended early.
        evaluation: the last result, if any.
        answers: the network's predictions in that evaluation.
        skipped: number of updates skipped because of a non-finite gradient.
        replaced: samples that could not be read.
        ranks: every rank's metrics at the end of a completed multi-rank run.
        worker_s: total time of the feeds' workers so far, busy and idle.
    """

    step: Step
    sized: Callable[[int], Backend]
    val_feed: Backend
    monitor: Monitor
    folder: Path
    classes: tuple[str, ...]
    callbacks: Mapping[str, Any] | None = None

    size = 0
    status = "failed"
    stopped: str | None = None
    evaluation: Evaluation | None = None
    answers: pictures.PredictionLog | None = None
    skipped = 0
    ranks: tuple[RankFigures, ...] = ()
    worker_s = 0.0
    # no update is in progress; no step has ended yet
    _whole = True
    _starting = True
    # for the last window: seconds per step, and the text in the progress bar
    _step_s = math.inf
    _shown = ""

    def __post_init__(self) -> None:
        monitor = self.monitor
        self.state = state = self.step.state
        self.config = config = state.config
        self.world = world = state.world
        self.parts = list[dict[str, Any]]()
        self._take_size(state.epoch)
        # probes are endless
        assert isinstance(self.feed.order, Order)
        self.order = self.feed.order
        self.saves = checkpoint_write.CheckpointWriter(state, self.order, self.folder, self.classes)
        self.val_batches = device_batches(self.val_feed, config, world.device)
        # since this run's start, by set and index: files on the list may have been fixed
        self.replaced: set[tuple[str, int]] = set()
        self._listed = listed(self.folder)
        self._own = accelerator.get(world.device)
        self.memory = device.MemoryWatch(self._own)
        self._run = callbacks.Run(state, self.folder, self.classes)
        self._boundary = checkpoint_write.StopAgreement(
            config, world, state.step, began_s=monitor.timer.began_s
        )
        self._logged_step = state.step
        steps = config.profile.steps if world.is_main else None
        self._trace = profile.Trace(steps, self.folder, monitor.clock.pause)
        # an event after each of the latest updates, with the state's counts
        self._updates: deque[tuple[Any, dict[str, Any], int]] = deque(maxlen=8)
        self._may_hang = world.size > 1 and world.is_main and self._own.has_streams
        if self._may_hang:
            signals.set_rescue(self._rescue)

    def fit(self) -> None:
        """Trains until the last epoch or step, or evaluates; sets ``status``."""
        state = self.state
        trainer = self.config.trainer
        with self._ending():
            if self.config.mode is not Mode.train:
                self.evaluate(max(0, state.epoch - 1))
                self.status = "completed"
                return
            if not self.has_work:
                say(
                    f"training is complete at step {state.step}; to continue, raise "
                    "trainer.epochs, trainer.max_steps or trainer.patience_epochs"
                )
                self.status = "idle"
                return
            self._call("on_start")
            # if a signal arrived before or during the evaluation
            if state.pending:
                self._save(self.evaluate(state.epoch - (state.samples == 0)).top1)
            elif state.step:
                say(f"resuming at epoch {state.epoch + 1}")
            self.step.check_last_batch(self.order.length)
            while not self._ends():
                epoch = state.epoch
                self._take_size(epoch)
                due = self._train_epoch(epoch)
                top1 = None
                if state.pending:
                    top1 = self.evaluate(epoch).top1
                else:
                    say(f"epoch {epoch + 1}: training: {self._shown}")
                if due or self._ends() or (epoch + 1) % self.config.checkpoint.every_epochs == 0:
                    self._save(top1)
            self._call("on_end")
            if not self.is_done:
                self.stopped = f"trainer.max_hours={trainer.max_hours} was reached"
            elif state.stale == trainer.patience_epochs:
                self.stopped = f"top-1 has not improved for {state.stale} epochs"
            if self.world.size > 1:
                # these differ between ranks
                own = RankFigures.of(
                    self.world.rank, self.monitor.clock.total(), self.step.forward_ms
                )
                self.ranks = tuple(self.world.gathered(own))
            self.status = "completed"

    @property
    def is_done(self) -> bool:
        """Whether the run ends here, due to its last epoch or step or trainer.patience_epochs."""
        state = self.state
        trainer = self.config.trainer
        return (
            state.epoch >= trainer.epochs
            or state.step >= (trainer.max_steps or math.inf)
            or state.stale >= (trainer.patience_epochs or math.inf)
        )

    @property
    def has_work(self) -> bool:
        """Whether a step or an evaluation is left to do."""
        return not self.is_done or self.state.pending

    def _ends(self) -> bool:
        return self._boundary.is_over or self.is_done

    def evaluate(self, epoch: int) -> Evaluation:
        """Evaluates once, logs the result and ends the validation feed's workers.

        Meanwhile, the training feed makes the first batches of the next epoch.
        """
        name = "evaluation"
        if self.config.mode is Mode.train:
            name = f"epoch {epoch + 1}"
            if not self._ends():
                # the feed cannot restart before its pass has ended
                self.train_batches.close()
                self._take_size(self.state.epoch)
                self.feed.prime(self.state.epoch)
        network = self.state.evaluated
        bar = progress(f"{name}: evaluating", len(self.val_feed), "batches")
        # compiling a graph for evaluation would take longer than the pass
        with self._untimed("evaluate"), self._uncompiled(), bar as shown:
            # each rank has its own batch norm statistics
            self.world.copy_from(0, network.buffers())
            batches = shown.over(self.val_batches)
            kept: list[Any] = []
            result = evaluate(network, batches, self.world, self.step.autocast, kept)
            places = self.val_feed.order.batches(0)
            self.answers = pictures.PredictionLog.gathered(kept, places, self.world)
            self.val_batches.close()
            self.val_feed.close()
        state = self.state
        state.pending = False
        if state.best_top1 is None or result.top1 > state.best_top1:
            state.best_top1 = result.top1
            state.stale = 0
        elif state.samples == 0:
            state.stale += 1
            self._drop_rate()
        self.evaluation = result
        figures = {
            Tag.VAL_TOP1: result.top1,
            Tag.VAL_TOP5: result.top5,
            Tag.VAL_LOSS: result.loss,
            **self.memory.read(evaluating=True),
        }
        self._write(epoch, figures)
        trained = f"; training: {self._shown}" if self._shown else ""
        top5 = f"top-5 {result.top5:.4f}, " if len(self.classes) > 5 else ""
        say(
            f"{name}: top-1 {result.top1:.4f}, {top5}loss {result.loss:.4f} on "
            f"{result.images} images{trained}"
        )
        self._list_replaced()
        self._call("on_epoch", result)
        return result

    def _drop_rate(self) -> None:
        """Lowers the ``schedule=plateau`` rate after enough evaluations without progress."""
        wanted = self.config.schedule
        is_due = self.state.stale % (wanted.patience_epochs + 1) == 0
        if wanted.name is ScheduleName.plateau and is_due:
            schedule = self.state.schedule
            schedule.drops += 1
            schedule.go_to(schedule.last_epoch)

    def _call(self, method: str, *given: Any) -> None:
        """Calls ``method`` on the user's callbacks and writes the values they log.

        Raises:
            ConfigError: a callback failed.
        """
        if not self.callbacks:
            return
        between = method in ("on_step", "on_window")
        with (self.monitor.clock.noted if between else self._untimed)("callbacks"):
            for name, callback in self.callbacks.items():
                if function := getattr(callback, method, None):
                    begin = f"callbacks={name}: {method} failed with"
                    with user_code.explained(begin, called=function):
                        function(self._run, *given)
        # no window may follow
        if self._run.logged and not between:
            self._write(self._run.epoch - 1, {})

    def part(self) -> dict[str, Any]:
        """Returns the measurements of the steps with the current image size."""
        meter = self.feed.meter
        return {
            "size": self.config.data.train_size and self.size,
            "window": self.monitor.clock.total(-1),
            "stages": meter.read() if meter else None,
            "settings": self.feed.settings,
        }

    def _take_size(self, epoch: int) -> None:
        """Switches the feed if the image size changes in ``epoch``."""
        size = train_size(self.config.data, epoch)
        if size == self.size:
            return
        clock = self.monitor.clock
        if self.size:
            self.train_batches.close()
            self.feed.close()
            self.parts.append(self.part())
            clock.start_part()
            say(f"training at {size} px from epoch {epoch + 1}")
        self.feed: Backend = self.sized(size)
        self.size = size
        self.train_batches: DataPrefetcher = self.step.batches(self.feed, clock)
        # the workers' totals at the end of the last window, and the time then
        self._looked: tuple[StageTotals | None, float] = (None, time.perf_counter())

    def _note_update(self) -> None:
        """Notifies callbacks of an update; if there are other ranks, records an event after it."""
        if self.callbacks:
            self._call("on_step")
        if not self._may_hang:
            return
        state = self.state
        is_full = len(self._updates) == self._updates.maxlen
        event = self._updates[0][0] if is_full else self._own.event()
        event.record(self._own.stream())
        counts = {name: getattr(state, name) for name in checkpoint_read.COUNTS}
        self._updates.append((event, counts, state.schedule.last_epoch))

    def _rescue(self) -> str:
        """Saves the state after the last completed update even if a collective hangs."""
        self._own.make_current()
        state = self.state
        done = [update for update in self._updates if update[0].query()]
        _, counts, state.schedule.last_epoch = done[-1]
        for name, value in counts.items():
            setattr(state, name, value)
        # the current stream would wait for the lost rank
        with self._own.on(self._own.idle_stream()):
            self.saves.save(at_once=True)
        return f", while another rank did not respond; step {state.step} was saved"

    def close(self) -> None:
        """Stops the feeds' threads and workers."""
        signals.set_rescue(None)
        for part in (self.train_batches, self.feed, self.val_batches, self.val_feed, self._trace):
            part.close()

    @contextmanager
    def _untimed(self, name: str) -> Iterator[None]:
        """Excludes a block's time and load from the training measurements."""
        sampler = self.monitor.sampler
        aside = sampler.aside() if sampler else nullcontext()
        with self.monitor.clock.pause(name), named(name), aside:
            yield

    def _uncompiled(self) -> Any:
        """Runs a block without torch.compile, whose graph is only for full training batches."""
        if self.config.trainer.compile:
            return torch.compiler.set_stance("force_eager")
        return nullcontext()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Saves a consistent state after an error, and always closes the feeds."""
        try:
            yield
        except Exception as error:
            # a callback may fail again
            self.callbacks = None
            if isinstance(error, Interrupted):
                self.status = "interrupted"
            expected = isinstance(error, Interrupted | DataError | LoaderError)
            # after other errors, the other ranks would not respond; diverged states and unfinished
            # updates are not saved
            answered = expected or self.world.size == 1
            if self._whole and answered and not isinstance(error, NonFiniteError):
                with nullcontext() if expected else suppress(Exception):
                    if self.state.step > self._logged_step:
                        self._close_window(self.state.epoch)
                    self.saves.save(at_once=True)
            raise
        finally:
            with closing(self.saves):
                self.close()

    def _train_epoch(self, epoch: int) -> bool:
        """Trains until the end of the epoch or run; returns whether a checkpoint is due.

        Raises:
            Interrupted: a rank received a signal.
            DiskError: the last checkpoint could not be written.
        """
        state = self.state
        config = self.config.trainer
        self.feed.set_epoch(epoch)
        self.step.begin_epoch()
        self.monitor.clock.start_epoch()
        batches = iter(self.train_batches)
        count = left = len(self.feed)
        self._bounds = [self.order.taken(epoch, 0)]
        steps = math.ceil(count / config.accumulate_steps)
        if config.max_steps:
            steps = min(steps, config.max_steps - state.step)
        # the run ends in this epoch
        last = epoch + 1 == config.epochs or state.step + steps == config.max_steps
        evaluated = primes = last or (epoch + 1) % config.eval_every_epochs == 0
        due = False
        if self._starting:
            say(f"training: {steps} steps in epoch {epoch + 1}; first step ...")
        with progress(f"epoch {epoch + 1}/{config.epochs}", steps, "steps") as bar:
            for steps_left in range(steps, 0, -1):
                last = steps_left == 1
                # so that the validation workers have batches ready at the end of the epoch
                if primes and (last or steps_left * self._step_s <= _WARM_UP_S):
                    self.val_feed.prime(0)
                    primes = False
                parts = min(config.accumulate_steps, left)
                self._one_step(batches, parts)
                left -= parts
                state.samples = self.order.taken(epoch, count - left)
                self._bounds.append(state.samples)
                if left == 0:
                    state.epoch = epoch + 1
                    state.samples = 0
                state.pending = evaluated and last
                self._note_update()
                bar.advance(1)
                # between steps: log, save and handle signals
                self.saves.check()
                signum, due = self._boundary.ask(state.step)
                if self._boundary.is_over:
                    state.pending = last = True
                if last or due or signum or state.step % self.config.watch.window_steps == 0:
                    with named("close window"):
                        self._close_window(epoch)
                        bar.note(self._shown)
                    self._list_replaced()
                if signum:
                    raise Interrupted(signum)
                if last:
                    break
                # at the end of an epoch, evaluation precedes the checkpoint
                if due:
                    self._save()
        return due

    def _one_step(self, batches: Iterator[tuple[Tensor, Tensor]], parts: int) -> None:
        clock = self.monitor.clock
        images_seen = 0
        with self._trace.step(self.state.step + 1):
            for part in range(parts):
                with clock.waiting(), named("wait for data"):
                    images, labels = next(batches)
                self._whole = False
                # a short batch would cause a recompilation
                short = len(labels) < self.feed.settings.batch_size
                with clock.computing(), self._uncompiled() if short else nullcontext():
                    self.step(images, labels, part=part, parts=parts)
                images_seen += len(labels)
            self._whole = True
            clock.step(images_seen)
        if self._starting:
            self._starting = False
            if writer := self.monitor.writer:
                # once, between steps: the host waits for the device
                with self._untimed("pictures"):
                    classes = self.classes
                    pictures.show_batch(images[:16], labels[:16], self.config.data, classes, writer)
            if self.monitor.sampler:
                self.monitor.sampler.restart()

    def _close_window(self, epoch: int) -> None:
        """Logs the window.

        During training, the host waits for the device only here and for checkpoints.

        Raises:
            NonFiniteError: too many consecutive updates were skipped.
        """
        clock = self.monitor.clock
        now = self.state.step
        steps = now - self._logged_step
        self._logged_step = now
        # read while the device is still busy
        memory = self.memory.read()
        clock.settle()
        figures = self.step.read()
        # the rate of the last update: the schedule has already advanced
        schedule = self.state.schedule
        lr = float(schedule.base_lrs[0]) * schedule.share(schedule.last_epoch - 1)
        window = clock.close_window()
        self.skipped += figures.skipped
        values: dict[str, Value] = {Tag.LOSS: figures.loss, Tag.LR: lr}
        shown = [f"lr {lr:.3g}"]
        if figures.loss is not None:
            shown.append(f"loss {figures.loss:.3f}")
        if window:
            if window.images_per_s:
                self._step_s = window.elapsed_s / window.steps
                rate = window.images_per_s * self.world.size
                shown.append(f"{rate:.0f} images/s" if rate >= 10 else f"{rate:.2g} images/s")
            if window.stall_fraction is not None:
                shown.append(f"stall {window.stall_fraction:.0%}")
            values |= by_tag(window, self.world.size) | self._worked()
            for look in self.monitor.on_window:
                look(clock, window)
        values |= memory
        self._call("on_window", {**values})
        with clock.noted("logging"):
            self._write(epoch, values)
        if figures.skipped:
            text = "step %d: %d updates were skipped because a loss or gradient was not finite"
            log.warning(text, now, figures.skipped)
        most = self.config.trainer.max_nonfinite_steps
        if figures.worst_streak > most:
            self._note_samples(epoch, steps)
            raise NonFiniteError(
                f"step {now}: {figures.worst_streak} updates in a row had a non-finite loss or "
                f"gradient (trainer.max_nonfinite_steps={most}); lower optim.lr, set "
                "optim.clip_norm=1 or use trainer.precision=fp32; nonfinite.json lists the samples "
                f"from the last {steps} steps"
            )
        self._bounds = self._bounds[-1:]
        self._shown = ", ".join(shown)

    def _worked(self) -> dict[str, Value]:
        """Returns the work done by the training feed's workers since the last call, by tag."""
        meter = self.feed.meter
        if not meter:
            return {}
        workers = self.feed.settings.num_workers
        before, before_s = self._looked
        self._looked = (meter.read(), time.perf_counter())
        worker_s = max(1, workers) * (self._looked[1] - before_s)
        self.worker_s += worker_s
        return {Tag.NUM_WORKERS: workers, **self._looked[0].since(before).by_tag(worker_s)}

    def _note_samples(self, epoch: int, steps: int) -> None:
        """Writes the samples from the last ``steps`` steps on all ranks."""
        order = self.order.indices(epoch) % self.order.length
        noted = {
            "epoch": epoch + 1,
            "steps": [self.state.step - steps + 1, self.state.step],
            "batches": [order[a:b].tolist() for a, b in itertools.pairwise(self._bounds)],
        }
        if self.monitor.writer:
            self.monitor.writer.write("nonfinite.json", json.dumps(noted))

    def _list_replaced(self) -> None:
        """Lists the samples that all ranks replaced since the last call; every rank calls this.

        Raises:
            DataError: more samples in a set were replaced than allowed; raised on every rank.
        """
        data = self.config.data
        if data.on_error is not OnError.skip:
            return
        feeds = {"training": self.feed, "validation": self.val_feed}
        new: list[tuple[str, Failure]] = []
        for name, feed in feeds.items():
            while feed.replaced:
                new.append((name, feed.replaced.popleft()))
        writer = self.monitor.writer
        for name, failure in itertools.chain(*self.world.gathered(new)):
            if not self.replaced:
                log.warning("%s: %s; replaced with another image", failure.where, failure.reason)
            self.replaced.add((name, failure.sample))
            if writer and (name, failure.where) not in self._listed:
                self._listed.add((name, failure.where))
                writer.bad_sample(name, failure.sample, failure.where, failure.reason)
        for name, feed in feeds.items():
            assert isinstance(feed.order, Order)
            bad, length = sum(each == name for each, _ in self.replaced), feed.order.length
            if bad > max(1, data.max_bad_fraction * length):
                raise DataError(
                    f"{bad} of {length} {name} images cannot be read, which exceeds "
                    f"data.max_bad_fraction={data.max_bad_fraction:g}; fix those listed in "
                    f"{BAD_SAMPLES} or raise it"
                )

    def _write(self, epoch: int, figures: Mapping[str, Value]) -> None:
        if self.monitor.writer:
            sampled = self.monitor.sampler.read() if self.monitor.sampler else {}
            whole = {**figures, **self._run.logged, **sampled}
            self.monitor.writer.scalars(self.state.step, whole, epoch=epoch + 1)
        self._run.logged.clear()

    def _save(self, top1: float | None = None) -> None:
        with self._untimed("checkpoint"):
            self.saves.save(top1)
