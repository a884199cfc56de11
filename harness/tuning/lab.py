"""Runs what a search asks for, on all ranks together, and turns whatever goes wrong into a refusal
with its symptom.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from harness.feed.gauge import Gauge
from harness.feed.interface import PROCESSES, FeedSettings, HostBatch
from harness.runtime import accelerator
from harness.runtime.errors import BadSample, LoaderError, printable
from harness.runtime.limits import Limits
from harness.tuning import capacity, probe
from harness.tuning.figures import Probes, Ranks, Rate, Trainee, Trial
from harness.tuning.search import Ask, in_flight
from harness.watch.figures import StepRun

# the tutorial's
PASSES = 4
PASS_BATCHES = 15
_WORKER_BYTES = 100 << 20  # private memory of a worker before one was looked at
_BLOCKS = 10
_PIN_GAIN = 0.05


@dataclass(slots=True)
class Lab:
    """Measures settings for one data set and one step.

    Attributes:
        worker_bytes: private memory of one worker, the largest seen.
        batch: a batch of the data set, in memory of its own, once one has been seen.
        first_s: what first steps took longer than others, which training has to pay anyway.
        launch_s: of the step, as ``StepRun`` has it.
    """

    probes: Probes
    trainee: Trainee
    limits: Limits
    ranks: Ranks
    worker_bytes: int = _WORKER_BYTES
    batch: HostBatch | None = None
    first_s: float = 0.0
    launch_s: float = 0.0
    _sample_s: float = 0.0  # the longest mean of a probe
    _start_s: float = 0.0  # of as many workers as there are cores, the longest that was seen
    _seen: int = 0  # batches of the last probe on samples of its own
    _batch_bytes: dict[int, int] = field(
        default_factory=dict
    )  # by batch size, where only loading one tells

    def attempt(self, ask: Ask) -> Trial:
        """What came of one measurement: the slowest rank's figures.

        Raises:
            BadSample: a sample cannot be read: no setting's fault.
        """
        kind = "supply" if ask.kind == "passes" else ask.kind
        refusals = self.ranks.gathered(self.refusal(ask.settings))
        if refused := next(filter(None, refusals), None):
            return Trial(ask.settings, kind, refused=refused)
        begin = self.now()
        bad = None
        try:
            trial = getattr(self, f"_{ask.kind}")(ask)
        except BadSample as error:
            bad = (error.where, error.reason)
            trial = Trial(ask.settings, kind)
        except (MemoryError, torch.OutOfMemoryError):
            trial = Trial(ask.settings, kind, refused="out of memory")
        except LoaderError as error:
            trial = Trial(ask.settings, kind, refused=_symptom(printable(str(error))))
        outcome = dataclasses.replace(trial, seconds=self.now() - begin), bad
        outcomes: list[tuple[Trial, tuple[str, str] | None]] = self.ranks.gathered(outcome)
        for _, where in outcomes:
            if where is not None:
                raise BadSample(*where)
        return min(
            (trial for trial, _ in outcomes), key=lambda t: t.rate.images_per_s if t.rate else -1.0
        )

    def demand(
        self,
        limit_s: float,
        rate: Callable[[Sequence[float], Sequence[float]], Rate] = Rate.typical,
    ) -> tuple[Rate, float] | None:
        """Images/s of the step on the slowest rank, and its processor seconds per image; None
        without any batch.

        By default it is the median step's, which a busy machine's slow steps leave alone;
        ``Rate.of`` counts these as well.
        """
        if self.batch is None:
            return None
        run = self.trainee.demand(self.batch, limit_s)
        own = rate(run.images, run.seconds), run.cpu_s / sum(run.images)
        found: list[tuple[Rate, float]] = self.ranks.gathered(own)
        self.first_s += -self.ranks.smallest(-run.first_s)
        self.launch_s = -self.ranks.smallest(-run.launch_s)
        return min(found, key=lambda rank: rank[0].images_per_s)

    @property
    def now(self) -> Callable[[], float]:
        """The clock."""
        return accelerator.of(self.trainee.device).now

    def pays_to_pin(self, own: FeedSettings) -> bool:
        """Whether page-locked batches reach the device sooner; never without a CUDA device."""
        if not accelerator.of(self.trainee.device).has_streams or self.batch is None:
            return False
        pays = self.refusal(dataclasses.replace(own, pin_memory=True)) is None
        try:
            pageable_s, pinned_s = (
                probe.measure_copies(self.batch.images, self.trainee.device) if pays else (0.0, 0.0)
            )
        except RuntimeError:  # no room for page-locked memory
            pays = False
        return self.ranks.smallest(float(pays and pinned_s < (1 - _PIN_GAIN) * pageable_s)) > 0

    def refusal(self, settings: FeedSettings) -> str | None:
        """Why ``settings`` cannot fit, with the arithmetic, or None."""
        held = self.probes.held_bytes(settings)
        return capacity.refusal(
            settings, self.batch_bytes(settings), self.worker_bytes, self.limits, held_bytes=held
        )

    def batch_bytes(self, settings: FeedSettings) -> int | None:
        """Bytes of one batch's tensors, where they are known."""
        return self.probes.batch_bytes(settings) or self._batch_bytes.get(settings.batch_size)

    def memory_bytes(self, settings: FeedSettings) -> int:
        """What a feed of ``settings`` takes: its workers' private memory, its batches in flight,
        and images that it holds.
        """
        held = self.probes.held_bytes(settings)
        needs = capacity.needs(settings, self.batch_bytes(settings), self.worker_bytes, held)
        return needs.memory_bytes

    def _supply(self, ask: Ask) -> Trial:
        try:
            gauge = Gauge(ask.settings.num_workers)
        except (OSError, RuntimeError) as error:
            raise LoaderError(f"no shared memory for counting: {error}") from error
        again = (
            ask.settings.num_workers == 0 and self._seen > 0
        )  # none of these hangs this process, and none is to be decoded
        feed = self.probes.probe(self._patient(ask.settings), gauge, again=again)
        until = probe.Until(
            ask.limit_s,
            ask.target,
            need_batch=self.batch is None,
            skip=self._seen if again else 0,
            start_s=self._starting_s(ask.settings),
        )
        found = probe.measure_supply(feed, gauge, self.ranks, until, self.now)
        self._learn(found, ask.settings.num_workers)
        if found.batches and not again:
            self._seen = found.batches
            self.probes.saw(found.batches)
        memory = self.memory_bytes(ask.settings)
        return Trial(
            ask.settings, "supply", found.rate, found.images, cost=found.cost, memory_bytes=memory
        )

    def _steps(self, ask: Ask) -> Trial:
        in_process = (
            ask.settings.num_workers == 0
        )  # these samples have come from workers: none of them hangs this process
        feed = self.probes.probe(self._patient(ask.settings), again=in_process)
        try:
            run = self.trainee.deliver(feed, in_flight(ask.settings), ask.limit_s)
        finally:
            feed.close()
        if not run.images:
            raise LoaderError("refused on another rank")
        bursts = (
            ask.settings.num_workers if ask.settings.backend == PROCESSES else 1
        )  # of a batch from each worker
        memory = self.memory_bytes(ask.settings)
        rate = _rate(run, max(1, bursts))
        return Trial(
            ask.settings,
            "steps",
            rate,
            sum(run.images),
            wait_fraction=run.stall_fraction,
            memory_bytes=memory,
        )

    def _passes(self, ask: Ask) -> Trial:
        settings = self._patient(ask.settings)
        images, seconds = probe.measure_passes(
            lambda: self.probes.probe(settings), PASSES, PASS_BATCHES
        )
        return Trial(ask.settings, "supply", Rate.of([images], [seconds]), images)

    def _learn(self, found: probe.Supply, workers: int) -> None:
        seen = int(-self.ranks.smallest(-found.worker_bytes))
        if seen:
            self.worker_bytes = (
                seen if self.worker_bytes == _WORKER_BYTES else max(self.worker_bytes, seen)
            )
        self._sample_s = max(self._sample_s, found.cost.wall_s)
        if workers:
            self._start_s = max(self._start_s, found.first_s / self._turns(workers))
        if found.batch is not None and self.batch is None:
            self.batch = found.batch
            tensors = (found.batch.images, found.batch.labels, found.batch.indices)
            self._batch_bytes[len(found.batch.labels)] = sum(tensor.nbytes for tensor in tensors)

    def _patient(self, settings: FeedSettings) -> FeedSettings:
        """``settings`` that wait for a batch as long as workers took to start and three batches to
        be made, at the slowest.
        """
        wait_s = 3 * settings.batch_size * self._sample_s if self._sample_s else 2 * probe.STUCK_S
        return dataclasses.replace(
            settings, timeout_s=self._starting_s(settings) + wait_s + probe.STUCK_S
        )

    def _starting_s(self, settings: FeedSettings) -> float:
        """Seconds that the workers may take to start: as long as was seen, for each time that the
        cores have to start some.
        """
        workers = settings.num_workers
        return max(probe.START_S * max(1, workers), self._start_s * self._turns(workers))

    def _turns(self, workers: int) -> int:
        """How often the cores have to start workers."""
        return math.ceil(workers / max(1.0, self.limits.cores))


def _symptom(text: str) -> str:
    """The text of a LoaderError, less advice on settings that are the probe's own."""
    return (
        "no batch came: the workers hang, or the storage does"
        if "loader.timeout_s" in text
        else text
    )


def _rate(run: StepRun, cycle: int) -> Rate:
    """The rate of consecutive steps, in up to ten blocks of whole cycles of so many batches, which
    come in bursts.
    """
    cycles = len(run.images) // cycle
    cycle = cycle if cycles > 1 else 1  # too few: by single steps
    skip = len(run.images) % cycle
    size = cycle * -(-max(1, len(run.images) // cycle) // _BLOCKS)
    blocks = range(skip, len(run.images), size)
    return Rate.of(
        [sum(run.images[i : i + size]) for i in blocks],
        [sum(run.seconds[i : i + size]) for i in blocks],
    )
