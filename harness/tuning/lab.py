"""Measures loader settings: loader-only throughput and the rate of real steps.

All ranks measure together. If a setting fails, it is rejected and the symptom is recorded.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil

from ..clock.stages import StageMeter, Work
from ..feed.base import PROCESSES, THREADS, Backend, FeedSettings, HostBatch
from ..monitor.console import AddRow
from ..runtime import accelerator, signals
from ..runtime.distributed import World
from ..runtime.errors import BadSample, LoaderError, is_out_of_memory, printable
from ..runtime.limits import Limits
from .measures import (
    Kind,
    Model,
    Probes,
    Rate,
    SampleCost,
    Trial,
    TuningReport,
    in_flight,
    shown,
    undisturbed,
)
from .steps import StepBenchmark

POLL_S = 0.05
_BLOCKS = 10


class Needs(NamedTuple):
    """A feed's peak resource use.

    Attributes:
        shm: bytes of shared memory, included in ``memory``.
        memory: total bytes of memory.
        open_files: number of open files.
    """

    shm: int = 0
    memory: int = 0
    open_files: int = 0


NONE = Needs()


@dataclass(slots=True)
class Supply:
    """A loader's throughput without a consumer, counted sample by sample in its workers.

    Attributes:
        settings: the loader's settings.
        skip: batches to leave out, in addition to those that fill the queue.
        batches: number of batches received.
        last: the latest batch, lent by its feed.
        worker_bytes: one worker's private memory; 0 without workers.
        points: the window's readings: time, this process's CPU seconds, and the workers' work so
            far.
    """

    settings: FeedSettings
    skip: int
    batches: int = 0
    last: HostBatch | None = None
    worker_bytes: int = 0
    points: list[tuple[float, ...]] = field(default_factory=list)
    # when every worker had made progress
    _moved: float = math.inf

    def look(self, at: float, cpu_s: float, work: Work) -> None:
        """Records the workers' progress."""
        if work.moved >= max(1, self.settings.num_workers) and self.batches >= self.skip:
            self._moved = min(self._moved, at)
        # earlier samples filled the queue and do not measure the feed's speed
        is_full = self.batches > self.skip + in_flight(self.settings)
        # do not wait for a queue that does not fill
        if self.points or is_full or at - self._moved >= 0.3:
            self.points.append((at, cpu_s, *work))

    def is_known(self, limit_s: float) -> bool:
        """Whether the window has lasted ``limit_s``, or three times that if samples are uneven."""
        if len(self.points) < 3 or not self.images:
            return False
        factor = 3 if self.rate.half_width > 0.2 else 1
        return self.points[-1][0] - self.points[0][0] >= factor * limit_s

    @property
    def images(self) -> int:
        """The number of samples in the window."""
        return int(self.points[-1][2] - self.points[0][2])

    @property
    def rate(self) -> Rate:
        """Images/s over the window, with a confidence interval computed from blocks of it."""
        stride = max(1, len(self.points) // _BLOCKS)
        seconds, _, images, *_ = np.diff(self.points[::-stride], axis=0).T
        return Rate.of(-images, -seconds)

    @property
    def cost(self) -> SampleCost:
        """The cost of one sample in the window."""
        each = np.subtract(self.points[-1], self.points[0]) / self.images
        _, receive_s, _, _, wall_s, square_s2, made_s = each.tolist()
        if self.settings.backend != PROCESSES or self.settings.num_workers == 0:
            # the samples are made in this process
            receive_s = max(0.0, receive_s - made_s)
        variation = math.sqrt(max(0.0, square_s2 - wall_s**2)) / wall_s
        return SampleCost(wall_s, made_s, variation, receive_s)


@dataclass(slots=True)
class LoaderBenchmark:
    """Measures settings for one dataset and one step.

    Attributes:
        worker_bytes: a worker's private memory, the last probe's maximum across ranks; an assumed
            value until then.
        batch: a copy of a batch from the dataset, once one has been received.
        first_s: extra seconds for first steps, which training has to spend anyway.
        launch_s: the step's launch time, as in ``StepRun``.
        trials: all settings measured or rejected, in order.
        tell: called with a table row for each trial.
        warm: whether loader-only trials repeat samples that have already been loaded.
        meter: the meter of the latest feed that was measured alone.
    """

    probes: Probes
    trainee: StepBenchmark
    limits: Limits
    ranks: World
    worker_bytes: int = 100 << 20
    batch: HostBatch | None = None
    first_s: float = 0.0
    launch_s: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    tell: AddRow = lambda row: None
    warm: bool = False
    meter: StageMeter | None = None

    def attempt(self, settings: FeedSettings, kind: Kind, limit_s: float = 1.5) -> Trial:
        """Returns the result of one measurement on the slowest rank.

        Args:
            settings: the loader's settings.
            kind: as in ``Trial``; "passes" times loading as the tutorial does, including startup.
            limit_s: duration of the measurement.

        Raises:
            BadSample: a sample cannot be read with any setting.
        """
        trial = self.measured(settings, kind, limit_s)
        self.trials.append(trial)
        self.tell(trial.row)
        return trial

    def measured(self, settings: FeedSettings, kind: Kind, limit_s: float) -> Trial:
        """Like ``attempt``, but does not keep the trial."""
        trial = Trial(settings, "steps" if kind == "steps" else "supply")
        if refused := self.unfit(settings):
            return replace(trial, refused=refused)
        begin = self.now()
        bad: BadSample | None = None
        # a hung worker is rejected within a minute, even if the user's timeout is longer
        patient = replace(settings, timeout_s=min(settings.timeout_s or 60.0, 60.0))
        measure = {"supply": self._supply, "steps": self._steps, "passes": self._passes}[kind]
        try:
            trial = replace(measure(patient, limit_s), settings=settings)
        except BadSample as error:
            bad = error
        except LoaderError as error:
            refused = printable(str(error))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            refused = "out of memory"
        trial = replace(trial, refused=refused, seconds=self.now() - begin)
        trials, met = zip(*self.ranks.gathered((trial, bad)), strict=True)
        for bad in filter(None, met):
            raise bad
        slowest: Trial = min(trials, key=lambda trial: trial.images_per_s)
        return slowest

    def demand(
        self,
        limit_s: float,
        rate: Callable[[Sequence[float], Sequence[float]], Rate] = Rate.typical,
    ) -> tuple[Rate, float]:
        """Returns the step's images/s on the slowest rank and its CPU seconds per image.

        The default rate is the median step's, which is not affected by slow steps on a busy
        machine; ``Rate.of`` includes them. Requires a batch from an earlier supply probe.
        """
        assert self.batch is not None, "a supply probe must come first"
        run = self.trainee.demand(self.batch, limit_s)
        self.first_s += run.first_s
        self.launch_s = -self.ranks.smallest(-run.launch_s)
        own = rate(run.images, run.seconds), run.cpu_s / sum(run.images)
        slowest: tuple[Rate, float] = min(self.ranks.gathered(own))
        return slowest

    def model(self, demand: float, step_cpu_s: float, trial: Trial) -> Model:
        """Returns the throughput model for the sample cost in ``trial``."""
        assert trial.cost is not None
        cores = self.limits.cores
        return Model(
            demand=demand,
            cost=undisturbed(trial.cost, trial.settings.num_workers, cores),
            cores=cores,
            step_cpu_s=step_cpu_s,
            alone_s=self.launch_s if self.trainee.overlaps else 1 / demand,
        )

    @property
    def now(self) -> Callable[[], float]:
        """The device's clock."""
        return accelerator.get(self.trainee.device).now

    def pays_to_pin(self, own: FeedSettings) -> bool:
        """Returns whether pinned batches fit and reach the device 5% faster on every rank."""
        copies_s = None
        # pinning may still fail due to lack of memory
        with suppress(RuntimeError):
            if self.refusal(replace(own, pin_memory=True)) is None:
                copies_s = self.copies_s()
        return all(self.ranks.gathered(copies_s is not None and copies_s[1] < 0.95 * copies_s[0]))

    def copies_s(self) -> tuple[float, float] | None:
        """Returns the median seconds to copy a batch from pageable and from pinned memory.

        The two kinds of copies alternate, and the host waits for each. Returns None if the device
        has no streams or there is no batch.

        Raises:
            RuntimeError: memory cannot be pinned.
        """
        own = accelerator.get(self.trainee.device)
        if not own.has_streams or self.batch is None:
            return None
        images = self.batch.images
        taken_s = []
        for source in (images, own.pin(images)) * 12:
            begin = own.now()
            own.copy(source)
            own.synchronize()
            taken_s.append(own.now() - begin)
        # the first two copies of each kind are for warm-up
        return median(taken_s[4::2]), median(taken_s[5::2])

    def needs(self, settings: FeedSettings) -> Needs:
        """Returns the resources that a feed uses if its consumer stalls.

        These are the workers' private memory, the images that the feed holds, and the batches in
        flight, all pinned; batches of unknown size are left out.
        """
        workers = settings.num_workers
        size = self.probes.batch_bytes(settings) or 0
        pinned = labels = 0
        if size and settings.pin_memory:
            # torch pins images and labels in blocks of a power of two each; indices are not pinned
            labels = 8 * settings.batch_size
            pinned = 1 << (max(1, size - 2 * labels) - 1).bit_length()
            labels = 1 << (labels - 1).bit_length()
            pinned += labels
        # in addition to the queue: one being made or moved, one being handed over, one in use
        batches = settings.batches_ahead + 3
        if settings.backend == THREADS:
            # the previous batch's labels, too
            return Needs(memory=batches * (pinned or size) + labels)
        held = workers * self.worker_bytes + self.probes.held_bytes(settings)
        # a batch has two files each for images, labels and indices; workers have pipes and queues
        return Needs(
            shm=batches * size if workers else 0,
            memory=batches * (size + pinned) + held,
            open_files=6 * settings.batches_ahead + 10 * workers,
        )

    def refusal(self, settings: FeedSettings, beside: Needs = NONE) -> str | None:
        """Returns why ``settings`` cannot fit on this rank, or None if they can.

        Another feed uses ``beside``, which the text does not include.
        """
        limits = self.limits
        for what, asked, taken, free, kept, told in zip(
            ("shared memory", "memory", "open files (raise ulimit -n)"),
            self.needs(settings),
            beside,
            (limits.shm_bytes, limits.memory_bytes, limits.open_files - limits.files_open),
            # reserve for everything not counted; for files: logs, checkpoints and libraries
            ((limits.shm_bytes or 0) / 5, limits.memory_bytes / 5, 64),
            (shown, shown, str),
            strict=True,
        ):
            if asked and free is not None and asked > free - kept - taken:
                return (
                    f"not tried for lack of {what}: {told(asked)} needed, {told(free)} free "
                    f"({told(kept)} reserved)"
                )
        return None

    def unfit(self, settings: FeedSettings) -> str | None:
        """Returns why ``settings`` cannot fit on all ranks, or None if they can."""
        return next(filter(None, self.ranks.gathered(self.refusal(settings))), None)

    def val_beside(self, train: FeedSettings) -> FeedSettings:
        """Returns the validation feed's settings, with as many workers as fit next to ``train``."""
        val = self.probes.val_settings(train)
        while val.num_workers and self.refusal(val, self.needs(train)):
            val = replace(val, num_workers=val.num_workers - 1)
        return val

    def report(self, before: Trial, after: Trial, **found: Any) -> TuningReport:
        """Returns the report on a search, with all its trials."""
        size = self.ranks.size
        before, after = (
            replace(side, memory_bytes=self.needs(side.settings).memory) for side in (before, after)
        )
        return TuningReport(
            before=before,
            after=after,
            val=self.ranks.agreed(self.val_beside(after.settings)),
            trials=tuple(self.trials),
            limits=self.limits,
            notes=(f"images/s are for the slowest of {size} ranks",) * (size > 1),
            worker_bytes=self.worker_bytes,
            **found,
        )

    def supplied(self, feed: Backend, limit_s: float, skip: int = 0) -> Supply:
        """Drains ``feed`` at full speed, counts samples in its workers, and closes it.

        A worker's batches may take seconds each and arrive in bursts, so counting batches here
        would take a long time. The window opens after ``skip`` batches, when every worker has made
        progress and the queue is full. It closes after ``limit_s``, or three times that if the
        interval exceeds 20% (uneven samples), but not before the first batch. The clock is read
        before workers are stopped. All ranks stop together.

        Raises:
            BadSample: a sample cannot be read.
            LoaderError: a worker died or timed out, or there is no shared memory for counting.
        """
        looked = self.now()
        supply = Supply(feed.settings, skip)
        feed.times_samples = True
        agreed = 0.0
        with closing(feed), closing(feed.polled(POLL_S)) as batches:
            while not agreed:
                try:
                    batch = next(batches)
                    signals.check()
                    if batch is not None:
                        supply.batches += 1
                        supply.last = batch
                    if self.now() - looked < POLL_S:
                        continue
                    looked = self.now()
                    if feed.meter is None:
                        raise LoaderError("no shared memory for counting samples")
                    supply.look(looked, time.process_time(), feed.meter.work())
                    is_over = supply.is_known(limit_s) and (self.batch or supply.last) is not None
                except Exception:
                    # notify all ranks before raising
                    self.ranks.smallest(-1.0)
                    raise
                # every rank gets here the same number of times, whatever its own feed does
                agreed = self.ranks.smallest(float(is_over))
            if agreed < 0:
                raise LoaderError("failed on another rank")
            self.meter = feed.meter
            if feed.worker_pids:
                with suppress(psutil.Error):
                    supply.worker_bytes = psutil.Process(feed.worker_pids[0]).memory_full_info().uss
            if self.batch is None and supply.last is not None:
                # the feed only lends its batch
                images, labels, indices = (tensor.clone() for tensor in supply.last[:3])
                self.batch = HostBatch(images, labels, indices)
        return supply

    def _supply(self, settings: FeedSettings, limit_s: float) -> Trial:
        # use samples that have loaded before, so that none can hang this process
        cursor = self.probes.cursor
        seen = len(cursor.seen)
        again = settings.num_workers == 0 and seen > 0
        feed = self.probes.probe(settings, again=again or self.warm)
        found = self.supplied(feed, limit_s, again * seen)
        # assumed until a worker has been measured
        self.worker_bytes = max(self.ranks.gathered(found.worker_bytes)) or self.worker_bytes
        if found.batches and not again:
            cursor.saw(found.batches)
        return Trial(settings, "supply", found.rate, cost=found.cost)

    def _steps(self, settings: FeedSettings, limit_s: float) -> Trial:
        # without workers, use samples that a worker has loaded, so that none can hang this process
        again = settings.num_workers == 0
        with closing(self.probes.probe(settings, again=again)) as feed:
            run = self.trainee.deliver(feed, in_flight(settings), limit_s)
        count = len(run.images)
        if count == 0:
            raise LoaderError("failed on another rank")
        # the interval is from ten blocks, each at least one burst: a batch per process
        burst = settings.num_workers if settings.backend == PROCESSES else 1
        block = max(1, math.ceil(count / _BLOCKS), min(burst, count // 2))
        blocks = range(count % block, count, block)
        rate = Rate.of(np.add.reduceat(run.images, blocks), np.add.reduceat(run.seconds, blocks))
        return Trial(settings, "steps", rate, wait_fraction=run.stall_fraction)

    def _passes(self, settings: FeedSettings, limit_s: float) -> Trial:
        """Times a loader as the tutorial does: four passes, each with its startup."""
        begin = self.now()
        images = 0
        for _ in range(4):
            with closing(self.probes.probe(settings)) as feed:
                for batch in itertools.islice(feed, 15):
                    images += len(batch.labels)
                    signals.check()
        return Trial(settings, "supply", Rate.of([images], [self.now() - begin]))
