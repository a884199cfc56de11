"""Searches loader settings: decides the next trial, the end and the choice.

The searches measure by a ``LoaderBenchmark``, in tests by a made-up machine that answers like one.
``tuner=auto`` looks at the user's setting first: what a sample costs in its workers, and what real
steps get from it. Only where they wait for data is something else tried, by real steps too: as many
workers as the model of throughput asks for, then another backend. The rules have their numbers in
docs/explanation/how-tuning-works.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import TunerConfig
from ..feed.base import ARRAYS, PROCESSES, THREADS, FeedSettings
from ..feed.threads import MOST_THREADS
from ..runtime.errors import rounded
from ..runtime.folder import log
from ..runtime.limits import Limits
from .lab import LoaderBenchmark
from .measures import BUSY, FED, Kind, Model, Rate, Trial, TuningReport, in_flight

# supply over demand that is aimed at
MET = 1.05
# batches ahead where samples are uneven: of all threads together, and of each process
_DEEP_THREADS = 16
_DEEP_PROCESS = 4
# seconds of a measurement, of which half are the feed's start and what is left out
_TAKES_S = {"supply": 1.0, "steps": 1.5}
# by what they take beside their workers: processes share no memory
_CHEAPEST = (ARRAYS, THREADS, PROCESSES)


def cost_of(settings: FeedSettings) -> tuple[int, int, int, bool]:
    """Returns what a setting costs the machine, as a key for sorting.

    That is workers, then the backend, batches in flight, pinned memory.
    """
    backend = _CHEAPEST.index(settings.backend)
    return settings.num_workers, backend, in_flight(settings), settings.pin_memory


def most_workers(config: TunerConfig, limits: Limits) -> int:
    """Returns the most workers that a search tries, but for the user's number."""
    return config.max_workers or min(MOST_THREADS, max(8, 4 * int(limits.cores)))


def grid(
    lab: LoaderBenchmark, own: FeedSettings, pin_choices: Sequence[bool], budget_s: float
) -> TuningReport:
    """Searches num_workers x pin_memory as a well-known tutorial does, after ``own``.

    For each pin_memory, num_workers goes 0, 4, 8, ... up to twice the cores until one is no faster
    than the best before it; then the three values on each side of that best are tried, and the
    fastest of all is taken. Its faults stay in: it times the workers' start and their primed queue
    with the loading, the page cache favours what runs later, it does not know how fast the model
    is, and it has no statistics. It is the baseline for better searches. (As printed, the tutorial
    gives ``num_workers`` to the loader only on CUDA machines, and elsewhere compares one setting
    with itself.)
    """
    trials: dict[FeedSettings, Trial] = {}

    def is_over() -> bool:
        return sum(trial.seconds for trial in trials.values()) > budget_s

    def attempt(settings: FeedSettings) -> float:
        if settings not in trials:
            if is_over():
                return 0.0
            trials[settings] = lab.attempt(settings, "passes")
        return trials[settings].images_per_s

    attempt(own)
    for pin in pin_choices:
        base = replace(own, pin_memory=pin)
        best = 0
        best_rate = 0.0
        for workers in range(0, 2 * max(1, int(lab.limits.cores)) + 1, 4):
            rate = attempt(replace(base, num_workers=workers))
            if rate <= best_rate:
                # no faster: look around the best
                for near in range(max(0, best - 3), best + 4):
                    attempt(replace(base, num_workers=near))
                break
            best = workers
            best_rate = rate
    chosen = min(trials.values(), key=lambda trial: (-trial.images_per_s, cost_of(trial.settings)))
    # where all were refused
    chosen = chosen if chosen.rate else trials[own]
    return lab.report(
        trials[own],
        chosen,
        search="grid",
        reason="It is the fastest of those tried, start-up included. How fast the model is was not "
        "measured",
        complete=not is_over(),
    )


@dataclass(eq=False)
class AutoSearch:
    """The search of ``tuner=auto`` in ``lab``, whose trials are all that it goes by.

    Attributes:
        own: the user's settings.
        config: the budget and the most workers.
        images_left: that this rank is still to be trained on.
        begin_s: when tuning began, on the lab's clock.
        complete: whether the time sufficed for all that was to be measured.
    """

    lab: LoaderBenchmark
    own: FeedSettings
    config: TunerConfig
    images_left: float = math.inf
    begin_s: float = 0.0
    complete: bool = True

    def run(self) -> TuningReport:
        """Measures what has to be measured, and returns the choice."""
        lab = self.lab
        own = self.own
        probe = self._probe()
        if probe.refused:
            log.warning("the loader could not be tuned: %s", probe.refused)
            # what did not even run does not fit
            ran = any(trial.seconds for trial in lab.trials)
            chosen = own if ran else replace(own, num_workers=0)
            why = "No setting could be measured"
            none, after = (Trial(settings, "supply") for settings in (own, chosen))
            return lab.report(none, after, search="auto", reason=why)
        self.demand, self.step_cpu_s = lab.demand(0.5)
        lab.tell(("demand", str(self.demand), "", "", "training steps on one preloaded batch"))
        # images/s
        self.takes = self.demand.images_per_s
        budget_s = self.config.budget_s
        if budget_s is None:
            # five seconds or seven steps, of which demand makes four; at most a tenth of the rest
            rest_s = self.images_left / min(self.takes, probe.images_per_s)
            budget_s = min(max(5.0, 7 * own.batch_size / self.takes), 0.1 * rest_s)
        # what the first step takes longer comes on top, for training pays that anyway
        self._left_s = lab.ranks.agreed(budget_s + lab.first_s - (lab.now() - self.begin_s))
        self.pin = lab.pays_to_pin(own)
        self.backend = probe.settings.backend
        # the setting to beat
        self.have = probe.settings if self._refused(own) else own
        chosen = self.have
        if self._has_time("supply"):
            chosen = self._outlasting() if self._is_uneven() else self._cheapest(probe.settings)
        after = self._side(chosen)
        return lab.report(
            self._side(own),
            after,
            search="auto",
            # a loader may have delivered more than the steps on one batch took
            demand=max(self.demand, after.rate or self.demand),
            reason=self._reason(chosen),
            complete=self.complete,
        )

    def _probe(self) -> Trial:
        """Measures the user's setting, or one worker; returns the first that succeeds, if any."""
        own = self.own
        trials = self.lab.trials
        modest = replace(own, num_workers=1, prefetch_factor=1)
        others = [replace(modest, backend=name) for name in self.lab.probes.backends]
        first = replace(own, num_workers=own.num_workers or 1)
        for settings in dict.fromkeys((first, modest, *others)):
            # threads that hang cannot be ended: none after workers that have died or hung
            if settings.backend != own.backend and any(trial.seconds for trial in trials):
                break
            if self.lab.attempt(settings, "supply", 0.5).rate:
                break
        return trials[-1]

    def _cheapest(self, probed: FeedSettings) -> FeedSettings:
        """Returns the cheapest setting that delivers as much as the best, after a search."""
        have = self.have
        # the loader alone may suffice, and the processors still be too few for both
        if self._supply(have) >= FED * self.takes or self.backend == ARRAYS:
            self._measure(have, "steps")
        if not self._is_fed(have):
            cost = self.models[self.backend].cost
            # where a sample waits, for storage or the interpreter, one worker alone may take less
            if cost.cpu_s < 0.8 * cost.wall_s and probed.num_workers > 1:
                self._measure(self._made(self.backend, 1), "supply")
            self._search()
        # rule 5: fewer workers, unless these would only get less of the processors
        chosen = self._best()
        model = self.models.get(chosen.backend)
        if model and not model.is_crowded and chosen.num_workers > 1:
            goal = MET * self.takes if self._is_fed(chosen) else self._got(chosen)
            if (fewest := model.workers_for(goal)) < chosen.num_workers:
                self._measure(replace(chosen, num_workers=fewest), "supply")
        # rule 2: something else may have slowed the setting to beat the first time
        chosen = self._best()
        if chosen != have and have.num_workers and not (self._is_fed(have) or self._refused(have)):
            kind: Kind = "steps" if have in self._seen("steps") else "supply"
            if self._measure(have, kind, again=True):
                chosen = self._best()
            elif self._got(chosen) < 1.5 * self._got(have):
                chosen = have
        return chosen

    def _search(self) -> None:
        """Tries more workers (rule 3), then the other backends (rule 4)."""
        beside = self.backend == THREADS or bool(self._seen("steps"))
        more = self._wanted(self.backend)
        if more.num_workers > self.have.num_workers:
            self._measure(more, "supply", beside=beside)
        for backend in reversed(self.lab.probes.backends):
            best = self._best()
            # a backend that needs less time to be tried is not to win by that
            if self._is_fed(best) or not self.complete:
                return
            # processes hand batches over besides
            full = self._got(best) >= BUSY * self.models[self.backend].roofline
            if backend != self.backend and not (backend == PROCESSES and full):
                self._measure(self._wanted(backend), "supply", beside=backend != PROCESSES)

    def _outlasting(self) -> FeedSettings:
        """Returns a queue that outlasts a few slow samples, which no short run judges (rule 6)."""
        have = self.have
        # a queue of K batches is empty for less than (D / S)^K of the time, if these differ as
        # much as exponential times
        ratio = self.takes / max(self._supply(have), self.takes)
        if ratio ** in_flight(have) <= 1 - FED:
            return have
        model = self.models[self.backend]
        enough = model.workers_for(1.15 * model.reachable)
        deep = self._made(self.backend, max(enough, have.num_workers))
        depth = _DEEP_PROCESS
        if self.backend == THREADS:
            depth = math.ceil(_DEEP_THREADS / deep.num_workers)
        depth = max(depth, have.prefetch_factor or 0)
        while self.lab.unfit(tried := replace(deep, prefetch_factor=depth)) and depth > 1:
            depth -= 1
        self._measure(tried, "supply")
        return have if self._refused(tried) else tried

    # What is measured

    def _measure(
        self, settings: FeedSettings, kind: Kind, *, beside: bool = False, again: bool = False
    ) -> bool:
        """Measures ``settings`` if that can be, fits into the time and tells something new.

        Args:
            settings: to be measured.
            kind: loading alone, or real steps.
            beside: have real steps, too, if loading alone makes it the best.
            again: measure what was measured.

        Returns whether it was measured.
        """
        # steps that take long are not slowed by what threads share with them
        beside = beside and not self._steps_are_long
        if beside and not self._has_time(kind, "steps"):
            return False
        is_vain = settings in self._seen(kind) or (kind == "steps" and self._steps_are_long)
        can_be = (again or not is_vain) and not self._refused(settings) and self._has_time(kind)
        if can_be:
            self._left_s -= self.lab.attempt(settings, kind, _TAKES_S[kind] / 2).seconds
        if beside and settings == self._best(unseen=True):
            self._measure(settings, "steps")
        return can_be

    def _has_time(self, *kinds: str) -> bool:
        """Returns whether these measurements fit into the time; else the look is incomplete."""
        is_left: bool = self._left_s >= sum(_TAKES_S[kind] for kind in kinds)
        self.complete &= is_left
        return is_left

    def _refused(self, settings: FeedSettings) -> bool:
        failed = any(trial.refused for trial in self.lab.trials if trial.settings == settings)
        return failed or self.lab.unfit(settings) is not None

    def _made(self, backend: str, workers: int) -> FeedSettings:
        """Returns the user's settings with another backend and workers, as many as may be and fit.

        They are pinned if that pays.
        """
        # what was refused before it ran is for ``unfit`` to say
        failed = [
            trial.settings.num_workers - 1
            for trial in self.lab.trials
            if trial.refused and trial.seconds and trial.settings.backend == backend
        ]
        settings = replace(
            self.own,
            backend=backend,
            num_workers=max(1, min(workers, most_workers(self.config, self.lab.limits), *failed)),
            pin_memory=self.pin,
            prefetch_factor=self.own.prefetch_factor if self.have == self.own else None,
        )
        while settings.num_workers > 1 and self.lab.unfit(settings):
            settings = replace(settings, num_workers=settings.num_workers - 1)
        return settings

    def _wanted(self, backend: str) -> FeedSettings:
        """Returns the workers that demand asks for by the model, or that fill the processors."""
        model = self.models[self.backend]
        return self._made(backend, model.workers_for(min(MET * self.takes, model.roofline)))

    # What follows from it

    def _seen(self, kind: Kind) -> dict[FeedSettings, Trial]:
        """Returns the best measurement of each setting."""
        trials = sorted(self.lab.trials, key=lambda trial: trial.images_per_s)
        return {trial.settings: trial for trial in trials if trial.kind == kind and trial.rate}

    def _supply(self, settings: FeedSettings) -> float:
        """Returns images/s of the loader alone, or as far as is known."""
        alone = self._seen("supply").get(settings)
        return alone.images_per_s if alone else self._got(settings)

    @property
    def models(self) -> dict[str, Model]:
        """The model of each backend, by the shortest time of a sample in it."""
        found = [
            (each.settings.backend, self.lab.model(self.takes, self.step_cpu_s, each))
            for each in self.lab.trials
            if each.cost
        ]
        return dict(sorted(found, key=lambda pair: -pair[1].cost.wall_s))

    def _is_uneven(self) -> bool:
        """Returns whether a few samples take so long that whole batches differ much."""
        cost = self.models[self.backend].cost
        size = self.own.batch_size
        deviation_s = math.sqrt(size) * cost.variation * cost.wall_s
        return deviation_s > max(0.3 * size * cost.wall_s, 0.01)

    def _side(self, settings: FeedSettings) -> Trial:
        """Returns what real steps get: as measured, else by the model and the loader alone."""
        steps = self._seen("steps")
        if run := steps.get(settings):
            return run
        model = self.models.get(settings.backend)
        if model is None or self._refused(settings):
            return Trial(settings, "steps", wait_fraction=1.0)
        bounds = [model.delivered(settings.num_workers)]
        if alone := self._seen("supply").get(settings):
            bounds.append(alone.images_per_s)
        for tried, trial in steps.items():
            if tried.backend == settings.backend:
                # the steps' pace beside this backend but for their waits; steps that wait longer
                # are too short to tell it
                bounds.append(trial.images_per_s / (1 - min(0.9, trial.wait_fraction or 0.0)))
                # fewer workers give no more
                if settings.num_workers <= tried.num_workers:
                    bounds.append(trial.images_per_s)
        rate = min(bounds)
        waits = max(0.0, 1 - rate / self.takes)
        return Trial(settings, "steps", Rate.exactly(rate), wait_fraction=waits)

    def _got(self, settings: FeedSettings) -> float:
        return self._side(settings).images_per_s

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
        steps = self._seen("steps")
        rates = {have: min(self.takes, self._got(have))}
        for settings in (*self._seen("supply"), *steps):
            is_seen = settings in steps or settings.backend in (have.backend, PROCESSES)
            rate = min(self.takes, self._got(settings))
            pays = cost_of(settings) <= cost_of(have) or rate >= 1.05 * rates[have]
            counts = pays and (unseen or is_seen or self._steps_are_long)
            if counts and not self._refused(settings):
                rates[settings] = rate
        return min((s for s in rates if rates[s] >= 0.97 * max(rates.values())), key=cost_of)

    def _reason(self, chosen: FeedSettings) -> str:
        models = self.models
        cost = models.get(chosen.backend, models[self.backend]).cost
        who = "the trainer" if chosen.backend == ARRAYS else "a worker"
        more = self._made(chosen.backend, chosen.num_workers + 1)
        why = ". Nothing cheaper delivers as much"
        if not self.complete:
            why = ". The time was over before more could be tried (tuner.budget_s gives more)"
        elif self._is_uneven():
            why = ", and a few take far longer: batches are kept ahead"
        elif self._is_fed(chosen):
            why = ". Nothing cheaper keeps the model busy"
        elif 0 < chosen.num_workers == more.num_workers:
            why = ". More workers are not tried, or do not fit (tuner.max_workers)"
        return (
            f"A sample takes {who} {rounded(cost.wall_s * 1e3)} ms, "
            f"{min(1.0, cost.cpu_s / cost.wall_s):.0%} of it on a processor{why}"
        )
