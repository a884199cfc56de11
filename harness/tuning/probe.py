"""Measures loader settings: what a loader supplies, and what steps get of it.

All ranks measure together. Whatever goes wrong becomes a refusal with its symptom.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import psutil
import torch

from harness.feed.interface import PROCESSES, Backend, FeedSettings, HostBatch, with_workers
from harness.feed.timed import TimedSteps
from harness.runtime import accelerator, signals
from harness.runtime.distributed import World
from harness.runtime.errors import BadSample, LoaderError, is_out_of_memory, printable
from harness.runtime.limits import Limits
from harness.tuning import capacity
from harness.tuning.capacity import Needs
from harness.tuning.measures import Probes, Rate, SampleCost, Trial
from harness.tuning.search import Ask, in_flight
from harness.watch.stages import Work

POLL_S = 0.05
# without a single sample for so long, the workers hang
STUCK_S = 10.0
_BLOCKS = 10

Clock = Callable[[], float]


@dataclass(slots=True)
class Supply:
    """What a loader gives with nothing consuming, counted sample by sample in its workers.

    Attributes:
        ask: the measurement.
        grew: when the number of samples that are done grew last.
        batches: how many have come.
        batch: the last of them in memory of its own, if ``ask`` needs one.
        worker_bytes: private memory of one worker; 0 without workers.
        points: the window: when, this process's processor seconds, and the workers' work so far.
    """

    ask: Ask
    grew: float
    batches: int = 0
    batch: HostBatch | None = None
    worker_bytes: int = 0
    points: list[tuple[float, float, Work]] = field(default_factory=list)
    # when every worker had moved, or all were seen to be at work
    _began: float | None = None
    # samples that were done at the last look
    _done: int = 0

    def look(self, at: float, cpu_s: float, work: Work) -> bool:
        """Notes how far the workers are. Returns whether enough is known.

        Raises:
            LoaderError: they have finished nothing for too long.
        """
        ask = self.ask
        allowed_s = STUCK_S
        if not work.samples:
            # what workers may take to start on a busy machine
            allowed_s += 3 * ask.settings.num_workers
        if work.samples > self._done:
            self._done = work.samples
            self.grew = at
        elif at - self.grew > allowed_s:
            raise LoaderError(
                f"no sample for {allowed_s:g} s: the workers hang, or the storage does"
            )
        # what came before is no measure of the feed's speed: it filled the queue
        is_full = self.batches > ask.skip + in_flight(ask.settings)
        has_moved = work.moved >= max(1, ask.settings.num_workers) and self.batches >= ask.skip
        if self._began is None and (is_full or has_moved):
            self._began = at
        # a queue that does not fill is waited for no longer
        if self._began is not None and (is_full or at - self._began >= 0.3):
            self.points.append((at, cpu_s, work))
        if len(self.points) < 3 or not self.images or (ask.needs_batch and not self.batches):
            return False
        # uneven samples take longer to be known
        factor = 3 if self.rate.half_width > 0.2 else 1
        return at - self.points[0][0] >= factor * ask.limit_s

    @property
    def images(self) -> int:
        """The samples in the window."""
        return self.points[-1][2].samples - self.points[0][2].samples

    @property
    def rate(self) -> Rate:
        """Images/s over the window, with the interval that ten blocks give."""
        times = [at for at, _, _ in self.points]
        samples = [work.samples for _, _, work in self.points]
        edges = np.linspace(times[0], times[-1], 1 + min(_BLOCKS, len(times) - 1))
        return Rate.of(np.diff(np.interp(edges, times, samples)), np.diff(edges))

    @property
    def cost(self) -> SampleCost:
        """What one sample of the window cost."""
        _, cpu_s, first = self.points[0]
        _, last_cpu_s, last = self.points[-1]
        count = self.images
        _, _, wall_s, square_s2, made_s = (np.subtract(last, first) / count).tolist()
        receive_s = (last_cpu_s - cpu_s) / count
        if self.ask.settings.backend != PROCESSES or self.ask.settings.num_workers == 0:
            # the samples are made in this process
            receive_s = max(0.0, receive_s - made_s)
        variation = math.sqrt(max(0.0, square_s2 - wall_s**2)) / wall_s
        return SampleCost(wall_s, made_s, variation, receive_s)


def measure_supply(
    feed: Backend,
    ranks: World,
    ask: Ask,
    now: Clock = time.perf_counter,
    cpu_now: Clock = time.process_time,
) -> Supply:
    """Takes batches as fast as ``feed`` gives them, counts samples in its workers, and closes it.

    A worker's batches may take seconds each, and come in bursts: counting batches here would say
    nothing in a short time. The window opens when every worker has moved and the queue is full,
    after what is to be skipped. The window closes after the limit, or after three of them if the
    interval is over 20 % (uneven samples). The clock is read before any worker is ended. All ranks
    stop together.

    Raises:
        BadSample: a sample cannot be read.
        LoaderError: a worker died, or none has finished a sample for ten seconds, or for a while
            longer at the start, or there is no shared memory to count in.
    """
    looked = now()
    supply = Supply(ask, looked)
    last = None
    feed.times_samples = True
    agreed = 0.0
    with closing(feed), closing(feed.polled(POLL_S)) as batches:
        while not agreed:
            try:
                batch = next(batches)
                signals.check()
                if batch is not None:
                    supply.batches += 1
                    last = batch
                if now() - looked < POLL_S:
                    continue
                looked = now()
                if feed.meter is None:
                    raise LoaderError("no shared memory for counting samples")
                is_over = supply.look(looked, cpu_now(), feed.meter.work())
            except Exception:
                # all ranks are told before it is raised
                ranks.smallest(-1.0)
                raise
            # every rank comes here equally often, whatever its own feed does
            agreed = ranks.smallest(float(is_over))
        if agreed < 0:
            raise LoaderError("refused on another rank")
        if feed.worker_pids:
            with suppress(psutil.Error):
                supply.worker_bytes = psutil.Process(feed.worker_pids[0]).memory_full_info().uss
        if ask.needs_batch and last is not None:
            supply.batch = last._replace(
                images=last.images.clone(), labels=last.labels.clone(), indices=last.indices.clone()
            )
    return supply


@dataclass(slots=True)
class Lab:
    """Measures settings for one data set and one step.

    Attributes:
        worker_bytes: private memory of the largest worker that was seen.
        batch: a batch of the data set, in memory of its own, once one has been seen.
        first_s: what first steps took longer than others, which training has to pay anyway.
        launch_s: of the step, as ``StepRun`` has it.
    """

    probes: Probes
    trainee: TimedSteps
    limits: Limits
    ranks: World
    worker_bytes: int = 100 << 20
    batch: HostBatch | None = None
    first_s: float = 0.0
    launch_s: float = 0.0
    _largest_bytes: int = 0

    def attempt(self, ask: Ask) -> Trial:
        """Returns what came of one measurement: the slowest rank's figures.

        Raises:
            BadSample: a sample cannot be read: no setting's fault.
        """
        trial = Trial(ask.settings, "steps" if ask.kind == "steps" else "supply")
        if refused := self.unfit(ask.settings):
            return replace(trial, refused=refused)
        begin = self.now()
        bad: BadSample | None = None
        # a worker that hangs is refused within a minute, however long the user's runs wait
        settings = ask.settings
        patience_s = min(settings.timeout_s or 60.0, 60.0)
        ask = replace(ask, settings=replace(settings, timeout_s=patience_s))
        try:
            if ask.kind == "steps":
                trial = self._steps(ask)
            elif ask.kind == "passes":
                # as the tutorial times a loader: four passes, each with its start-up
                images = 0
                for _ in range(4):
                    with closing(self.probes.probe(ask.settings)) as feed:
                        for batch in itertools.islice(feed, 15):
                            images += len(batch.labels)
                            signals.check()
                rate = Rate.of([images], [self.now() - begin])
                trial = replace(trial, rate=rate, images=images)
            else:
                trial = self._supply(ask)
        except BadSample as error:
            bad = error
        except LoaderError as error:
            refused = printable(str(error))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            refused = "out of memory"
        seconds = self.now() - begin
        trial = replace(trial, settings=settings, refused=refused, seconds=seconds)
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
        own = rate(run.images, run.seconds), run.cpu_s / sum(run.images)
        self.first_s += run.first_s
        self.launch_s = -self.ranks.smallest(-run.launch_s)
        slowest: tuple[Rate, float] = min(
            self.ranks.gathered(own), key=lambda rank: rank[0].images_per_s
        )
        return slowest

    @property
    def now(self) -> Clock:
        """The device's clock."""
        return accelerator.of(self.trainee.device).now

    def pays_to_pin(self, own: FeedSettings) -> bool:
        """Returns whether page-locked batches fit and reach the device 5 % sooner on every rank."""
        pays = False
        if self.refusal(replace(own, pin_memory=True)) is None:
            # the system may have no room for page-locked memory all the same
            with suppress(RuntimeError):
                copies_s = self.copies_s()
                pays = copies_s is not None and copies_s[1] < 0.95 * copies_s[0]
        return all(self.ranks.gathered(pays))

    def copies_s(self) -> tuple[float, float] | None:
        """Returns the median seconds of a batch's copy, from pageable and from pinned memory.

        They are measured in turn, one copy at a time: the host waits for each. None: no CUDA
        device, or no batch.

        Raises:
            RuntimeError: there is no room for page-locked memory.
        """
        own = accelerator.of(self.trainee.device)
        if not own.has_streams or self.batch is None:
            return None

        def taken_s(source: torch.Tensor) -> float:
            begin = own.now()
            own.copy(source)
            own.synchronize()
            return own.now() - begin

        images = self.batch.images
        pinned = own.pin(images)
        turns = [(taken_s(images), taken_s(pinned)) for _ in range(12)]
        # the first two warm up
        pageable_s, pinned_s = zip(*turns[2:], strict=True)
        return statistics.median(pageable_s), statistics.median(pinned_s)

    def needs(self, settings: FeedSettings) -> Needs:
        """Returns what a feed takes: private memory, batches in flight, images that it holds."""
        size = self.probes.batch_bytes(settings)
        held = self.probes.held_bytes(settings)
        return capacity.needs(settings, size, self.worker_bytes, held)

    def refusal(self, settings: FeedSettings, beside: Needs = capacity.NONE) -> str | None:
        """Returns why ``settings`` cannot fit on this rank, or None."""
        return capacity.refusal(self.needs(settings), self.limits, beside)

    def unfit(self, settings: FeedSettings) -> str | None:
        """Returns why ``settings`` cannot fit on all ranks, or None."""
        return next(filter(None, self.ranks.gathered(self.refusal(settings))), None)

    def val_beside(self, train: FeedSettings) -> FeedSettings:
        """Returns the validation feed's settings, with less until they fit beside ``train``.

        That is fewer batches in flight, then fewer workers.
        """
        val = self.probes.val_settings(train)
        while val.num_workers and self.refusal(val, self.needs(train)):
            if val.prefetch_factor and val.prefetch_factor > 1:
                val = replace(val, prefetch_factor=val.prefetch_factor - 1)
            else:
                val = with_workers(val, val.num_workers - 1)
        return val

    def _supply(self, ask: Ask) -> Trial:
        settings = ask.settings
        # samples that have loaded before: none of them can hang this process, nor is decoded in it
        seen = len(self.probes.cursor.seen)
        again = settings.num_workers == 0 and seen > 0
        ask = replace(ask, needs_batch=self.batch is None, skip=again * seen)
        feed = self.probes.probe(settings, again=again)
        found = measure_supply(feed, self.ranks, ask, self.now)
        # the largest worker of any rank and probe; before the first has been seen it is assumed
        self._largest_bytes = max(self._largest_bytes, *self.ranks.gathered(found.worker_bytes))
        self.worker_bytes = self._largest_bytes or self.worker_bytes
        self.batch = self.batch or found.batch
        if found.batches and not again:
            self.probes.cursor.saw(found.batches)
        return Trial(settings, "supply", found.rate, found.images, cost=found.cost)

    def _steps(self, ask: Ask) -> Trial:
        settings = ask.settings
        # without workers on samples that have come from one: none of them can hang this process
        again = settings.num_workers == 0
        with closing(self.probes.probe(settings, again=again)) as feed:
            run = self.trainee.deliver(feed, in_flight(settings), ask.limit_s)
        count = len(run.images)
        if count == 0:
            raise LoaderError("refused on another rank")
        # the interval is that of ten blocks of whole bursts, of a batch from each process; where
        # there are too few bursts, of steps
        burst = 1
        if settings.backend == PROCESSES and 1 < settings.num_workers <= count // 2:
            burst = settings.num_workers
        blocks = range(count % burst, count, burst * math.ceil(count // burst / _BLOCKS))
        rate = Rate.of(np.add.reduceat(run.images, blocks), np.add.reduceat(run.seconds, blocks))
        wait_fraction = run.stall_fraction
        return Trial(settings, "steps", rate, sum(run.images), wait_fraction=wait_fraction)
