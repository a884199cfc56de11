"""Measures loader settings: loader-only throughput, and the rate of real steps.

All ranks measure together. Whatever goes wrong becomes a refusal with its symptom.
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

from ..clock.stages import Work
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

Clock = Callable[[], float]


class Needs(NamedTuple):
    """The most that a feed takes at any time.

    Attributes:
        shm: bytes of shared memory, which are part of ``memory``.
        memory: bytes in all.
        open_files: how many.
    """

    shm: int = 0
    memory: int = 0
    open_files: int = 0


NONE = Needs()


@dataclass(slots=True)
class Supply:
    """What a loader gives with nothing consuming, counted sample by sample in its workers.

    Attributes:
        settings: the loader's.
        skip: batches that are left out, in addition to those that fill the queue.
        batches: how many have come.
        last: the last of them, lent by its feed.
        worker_bytes: private memory of one worker; 0 without workers.
        points: the window: when, this process's processor seconds, and the workers' work so far.
    """

    settings: FeedSettings
    skip: int
    batches: int = 0
    last: HostBatch | None = None
    worker_bytes: int = 0
    points: list[tuple[float, ...]] = field(default_factory=list)
    # when every worker had moved
    _moved: float = math.inf

    def look(self, at: float, cpu_s: float, work: Work) -> None:
        """Notes how far the workers are."""
        if work.moved >= max(1, self.settings.num_workers) and self.batches >= self.skip:
            self._moved = min(self._moved, at)
        # what came before is no measure of the feed's speed: it filled the queue
        is_full = self.batches > self.skip + in_flight(self.settings)
        # a queue that does not fill is waited for no longer
        if self.points or is_full or at - self._moved >= 0.3:
            self.points.append((at, cpu_s, *work))

    def is_known(self, limit_s: float) -> bool:
        """Whether the window has lasted for ``limit_s``, or three of them with uneven samples."""
        if len(self.points) < 3 or not self.images:
            return False
        factor = 3 if self.rate.half_width > 0.2 else 1
        return self.points[-1][0] - self.points[0][0] >= factor * limit_s

    @property
    def images(self) -> int:
        """The samples in the window."""
        return int(self.points[-1][2] - self.points[0][2])

    @property
    def rate(self) -> Rate:
        """Images/s over the window, with the interval that ten blocks or more give."""
        stride = max(1, len(self.points) // _BLOCKS)
        seconds, _, images, *_ = np.diff(self.points[::-stride], axis=0).T
        return Rate.of(-images, -seconds)

    @property
    def cost(self) -> SampleCost:
        """What one sample of the window cost."""
        each = np.subtract(self.points[-1], self.points[0]) / self.images
        _, receive_s, _, _, wall_s, square_s2, made_s = each.tolist()
        if self.settings.backend != PROCESSES or self.settings.num_workers == 0:
            # the samples are made in this process
            receive_s = max(0.0, receive_s - made_s)
        variation = math.sqrt(max(0.0, square_s2 - wall_s**2)) / wall_s
        return SampleCost(wall_s, made_s, variation, receive_s)


@dataclass(slots=True)
class LoaderBenchmark:
    """Measures settings for one data set and one step.

    Attributes:
        worker_bytes: private memory of a worker, as the last probe has seen it on any rank; before
            one has, an assumption.
        batch: a batch of the data set, in memory of its own, once one has been seen.
        first_s: what first steps took longer than others, which training has to pay anyway.
        launch_s: of the step, as ``StepRun`` has it.
        trials: all that was measured or refused, in order.
        tell: is given a row of a table for each of them.
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
    cpu_now: Clock = time.process_time

    def attempt(self, settings: FeedSettings, kind: Kind, limit_s: float = 1.5) -> Trial:
        """Returns what came of one measurement: the slowest rank's figures.

        Args:
            settings: the loader's.
            kind: as in ``Trial``; "passes": loading as the tutorial times it, start-up included.
            limit_s: how long to measure.

        Raises:
            BadSample: a sample cannot be read: no setting's fault.
        """
        trial = self.measured(settings, kind, limit_s)
        self.trials.append(trial)
        self.tell(trial.row)
        return trial

    def measured(self, settings: FeedSettings, kind: Kind, limit_s: float) -> Trial:
        """As ``attempt``, and keeps no trial."""
        trial = Trial(settings, "steps" if kind == "steps" else "supply")
        if refused := self.unfit(settings):
            return replace(trial, refused=refused)
        begin = self.now()
        bad: BadSample | None = None
        # a worker that hangs is refused within a minute, however long the user's runs wait
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
        """Returns images/s of the step on the slowest rank, and its processor seconds per image.

        By default the rate is the median step's, which a busy machine's slow steps leave alone;
        ``Rate.of`` counts these as well. A supply probe must have brought a batch.
        """
        assert self.batch is not None, "a supply probe comes first"
        run = self.trainee.demand(self.batch, limit_s)
        self.first_s += run.first_s
        self.launch_s = -self.ranks.smallest(-run.launch_s)
        own = rate(run.images, run.seconds), run.cpu_s / sum(run.images)
        slowest: tuple[Rate, float] = min(self.ranks.gathered(own))
        return slowest

    def model(self, demand: float, step_cpu_s: float, trial: Trial) -> Model:
        """Returns the model of throughput by what a sample cost in ``trial``."""
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
    def now(self) -> Clock:
        """The device's clock."""
        return accelerator.get(self.trainee.device).now

    def pays_to_pin(self, own: FeedSettings) -> bool:
        """Returns whether page-locked batches fit and reach the device 5 % sooner on every rank."""
        copies_s = None
        # the system may have no room for page-locked memory all the same
        with suppress(RuntimeError):
            if self.refusal(replace(own, pin_memory=True)) is None:
                copies_s = self.copies_s()
        return all(self.ranks.gathered(copies_s is not None and copies_s[1] < 0.95 * copies_s[0]))

    def copies_s(self) -> tuple[float, float] | None:
        """Returns the median seconds of a batch's copy, from pageable and from pinned memory.

        They are measured in turn, one copy at a time: the host waits for each. None: a device
        without streams, or no batch.

        Raises:
            RuntimeError: there is no room for page-locked memory.
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
        # the first two of each warm up
        return median(taken_s[4::2]), median(taken_s[5::2])

    def needs(self, settings: FeedSettings) -> Needs:
        """Returns what a feed takes before a consumer that stands still.

        That is private memory of workers, the images that it holds, and the batches in flight,
        which are then all page-locked; batches of unknown size are left out.
        """
        workers = settings.num_workers
        size = self.probes.batch_bytes(settings) or 0
        pinned = labels = 0
        if size and settings.pin_memory:
            # torch gives images and labels a power of two each; indices stay as they are
            labels = 8 * settings.batch_size
            pinned = 1 << (max(1, size - 2 * labels) - 1).bit_length()
            labels = 1 << (labels - 1).bit_length()
            pinned += labels
        # beside those that are ready: one in the making or on its way, one handed over, one in use
        batches = settings.batches_ahead + 3
        if settings.backend == THREADS:
            # labels are of the batch before, too
            return Needs(memory=batches * (pinned or size) + labels)
        held = workers * self.worker_bytes + self.probes.held_bytes(settings)
        # a batch has two files for each of images, labels and indices; a worker has pipes, queues
        return Needs(
            shm=batches * size if workers else 0,
            memory=batches * (size + pinned) + held,
            open_files=6 * settings.batches_ahead + 10 * workers,
        )

    def refusal(self, settings: FeedSettings, beside: Needs = NONE) -> str | None:
        """Returns why ``settings`` cannot fit on this rank, or None.

        Another feed takes what is ``beside``; the line does not show it.
        """
        limits = self.limits
        for what, asked, taken, free, kept, told in zip(
            ("shared memory", "memory", "open files (ulimit -n raises them)"),
            self.needs(settings),
            beside,
            (limits.shm_bytes, limits.memory_bytes, limits.open_files - limits.files_open),
            # for what the reckoning leaves out; of files for logs, checkpoints and libraries
            ((limits.shm_bytes or 0) / 5, limits.memory_bytes / 5, 64),
            (shown, shown, str),
            strict=True,
        ):
            if asked and free is not None and asked > free - kept - taken:
                return (
                    f"the feed would take {told(asked)} of {what}, of which {told(free)} are free "
                    f"({told(kept)} are kept back): not tried"
                )
        return None

    def unfit(self, settings: FeedSettings) -> str | None:
        """Returns why ``settings`` cannot fit on all ranks, or None."""
        return next(filter(None, self.ranks.gathered(self.refusal(settings))), None)

    def val_beside(self, train: FeedSettings) -> FeedSettings:
        """Returns the validation feed's settings, with as many workers as fit beside ``train``."""
        val = self.probes.val_settings(train)
        while val.num_workers and self.refusal(val, self.needs(train)):
            val = replace(val, num_workers=val.num_workers - 1)
        return val

    def report(self, before: Trial, after: Trial, **found: Any) -> TuningReport:
        """Returns what a search found, with all that was measured."""
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
            notes=(f"images/s are those of the slowest of {size} ranks",) * (size > 1),
            worker_bytes=self.worker_bytes,
            **found,
        )

    def supplied(self, feed: Backend, limit_s: float, skip: int = 0) -> Supply:
        """Takes batches as fast as ``feed`` gives them, counts samples in its workers, closes it.

        A worker's batches may take seconds each, and come in bursts: counting batches here would
        say nothing in a short time. The window opens when every worker has moved and the queue is
        full, after ``skip`` batches. The window closes after ``limit_s``, or after three of them if
        the interval is over 20 % (uneven samples), and no sooner than a first batch was seen. The
        clock is read before any worker is ended. All ranks stop together.

        Raises:
            BadSample: a sample cannot be read.
            LoaderError: a worker died, or gave nothing in time, or there is no shared memory to
                count in.
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
                    supply.look(looked, self.cpu_now(), feed.meter.work())
                    is_over = supply.is_known(limit_s) and (self.batch or supply.last) is not None
                except Exception:
                    # all ranks are told before it is raised
                    self.ranks.smallest(-1.0)
                    raise
                # every rank comes here equally often, whatever its own feed does
                agreed = self.ranks.smallest(float(is_over))
            if agreed < 0:
                raise LoaderError("refused on another rank")
            if feed.worker_pids:
                with suppress(psutil.Error):
                    supply.worker_bytes = psutil.Process(feed.worker_pids[0]).memory_full_info().uss
            if self.batch is None and supply.last is not None:
                # lent, as its feed has it
                images, labels, indices = (tensor.clone() for tensor in supply.last[:3])
                self.batch = HostBatch(images, labels, indices)
        return supply

    def _supply(self, settings: FeedSettings, limit_s: float) -> Trial:
        # samples that have loaded before: none of them can hang this process, nor is decoded in it
        cursor = self.probes.cursor
        seen = len(cursor.seen)
        again = settings.num_workers == 0 and seen > 0
        found = self.supplied(self.probes.probe(settings, again=again), limit_s, again * seen)
        # before a worker has been seen, its memory is assumed
        self.worker_bytes = max(self.ranks.gathered(found.worker_bytes)) or self.worker_bytes
        if found.batches and not again:
            cursor.saw(found.batches)
        return Trial(settings, "supply", found.rate, cost=found.cost)

    def _steps(self, settings: FeedSettings, limit_s: float) -> Trial:
        # without workers on samples that have come from one: none of them can hang this process
        again = settings.num_workers == 0
        with closing(self.probes.probe(settings, again=again)) as feed:
            run = self.trainee.deliver(feed, in_flight(settings), limit_s)
        count = len(run.images)
        if count == 0:
            raise LoaderError("refused on another rank")
        # the interval is that of ten blocks, each at least a burst: a batch from each process
        burst = settings.num_workers if settings.backend == PROCESSES else 1
        block = max(1, math.ceil(count / _BLOCKS), min(burst, count // 2))
        blocks = range(count % block, count, block)
        rate = Rate.of(np.add.reduceat(run.images, blocks), np.add.reduceat(run.seconds, blocks))
        return Trial(settings, "steps", rate, wait_fraction=run.stall_fraction)

    def _passes(self, settings: FeedSettings, limit_s: float) -> Trial:
        """Times a loader as the tutorial does: four passes, each with its start-up."""
        begin = self.now()
        images = 0
        for _ in range(4):
            with closing(self.probes.probe(settings)) as feed:
                for batch in itertools.islice(feed, 15):
                    images += len(batch.labels)
                    signals.check()
        return Trial(settings, "supply", Rate.of([images], [self.now() - begin]))
