"""Searches loader settings: decides what to try next, when to stop and which setting to choose.

Searches take measurements with a ``LoaderBenchmark``, which tests replace with a simulated machine.
``tuner=auto`` first measures the user's setting: the cost of a sample in its workers and the rate
of real steps. Only if steps wait for data does it try other settings, also with real steps: first
the number of workers from the throughput model, then another backend. Rule numbers refer to
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

# target ratio of supply to demand
MET = 1.05
# batches ahead if samples are uneven: for all threads together, and per process
_DEEP_THREADS = 16
_DEEP_PROCESS = 4
# seconds per measurement, half of them for the feed's start and warm-up
_TAKES_S = {"supply": 1.0, "steps": 1.5}
# ordered by cost in addition to the workers: processes do not share memory
_CHEAPEST = (ARRAYS, THREADS, PROCESSES)


def cost_of(settings: FeedSettings) -> tuple[int, int, int, bool]:
    """Returns a sort key for the cost of a setting to the machine.

    The key consists of workers, backend, batches in flight and pinned memory.
    """
    backend = _CHEAPEST.index(settings.backend)
    return settings.num_workers, backend, in_flight(settings), settings.pin_memory


def most_workers(config: TunerConfig, limits: Limits) -> int:
    """Returns the maximum number of workers in a search, except for the user's own number."""
    return config.max_workers or min(MOST_THREADS, max(8, 4 * int(limits.cores)))


def grid(
    lab: LoaderBenchmark, own: FeedSettings, pin_choices: Sequence[bool], budget_s: float
) -> TuningReport:
    """Searches num_workers x pin_memory like a well-known tutorial, after measuring ``own``.

    For each pin_memory, num_workers is 0, 4, 8, ... up to twice the number of cores, until a value
    is no faster than the best so far; then the three values on each side of that best value are
    tried, and the fastest overall is chosen. The tutorial's flaws are kept: it times worker startup
    and the primed queue together with loading, the page cache favors later trials, and it ignores
    the model's speed and uses no statistics. It is the baseline for better searches. (As published,
    the tutorial passes ``num_workers`` to the loader only on CUDA machines, and otherwise compares
    one setting with itself.)
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
                # no faster: try the neighbors of the best value
                for near in range(max(0, best - 3), best + 4):
                    attempt(replace(base, num_workers=near))
                break
            best = workers
            best_rate = rate
    chosen = min(trials.values(), key=lambda trial: (-trial.images_per_s, cost_of(trial.settings)))
    # if all were rejected
    chosen = chosen if chosen.rate else trials[own]
    return lab.report(
        trials[own],
        chosen,
        search="grid",
        reason="With startup, it is the fastest of those tried. Model speed was not measured",
        complete=not is_over(),
    )


@dataclass(eq=False)
class AutoSearch:
    """The search for ``tuner=auto``, based only on trials run by ``lab``.

    Attributes:
        own: the user's settings.
        config: the budget and the maximum number of workers.
        images_left: images that this rank has yet to train on.
        begin_s: when tuning began, on the lab's clock.
        complete: whether the budget was sufficient for all measurements.
    """

    lab: LoaderBenchmark
    own: FeedSettings
    config: TunerConfig
    images_left: float = math.inf
    begin_s: float = 0.0
    complete: bool = True

    def run(self) -> TuningReport:
        """Runs the measurements and returns the choice."""
        lab = self.lab
        own = self.own
        probe = self._probe()
        if probe.refused:
            log.warning("the loader could not be tuned: %s", probe.refused)
            # if no setting even ran, the user's does not fit
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
            # five seconds or seven steps, four of them for demand; at most a tenth of the time left
            rest_s = self.images_left / min(self.takes, probe.images_per_s)
            budget_s = min(max(5.0, 7 * own.batch_size / self.takes), 0.1 * rest_s)
        # the first step's extra time is not counted, because training has to spend it anyway
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
            # a loader may have delivered more than the steps on one batch consumed
            demand=max(self.demand, after.rate or self.demand),
            reason=self._reason(chosen),
            complete=self.complete,
        )

    def _probe(self) -> Trial:
        """Measures the user's setting or else one worker; returns the first success or last try."""
        own = self.own
        trials = self.lab.trials
        modest = replace(own, num_workers=1, prefetch_factor=1)
        others = [replace(modest, backend=name) for name in self.lab.probes.backends]
        first = replace(own, num_workers=own.num_workers or 1)
        for settings in dict.fromkeys((first, modest, *others)):
            # hung threads cannot be killed, so none are tried after workers have died or hung
            if settings.backend != own.backend and any(trial.seconds for trial in trials):
                break
            if self.lab.attempt(settings, "supply", 0.5).rate:
                break
        return trials[-1]

    def _cheapest(self, probed: FeedSettings) -> FeedSettings:
        """Searches; returns the cheapest setting that delivers as much as the best."""
        have = self.have
        # the loader alone may suffice, yet there may be too few cores for both
        if self._supply(have) >= FED * self.takes or self.backend == ARRAYS:
            self._measure(have, "steps")
        if not self._is_fed(have):
            cost = self.models[self.backend].cost
            # if samples wait for storage or the interpreter, a single worker may be faster
            if cost.cpu_s < 0.8 * cost.wall_s and probed.num_workers > 1:
                self._measure(self._made(self.backend, 1), "supply")
            self._search()
        # rule 5: fewer workers, unless they would only get less CPU time
        chosen = self._best()
        model = self.models.get(chosen.backend)
        if model and not model.is_crowded and chosen.num_workers > 1:
            goal = MET * self.takes if self._is_fed(chosen) else self._got(chosen)
            if (fewest := model.workers_for(goal)) < chosen.num_workers:
                self._measure(replace(chosen, num_workers=fewest), "supply")
        # rule 2: the first measurement of the setting to beat may have been disturbed
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
            # a backend must not win just because its trial takes less time
            if self._is_fed(best) or not self.complete:
                return
            # processes also spend CPU time handing over batches
            full = self._got(best) >= BUSY * self.models[self.backend].roofline
            if backend != self.backend and not (backend == PROCESSES and full):
                self._measure(self._wanted(backend), "supply", beside=backend != PROCESSES)

    def _outlasting(self) -> FeedSettings:
        """Returns a setting whose queue outlasts slow samples too rare for a trial (rule 6)."""
        have = self.have
        # a queue of K batches is empty for less than (D / S)^K of the time if batch times are
        # exponentially distributed
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

    # Measurements

    def _measure(
        self, settings: FeedSettings, kind: Kind, *, beside: bool = False, again: bool = False
    ) -> bool:
        """Measures ``settings`` if that is possible, informative and within the budget.

        Args:
            settings: the setting to measure.
            kind: loading only, or real steps.
            beside: also run real steps if loading alone makes it the best.
            again: repeat an existing measurement.

        Returns whether it was measured.
        """
        # long steps are not slowed by sharing the interpreter with threads
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
        """Returns whether these measurements fit the budget; if not, marks tuning incomplete."""
        is_left: bool = self._left_s >= sum(_TAKES_S[kind] for kind in kinds)
        self.complete &= is_left
        return is_left

    def _refused(self, settings: FeedSettings) -> bool:
        failed = any(trial.refused for trial in self.lab.trials if trial.settings == settings)
        return failed or self.lab.unfit(settings) is not None

    def _made(self, backend: str, workers: int) -> FeedSettings:
        """Returns the user's settings with another backend and ``workers`` workers.

        There are fewer if so many are not allowed or do not fit. Batches are pinned if that pays.
        """
        # settings rejected before they ran are left to ``unfit``
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
        """Returns the setting that meets demand according to the model, or else fills the cores."""
        model = self.models[self.backend]
        return self._made(backend, model.workers_for(min(MET * self.takes, model.roofline)))

    # Conclusions

    def _seen(self, kind: Kind) -> dict[FeedSettings, Trial]:
        """Returns the best measurement for each setting."""
        trials = sorted(self.lab.trials, key=lambda trial: trial.images_per_s)
        return {trial.settings: trial for trial in trials if trial.kind == kind and trial.rate}

    def _supply(self, settings: FeedSettings) -> float:
        """Returns loader-only images/s or, if not measured, images/s with steps."""
        alone = self._seen("supply").get(settings)
        return alone.images_per_s if alone else self._got(settings)

    @property
    def models(self) -> dict[str, Model]:
        """The model for each backend, based on its shortest sample time."""
        found = [
            (each.settings.backend, self.lab.model(self.takes, self.step_cpu_s, each))
            for each in self.lab.trials
            if each.cost
        ]
        return dict(sorted(found, key=lambda pair: -pair[1].cost.wall_s))

    def _is_uneven(self) -> bool:
        """Returns whether slow samples make batch times vary widely."""
        cost = self.models[self.backend].cost
        size = self.own.batch_size
        deviation_s = math.sqrt(size) * cost.variation * cost.wall_s
        return deviation_s > max(0.3 * size * cost.wall_s, 0.01)

    def _side(self, settings: FeedSettings) -> Trial:
        """Returns the rate of real steps, measured or else from the model and loader-only rate."""
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
                # the steps' rate with this backend without waits; with longer waits, the steps are
                # too short to show it
                bounds.append(trial.images_per_s / (1 - min(0.9, trial.wait_fraction or 0.0)))
                # fewer workers do not deliver more
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
        """Whether steps are too long to be slowed by sharing the interpreter with threads."""
        return self.own.batch_size > 0.25 * self.takes

    def _best(self, *, unseen: bool = False) -> FeedSettings:
        """Returns the cheapest measured setting that delivers as much as the best (rule 1).

        Settings that cost more than the one to beat must deliver more. Threads and arrays that
        replace another backend count only if measured with steps, unless ``unseen``.
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
        who = "the main process" if chosen.backend == ARRAYS else "a worker"
        more = self._made(chosen.backend, chosen.num_workers + 1)
        why = ". The choice is the cheapest setting that trains as fast"
        is_fed = self._is_fed(chosen)
        if not (self.complete or is_fed):
            why = ". Tuning ran out of time before it could try more (raise tuner.budget_s)"
        elif self._is_uneven():
            deeper = chosen.batches_ahead > self.own.batches_ahead
            why = ", and a few take far longer" + ", so more batches are prefetched" * deeper
        elif is_fed:
            why = ". The choice is the cheapest setting that keeps the model busy" * self.complete
        elif 0 < chosen.num_workers == more.num_workers:
            why = ". More workers are not allowed or do not fit (tuner.max_workers)"
        return (
            f"A sample takes {who} {rounded(cost.wall_s * 1e3)} ms, "
            f"{min(1.0, cost.cpu_s / cost.wall_s):.0%} of it on a CPU core{why}"
        )
