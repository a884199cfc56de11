"""``tuner=auto``: a short look, after which a feed that keeps the model busy is chosen, or the best
that was seen.

The user's own setting comes first: what a sample costs in its workers, and what real steps get from
it. Only where they wait for data is something else tried, by real steps too: as many workers as the
model of throughput asks for, then another form.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator

from harness.feed.arrays import ARRAYS, in_form
from harness.feed.interface import PROCESSES, THREADS, FeedSettings
from harness.tuning.figures import Rate, Trial
from harness.tuning.model import BUSY, Model, undisturbed
from harness.tuning.search import DEEP, Ask, Choice, Problem, Search, cost_of, with_workers

MET = 1.05  # supply over demand that is aimed at
FED = 0.95  # delivered over demand with which there is nothing to gain
_GAIN = 0.05  # what a costlier setting must deliver more than the user's own
_FAR = 1.5  # times as much: no disturbance
_LESS = 0.03  # and what a cheaper one may deliver less than the best
_WAITING = (
    0.8  # on a processor for less of its time, a sample waits: for storage, or for the interpreter
)
_LONG_STEP_S = 0.25  # beside a step that takes longer, what threads share with it is nothing
# standard deviation of a batch's time, over its mean and in seconds: no short run can judge
_UNEVEN = 0.3
_UNEVEN_S = 0.01
_SPARE = 1.15  # supply over demand that is aimed at with uneven samples
_SUPPLY_S = 0.5
_STEPS_S = 0.8
# with the feed's start and what is left out
_SUPPLY_TAKES_S = 1.0
_STEPS_TAKE_S = 1.5

Asking = Generator[Ask, Trial, None]


class Look:
    """The look at one problem; ``run`` is its generator."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.trials: list[Trial] = []
        self.models: dict[str, Model] = {}  # by form, of those that were probed
        self.complete = True
        for trial in problem.calibration:
            self._note(trial)
        self.form = problem.calibration[-1].settings.backend
        self.have = self._first()  # the setting to beat

    def run(self) -> Search:
        """Ask for what has to be measured, and return the choice."""
        if not self._has(_SUPPLY_TAKES_S):
            self.complete = False
            return self._choice(self.have)
        if self._is_uneven():
            deep = self._deep()
            yield from self._supply(deep)
            return self._choice(self.have if self._refused(deep) else deep)
        if self._suffices(self.have) or self.form == ARRAYS:
            yield from self._steps(self.have)
        if not self._is_fed(self.have):
            yield from self._more()
            yield from self._others()
        yield from self._fewer(self._best())
        return self._choice((yield from self._confirmed(self._best())))

    # What is measured

    def _note(self, trial: Trial) -> None:
        self.trials.append(trial)
        if trial.cost is None:
            return
        problem = self.problem
        form = trial.settings.backend
        cost = undisturbed(trial.cost, trial.settings.num_workers, problem.cores)
        if form not in self.models or cost.wall_s < self.models[form].cost.wall_s:
            self.models[form] = Model(
                demand=problem.demand.images_per_s,
                cost=cost,
                cores=problem.cores,
                step_cpu_s=problem.step_cpu_s,
                alone_s=problem.alone_s,
            )

    def _steps(self, settings: FeedSettings) -> Asking:
        """Real steps on a feed of ``settings``, unless they do not fit, the time is over, or they
        are too slow to be slowed.
        """
        if not self._steps_are_long():
            yield from self._measure(self._ask_steps(settings), _STEPS_TAKE_S)

    def _supply(self, settings: FeedSettings) -> Asking:
        """What a feed of ``settings`` gives with nothing consuming, likewise."""
        yield from self._measure(self._ask_supply(settings), _SUPPLY_TAKES_S)

    def _ask_steps(self, settings: FeedSettings) -> Ask:
        return Ask(settings, "steps", limit_s=_STEPS_S)

    def _ask_supply(self, settings: FeedSettings) -> Ask:
        return Ask(settings, "supply", MET * self.problem.demand.images_per_s, _SUPPLY_S)

    def _measure(self, ask: Ask, takes_s: float, *, again: bool = False) -> Asking:
        if (self._of(ask.kind, ask.settings) and not again) or self._refused(ask.settings):
            return
        if not self._has(takes_s):
            self.complete = False
            return
        self._note((yield ask))

    def _has(self, seconds: float) -> bool:
        """Whether so much of the budget is left."""
        spent = self.trials[len(self.problem.calibration) :]
        return self.problem.budget_s - sum(trial.seconds for trial in spent) >= seconds

    # What is tried besides

    def _more(self) -> Asking:
        """As many workers as demand asks for, by what a sample takes one that is alone."""
        base = self._base(self.form)
        if self._samples_wait():
            yield from self._supply(with_workers(base, 1))
        more = with_workers(base, self._wanted(self.form))
        if more.num_workers > self.have.num_workers:
            yield from self._tried(more, beside=self.form == THREADS or bool(self._of("steps")))

    def _others(self) -> Asking:
        """The other forms, while none feeds the model: arrays first, and processes only where
        processors are left over.
        """
        for form in sorted(self.problem.forms, key=lambda form: form != ARRAYS):
            if not self.complete:  # one that needs less time to be tried is not to win by that
                return
            if (
                form == self.form
                or self._is_fed(self._best())
                or (form == PROCESSES and self._processors_are_full())
            ):
                continue
            yield from self._tried(
                with_workers(self._base(form), self._wanted(form)), beside=form != PROCESSES
            )

    def _tried(self, settings: FeedSettings, *, beside: bool) -> Asking:
        """What ``settings`` give alone, and ``beside`` real steps, which may be slower there, if
        they would be the best.
        """
        if not self._has(_SUPPLY_TAKES_S + (_STEPS_TAKE_S if beside else 0.0)):
            self.complete = False
            return
        yield from self._supply(settings)
        if beside and settings == self._best(unseen=True):
            yield from self._steps(settings)

    def _fewer(self, chosen: FeedSettings) -> Asking:
        """Measure the fewest workers that give as much as ``chosen``, by the model of its form, if
        they are fewer.
        """
        model = self.models.get(chosen.backend)
        if model is None or model.is_crowded or chosen.num_workers < 2:
            return
        fewest = self._enough(model, self._got(chosen).images_per_s)
        if fewest < chosen.num_workers:
            yield from self._supply(with_workers(chosen, fewest))

    def _confirmed(self, chosen: FeedSettings) -> Generator[Ask, Trial, FeedSettings]:
        """What is best once what there is was measured again: something else may have slowed it the
        first time.

        Without the time for that it stays, unless ``chosen`` delivers half as much again.
        """
        have = self.have
        if chosen == have or self._refused(have) or not have.num_workers or self._is_fed(have):
            return chosen
        steps = bool(self._of("steps", have))
        takes_s = _STEPS_TAKE_S if steps else _SUPPLY_TAKES_S
        if not self._has(takes_s):
            self.complete = False
            return (
                chosen
                if self._got(chosen).images_per_s >= _FAR * self._got(have).images_per_s
                else have
            )
        yield from self._measure(
            self._ask_steps(have) if steps else self._ask_supply(have), takes_s, again=True
        )
        return self._best()

    def _enough(self, model: Model, got: float) -> int:
        """The fewest workers for demand, or for what steps ``got`` where it is less."""
        demand = self.problem.demand.images_per_s
        return model.workers_for(MET * demand if got >= FED * demand else got)

    # What follows from it

    def _of(self, kind: str, settings: FeedSettings | None = None) -> list[Trial]:
        return [
            t
            for t in self.trials
            if t.kind == kind and t.rate and (settings is None or t.settings == settings)
        ]

    def _refused(self, settings: FeedSettings) -> bool:
        return (
            any(t.refused for t in self.trials if t.settings == settings)
            or self.problem.fits(settings) is not None
        )

    def _base(self, form: str) -> FeedSettings:
        """The user's settings in ``form``, pinned if that pays, with as many batches in flight as
        fit with one worker.
        """
        base = dataclasses.replace(
            in_form(self.problem.own, form), pin_memory=self.problem.pin_memory
        )
        depth = 2 if self._refused(self.problem.own) else base.prefetch_factor or 2
        fitting = (
            k for k in range(depth, 1, -1) if self.problem.fits(with_workers(base, 1, k)) is None
        )
        return (
            base if form == ARRAYS else dataclasses.replace(base, prefetch_factor=next(fitting, 1))
        )

    def _first(self) -> FeedSettings:
        """The user's own setting; where it does not work or fit, that of the probe, or as many
        workers of its as fit.
        """
        probed = self.problem.calibration[-1].settings
        fitting = with_workers(
            self._base(self.form), min(probed.num_workers, self._most(self.form))
        )
        return next((s for s in (self.problem.own, probed) if not self._refused(s)), fitting)

    def _most(self, form: str) -> int:
        """The most workers that may be tried and that fit; at least 1."""
        base = self._base(form)
        # what was refused before it ran is for ``fits`` to say
        failed = [
            t.settings.num_workers
            for t in self.trials
            if t.refused and t.seconds and t.settings.backend == form
        ]
        top = min([self.problem.most, *(n - 1 for n in failed)])
        return next(
            (n for n in range(top, 1, -1) if self.problem.fits(with_workers(base, n)) is None), 1
        )

    def _wanted(self, form: str) -> int:
        """The workers of ``form`` that demand asks for by the model, or that fill the processors."""
        model = self.models[self.form]
        return min(model.workers_for(min(MET * model.demand, model.roofline)), self._most(form))

    def _got(self, settings: FeedSettings) -> Rate:
        """What real steps get: as measured, else by the model and what the loader alone gave."""
        if runs := self._of("steps", settings):
            return max((run.rate for run in runs if run.rate), key=lambda rate: rate.images_per_s)
        model = self.models.get(settings.backend)
        if model is None or self._refused(settings):
            return Rate.exactly(0.0)
        supply = sorted(
            trial.rate.images_per_s for trial in self._of("supply", settings) if trial.rate
        )[-1:]
        seen = [trial for trial in self._of("steps") if trial.settings.backend == settings.backend]
        pace = [trial.working for trial in seen]
        # no fewer workers give more
        more = [
            t.rate.images_per_s
            for t in seen
            if t.rate and t.settings.num_workers >= settings.num_workers
        ]
        return Rate.exactly(min([model.delivered(settings.num_workers), *supply, *pace, *more]))

    def _suffices(self, settings: FeedSettings) -> bool:
        """Whether the loader alone gives what steps take; the processors may still be too few for
        both.
        """
        supply = [trial.rate.images_per_s for trial in self._of("supply", settings) if trial.rate]
        return (
            max(supply, default=self._got(settings).images_per_s)
            >= FED * self.problem.demand.images_per_s
        )

    def _is_fed(self, settings: FeedSettings) -> bool:
        return self._got(settings).images_per_s >= FED * self.problem.demand.images_per_s

    def _steps_are_long(self) -> bool:
        return self.problem.own.batch_size > _LONG_STEP_S * self.problem.demand.images_per_s

    def _samples_wait(self) -> bool:
        """Whether a sample spends much of its time on no processor, so that it may take one worker
        alone less.
        """
        cost = self.models[self.form].cost
        return (
            cost.cpu_s < _WAITING * cost.wall_s
            and self.problem.calibration[-1].settings.num_workers > 1
        )

    def _processors_are_full(self) -> bool:
        return self._got(self._best()).images_per_s >= BUSY * self.models[self.form].roofline

    def _is_uneven(self) -> bool:
        """Whether a few samples take so long that whole batches differ much."""
        cost = self.models[self.form].cost
        size = self.problem.own.batch_size
        deviation_s = math.sqrt(size) * cost.variation * cost.wall_s
        return deviation_s > max(_UNEVEN * size * cost.wall_s, _UNEVEN_S)

    def _deep(self) -> FeedSettings:
        """Workers for demand with some to spare, and a queue that outlasts a slow sample, as deep
        as fits.
        """
        model = self.models[self.form]
        base = self._base(self.form)
        enough = min(model.workers_for(_SPARE * model.reachable), self._most(self.form))
        workers = max(enough, min(self.have.num_workers, self._most(self.form)))
        depth = max(DEEP.get(self.form, 2), self.have.prefetch_factor or 0)
        fitting = (
            k
            for k in range(depth, 1, -1)
            if self.problem.fits(with_workers(base, workers, k)) is None
        )
        return with_workers(base, workers, next(fitting, 1))

    def _best(self, *, unseen: bool = False) -> FeedSettings:
        """The cheapest setting that delivers as much as the best, of those that were measured.

        Those that cost more than what there is must deliver more. Threads and arrays in place of
        another form count where steps were seen beside them, or are ``unseen`` too.
        """
        have = self.have
        demand = self.problem.demand.images_per_s
        rates = {have: min(demand, self._got(have).images_per_s)}
        for settings in dict.fromkeys(trial.settings for trial in self.trials if trial.rate):
            counts = (
                unseen or settings.backend in (have.backend, PROCESSES) or self._steps_are_long()
            )
            rate = min(demand, self._got(settings).images_per_s)
            pays = cost_of(settings) <= cost_of(have) or rate >= (1 + _GAIN) * rates[have]
            if (counts or self._of("steps", settings)) and pays and not self._refused(settings):
                rates[settings] = rate
        return min((s for s in rates if rates[s] >= (1 - _LESS) * max(rates.values())), key=cost_of)

    # The choice

    def _choice(self, chosen: FeedSettings) -> Choice:
        own = self.problem.own
        demand = self.problem.demand.images_per_s
        before = self._got(own)
        after = self._got(chosen)
        return Choice(
            settings=chosen,
            before=before if before.images_per_s else None,
            after=after,
            demand=max(demand, after.images_per_s),
            waits=(self._waits(own, before), self._waits(chosen, after)),
            reason=self._reason(chosen),
            complete=self.complete,
        )

    def _waits(self, settings: FeedSettings, got: Rate) -> float:
        """The share of the time that steps wait for data."""
        runs = [t.wait_fraction for t in self._of("steps", settings) if t.wait_fraction is not None]
        return (
            min(runs) if runs else max(0.0, 1 - got.images_per_s / self.problem.demand.images_per_s)
        )

    def _reason(self, chosen: FeedSettings) -> str:
        model = self.models.get(chosen.backend) or self.models[self.form]
        wall_s = model.cost.wall_s
        cpu_s = model.cost.cpu_s
        who = "the trainer" if chosen.backend == ARRAYS else "a worker"
        each = (
            f"A sample takes {who} {wall_s * 1e3:.2g} ms, {min(1.0, cpu_s / wall_s):.0%} of it "
            "on a processor"
        )
        if not self.complete:
            return (
                f"{each}. The time was over before more could be tried (tuner.budget_s gives more)"
            )
        if self._is_uneven():
            return f"{each}, and a few take far longer: more batches are kept ahead"
        if len(self.trials) == len(self.problem.calibration):
            return f"{each}. Nothing else was worth a try"
        if chosen == self.problem.own:
            return f"{each}. Nothing cheaper does as well, and nothing is faster"
        if not self._is_fed(chosen) and chosen.num_workers == self._most(chosen.backend):
            return f"{each}. More workers are not tried, or do not fit (tuner.max_workers)"
        what = "keeps the model busy" if self._is_fed(chosen) else "delivers what can be had"
        if chosen.backend == ARRAYS:
            return f"{each}. A feed of arrays needs no workers, and {what}"
        return f"{each}. num_workers={chosen.num_workers} is the least that {what}"
