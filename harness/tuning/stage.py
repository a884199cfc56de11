"""Tuning as a stage of a run: recalled where such a run was tuned before, measured where not, and
checked while training.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import Config, TunerName
from harness.feed.arrays import in_form
from harness.feed.forms import Feeds
from harness.feed.interface import Feed, FeedSettings
from harness.feed.threads import ThreadFeed
from harness.runtime import accelerator
from harness.runtime.distributed import World
from harness.runtime.files import typed
from harness.runtime.limits import Limits
from harness.tuning import capacity
from harness.tuning.figures import Trainee
from harness.tuning.follow import Follow
from harness.tuning.live import Live
from harness.tuning.memory import Memory, fingerprint
from harness.tuning.report import TuningReport
from harness.tuning.search import DEEP, with_workers
from harness.tuning.tuner import most_workers, tune
from harness.watch.clock import StepClock
from harness.watch.figures import Window
from harness.watch.station import Watch


@dataclass(slots=True)
class Tuned:
    """What the stage found, and what follows it while training.

    Attributes:
        forget: forgets the answer.
        most: threads that may be tried while training; None where their number stays.
        val_follows: whether the validation feed is to have as many.
        live: changes their number.
    """

    report: TuningReport
    forget: Callable[[], object] | None
    most: int | None
    val_follows: bool
    live: Live | None = None

    def told(self, watch: Watch, folder: Path) -> tuple[FeedSettings, FeedSettings]:
        """The settings of both feeds, once all is printed, and written by the first rank."""
        self.report.publish(folder if watch.board else None, watch.board)
        watch.course.mark("tuning")
        return self.report.settings, self.report.val

    def follow(self, feed: Feed, val_feed: Feed, watch: Watch, step: int) -> None:
        """Check while training what was predicted, and let threads follow the run; ``step`` updates
        of it are done.
        """
        follow = Follow(self.report, self.forget)
        before = self._before()
        if not (self.most and isinstance(feed, ThreadFeed) and feed.settings.num_workers):
            watch.on_window.append(follow.look)
            return
        threads = [
            one
            for one in (feed, val_feed if self.val_follows else None)
            if isinstance(one, ThreadFeed)
        ]
        most = min(self.most, *(one.most_threads for one in threads))
        self.live = live = Live(threads, self.report.limits.cores, most, step=step, before=before)

        def look(clock: StepClock, window: Window) -> None:
            live.look(clock, window)
            if not live.changes:  # else another number was predicted for
                follow.look(clock, window)

        watch.on_window.append(look)

    def summary(self, total: Window) -> dict[str, Any]:
        """What ``report.json`` says of it; ``total`` is of the run's steps."""
        found = self.report.summary()
        live = self.live
        if live is not None:
            found["gained_s"] = live.gained_s
        elif (before := self._before()) is not None:
            found["gained_s"] = max(0.0, total.images / before - total.elapsed_s)
        if live is not None and live.changes:
            found["changes"] = live.changes
        if live is not None and live.settled != self.report.settings.num_workers:
            settings, val = (
                dataclasses.replace(one, num_workers=live.settled)
                for one in (self.report.settings, self.report.val)
            )
            now = dataclasses.replace(
                self.report, settings=settings, val=val if self.val_follows else self.report.val
            )
            found["settled"] = now.override
        return found

    def _before(self) -> float | None:
        """Images/s that steps got with the user's own setting, where this run measured them and
        came to another one.
        """
        report = self.report
        rate = self.report.before.images_per_s
        known = rate is not None and report.demand is not None and not report.reused
        return (
            rate.images_per_s
            if known and rate and report.settings != report.before.settings
            else None
        )


def tuned(
    feeds: Feeds,
    trainee: Trainee,
    config: Config,
    limits: Limits,
    world: World,
    step: int | None = None,
) -> Tuned:
    """The settings for this run's feeds, the same on every rank; ``step`` updates of it are done.

    One of several runs alike tunes, the others wait for its answer.
    ``tuner.fresh=true`` forgets what was found before.

    Raises:
        BadSample: a sample cannot be read.
    """
    begin = time.perf_counter()
    own = feeds.settings(limits)
    device = accelerator.of(world.device).name
    facts = fingerprint(
        config, feeds.splits.fingerprint(), limits, world.size, world.local_size, device
    )
    memory = Memory(facts) if world.is_main else None
    with memory.held() if memory else nullcontext():
        if memory and config.tuner.fresh:
            memory.forget()
        read: Callable[[Any], TuningReport | None] = lambda answer: _recalled(
            answer, own, feeds, limits
        )
        report: TuningReport | None = world.agreed(memory and memory.recall(read))
        if report is not None:
            report = dataclasses.replace(report, seconds=time.perf_counter() - begin)
        else:
            report = tune(
                feeds,
                trainee,
                own,
                config.tuner,
                limits,
                world,
                _images_left(config, feeds, step or 0),
            )
            sound = report.complete and report.others_cores is None
            if memory and sound and report.after.images_per_s is not None:
                when = (
                    f"found by a run of {time.strftime('%Y-%m-%d %H:%M')}; tuner.fresh=true "
                    "tunes again"
                )
                memory.keep(dataclasses.replace(report, notes=(when, *report.notes)).to_plain())
    asked = config.tuner.live
    by_look = config.tuner.name is TunerName.auto
    follows = (
        by_look
        and world.size == 1
        and (asked if asked is not None else not accelerator.of(world.device).has_streams)
    )
    return Tuned(
        report,
        memory.forget if memory else None,
        most_workers(config.tuner, limits) if follows else None,
        val_follows=config.loader.val.num_workers is None
        and report.val.num_workers == report.settings.num_workers,
    )


def _images_left(config: Config, feeds: Feeds, step: int) -> int:
    trainer = config.trainer
    steps = trainer.epochs * feeds.steps_per_epoch()
    last = steps if trainer.max_steps is None else min(steps, trainer.max_steps)
    return max(0, last - step) * trainer.accumulate_steps * config.loader.batch_size


def _recalled(answer: Any, own: FeedSettings, feeds: Feeds, limits: Limits) -> TuningReport | None:
    """The remembered report as it holds for this run; None where there is none, or what it chose
    does not fit today.

    What is never tuned comes from this run's settings, and so does all about the validation feed.

    Raises:
        TypeError, ValueError: it is no report, or no search of this run could have come to its
            choice.
    """
    report: TuningReport = typed(TuningReport, answer)
    settings = dataclasses.replace(report.settings, timeout_s=own.timeout_s)
    if not _may_be_chosen(settings, own, feeds, limits) or (
        report.demand and not report.demand.images_per_s
    ):
        raise ValueError(f"no choice for this run: {settings}")
    size = feeds.batch_bytes(settings)
    worker_bytes = _worker_bytes(report, feeds)
    held_bytes = feeds.held_bytes(settings)
    if capacity.refusal(settings, size, worker_bytes, limits, held_bytes=held_bytes) is not None:
        return None
    val = feeds.val_settings(settings)
    val = capacity.beside(settings, val, size, feeds.batch_bytes(val), worker_bytes, limits)
    notes = report.notes
    if own != dataclasses.replace(report.before.settings, timeout_s=own.timeout_s):
        notes += (
            (
                f"before and the ceiling are that run's, which came with {report.before.settings}; "
                f"yours is {own}"
            ),
        )
    return dataclasses.replace(report, settings=settings, val=val, notes=notes, reused=True)


def _may_be_chosen(found: FeedSettings, own: FeedSettings, feeds: Feeds, limits: Limits) -> bool:
    """Whether a search of this run may come to ``found``: the rest of it is ``own``, and the
    numbers are such as are tried.
    """
    most = max(own.num_workers, most_workers(feeds.config.tuner, limits))
    deepest = max(*DEEP.values(), own.prefetch_factor or 0)
    made = with_workers(in_form(own, found.backend), found.num_workers, found.prefetch_factor)
    made = dataclasses.replace(
        made,
        pin_memory=found.pin_memory and accelerator.of(feeds.world.device).has_streams,
        persistent_workers=found.persistent_workers and found.num_workers > 0,
    )
    tried = found.num_workers <= most and (found.prefetch_factor or 1) <= deepest
    return tried and found.backend in feeds.forms and found == made


def _worker_bytes(report: TuningReport, feeds: Feeds) -> int:
    """Private memory of one worker as it was measured."""
    settings = report.settings
    if not settings.num_workers or report.after.memory_bytes is None:
        return 0
    batches = capacity.needs(settings, feeds.batch_bytes(settings), 0).memory_bytes
    return max(0, report.after.memory_bytes - batches) // settings.num_workers
