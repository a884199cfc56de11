"""``tuner=auto``: a short look, after which the cheapest feed that keeps the model busy is chosen.

The user's setting comes first: what a sample costs in its workers, and what real steps get from
it. Only where they wait for data is something else tried, by real steps too: as many workers as the
model of throughput asks for, then another backend. The rules have their numbers in docs/tuning.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Literal

from harness.feed.interface import (
    ARRAYS,
    PROCESSES,
    THREADS,
    FeedSettings,
    with_backend,
    with_workers,
)
from harness.tuning.measures import Rate, Trial
from harness.tuning.model import BUSY, Model, undisturbed
from harness.tuning.search import DEEP, Ask, Choice, Search, cost_of, in_flight

# supply over demand that is aimed at
MET = 1.05
# delivered over demand with which there is nothing to gain
FED = 0.95
# seconds of a measurement, of which half are the feed's start and what is left out
_TAKES_S = {"supply": 1.0, "steps": 1.5}

Kind = Literal["supply", "steps"]
Asking = Generator[Ask, Trial, None]


@dataclass(eq=False)
class Look:
    """The look at one problem; ``run`` is its generator.

    Attributes:
        own: the user's settings.
        calibration: the probes so far: of ``own``, or of one worker where it has none or failed;
            the last succeeded.
        backends: the names of the backends, ``own``'s among them.
        demand: images/s that the step takes with a batch at hand, on the slowest rank.
        step_cpu_s: processor seconds of the step per image, in this process.
        cores: processors that one rank may use.
        most: workers that may be tried.
        pin_memory: whether page-locked batches pay.
        fits: why a setting does not fit into memory, or None.
        budget_s: seconds left for the search.
        alone_s: seconds per image that a process without workers spends on the step, and cannot
            load in.
    """

    own: FeedSettings
    calibration: tuple[Trial, ...]
    backends: tuple[str, ...]
    demand: Rate
    step_cpu_s: float
    cores: float
    most: int
    pin_memory: bool
    fits: Callable[[FeedSettings], str | None]
    budget_s: float
    alone_s: float

    def __post_init__(self) -> None:
        # images/s
        self.takes = self.demand.images_per_s
        self.trials: list[Trial] = []
        # by backend, of those that were probed
        self.models: dict[str, Model] = {}
        self.complete = True
        for trial in self.calibration:
            self._note(trial)
        probed = self.calibration[-1].settings
        self.backend = probed.backend
        # the setting to beat: the user's, else what fits of the one that was probed
        self.have = self.own
        if self._refused(self.own):
            workers = min(probed.num_workers, self._most(self.backend))
            self.have = with_workers(self._base(self.backend), workers)

    def run(self) -> Search:
        """Asks for what has to be measured, and returns the choice."""
        if not self._has_time(_TAKES_S["supply"]):
            return self._choice(self.have)
        # the loader alone may suffice, and the processors still be too few for both
        supply = max(
            (trial.images_per_s for trial in self._of("supply", self.have)),
            default=self._got(self.have),
        )
        if self._is_uneven():
            # a queue of K batches is empty for less than (D / S)^K of the time, if these differ as
            # much as exponential times
            if (self.takes / max(supply, self.takes)) ** in_flight(self.have) <= 1 - FED:
                return self._choice(self.have)
            # rule 6: no short run can judge a few slow samples; the queue must outlast them
            base = self._base(self.backend)
            enough = self.model.workers_for(1.15 * self.model.reachable)
            workers = min(max(enough, self.have.num_workers), self._most(self.backend))
            depth = max(DEEP.get(self.backend, 2), self.have.prefetch_factor or 0)
            depth = self._largest(depth, lambda k: with_workers(base, workers, k))
            deep = with_workers(base, workers, depth)
            yield from self._measure("supply", deep)
            return self._choice(self.have if self._refused(deep) else deep)
        if supply >= FED * self.takes or self.backend == ARRAYS:
            yield from self._measure("steps", self.have)
        if not self._is_fed(self.have):
            yield from self._search()
        # rule 5: fewer workers, unless these would only get less of the processors
        chosen = self._best()
        model = self.models.get(chosen.backend)
        if model and not model.is_crowded and chosen.num_workers > 1:
            goal = self._got(chosen)
            if self._is_fed(chosen):
                goal = MET * self.takes
            if (fewest := model.workers_for(goal)) < chosen.num_workers:
                yield from self._measure("supply", with_workers(chosen, fewest))
        # rule 2: something else may have slowed the setting to beat the first time
        chosen = self._best()
        have = self.have
        if chosen != have and have.num_workers and not (self._is_fed(have) or self._refused(have)):
            kind: Kind = "steps" if self._of("steps", have) else "supply"
            if self._has_time(_TAKES_S[kind]):
                yield from self._ask(kind, have)
                chosen = self._best()
            elif self._got(chosen) < 1.5 * self._got(have):
                chosen = have
        return self._choice(chosen)

    def _search(self) -> Asking:
        """Asks for more workers (rule 3), then for the other backends (rule 4)."""
        base = self._base(self.backend)
        cost = self.model.cost
        beside = self.backend == THREADS or bool(self._of("steps"))
        # where a sample waits, for storage or for the interpreter, one worker alone may take less
        waits = cost.cpu_s < 0.8 * cost.wall_s
        # where it does little else, and there is time for one of both, more are tried at once
        spare_s = self._left_s() - self._takes_s(beside)
        if cost.cpu_s < 0.2 * cost.wall_s and 0 <= spare_s < _TAKES_S["supply"]:
            waits = self.complete = False
        if waits and self.calibration[-1].settings.num_workers > 1:
            yield from self._measure("supply", with_workers(base, 1))
        more = with_workers(base, self._wanted(self.backend))
        if more.num_workers > self.have.num_workers:
            yield from self._try(more, beside=beside)
        for backend in sorted(self.backends, key=lambda backend: backend != ARRAYS):
            best = self._best()
            # a backend that needs less time to be tried is not to win by that
            if self._is_fed(best) or not self.complete:
                return
            # processes hand batches over besides
            full = self._got(best) >= BUSY * self.model.roofline
            if backend != self.backend and not (backend == PROCESSES and full):
                other = with_workers(self._base(backend), self._wanted(backend))
                yield from self._try(other, beside=backend != PROCESSES)

    # What is measured

    def _try(self, settings: FeedSettings, *, beside: bool) -> Asking:
        """Asks what ``settings`` give alone, and if that may be best, ``beside`` real steps."""
        if not self._has_time(self._takes_s(beside)):
            return
        yield from self._measure("supply", settings)
        if beside and settings == self._best(unseen=True):
            yield from self._measure("steps", settings)

    def _measure(self, kind: Kind, settings: FeedSettings) -> Asking:
        """Asks for one measurement, unless it was made, cannot be, or would tell nothing."""
        is_known = self._of(kind, settings) or self._refused(settings)
        if is_known or (kind == "steps" and self._steps_are_long()):
            return
        if self._has_time(_TAKES_S[kind]):
            yield from self._ask(kind, settings)

    def _ask(self, kind: Kind, settings: FeedSettings) -> Asking:
        self._note((yield Ask(settings, kind, _TAKES_S[kind] / 2)))

    def _has_time(self, seconds: float) -> bool:
        """Returns whether that much of the budget is left; without it the look is incomplete."""
        is_left = self._left_s() >= seconds
        self.complete = self.complete and is_left
        return is_left

    def _takes_s(self, beside: bool) -> float:
        """Returns the seconds of trying a setting, ``beside`` real steps too."""
        return _TAKES_S["supply"] + _TAKES_S["steps"] * (beside and not self._steps_are_long())

    def _left_s(self) -> float:
        spent = self.trials[len(self.calibration) :]
        return self.budget_s - sum(trial.seconds for trial in spent)

    def _note(self, trial: Trial) -> None:
        self.trials.append(trial)
        if trial.cost is None:
            return
        backend = trial.settings.backend
        cost = undisturbed(trial.cost, trial.settings.num_workers, self.cores)
        if backend not in self.models or cost.wall_s < self.models[backend].cost.wall_s:
            self.models[backend] = Model(
                demand=self.takes,
                cost=cost,
                cores=self.cores,
                step_cpu_s=self.step_cpu_s,
                alone_s=self.alone_s,
            )

    # What follows from it

    @property
    def model(self) -> Model:
        """The model of the user's backend, or of the one that was probed in its place."""
        return self.models[self.backend]

    def _of(self, kind: Kind, settings: FeedSettings | None = None) -> list[Trial]:
        """Returns the trials of a kind that gave a rate, of one setting or of all."""
        return [
            trial
            for trial in self.trials
            if trial.kind == kind and trial.rate and settings in (None, trial.settings)
        ]

    def _refused(self, settings: FeedSettings) -> bool:
        failed = any(trial.refused for trial in self.trials if trial.settings == settings)
        return failed or self.fits(settings) is not None

    def _largest(self, most: int, make: Callable[[int], FeedSettings]) -> int:
        """Returns the largest number up to ``most`` whose setting fits; at least 1."""
        return next((n for n in range(most, 1, -1) if self.fits(make(n)) is None), 1)

    def _base(self, backend: str) -> FeedSettings:
        """Returns the user's settings for a backend, pinned if that pays.

        As many batches are in flight as fit with one worker.
        """
        base = replace(with_backend(self.own, backend), pin_memory=self.pin_memory)
        depth = 2
        if not self._refused(self.own):
            depth = self.own.prefetch_factor or 2
        depth = self._largest(depth, lambda k: with_workers(base, 1, k))
        return replace(base, prefetch_factor=depth)

    def _most(self, backend: str) -> int:
        """Returns the most workers that may be tried and that fit; at least 1."""
        base = self._base(backend)
        # what was refused before it ran is for ``fits`` to say
        failed = [
            trial.settings.num_workers - 1
            for trial in self.trials
            if trial.refused and trial.seconds and trial.settings.backend == backend
        ]
        return self._largest(min([self.most, *failed]), lambda n: with_workers(base, n))

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
        if runs := [trial.rate for trial in self._of("steps", settings) if trial.rate]:
            return max(runs, key=lambda rate: rate.images_per_s)
        model = self.models.get(settings.backend)
        if model is None or self._refused(settings):
            return Rate.exactly(0.0)
        bounds = [model.delivered(settings.num_workers)]
        if supply := [trial.images_per_s for trial in self._of("supply", settings)]:
            bounds.append(max(supply))
        for run in self._of("steps"):
            if run.settings.backend == settings.backend:
                # the steps' pace beside this backend but for their waits; steps that wait longer
                # are too short to tell it
                bounds.append(run.images_per_s / (1 - min(0.9, run.wait_fraction or 0.0)))
                # fewer workers give no more
                if settings.num_workers <= run.settings.num_workers:
                    bounds.append(run.images_per_s)
        return Rate.exactly(min(bounds))

    def _got(self, settings: FeedSettings) -> float:
        return self._rate(settings).images_per_s

    def _is_fed(self, settings: FeedSettings) -> bool:
        return self._got(settings) >= FED * self.takes

    def _steps_are_long(self) -> bool:
        """Returns whether a step takes so long that what threads share with it is nothing."""
        return self.own.batch_size > 0.25 * self.takes

    def _best(self, *, unseen: bool = False) -> FeedSettings:
        """Returns the cheapest measured setting that delivers as much as the best (rule 1).

        Those that cost more than the one to beat must deliver more. Threads and arrays in place of
        another backend count where steps were seen beside them, or are ``unseen`` too.
        """
        have = self.have
        rates = {have: min(self.takes, self._got(have))}
        for settings in dict.fromkeys(trial.settings for trial in self.trials if trial.rate):
            counts = unseen or settings.backend in (have.backend, PROCESSES)
            if not (counts or self._steps_are_long() or self._of("steps", settings)):
                continue
            rate = min(self.takes, self._got(settings))
            pays = cost_of(settings) <= cost_of(have) or rate >= 1.05 * rates[have]
            if pays and not self._refused(settings):
                rates[settings] = rate
        return min((s for s in rates if rates[s] >= 0.97 * max(rates.values())), key=cost_of)

    # The choice

    def _choice(self, chosen: FeedSettings) -> Choice:
        before = self._rate(self.own)
        after = self._rate(chosen)
        return Choice(
            settings=chosen,
            before=before if before.images_per_s else None,
            after=after,
            # a loader may have delivered more than the steps on one batch took
            demand=max(self.demand, after, key=lambda rate: rate.images_per_s),
            waits=(self._waits(self.own), self._waits(chosen)),
            reason=self._reason(chosen),
            complete=self.complete,
        )

    def _waits(self, settings: FeedSettings) -> float:
        """Returns the share of the time that steps wait for data."""
        runs = [trial.wait_fraction or 0.0 for trial in self._of("steps", settings)]
        return min(runs, default=max(0.0, 1 - self._got(settings) / self.takes))

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
        if not self._is_fed(chosen) and chosen.num_workers == self._most(chosen.backend):
            return f"{each}. More workers are not tried, or do not fit (tuner.max_workers)"
        what = "keeps the model busy" if self._is_fed(chosen) else "delivers as much"
        return f"{each}. Nothing cheaper {what}"
