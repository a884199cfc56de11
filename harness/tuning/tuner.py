"""Tunes the loader before training, stores the choice and adjusts threads later.

The number of loader threads is adjusted based on the run's own measurements, without changing any
batch. Two rules, numbered as in docs/explanation/how-tuning-works.md, use the search's model:

7. If steps wait for data, the threads are busy, and cores are free, the tuner tries the number of
   threads from the model.
8. If a sample takes less than half as long as when the number was set, it tries fewer threads: the
   number from the model or, if that is no lower, the minimum, because threads may wait for each
   other.

A change that gains nothing is reverted, and the tuner does not try to increase the number for a
while.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..clock.clock import StepClock
from ..clock.figures import Window
from ..config import Config, TunerConfig, TunerName, shown, train_sizes, walk
from ..data.storage import cache_root
from ..feed.base import Backend, FeedSettings
from ..feed.feeds import Feeds
from ..feed.threads import ThreadFeed
from ..monitor.console import live_table, say
from ..monitor.host import Neighbors, environment
from ..runtime import accelerator, user_code
from ..runtime.distributed import World
from ..runtime.errors import rounded
from ..runtime.files import from_json, quarantine, read_kept, write_kept
from ..runtime.folder import log
from ..runtime.limits import Limits
from .auto import MET, AutoSearch, grid, most_workers
from .lab import LoaderBenchmark
from .measures import BUSY, FED, Model, Probes, SampleCost, TuningReport, undisturbed
from .steps import StepBenchmark

if TYPE_CHECKING:
    from ..training.engine import Engine

_MAX_AGE_S = 30 * 24 * 3600.0
# settings, in addition to all augment settings, that affect the cost of a sample or step, or the
# search
_SETTINGS = {
    "data.image_size",
    "data.eval_resize",
    "data.interpolation",
    "data.exif_orientation",
    "data.cache",
    "data.cache_gb",
    "data.cache_max_side",
    "loader.backend",
    "loader.batch_size",
    "loader.order",
    "loader.lanes",
    "loader.window_mb",
    "loader.start_method",
    "loader.device_prefetch",
    "model.name",
    "model.args",
    "optim.name",
    "optim.loss",
    "trainer.compile_mode",
    "trainer.sync_batch_norm",
    "trainer.checkpoint_blocks",
    "optim.freeze",
    "trainer.precision",
    "trainer.channels_last",
    "trainer.compile",
    "trainer.accumulate_steps",
    "trainer.num_threads",
    "trainer.deterministic",
    "tuner.name",
    "tuner.budget_s",
    "tuner.max_workers",
}
STEPS = 100


def tune(
    probes: Probes,
    trainee: StepBenchmark,
    own: FeedSettings,
    config: TunerConfig,
    limits: Limits,
    ranks: World,
    images_left: float = math.inf,
) -> TuningReport:
    """Chooses the setting with the fewest workers among those with the most training images/s.

    All ranks try the same settings at the same time and use the same choice. There are no side
    effects: everything that steps change is restored, including random states. Settings that do not
    fit are rejected before they run; those that crash or hang are rejected with the symptom.

    Args:
        probes: makes the feeds to measure.
        trainee: the training step.
        own: the user's settings; the choice is not slower.
        config: the search, its budget and the maximum number of workers.
        limits: the resources that this rank may use.
        ranks: this rank among the others.
        images_left: images that this rank has yet to train on.

    Raises:
        BadSample: a sample cannot be read.
    """
    device = accelerator.get(trainee.device)
    begin = device.now()
    own = ranks.agreed(own)
    # all ranks must compute the same numbers
    limits = replace(limits, cores=ranks.smallest(limits.cores))
    lab = LoaderBenchmark(probes, trainee, limits, ranks)
    with trainee.preserved_state():
        search = config.name.name
        if config.name is TunerName.grid:
            search += f", only {own.backend}"
        title = f"tuning the loader (tuner={search})"
        columns = ("measured    ", "images/s  ", "waiting", "seconds", "setting")
        lab.tell = live_table(title, columns)
        # other ranks would be treated as other programs
        neighbors = Neighbors(limits.cores if ranks.size == 1 else None)
        if config.name is TunerName.grid:
            pins = (False, True)[: 1 + device.has_streams]
            report = grid(lab, own, pins, config.budget_s or math.inf)
        else:
            report = AutoSearch(lab, own, config, images_left, begin).run()
        others = neighbors.warned("; tune again after they end")
    device.release()
    return replace(report, seconds=device.now() - begin, others_cores=others)


def tuned(
    feeds: Feeds,
    trainee: StepBenchmark,
    config: Config,
    limits: Limits,
    world: World,
    step: int | None = None,
) -> Tuned:
    """Returns the settings for this run's feeds, which are the same on every rank.

    ``step`` is the number of updates completed; each training image size gets an equal share of the
    rest. ``tuner.fresh=true`` discards an earlier result.

    Raises:
        BadSample: a sample cannot be read.
    """
    own = feeds.settings(limits)
    device = accelerator.get(world.device)
    data = feeds.splits.fingerprint()
    memory = TuningCache(fingerprint(config, data, limits, world, device.name))
    report = None
    if world.is_main:
        if config.tuner.fresh:
            memory.forget()
        if answer := memory.recall():
            lab = LoaderBenchmark(feeds, trainee, limits, world)
            report = _fitting(from_json(TuningReport, answer), own, lab)
    report = world.agreed(report)
    if report is None:
        # no updates are left if a resumed run is done
        steps = config.trainer.epochs * feeds.steps_per_epoch()
        steps = min(steps, config.trainer.max_steps or steps)
        left = max(0, steps - (step or 0)) * config.trainer.accumulate_steps
        sizes = {*train_sizes(config.data)}
        images = left * config.loader.batch_size / len(sizes)
        if len(sizes) > 1:
            say(f"training images at {feeds.splits.train.image_size} px:")
        report = tune(feeds, trainee, own, config.tuner, limits, world, images)
        is_sound = report.complete and report.others_cores is None and report.after.rate
        if world.is_main and is_sound:
            when = time.strftime("%Y-%m-%d %H:%M")
            note = f"measured in a run on {when}; tuner.fresh=true tunes again"
            memory.keep(replace(report, notes=(note, *report.notes)).to_plain())
    follows = config.tuner.live
    if follows is None:
        follows = not device.has_streams
    # ranks that wait for each other cannot judge their own changes
    follows = follows and config.tuner.name is TunerName.auto and world.size == 1
    return Tuned(
        report,
        memory.forget,
        most_workers(config.tuner, limits) if follows else None,
        val_follows=config.loader.val.num_workers is None
        and report.val.num_workers == report.settings.num_workers,
    )


def _fitting(report: TuningReport, own: FeedSettings, lab: LoaderBenchmark) -> TuningReport | None:
    """Returns a stored report adapted to this run, or None if it does not fit now.

    Settings that are never tuned and those for the validation feed come from this run.
    """
    settings = replace(report.settings, timeout_s=own.timeout_s)
    lab.worker_bytes = report.worker_bytes
    if lab.refusal(settings):
        return None
    # ``before`` and its row are from the earlier run
    after = replace(report.after, settings=settings)
    val = lab.val_beside(settings)
    return replace(report, after=after, val=val, seconds=0.0, reused=True)


@dataclass(slots=True)
class Tuned:
    """The tuning result, and its adjustment during training.

    Attributes:
        report: contains the prediction.
        forget: removes the stored result; called if the prediction was wrong.
        most: maximum number of threads to try during training; None if their number is fixed.
        val_follows: whether the validation feed gets the same number of threads.
        live: changes the number of threads.
        checked: whether the prediction has been compared with the run.
    """

    report: TuningReport
    forget: Callable[[], object]
    most: int | None = None
    val_follows: bool = False
    live: OnlineTuner | None = None
    checked: bool = False

    def follow(self, feed: Backend, val_feed: Backend, step: int) -> None:
        """Starts adapting the threads to the run, in which ``step`` updates are done."""
        if self.most and isinstance(feed, ThreadFeed) and feed.settings.num_workers:
            feeds = [feed]
            if self.val_follows and isinstance(val_feed, ThreadFeed):
                feeds.append(val_feed)
            self.live = OnlineTuner(feeds, self.report.limits.cores, self.most, step=step)

    def look(self, engine: Engine, clock: StepClock, window: Window) -> None:
        """Processes a window of steps from ``engine``."""
        if self.live is not None and self.live.feeds[0] is engine.feed:
            self.live.look(window)
        else:
            # the first window of a feed
            self.follow(engine.feed, engine.val_feed, engine.state.step)
        # the prediction holds only for the original number
        if self.live is None or not self.live.changes:
            self.check(clock)

    def check(self, clock: StepClock) -> None:
        """Warns once, after a hundred steps, if training waits longer than tuning predicted."""
        report = self.report
        predicted = report.after.wait_fraction
        total = clock.total(-1)
        if self.checked or predicted is None or total.steps + total.first_steps < STEPS:
            return
        self.checked = True
        stall = total.stall_fraction or 0.0
        # five percentage points over the prediction
        if stall <= predicted + 0.05:
            return
        # either the step became faster, or the loader became slower
        why = (
            f"Training reaches {total.images_per_s or 0.0:.0f} images/s per rank, not "
            f"{report.after.rate}. Possible causes are other programs, slower storage or costlier "
            "samples; see host/cpu_fraction and host/disk_read_bytes_per_s"
        )
        if report.demand and total.compute_ms:
            was_ms = report.settings.batch_size / report.demand.images_per_s * 1e3
            # both belong to the step
            is_ms = total.compute_ms.median + (total.prepare_ms.median if total.prepare_ms else 0)
            if is_ms < 0.9 * was_ms:
                why = f"A step takes {is_ms:.1f} ms, not {was_ms:.1f}. Try tuner.fresh=true"
        log.warning(
            f"Over the first {total.steps} steps, training waited for data {stall:.0%} of the "
            f"time. Tuning predicted {predicted:.0%}. {why}."
        )
        self.forget()
        say("The stored tuning result has been discarded. The next run tunes again.")

    def summary(self) -> dict[str, Any]:
        """Returns the tuning entry for ``report.json``."""
        report = self.report
        found = report.summary()
        if self.live and self.live.changes:
            found["changes"] = self.live.changes
            if (threads := self.live.settled) != report.settings.num_workers:
                # how to start with the last number
                settings = replace(report.settings, num_workers=threads)
                val = replace(report.val, num_workers=threads) if self.val_follows else report.val
                after = replace(report.after, settings=settings)
                found["settled"] = replace(report, after=after, val=val).override
        return found


class Period(NamedTuple):
    """Several windows combined.

    Attributes:
        images_per_s: training images/s.
        stall: fraction of time that the device was idle due to missing data.
        wall_s: seconds per sample in a thread.
        cpu_s: CPU seconds per sample.
        step_cpu_s: CPU seconds per image for everything else in this process; 0 if not yet known.
    """

    images_per_s: float
    stall: float
    wall_s: float
    cpu_s: float
    step_cpu_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """A change in the number of threads after ``step`` updates, with the rate before it."""

    step: int
    threads: int
    before: int
    images_per_s: float
    reason: str


class OnlineTuner:
    """Adapts the number of loader threads to the run.

    Args:
        feeds: the training feed, and others that get the same number of threads.
        cores: cores that this process may use.
        most: maximum number of threads to try.
        step: updates already done.

    Attributes:
        changes: all changes, in order.
    """

    def __init__(
        self,
        feeds: Sequence[ThreadFeed],
        cores: float,
        most: int,
        *,
        step: int = 0,
    ) -> None:
        settings = feeds[0].settings
        self.feeds = feeds
        self.changes = list[Change]()
        self._cores = cores
        # no more than the samples in progress at once
        self._most = min(most, settings.batch_size * (1 + settings.batches_ahead))
        self._fewest = min(settings.num_workers, max(1, int(cores)))
        # the number requested by the previous period: a single one may be due to chance
        self._asked = settings.num_workers
        # the time per sample when the number was set
        self._sample_s = 0.0
        # the state before a change that has not been judged yet
        self._tried: tuple[int, Period] | None = None
        # periods left without an increase, and the number after the next vain increase
        self._rest = 0
        self._next_rest = 30
        self._step = step
        self._step_cpu_s = 0.0
        self._begin()

    @property
    def threads(self) -> int:
        """The current number of threads."""
        return self.feeds[0].settings.num_workers

    @property
    def settled(self) -> int:
        """The number known to be good: the one before a change that has not yet been judged."""
        return self._tried[0] if self._tried else self.threads

    def _begin(self) -> None:
        # seconds, stalled seconds, images, steps, windows that include more than steps
        self._sums = np.zeros(5)
        self._worked = self.feeds[0].meter.read()
        self._began_cpu_s = time.process_time()

    def look(self, window: Window) -> None:
        """Adds a window of steps; judges the number of threads once there are enough steps."""
        self._step += window.steps + window.first_steps
        stalled_s = window.elapsed_s * (window.stall_fraction or 0.0)
        odd = bool(window.first_steps or window.pauses_s)
        self._sums += window.elapsed_s, stalled_s, window.images, window.steps, odd
        seconds, stalled_s, images, steps, mixed = self._sums.tolist()
        # too short to judge
        if seconds < 1.0 or steps < 8:
            return
        worked = self.feeds[0].meter.read().since(self._worked)
        if worked.samples and images:
            cpu_s = sum(cost.cpu_s for cost in worked.stages.values())
            if not mixed:
                # the CPU time is only for steps and threads
                spent_s = time.process_time() - self._began_cpu_s
                self._step_cpu_s = max(0.0, spent_s - cpu_s) / images
            wall_s = worked.busy_s / worked.samples
            cpu_s /= worked.samples
            rate = images / seconds
            self.judge(Period(rate, stalled_s / seconds, wall_s, cpu_s, self._step_cpu_s))
        self._begin()

    def judge(self, period: Period) -> None:
        """Changes the number of threads if ``period`` calls for it."""
        threads = self.threads
        self._rest = max(0, self._rest - 1)
        self._sample_s = self._sample_s or period.wall_s
        if self._tried:
            former, before = self._tried
            self._tried = None
            # more threads must deliver 5% more, and fewer at most 3% less
            if period.images_per_s < (1.05 if former < threads else 0.97) * before.images_per_s:
                self._rest = self._next_rest
                self._next_rest *= 4
                limit = "not 5% more" if former < threads else "over 3% less"
                reason = (
                    f"Reverted: {threads} gave {period.images_per_s:.0f} images/s, {limit} than "
                    f"the {before.images_per_s:.0f} with {former}"
                )
                self._change(former, period, before.wall_s, reason)
                return
        wanted, reason = self._wanted(period)
        asked = self._asked
        self._asked = wanted
        if min(wanted, asked) > threads or max(wanted, asked) < threads:
            self._tried = threads, period
            self._change(wanted, period, period.wall_s, reason)

    def _wanted(self, period: Period) -> tuple[int, str]:
        """Returns a number of threads worth trying, and the reason."""
        threads = self.threads
        now = f"A sample takes {rounded(period.wall_s * 1e3)} ms"
        cost = SampleCost(period.wall_s, period.cpu_s, 0.0)
        model = Model(
            demand=period.images_per_s / max(1 - period.stall, 0.01),
            cost=undisturbed(cost, threads, self._cores),
            cores=self._cores,
            step_cpu_s=period.step_cpu_s,
            alone_s=0.0,
        )
        wanted = min(model.workers_for(MET * model.reachable), self._most)
        # rule 8: samples take less than half as long
        if 2 * period.wall_s < self._sample_s:
            fewer = max(wanted, self._fewest) if wanted < threads else self._fewest
            return min(threads, fewer), f"{now} instead of {rounded(self._sample_s * 1e3)}"
        # rule 7: steps do not wait for idle threads
        at_work = period.images_per_s * period.wall_s >= 0.8 * threads
        full = period.images_per_s >= BUSY * model.roofline
        if period.stall > 1 - FED and at_work and not full and not self._rest:
            reason = f"Training waited for data {period.stall:.0%} of the time. {now}"
            return max(threads, wanted), reason
        return threads, ""

    def _change(self, threads: int, period: Period, sample_s: float, reason: str) -> None:
        before = self.threads
        for feed in self.feeds:
            feed.resize(threads)
        if self.threads != threads:
            # the system does not allow more
            self._most = self.threads
        self._asked = threads
        self._sample_s = sample_s
        if self.threads == before:
            return
        self.changes.append(Change(self._step, self.threads, before, period.images_per_s, reason))
        say(f"Step {self._step}: now using {self.threads} loader threads (was {before}). {reason}.")


class TuningCache:
    """The stored result for one fingerprint, as a file in the cache."""

    def __init__(self, fingerprint: Mapping[str, Any]) -> None:
        self._key = json.dumps(fingerprint, sort_keys=True).encode()
        name = hashlib.sha256(self._key).hexdigest()
        self.path = cache_root() / "tuning" / f"{name}.json"

    def recall(self) -> Any:
        """Returns the stored result, or None if there is none or it is over 30 days old."""
        answer = read_kept(self.path, self._key)
        # another run may remove it now
        with suppress(FileNotFoundError):
            # nor from the future, which means that a clock was wrong
            if answer and abs(time.time() - self.path.stat().st_mtime) < _MAX_AGE_S:
                return json.loads(answer)
        return None

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Stores ``answer``, plain JSON values, replacing any earlier one."""
        write_kept(self.path, self._key, json.dumps(answer).encode())

    def forget(self) -> None:
        """Removes the stored result, if it exists and can be removed."""
        with suppress(OSError):
            quarantine(self.path)


def fingerprint(
    config: Config, data: Mapping[str, Any], limits: Limits, world: World, device_name: str
) -> dict[str, Any]:
    """Returns everything that determines the best loader settings, as plain values.

    Free memory is excluded because it changes constantly; the caller checks whether a recalled
    result still fits.

    Args:
        config: the run's settings, excluding those being tuned.
        data: identity of the training set.
        limits: the resources that this rank may use.
        world: the ranks, in total and on this node.
        device_name: name of the network's device, such as the GPU's.
    """
    settings = {
        path: shown(value)
        for path, value, _ in walk(config)
        if path in _SETTINGS or path.startswith("augment.")
    }
    # the code that determines a sample's cost, and the choice
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for room in ("data", "feed", "tuning"):
        for path in sorted((package / room).glob("*.py")):
            sources.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    names = attrgetter(*user_code.PARTS)(config)
    return {
        "machine": {**environment(device_name), "usable_cores": round(limits.cores, 2)},
        "sources": sources.hexdigest(),
        "own": [user_code.digest(name) for name in names if user_code.is_own(name)],
        "ranks": [world.size, world.local_size],
        "data": dict(data),
        "settings": settings,
    }
