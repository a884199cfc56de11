"""Which loader settings to try next, when to stop, and which to choose: policy without a clock.

A search is a generator: it yields what to measure, is sent what came of it, and returns its choice.
So the tutorial's grid and ``tuner=auto`` run on the same measurements, and both can be tested on
made-up machines.

``tuner=auto`` looks at the user's setting first: what a sample costs in its workers, and what real
steps get from it. Only where they wait for data is something else tried, by real steps too: as many
workers as the model of throughput asks for, then another backend. The rules have their numbers in
docs/tuning.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.feed.interface import (
    ARRAYS,
    PROCESSES,
    THREADS,
    FeedSettings,
)
from harness.tuning.measures import Kind, Rate, SampleCost, Trial
from harness.tuning.model import BUSY, Model

# supply over demand that is aimed at
MET = 1.05
# delivered over demand with which there is nothing to gain
FED = 0.95
# batches ahead where samples are uneven: of all threads together, of each process
_DEEP = {THREADS: 16, PROCESSES: 4}
# seconds of a measurement, of which half are the feed's start and what is left out
_TAKES_S = {"supply": 1.0, "steps": 1.5}
# by what they take beside their workers: processes share no memory
_CHEAPEST = (ARRAYS, THREADS, PROCESSES)


@dataclass(frozen=True, slots=True)
class Ask:
    """One measurement that a search asks for.

    Attributes:
        kind: "supply", "steps" (see ``Trial``) or "passes": as the tutorial times its loader,
            start-up included.
        limit_s: how long to measure.
    """

    settings: FeedSettings
    kind: Kind | Literal["passes"]
    limit_s: float = 1.5


@dataclass(frozen=True, slots=True)
class Side:
    """What one setting gives: a row of the table before and after.

    Attributes:
        images_per_s: delivered to training steps, measured or predicted; of the loader alone where
            a search does not run steps; None where neither could be had.
        wait_fraction: share of the time in which the steps wait for data.
        memory_bytes: the workers' private memory and the batches in flight.
    """

    settings: FeedSettings
    images_per_s: Rate | None = None
    wait_fraction: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search found.

    Attributes:
        before: the user's own settings.
        after: the choice.
        demand: images/s that the step takes, as far as the search has learned; None where it did
            not look.
        reason: why this choice, in sentences without the last period.
        complete: False where the budget ended the search.
    """

    before: Side
    after: Side
    demand: Rate | None = None
    reason: str = ""
    complete: bool = True

    @property
    def settings(self) -> FeedSettings:
        """The choice for the training feed."""
        return self.after.settings

    @property
    def ceiling(self) -> float | None:
        """The speed-up over ``before`` if loading were free; None where that is not known."""
        before = self.before.images_per_s
        if not (self.demand and before):
            return None
        return max(1.0, self.demand.images_per_s / before.images_per_s)

    @property
    def sentence(self) -> str:
        """What the step takes, what settings deliver, and why one was chosen."""
        before = self.before
        after = self.after
        if not (self.ceiling and after.images_per_s):
            return f"Chosen: {after.settings}. {self.reason}."
        rates = (
            f"The model takes {self.demand} images/s. {before.settings} delivers "
            f"{before.images_per_s}"
        )
        if after.settings != before.settings:
            return f"{rates}, {after.settings} {after.images_per_s}. {self.reason}."
        if FED * self.ceiling <= 1:
            return f"Nothing to gain (ceiling {self.ceiling:.1f}x). {rates}. {self.reason}."
        return f"{rates}, and stays. {self.reason}."


Search = Generator[Ask, Trial, Choice]
Asking = Generator[Ask, Trial, None]


def follow(search: Search, attempt: Callable[[Ask], Trial]) -> Choice:
    """Runs a search to its choice; ``attempt`` measures what is asked."""
    # a generator is begun with None
    trial: Any = None
    while True:
        try:
            ask = search.send(trial)
        except StopIteration as end:
            choice: Choice = end.value
            return choice
        trial = attempt(ask)


def in_flight(settings: FeedSettings) -> int:
    """Returns how many batches are made, or in the making, before one is taken.

    Each process makes its own; threads make one together.
    """
    each = settings.prefetch_factor or 0
    if settings.backend != THREADS:
        return settings.num_workers * each
    return each + (settings.num_workers > 0)


def cost_of(settings: FeedSettings) -> tuple[int, int, int, bool]:
    """Returns what a setting costs the machine, as a key for sorting.

    That is workers, then the backend, batches in flight, pinned memory.
    """
    backend = _CHEAPEST.index(settings.backend)
    return settings.num_workers, backend, in_flight(settings), settings.pin_memory


def grid(own: FeedSettings, cores: int, pin_choices: Sequence[bool], budget_s: float) -> Search:
    """Searches num_workers x pin_memory as a well-known tutorial does, after ``own``.

    For each pin_memory, num_workers goes 0, 4, 8, ... up to twice the cores until one is no faster
    than the best before it; then the three values on each side of that best are tried, and the
    fastest of all is taken. Its faults stay in: it times the workers' start and their primed queue
    with the loading, the page cache favours what runs later, it does not know how fast the model
    is, and it has no statistics. It is the baseline for better searches. (As printed, the tutorial
    gives ``num_workers`` to the loader on CUDA machines alone, and elsewhere compares one setting
    with itself.)
    """
    trials: dict[FeedSettings, Trial] = {}

    def is_over() -> bool:
        return sum(trial.seconds for trial in trials.values()) > budget_s

    def attempt(settings: FeedSettings) -> Generator[Ask, Trial, float]:
        if settings not in trials:
            if is_over():
                return 0.0
            trials[settings] = yield Ask(settings, "passes")
        return trials[settings].images_per_s

    yield from attempt(own)
    for pin in pin_choices:
        base = replace(own, pin_memory=pin)
        best = 0
        best_rate = 0.0
        for workers in range(0, 2 * cores + 1, 4):
            rate = yield from attempt(replace(base, num_workers=workers))
            if rate > best_rate:
                best = workers
                best_rate = rate
                continue
            # one that is no faster: look around the best
            for near in range(max(0, best - 3), best + 4):
                yield from attempt(replace(base, num_workers=near))
            break
    chosen = min(trials.values(), key=lambda trial: (-trial.images_per_s, cost_of(trial.settings)))
    # where all were refused
    chosen = chosen if chosen.rate else trials[own]
    return Choice(
        before=Side(own, trials[own].rate),
        after=Side(chosen.settings, chosen.rate),
        reason="It is the fastest of those tried, start-up included. How fast the model is was not "
        "measured",
        complete=not is_over(),
    )


@dataclass(eq=False)
class AutoSearch:
    """The look at one problem; ``run`` is its generator.

    Attributes:
        own: the user's settings.
        trials: the probes so far: of ``own``, or of one worker where it has none or failed; the
            last succeeded. Grows.
        backends: the names of the backends, ``own``'s among them, the cheapest last.
        demand: images/s that the step takes with a batch at hand, on the slowest rank.
        modelled: a model of throughput by what a probe has found.
        most: workers that may be tried.
        pin_memory: whether page-locked batches pay.
        fits: why a setting does not fit into memory, or None.
        left_s: seconds left for the search.
    """

    own: FeedSettings
    trials: list[Trial]
    backends: Sequence[str]
    demand: Rate
    modelled: Callable[[SampleCost, int], Model]
    most: int
    pin_memory: bool
    fits: Callable[[FeedSettings], str | None]
    left_s: float

    def __post_init__(self) -> None:
        # images/s
        self.takes = self.demand.images_per_s
        # the best measurement of each setting, alone and by real steps
        self.supply: dict[FeedSettings, Trial] = {}
        self.steps: dict[FeedSettings, Trial] = {}
        # by backend, of those that were probed
        self.models: dict[str, Model] = {}
        self.complete = True
        for trial in self.trials:
            self._note(trial)
        self.probed = self.trials[-1].settings
        self.backend = self.probed.backend
        # the setting to beat
        self.have = self.probed if self._refused(self.own) else self.own

    def run(self) -> Search:
        """Asks for what has to be measured, and returns the choice."""
        if not self._has_time("supply"):
            return self._choice(self.have)
        # the loader alone may suffice, and the processors still be too few for both
        alone = self.supply.get(self.have)
        supply = alone.images_per_s if alone else self._got(self.have)
        if self._is_uneven():
            return (yield from self._outlast(supply))
        if supply >= FED * self.takes or self.backend == ARRAYS:
            yield from self._measure("steps", self.have)
        if not self._is_fed(self.have):
            yield from self._search()
        # rule 5: fewer workers, unless these would only get less of the processors
        chosen = self._best()
        model = self.models.get(chosen.backend)
        if model and not model.is_crowded and chosen.num_workers > 1:
            goal = MET * self.takes if self._is_fed(chosen) else self._got(chosen)
            if (fewest := model.workers_for(goal)) < chosen.num_workers:
                yield from self._measure("supply", replace(chosen, num_workers=fewest))
        # rule 2: something else may have slowed the setting to beat the first time
        chosen = self._best()
        have = self.have
        if chosen != have and have.num_workers and not (self._is_fed(have) or self._refused(have)):
            kind: Kind = "steps" if have in self.steps else "supply"
            if self._has_time(kind):
                yield from self._ask(kind, have)
                chosen = self._best()
            elif self._got(chosen) < 1.5 * self._got(have):
                chosen = have
        return self._choice(chosen)

    def _outlast(self, supply: float) -> Search:
        """Asks for a queue that outlasts a few slow samples, which no short run judges (rule 6)."""
        have = self.have
        # a queue of K batches is empty for less than (D / S)^K of the time, if these differ as
        # much as exponential times
        if (self.takes / max(supply, self.takes)) ** in_flight(have) <= 1 - FED:
            return self._choice(have)
        base = self._base(self.backend)
        enough = self.model.workers_for(1.15 * self.model.reachable)
        workers = min(max(enough, have.num_workers), self._most(self.backend))
        depth = max(_DEEP.get(self.backend, 2), have.prefetch_factor or 0)
        deep = replace(base, num_workers=workers)
        depth = self._largest(depth, lambda k: replace(deep, prefetch_factor=k))
        deep = replace(deep, prefetch_factor=depth)
        yield from self._measure("supply", deep)
        return self._choice(have if self._refused(deep) else deep)

    def _search(self) -> Asking:
        """Asks for more workers (rule 3), then for the other backends (rule 4)."""
        base = self._base(self.backend)
        cost = self.model.cost
        beside = self.backend == THREADS or bool(self.steps)
        # where a sample waits, for storage or for the interpreter, one worker alone may take less
        if cost.cpu_s < 0.8 * cost.wall_s and self.probed.num_workers > 1:
            yield from self._measure("supply", replace(base, num_workers=1))
        more = replace(base, num_workers=self._wanted(self.backend))
        if more.num_workers > self.have.num_workers:
            yield from self._try(more, beside)
        for backend in reversed(self.backends):
            best = self._best()
            # a backend that needs less time to be tried is not to win by that
            if self._is_fed(best) or not self.complete:
                return
            # processes hand batches over besides
            full = self._got(best) >= BUSY * self.model.roofline
            if backend != self.backend and not (backend == PROCESSES and full):
                other = replace(self._base(backend), num_workers=self._wanted(backend))
                yield from self._try(other, backend != PROCESSES)

    # What is measured

    def _try(self, settings: FeedSettings, beside: bool) -> Asking:
        """Asks what ``settings`` give alone, and if that may be best, ``beside`` real steps."""
        beside = beside and not self._steps_are_long
        if not self._has_time("supply", *["steps"] * beside):
            return
        yield from self._measure("supply", settings)
        if beside and settings == self._best(unseen=True):
            yield from self._measure("steps", settings)

    def _measure(self, kind: Kind, settings: FeedSettings) -> Asking:
        """Asks for one measurement, unless it was made, cannot be, or would tell nothing."""
        known = self.steps if kind == "steps" else self.supply
        is_vain = kind == "steps" and self._steps_are_long
        if not (is_vain or settings in known or self._refused(settings)) and self._has_time(kind):
            yield from self._ask(kind, settings)

    def _ask(self, kind: Kind, settings: FeedSettings) -> Asking:
        trial = yield Ask(settings, kind, _TAKES_S[kind] / 2)
        self.left_s -= trial.seconds
        self.trials.append(trial)
        self._note(trial)

    def _has_time(self, *kinds: str) -> bool:
        """Returns whether these measurements fit into the time; else the look is incomplete."""
        is_left = self.left_s >= sum(_TAKES_S[kind] for kind in kinds)
        self.complete &= is_left
        return is_left

    def _note(self, trial: Trial) -> None:
        settings = trial.settings
        known = self.steps if trial.kind == "steps" else self.supply
        if trial.images_per_s > (known[settings].images_per_s if settings in known else 0.0):
            known[settings] = trial
        if trial.cost is None:
            return
        backend = settings.backend
        model = self.modelled(trial.cost, settings.num_workers)
        if backend not in self.models or model.cost.wall_s < self.models[backend].cost.wall_s:
            self.models[backend] = model

    # What follows from it

    @property
    def model(self) -> Model:
        """The model of the user's backend, or of the one that was probed in its place."""
        return self.models[self.backend]

    def _refused(self, settings: FeedSettings) -> bool:
        failed = any(trial.refused for trial in self.trials if trial.settings == settings)
        return failed or self.fits(settings) is not None

    def _largest(self, most: int, make: Callable[[int], FeedSettings]) -> int:
        """Returns the largest number up to ``most`` whose setting fits; at least 1."""
        return next((n for n in range(most, 1, -1) if self.fits(make(n)) is None), 1)

    def _base(self, backend: str) -> FeedSettings:
        """Returns the user's settings for a backend, pinned if that pays."""
        depth = self.own.prefetch_factor if self.have == self.own else 2
        return replace(self.own, backend=backend, pin_memory=self.pin_memory, prefetch_factor=depth)

    def _most(self, backend: str) -> int:
        """Returns the most workers that may be tried and that fit; at least 1."""
        base = self._base(backend)
        # what was refused before it ran is for ``fits`` to say
        failed = [
            trial.settings.num_workers - 1
            for trial in self.trials
            if trial.refused and trial.seconds and trial.settings.backend == backend
        ]
        return self._largest(min([self.most, *failed]), lambda n: replace(base, num_workers=n))

    def _wanted(self, backend: str) -> int:
        """Returns the workers that demand asks for by the model, or that fill the processors."""
        goal = min(MET * self.takes, self.model.roofline)
        return min(self.model.workers_for(goal), self._most(backend))

    def _is_uneven(self) -> bool:
        """Returns whether a few samples take so long that whole batches differ much."""
        cost = self.model.cost
        size = self.own.batch_size
        deviation_s = math.sqrt(size) * cost.variation * cost.wall_s
        return deviation_s > max(0.3 * size * cost.wall_s, 0.01)

    def _rate(self, settings: FeedSettings) -> Rate:
        """Returns what real steps get: as measured, else by the model and the loader alone."""
        run = self.steps.get(settings)
        if run and run.rate:
            return run.rate
        model = self.models.get(settings.backend)
        if model is None or self._refused(settings):
            return Rate.exactly(0.0)
        bounds = [model.delivered(settings.num_workers)]
        if settings in self.supply:
            bounds.append(self.supply[settings].images_per_s)
        for tried, trial in self.steps.items():
            if tried.backend == settings.backend:
                # the steps' pace beside this backend but for their waits; steps that wait longer
                # are too short to tell it
                bounds.append(trial.images_per_s / (1 - min(0.9, trial.wait_fraction or 0.0)))
                # fewer workers give no more
                if settings.num_workers <= tried.num_workers:
                    bounds.append(trial.images_per_s)
        return Rate.exactly(min(bounds))

    def _got(self, settings: FeedSettings) -> float:
        return self._rate(settings).images_per_s

    def _is_fed(self, settings: FeedSettings) -> bool:
        return self._got(settings) >= FED * self.takes

    @property
    def _steps_are_long(self) -> bool:
        """Whether a step takes so long that what threads share with it is nothing."""
        return self.own.batch_size > 0.25 * self.takes

    def _best(self, *, unseen: bool = False) -> FeedSettings:
        """Returns the cheapest measured setting that delivers as much as the best (rule 1).

        Those that cost more than the one to beat must deliver more. Threads and arrays in place of
        another backend count where steps were seen beside them, or are ``unseen`` too.
        """
        have = self.have
        rates = {have: min(self.takes, self._got(have))}
        all_count = unseen or self._steps_are_long
        for settings in (*self.supply, *self.steps):
            is_seen = settings in self.steps or settings.backend in (have.backend, PROCESSES)
            if not (all_count or is_seen):
                continue
            rate = min(self.takes, self._got(settings))
            pays = cost_of(settings) <= cost_of(have) or rate >= 1.05 * rates[have]
            if pays and not self._refused(settings):
                rates[settings] = rate
        return min((s for s in rates if rates[s] >= 0.97 * max(rates.values())), key=cost_of)

    # The choice

    def _choice(self, chosen: FeedSettings) -> Choice:
        after = self._side(chosen)
        return Choice(
            before=self._side(self.own),
            after=after,
            # a loader may have delivered more than the steps on one batch took
            demand=max(self.demand, after.images_per_s or self.demand),
            reason=self._reason(chosen),
            complete=self.complete,
        )

    def _side(self, settings: FeedSettings) -> Side:
        rate = self._rate(settings)
        waits = max(0.0, 1 - rate.images_per_s / self.takes)
        if settings in self.steps:
            waits = self.steps[settings].wait_fraction or 0.0
        return Side(settings, rate if rate.images_per_s else None, waits)

    def _reason(self, chosen: FeedSettings) -> str:
        cost = self.models.get(chosen.backend, self.model).cost
        who = "the trainer" if chosen.backend == ARRAYS else "a worker"
        each = (
            f"A sample takes {who} {cost.wall_s * 1e3:.2g} ms, "
            f"{min(1.0, cost.cpu_s / cost.wall_s):.0%} of it on a processor"
        )
        if not self.complete:
            return (
                f"{each}. The time was over before more could be tried (tuner.budget_s gives more)"
            )
        if self._is_uneven():
            return f"{each}, and a few take far longer: batches are kept ahead"
        if self._is_fed(chosen):
            return f"{each}. Nothing cheaper keeps the model busy"
        if chosen.num_workers == self._most(chosen.backend):
            return f"{each}. More workers are not tried, or do not fit (tuner.max_workers)"
        return f"{each}. Nothing cheaper delivers as much"
