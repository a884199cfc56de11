"""``tuner=auto``: the fewest workers that feed the model, by a prediction, a few probes and real steps.

Probes follow the supply curve only where the prediction leaves it open, and what is left is ranked by what real steps get.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from itertools import zip_longest

from harness.feed.arrays import ARRAYS
from harness.feed.interface import PROCESSES, THREADS, FeedSettings
from harness.tuning.evidence import GAIN, MET, OWN_TOLERANCE, TOLERANCE, Evidence, saturated
from harness.tuning.figures import MOSTLY, Trial
from harness.tuning.search import Ask, Choice, Problem, Search, depths, in_flight, with_workers

HEADROOM = 1.15  # supply over demand that a prediction aims at
KEEPS_UP = 0.98  # delivered over what can be reached with which there is nothing to gain
QUEUE_EMPTY = 0.01  # share of the images that may be lost for want of batches in flight
_HELD_UP_S = 0.1  # for which a worker may have to wait for a processor while the others go on
_PROBE_S, _STEPS_S = 1.8, 2.0  # what one more measurement is likely to cost
_TURNS, _TURNS_CROWDED = 3, 4  # of real steps on what is left
_POINTS, _POINTS_OTHER = 6, 3  # probes of the supply curve of the user's form, and of each other one

Asking = Generator[Ask, Trial, None]


class Auto:
    """The search over one problem; ``run`` is its generator."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known = Evidence(problem)

    def run(self) -> Search:
        """Ask for what has to be measured, and return the choice."""
        own, known = self.problem.own, self.known
        for trial in self.problem.calibration:
            known.note(trial)
        if known.uneven(own.backend):
            yield from self._uneven()
        if known.uneven(own.backend):
            return self._choice(known.cheapest_on_paper(self._measured()))
        if self._may_keep_up():
            yield from self._steps(own)
            if self._keeps_up(own):
                yield from self._fewer()
                return self._choice(known.cheapest_good())
        for form in self._forms():
            if not self._needs_no_workers():
                yield from self._curve(form)
        yield from self._settle(self._finalists())
        yield from self._confirm(known.cheapest_good())
        return self._choice(known.cheapest_good())

    def _supply(self, settings: FeedSettings, anew: bool = False) -> Asking:
        if anew or settings.num_workers not in self.known.points(settings.backend) or not self.known.of("supply", settings):
            target = None if self.known.uneven(settings.backend) else MET * self.known.demand()
            self.known.note((yield Ask(settings, "supply", target=target)))

    def _steps(self, settings: FeedSettings) -> Asking:
        self.known.note((yield Ask(settings, "steps", limit_s=1.2)))

    def _has(self, seconds: float) -> bool:
        """Whether so much of the budget is left."""
        spent = self.known.trials[len(self.problem.calibration) :]
        return self.problem.budget_s - sum(trial.seconds for trial in spent) >= seconds

    def _uneven(self) -> Asking:
        """Probe what looks best on paper, to know the samples' times better, until it stays the same; then other forms once.

        At least one probe more than the first: if it finds the samples even, the machine was busy. Threads that would be best
        if they left the steps alone are tried with real ones, and as many processes.
        """
        own, known = self.problem.own, self.known
        for _ in range(3):
            looked = known.cheapest_on_paper([own.backend])
            probed = looked.num_workers in (0, *known.points(own.backend))
            if (probed and known.probes(own.backend) > 1) or not self._has(3 * _PROBE_S):
                break
            yield from self._supply(looked if looked.num_workers else self.problem.calibration[-1].settings, anew=probed)
            if not known.uneven(own.backend):
                return
        for form in self._forms():
            if form != own.backend and self._has(3 * _PROBE_S):
                yield from self._supply(with_workers(known.base(form), max(1, looked.num_workers)))
        best = known.cheapest_on_paper(self._measured(), sure=False)
        if best.backend == THREADS and best.num_workers and PROCESSES in known.costs:
            yield from self._beside(with_workers(known.base(PROCESSES), best.num_workers), best)

    def _beside(self, *feeds: FeedSettings) -> Asking:
        """Real steps beside each of ``feeds``, if they would not only wait, and if there is time enough for a few batches.

        With several ranks each waits for the slow samples of all, and the rest of its steps is no measure of anything.
        """
        demand, rates = self.problem.demand.images_per_s, [self.known.on_paper(settings) for settings in feeds]
        seconds = sum(_STEPS_S + 4 * self.problem.own.batch_size / rate for rate in rates)
        fit = not any(map(self.known.refused, feeds))
        if fit and self.problem.ranks == 1 and min(rates) > (1 - MOSTLY) * demand and self._has(seconds):
            for settings in feeds:
                yield from self._steps(settings)

    def _measured(self) -> list[str]:
        """The forms of which a sample's cost is known."""
        return [form for form in self._forms() if form in self.known.costs]

    def _forms(self) -> list[str]:
        """The forms in the order in which they are looked at: first arrays, which take one probe, then the user's own."""
        return sorted(self.problem.forms, key=lambda form: (form != ARRAYS, form != self.problem.own.backend))

    # Nothing to gain?

    def _may_keep_up(self) -> bool:
        """Whether real steps on the user's own setting are worth a look before anything else."""
        own, known = self.problem.own, self.known
        if not known.steady(own):
            return False
        if own.num_workers == 0:
            return known.at_most(own) >= 0.9 * self._goal()
        supply = known.supply(own)
        return supply is not None and supply.images_per_s >= MET * self._goal()

    def _keeps_up(self, settings: FeedSettings) -> bool:
        got = self.known.worth(settings)
        return bool(self.known.of("steps", settings)) and got is not None and got >= KEEPS_UP * self._goal()

    def _goal(self) -> float:
        """Images/s with which nothing can be gained: the step's own, or of a single form those that the processors allow."""
        return self.known.demand() if len(self.problem.forms) > 1 else self.known.reachable()

    def _fewer(self) -> Asking:
        """Try far fewer workers than the user's, where the prediction says that they would do."""
        own = self.problem.own
        fewer = with_workers(own, self._predicted(own.backend))
        if fewer.num_workers < own.num_workers - 1:
            yield from self._supply(fewer)
            if self.known.met(fewer):
                yield from self._steps(fewer)

    # The supply curve of one form

    def _predicted(self, form: str) -> int:
        need = HEADROOM * self.known.reachable() * self.known.costs[form].wall_s
        return max(1, min(math.ceil(min(need, self.known.filling(form))), self.known.most(form)))

    def _curve(self, form: str) -> Asking:
        base, own = self.known.base(form), self.problem.own.backend
        if form not in self.known.costs and not self.known.points(form):  # at first as many as the user's form would need
            yield from self._supply(with_workers(base, self._predicted(own) if own in self.known.costs else 1))
        if form == own == ARRAYS:  # whose first probe had to decode what it gave
            yield from self._supply(base, anew=True)
        if form not in self.known.costs or form == ARRAYS:  # what could not be measured once cannot be with more workers
            return
        workers: int | None = self._predicted(form)
        for _ in range(_POINTS if form == own else _POINTS_OTHER):
            if workers is None or not self._has(3 * _PROBE_S):
                break
            yield from self._supply(with_workers(base, workers))
            workers = self._next(form)
        while (knee := self._knee(form)) is not None and self._has(3 * _PROBE_S):
            yield from self._supply(with_workers(base, knee))

    def _next(self, form: str) -> int | None:
        """The number of workers that tells most, or None where enough is known."""
        points, goal = self.known.points(form), MET * self.known.demand()
        met = min((n for n, rate in points.items() if rate >= goal), default=None)
        short = max((n for n, rate in points.items() if 0 < rate < goal and (met is None or n < met)), default=0)
        if met is not None:
            guess = math.ceil(met * goal / points[met] - 0.05)
            return None if met - short <= 1 or guess >= met else max(guess, short + 1)
        most = self.known.most(form)
        if saturated(points) or short >= most:
            return None
        if not short:
            return 1 if 1 not in points else None
        grown = math.ceil(short * HEADROOM * self.known.demand() / points[short])
        full = math.ceil(min(self.known.filling(form), most))
        return min(most, max(short + 1, min(grown, 2 * short, full)))

    def _knee(self, form: str) -> int | None:
        """Where demand is not met, fewer workers that may give as much as the most of them did.

        It is where linear growth would reach that; where more gave nothing for want of something else than processors, which
        workers may share, it is half of the fewest that were tried.
        """
        points = self.known.points(form)
        best = max(points.values())
        if not best or best >= MET * self.known.demand():
            return None
        knee = math.ceil(best * (1 - GAIN) * self.known.costs[form].wall_s - 0.05)
        good = min(n for n, rate in points.items() if rate >= (1 - GAIN) * best)
        if good == min(points) and saturated(points) and not self.known.crowded(form):
            knee = min(knee, good // 2)
        return knee if 0 < knee < good and knee not in points else None

    def _needs_no_workers(self) -> bool:
        """Whether arrays were found to feed the model: no other form could do as well with less."""
        got = self.known.delivered(self.known.base(ARRAYS)) if ARRAYS in self.known.costs else None
        return got is not None and got.images_per_s >= (1 - TOLERANCE) * self.known.demand()

    # The last few

    def _finalists(self) -> list[FeedSettings]:
        """The settings that real steps have to tell apart, the user's own and the most promising first; at most five."""
        own, known = self.problem.own, self.known
        candidates = sorted(map(self._candidates, known.costs), key=lambda found: -max(map(known.at_most, found), default=0.0))
        found = [own, *(s for turn in zip_longest(*candidates) for s in turn if s is not None)]  # the forms by turns
        fair = (0.75 if self._is_crowded() else 0.9) * max(map(known.at_most, found))  # bounds that few reach in a crowd
        return list(dict.fromkeys(s for s in found if s == own or known.at_most(s) >= fair))[:5]

    def _candidates(self, form: str) -> list[FeedSettings]:
        """What may be the best of one form."""
        base = self.known.base(form)
        counts = [*self._sufficient(form), *(self._near_roofline(form) if self.known.crowded(form) else [])]
        found = [self._deep_enough(with_workers(base, n)) for n in counts]
        return found if form == THREADS and PROCESSES in self.known.costs else [*found, with_workers(base, 0)]

    def _sufficient(self, form: str) -> list[int]:
        """The fewest workers that were measured to meet demand, or else to give nearly what the most of them did."""
        points = {n: rate for n, rate in self.known.points(form).items() if rate > 0}
        if not points:
            return []
        goal = min(MET * self.known.demand(), (1 - GAIN) * max(points.values()))
        return [min(n for n, rate in points.items() if rate >= goal)]

    def _near_roofline(self, form: str) -> list[int]:
        """Numbers of workers worth real steps where step and workers fight for the processors."""
        alone, most = math.ceil(self.known.roofline(form) * self.known.costs[form].wall_s), self.known.most(form)
        return sorted({min(most, max(1, n)) for n in (alone - 1, alone, alone + 1)})

    def _deep_enough(self, settings: FeedSettings) -> FeedSettings:
        """``settings`` with batches enough in flight for the spread of the samples' times, and no fewer than the user's.

        Where step and workers fight for the processors, also enough to go on while a worker has to wait for one.
        """
        if settings.num_workers == 0 or not self.known.times(settings.backend):
            return settings
        least, crowded = settings.prefetch_factor or 2, self.known.crowded(settings.backend)
        tried = [dataclasses.replace(settings, prefetch_factor=k) for k in (least, *depths(settings.backend)) if k >= least]
        rates = {deep: self.known.on_paper(deep) for deep in dict.fromkeys(tried) if self.problem.fits(deep) is None}
        held_up = _HELD_UP_S * self.known.reachable() / settings.batch_size if crowded else 0.0
        good = (deep for deep, rate in rates.items() if rate >= (1 - QUEUE_EMPTY) * max(rates.values()))
        return next((deep for deep in good if in_flight(deep) >= held_up), max(rates, key=in_flight, default=settings))

    def _settle(self, finalists: Sequence[FeedSettings]) -> Asking:
        """Real steps on the finalists in turn, there and back, until the best is known or too little time is left."""
        left = [s for s in finalists if not self.known.refused(s)]
        if not all(self.known.steady(s) for s in left):
            return
        for turn in range(_TURNS_CROWDED if self._is_crowded() else _TURNS):
            if left in ([], [self.problem.own]) or not self._has(2 * _STEPS_S):
                return
            for settings in left if turn % 2 == 0 else left[::-1]:
                if not self._has(_STEPS_S):
                    return
                if turn or not self.known.of("steps", settings):
                    yield from self._steps(settings)
            left = self._still_open(left, turn)

    def _still_open(self, settings: Sequence[FeedSettings], turn: int) -> list[FeedSettings]:
        """Those that may yet be the choice; none where another turn would hardly change it.

        Where step and workers fight for the processors, a run may be far off: a single one rules out only what gets less than
        half, and three have to agree.
        """
        noise, once = (2.0, 0.5) if self._is_crowded() else (1.0, 0.1)
        rates = {s: worth for s in settings if self.known.of("steps", s) and (worth := self.known.worth(s))}
        best = max(rates.values(), default=0.0)
        left = [s for s, rate in rates.items() if rate >= (1 - (noise * 0.04 if turn else once)) * best]
        clear = all(abs(rates[s] / best - (1 - TOLERANCE)) > noise * 0.02 / (turn + 1) for s in left)
        return [] if len(left) < 2 or (turn >= noise and clear) else left

    def _is_crowded(self) -> bool:
        return any(self.known.crowded(form) for form in self.known.costs)

    def _confirm(self, chosen: FeedSettings) -> Asking:
        """One step up, and another, where steps still wait for data although supply meets demand."""
        known = self.known
        for _ in range(2):
            got, supply = known.worth(chosen), known.supply(chosen)
            if got is None or supply is None or not known.of("steps", chosen) or chosen.num_workers == 0:
                return
            enough = got >= KEEPS_UP * min(known.reachable(), supply.images_per_s)
            if enough or known.crowded(chosen.backend) or not self._has(_STEPS_S):
                return
            deeper = dataclasses.replace(chosen, prefetch_factor=2 * (chosen.prefetch_factor or 2))
            more = with_workers(chosen, min(chosen.num_workers + 1, known.most(chosen.backend)))
            up = deeper if known.costs[chosen.backend].variation > 1 else more
            if known.refused(up) or known.of("steps", up):
                return
            yield from self._steps(up)
            after = known.worth(up)
            if after is None or after < (1 + OWN_TOLERANCE) * got:
                return
            chosen = up

    # The choice

    def _choice(self, chosen: FeedSettings) -> Choice:
        own, known = self.problem.own, self.known
        bound = known.bottleneck(chosen)
        return Choice(
            settings=chosen,
            before=known.delivered(own),
            after=known.delivered(chosen),
            demand=known.demand(),
            waits=(known.wait(own), known.wait(chosen)),
            bound=bound,
            reason=self._reason(chosen, bound),
            complete=self._has(0.0),
        )

    def _reason(self, chosen: FeedSettings, bound: str) -> str:
        cost = self.known.costs.get(chosen.backend)
        if cost is None:
            return "no worker could be measured"
        on_processor, who = min(1.0, cost.cpu_s / cost.wall_s), "the trainer" if chosen.backend == ARRAYS else "a worker"
        each = f"a sample takes {who} {cost.wall_s * 1e3:.2g} ms, {on_processor:.0%} of it on a processor"
        if not self._has(0.0):
            return f"{each}; the time was over before more could be tried (tuner.budget_s)"
        if chosen == self.problem.own:
            return f"{each}; nothing cheaper does as well, and nothing is faster"
        what = "keeps the model busy" if bound == "model" else "delivers what can be had"
        if chosen.backend == ARRAYS:
            return f"{each}; a feed of arrays needs no workers and {what}"
        return f"{each}; num_workers={chosen.num_workers} is the least that {what}"
