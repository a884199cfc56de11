"""Tuning as a stage of a run: recalled or measured before training, and checked during training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from harness.config import Config, TunerName
from harness.feed.feeds import Feeds
from harness.feed.interface import Backend, FeedSettings
from harness.feed.threads import ThreadFeed
from harness.feed.timed import TimedSteps
from harness.runtime import accelerator
from harness.runtime.distributed import World
from harness.runtime.files import typed
from harness.runtime.folder import log
from harness.runtime.limits import Limits
from harness.tuning.answer import TuningReport
from harness.tuning.live import Live
from harness.tuning.memory import Memory, fingerprint
from harness.tuning.probe import Lab
from harness.tuning.tuner import most_workers, tune
from harness.watch.clock import StepClock
from harness.watch.console import say
from harness.watch.figures import Window
from harness.watch.station import Watch

STEPS = 100


@dataclass(slots=True)
class Tuned:
    """What the stage found, and what follows it while training.

    Attributes:
        report: holds the prediction.
        forget: forgets the answer; called where it did not hold.
        most: threads that may be tried while training; None where their number stays.
        val_follows: whether the validation feed is to have as many.
        live: changes their number.
        checked: whether the prediction was compared with the run.
    """

    report: TuningReport
    forget: Callable[[], object]
    most: int | None = None
    val_follows: bool = False
    live: Live | None = None
    checked: bool = False

    def told(self, watch: Watch) -> tuple[FeedSettings, FeedSettings]:
        """Prints all, the first rank writes it; returns the settings of both feeds."""
        self.report.publish(watch.board)
        watch.course.mark("tuning")
        return self.report.settings, self.report.val

    def follow(self, feed: Backend, val_feed: Backend, watch: Watch, step: int) -> None:
        """Checks while training what was predicted, and lets threads follow the run.

        ``step`` updates of the run are done.
        """
        feeds = [feed, val_feed] if self.val_follows else [feed]
        threads = [one for one in feeds if isinstance(one, ThreadFeed)]
        if self.most and isinstance(feed, ThreadFeed) and feed.settings.num_workers:
            cores = self.report.limits.cores
            self.live = Live(threads, cores, self.most, step=step)
        watch.on_window.append(self.look)

    def look(self, clock: StepClock, window: Window) -> None:
        """Takes in a window of steps, and what came before it."""
        if self.live is not None:
            self.live.look(clock, window)
            # another number was predicted for
            if self.live.changes:
                return
        self.check(clock)

    def check(self, clock: StepClock) -> None:
        """Tells once, after a hundred steps, whether training waits no more than tuning said."""
        predicted = self.report.after.wait_fraction
        if self.checked or predicted is None:
            return
        total = clock.total()
        if total.steps + total.first_steps < STEPS:
            return
        self.checked = True
        stall = total.stall_fraction or 0.0
        # five points over the prediction
        if stall <= predicted + 0.05:
            return
        # a step that became faster, or else a slower loader
        why = (
            f"The feed delivers {total.images_per_s or 0.0:.0f} images/s a rank and not "
            f"{self.report.after.images_per_s}. Other programs, slower storage or costlier samples "
            "may be why: see host/cpu_fraction and host/disk_read_bytes_per_s"
        )
        if self.report.demand and total.compute_ms:
            was_ms = self.report.settings.batch_size / self.report.demand.images_per_s * 1e3
            is_ms = total.compute_ms.median
            if total.prepare_ms:
                # both are what a step takes
                is_ms += total.prepare_ms.median
            if is_ms < 0.9 * was_ms:
                why = f"A step takes {is_ms:.1f} ms and not {was_ms:.1f}. Try: tuner.fresh=true"
        log.warning(
            f"Over the first {total.steps} steps, training waited for data {stall:.0%} of the "
            f"time. Tuning said {predicted:.0%}. {why}."
        )
        self.forget()
        say("The remembered answer is forgotten. The next run tunes again.")

    def summary(self) -> dict[str, Any]:
        """Returns what ``report.json`` says of tuning."""
        report = self.report
        found = report.summary()
        live = self.live
        if live is None:
            return found
        if live.changes:
            found["changes"] = live.changes
        if live.policy.settled != report.settings.num_workers:
            # how to begin with the last number
            settings = replace(report.settings, num_workers=live.policy.settled)
            val = report.val
            if self.val_follows:
                val = replace(val, num_workers=live.policy.settled)
            found["settled"] = replace(report, settings=settings, val=val).override
        return found


def tuned(
    feeds: Feeds,
    trainee: TimedSteps,
    config: Config,
    limits: Limits,
    world: World,
    step: int | None = None,
) -> Tuned:
    """Returns the settings for this run's feeds, the same on every rank.

    ``step`` updates of the run are done. ``tuner.fresh=true`` forgets what was found before.

    Raises:
        BadSample: a sample cannot be read.
    """
    begin = time.perf_counter()
    own = feeds.settings(limits)
    device = accelerator.of(world.device)
    data = feeds.splits.fingerprint()
    memory = Memory(fingerprint(config, data, limits, world.size, world.local_size, device.name))
    report: TuningReport | None = None
    if world.is_main:
        if config.tuner.fresh:
            memory.forget()
        report = memory.recall(lambda answer: _recalled(answer, own, feeds, trainee, limits))
    report = world.agreed(report)
    if report is not None:
        report = replace(report, seconds=time.perf_counter() - begin)
    else:
        # no update is left where a resumed run is done
        steps = config.trainer.epochs * feeds.steps_per_epoch()
        if config.trainer.max_steps is not None:
            steps = min(steps, config.trainer.max_steps)
        left = max(0, steps - (step or 0)) * config.trainer.accumulate_steps
        images = left * config.loader.batch_size
        report = tune(feeds, trainee, own, config.tuner, limits, world, images)
        is_sound = report.complete and report.others_cores is None and report.after.images_per_s
        if world.is_main and is_sound:
            when = (
                f"found by a run of {time.strftime('%Y-%m-%d %H:%M')}; tuner.fresh=true tunes again"
            )
            memory.keep(replace(report, notes=(when, *report.notes)).to_plain())
    follows = config.tuner.live
    if follows is None:
        follows = not device.has_streams
    # ranks that wait for each other cannot judge their own tries
    follows = follows and config.tuner.name is TunerName.auto and world.size == 1

    return Tuned(
        report,
        memory.forget,
        most_workers(config.tuner, limits) if follows else None,
        val_follows=config.loader.val.num_workers is None
        and report.val.num_workers == report.settings.num_workers,
    )


def _recalled(
    answer: Any, own: FeedSettings, feeds: Feeds, trainee: TimedSteps, limits: Limits
) -> TuningReport | None:
    """Returns the remembered report as it holds for this run; None if it does not fit today.

    What is never tuned comes from this run's settings, and so does all about the validation feed.

    Raises:
        TypeError, ValueError: it is no report.
    """
    report: TuningReport = typed(TuningReport, answer)
    settings = replace(
        report.settings,
        batch_size=own.batch_size,
        start_method=own.start_method,
        timeout_s=own.timeout_s,
    )
    most = max(own.num_workers, most_workers(feeds.config.tuner, limits))
    # more are of a run whose own setting it was
    if settings.num_workers > most or settings.backend not in feeds.backends:
        return None
    # private memory of one worker, as it was measured
    lab = Lab(feeds, trainee, limits, feeds.world, worker_bytes=0)
    others = (report.after.memory_bytes or 0) - lab.needs(settings).memory
    lab.worker_bytes = max(0, others) // max(1, settings.num_workers)
    if lab.refusal(settings):
        return None
    # what was before is that run's, and its row has that run's setting
    return replace(report, settings=settings, val=lab.val_beside(settings), reused=True)
