"""What is known of each setting after some trials, measured or predicted, and what follows from it.

The prediction is an operational one (Denning and Buzen 1978): with w seconds of wall and c of processor time a sample, n
workers give at most n / w images/s, and C processors at most C / c, or C / (c + s) where the step takes s of them per image.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from harness.feed.arrays import ARRAYS, in_form
from harness.feed.interface import PROCESSES, THREADS, FeedSettings
from harness.tuning import queueing
from harness.tuning.figures import MOSTLY, Rate, SampleCost, Trial, together
from harness.tuning.search import Problem, cost_of, depths, in_flight, with_workers

MET = 1.05  # supply over demand with which a measured setting feeds the model
GAIN = 0.03  # more workers that give less than this are not worth having
TOLERANCE = 0.02  # a cheaper setting may deliver so much less than the best
OWN_TOLERANCE = 0.01  # and so much less than the user's own
STEADY_BATCH_S = 0.4  # a worker's batch that takes longer makes steps come in bursts that short runs cannot judge
_UNEVEN = 0.3  # standard deviation of a batch's time over its mean from which short measurements say little
_UNEVEN_S = 0.01
_ENOUGH = 0.5  # of a probe's samples: so many without slow ones, and the machine was to blame for those
_SPARE = 1.15  # how much more than demand uneven samples are reckoned to have to meet
_LONG_WAIT = 0.15  # of the time
_SLOWED = 0.05  # of its speed: what a step may lose to threads, which share its interpreter, without waiting for data
BUSY = 0.8  # share of the cores above which workers and step are in each other's way


@dataclass(slots=True)
class Evidence:
    """All trials of one search."""

    problem: Problem
    trials: list[Trial] = field(default_factory=list)
    costs: dict[str, SampleCost] = field(default_factory=dict)  # of one worker that has a processor to itself, by form

    def note(self, trial: Trial) -> None:
        """Take in one more trial."""
        self.trials.append(trial)
        cost, form = trial.cost, trial.settings.backend
        if cost is not None:
            alone = dataclasses.replace(cost, wall_s=self._alone(cost, trial.settings.num_workers))
            if form not in self.costs or alone.wall_s < self.costs[form].wall_s:
                self.costs[form] = alone
            if self.uneven(form):  # known from all probes together, not from the luckiest
                self.costs[form] = dataclasses.replace(cost, wall_s=queueing.moments(self.times(form))[0])

    def _alone(self, cost: SampleCost, workers: int) -> float:
        """A sample's wall seconds without the other workers, who took each other's processors if all of them were busy."""
        cores = self.problem.cores
        crowded = workers > cores and workers * cost.cpu_s / cost.wall_s > BUSY * cores
        return max(cost.cpu_s, cost.wall_s * cores / workers) if crowded else cost.wall_s

    def of(self, kind: str, settings: FeedSettings | None = None) -> list[Trial]:
        """The trials of one kind that gave a figure, of ``settings`` or all."""
        return [t for t in self.trials if t.kind == kind and t.rate and (settings is None or t.settings == settings)]

    def refused(self, settings: FeedSettings) -> bool:
        """Whether a trial of ``settings`` was refused, or one would be."""
        return any(t.refused for t in self.trials if t.settings == settings) or self.problem.fits(settings) is not None

    def base(self, form: str) -> FeedSettings:
        """The user's settings in ``form``, pinned if that pays, with as many batches in flight as fit with one worker."""
        base = dataclasses.replace(in_form(self.problem.own, form), pin_memory=self.problem.pin_memory)
        depth = base.prefetch_factor or 2
        fitting = (k for k in range(depth, 1, -1) if self.problem.fits(with_workers(base, 1, k)) is None)
        return dataclasses.replace(base, prefetch_factor=next(fitting, 1)) if base.num_workers else base

    def points(self, form: str) -> dict[int, float]:
        """Measured supply in images/s by number of workers; 0 where a setting was refused."""
        points: dict[int, float] = {}
        for trial in self.trials:
            if trial.kind == "supply" and trial.settings.backend == form:
                rate = trial.rate.images_per_s if trial.rate else 0.0
                points[trial.settings.num_workers] = max(rate, points.get(trial.settings.num_workers, 0.0))
        return points

    def times(self, form: str) -> queueing.Times:
        """(seconds, samples) over all probes of ``form``, less the one that the machine was too busy for, if there is one."""
        probes = [trial.cost.times for trial in self.of("supply") if trial.settings.backend == form and trial.cost]
        pooled = queueing.pooled(probes)
        if len(probes) > 1 and self._are_uneven(pooled):
            worst = max(range(len(probes)), key=lambda i: queueing.moments(probes[i])[1])
            rest = queueing.pooled(probes[:worst] + probes[worst + 1 :])
            if queueing.samples(rest) >= _ENOUGH * queueing.samples(probes[worst]) and not self._are_uneven(rest):
                return rest  # the data's own slow samples would have come again
        return pooled

    def probes(self, form: str) -> int:
        """How many probes of ``form`` gave a figure."""
        return sum(trial.settings.backend == form for trial in self.of("supply"))

    def uneven(self, form: str) -> bool:
        """Whether few samples take so long that even whole batches differ much, and by more than handing them over takes.

        What the user's own form has seen of that holds for the others: it is the data's, but for arrays, which wait for none.
        """
        own = self.problem.own.backend
        return self._are_uneven(self.times(form)) or (ARRAYS not in (form, own) and self._are_uneven(self.times(own)))

    def _are_uneven(self, times: queueing.Times) -> bool:
        (mean, variance), size = queueing.moments(times), self.problem.own.batch_size
        return size * variance > max(_UNEVEN * size * mean, _UNEVEN_S) ** 2

    def on_paper(self, settings: FeedSettings, demand: float | None = None) -> float:
        """Images/s that steps of ``demand`` (None: the measured one) get by the times of all samples seen so far."""
        size, cost, workers = settings.batch_size, self.costs[settings.backend], settings.num_workers
        times, wall_s = self.times(settings.backend), cost.wall_s
        if self.uneven(settings.backend) and settings.backend != ARRAYS:
            times = queueing.with_slow_of([self.times(form) for form in self.costs if form != ARRAYS], times)
            wall_s = queueing.moments(times)[0]
        demand = demand or self.problem.demand.images_per_s
        if workers == 0:
            beside_s = self.problem.launch_s if self.problem.overlaps else 1 / demand
            return min(demand, 1 / (beside_s + wall_s))
        crowding = max(1.0, workers * cost.cpu_s / wall_s / self.problem.cores)
        drawn = queueing.batch_times(times, size)
        batches = queueing.Batches(crowding * drawn.total_s, crowding * drawn.longest_s)
        if settings.backend == THREADS:
            step_s = size / (demand * self.kept(THREADS))
            return size * queueing.delivered_together(batches, workers, in_flight(settings), step_s)
        return size * queueing.delivered(batches.total_s, workers, settings.prefetch_factor or 1, size / demand)

    def kept(self, form: str) -> float:
        """What steps keep of their speed beside workers of ``form``: 1 but of threads that were tried beside uneven samples.

        The waits of so short a run say nothing of such samples; the rest of a step beside threads, and beside processes, does.
        """
        return min(1.0, self._working(THREADS) / self._working(PROCESSES)) if form == THREADS and self._compared() else 1.0

    def _compared(self) -> bool:
        return self.uneven(THREADS) and self._working(THREADS) > 0 and self._working(PROCESSES) > 0

    def _working(self, form: str) -> float:
        """Images/s of the steps beside workers of ``form`` but for their waits; 0 where none was run that did not only wait."""
        runs = [t for t in self.of("steps") if t.settings.backend == form and t.settings.num_workers]
        return statistics.median([t.working for t in runs if (t.wait_fraction or 0.0) < MOSTLY] or [0.0])

    def cheapest_on_paper(self, forms: Iterable[str], sure: bool = True) -> FeedSettings:
        """The cheapest setting of ``forms`` that on paper delivers as much as their best, and as the user's own.

        Both within the tolerances, and for a somewhat faster step: how many samples are slow is known from a few dozen at best.
        ``sure``: threads that were not seen beside real steps count less.
        """
        own, demand = self.problem.own, _SPARE * self.problem.demand.images_per_s
        rates: dict[FeedSettings, float] = {}
        for form in forms:
            base = self.base(form)
            for workers in _counts(0 if form == ARRAYS else self.most(form)):
                tried = [with_workers(base, workers, depth) for depth in (depths(form) if workers else (None,))]
                found = {s: self.on_paper(s, demand) for s in tried if not self.refused(s)}
                rates |= found
                if workers and max(found.values(), default=0.0) >= 0.995 * demand * self.kept(form):  # more only cost more
                    break
        if not self.refused(own):
            rates[own] = self.on_paper(own, demand)
        return self.cheapest({s: (self._sure(s) if sure else 1.0) * rate for s, rate in rates.items()})

    def supply(self, settings: FeedSettings) -> Rate | None:
        """What the loader alone gives, as measured; without workers what one sample's cost predicts."""
        found = [t.rate for t in self.of("supply", settings) if t.rate]
        if found:
            return max(found, key=lambda rate: rate.images_per_s)
        cost = self.costs.get(settings.backend)
        return Rate.exactly(1 / cost.wall_s) if cost and settings.num_workers == 0 else None

    def delivered(self, settings: FeedSettings) -> Rate | None:
        """What steps get: as measured with real ones, all runs together; else predicted from supply and demand."""
        if self.uneven(settings.backend):
            return Rate.exactly(self.on_paper(settings))
        runs, supply, demand = self.of("steps", settings), self.supply(settings), self.demand()
        if runs:
            return self._not_read_again(settings, together(runs))
        if supply is None:
            return None
        if settings.num_workers == 0 and not self.problem.overlaps:
            return Rate.exactly(1 / (1 / demand + 1 / supply.images_per_s))
        reach = min(demand, self.roofline(settings.backend))
        if settings.num_workers == 0:
            reach = min(reach, 1 / (self.problem.launch_s + 1 / supply.images_per_s))
        return Rate(*(min(value, reach) for value in (supply.images_per_s, supply.low, supply.high)))

    def _not_read_again(self, settings: FeedSettings, measured: Rate) -> Rate:
        """``measured``, or what a first reading allows: without workers, steps ran on samples that were read before."""
        cost = self.costs.get(settings.backend)
        if settings.num_workers or cost is None or cost.cpu_s > 0.5 * cost.wall_s:
            return measured
        return min(measured, Rate.exactly(1 / (self.problem.alone_s + cost.wall_s)), key=lambda rate: rate.images_per_s)

    def demand(self) -> float:
        """Images/s that the step takes: as measured with a batch at hand, or more where steps took more while they had one."""
        runs = [t.working for t in self.of("steps") if not self.uneven(t.settings.backend)]
        return max([self.problem.demand.images_per_s, *runs])

    def worth(self, settings: FeedSettings) -> float | None:
        """What tells two settings apart, in images/s.

        Where steps and workers fight for the processors, or steps wait long, it is what steps get; else what they would get by
        their waits, because then the steps' own time is the same noise under every setting; but threads may slow the steps.
        """
        got, wait = self.delivered(settings), self.wait(settings)
        if got is None or wait is None or wait > _LONG_WAIT or self.crowded(settings.backend):
            return None if got is None else self._sure(settings) * got.images_per_s
        by_waits = self.demand() * (1 - wait)
        slowed = settings.backend == THREADS and got.images_per_s < (1 - _SLOWED) * by_waits
        return got.images_per_s if slowed else self._sure(settings) * by_waits

    def _sure(self, settings: FeedSettings) -> float:
        """What is sure of a predicted rate: less of threads that were not seen beside real steps, if there is another form."""
        if settings.backend != THREADS or not settings.num_workers or len(self.problem.forms) == 1:
            return 1.0
        seen = settings == self.problem.own or self.of("steps", settings) or self._compared()
        return 1.0 if seen else 1 - _SLOWED

    def at_most(self, settings: FeedSettings) -> float:
        """What ``settings`` deliver, or at most, where only a sample's cost is known; 0 where they are refused."""
        if (rate := self.delivered(settings)) is not None:
            return rate.images_per_s
        cost = self.costs.get(settings.backend)
        return 0.0 if cost is None or self.refused(settings) else min(settings.num_workers / cost.wall_s, self.reachable())

    def wait(self, settings: FeedSettings) -> float | None:
        """The share of the time that steps wait for data."""
        runs = [t.wait_fraction for t in self.of("steps", settings) if t.wait_fraction is not None]
        if runs and not self.uneven(settings.backend):
            return sum(runs) / len(runs)
        got = self.delivered(settings)
        return None if got is None else max(0.0, 1 - got.images_per_s / self.demand())

    def reachable(self) -> float:
        """The most that any setting can deliver: the step's own speed, or what the processors allow."""
        return min(self.demand(), max(map(self.roofline, self.costs), default=math.inf))

    def roofline(self, form: str) -> float:
        """Images/s at which loading, receiving and step together fill all processors."""
        each = self._busy_s(form)
        return self.problem.cores / each if each else math.inf

    def _busy_s(self, form: str) -> float:
        """Processor seconds that an image costs in all; 0 where that is not known."""
        cost = self.costs.get(form)
        return cost.cpu_s + cost.receive_s + self.problem.step_cpu_s if cost else 0.0

    def crowded(self, form: str) -> bool:
        """Whether loading beside the step needs nearly all processors."""
        return self.reachable() > BUSY * self.roofline(form)

    def filling(self, form: str) -> float:
        """The number of workers that fill all processors when nothing else runs."""
        cost = self.costs[form]
        return self.problem.cores * cost.wall_s / cost.cpu_s if cost.cpu_s > 0 else math.inf

    def most(self, form: str) -> int:
        """The most workers that may be tried, that fit, and that are fewer than what failed; at least 1."""
        base, failed = self.base(form), [n for n, rate in self.points(form).items() if rate == 0]
        top = min([self.problem.most, *(n - 1 for n in failed)])
        return next((n for n in range(top, 1, -1) if self.problem.fits(with_workers(base, n)) is None), 1)

    def steady(self, settings: FeedSettings) -> bool:
        """Whether a worker's batches come often and evenly enough for a short run of steps to judge."""
        cost, supply = self.costs.get(settings.backend), self.supply(settings)
        if cost is None or self.uneven(settings.backend):
            return False
        wall_s = max(cost.wall_s, settings.num_workers / supply.images_per_s if supply else 0.0)  # what all share takes longer
        return wall_s * settings.batch_size <= STEADY_BATCH_S

    def met(self, settings: FeedSettings) -> bool:
        """Whether supply was measured to exceed demand."""
        supply = self.supply(settings)
        return supply is not None and supply.images_per_s >= MET * self.demand()

    def cheapest_good(self) -> FeedSettings:
        """The cheapest setting that delivers as much as the best, and as the user's own, within the tolerances.

        Where real steps were run on others than the user's own, only settings that were tried with them count.
        """
        failed, steps = {t.settings for t in self.trials if t.refused}, self.of("steps")
        ranked = any(t.settings != self.problem.own for t in steps)
        pool = steps if ranked else [*steps, *self.of("supply")]
        known = dict.fromkeys(t.settings for t in pool if t.settings not in failed)
        return self.cheapest({s: worth for s in known if (worth := self.worth(s)) is not None})

    def cheapest(self, rates: Mapping[FeedSettings, float]) -> FeedSettings:
        """The cheapest of the settings whose ``rates`` are the best's and the user's own, within the tolerances."""
        own = self.problem.own
        if not rates:
            return own
        floor = max((1 - TOLERANCE) * max(rates.values()), (1 - OWN_TOLERANCE) * rates.get(own, 0.0))
        return min((s for s in rates if rates[s] >= floor), key=lambda s: (cost_of(s), -rates[s]))

    def bottleneck(self, chosen: FeedSettings) -> str:
        """What keeps ``chosen`` from delivering more: model, processor, memory, workers, refused, storage or transport."""
        got, cost = self.delivered(chosen), self.costs.get(chosen.backend)
        if got is None or cost is None:
            return "unknown"
        if got.images_per_s >= 0.97 * self.demand():
            return "model"
        if got.images_per_s >= BUSY * self.roofline(chosen.backend) or chosen.backend == ARRAYS:  # which no worker can help
            return "processor"
        if chosen.num_workers >= self.most(chosen.backend) and not saturated(self.points(chosen.backend)):
            if chosen.num_workers >= self.problem.most:
                return "workers"
            return "refused" if self.problem.fits(with_workers(chosen, chosen.num_workers + 1)) is None else "memory"
        if self._starved(chosen.backend, cost):
            probes = [t for t in self.of("supply") if t.settings.num_workers >= chosen.num_workers]
            return "storage" if cost.cpu_s < 0.5 * cost.wall_s or any(map(_waits, probes)) else "transport"
        return "processor" if self.crowded(chosen.backend) else "transport"

    def _starved(self, form: str, cost: SampleCost) -> bool:
        """Whether the loader alone gives too little, with processors to spare."""
        best = max(self.points(form).values(), default=0.0)
        return best < MET * self.demand() and best * (cost.cpu_s + cost.receive_s) < BUSY * self.problem.cores


def _waits(probe: Trial) -> bool:
    """Whether workers were busy with samples all the time, and samples waited for something else than a processor."""
    cost, rate = probe.cost, probe.rate
    if cost is None or rate is None:
        return False
    busy = rate.images_per_s * cost.wall_s / max(1, probe.settings.num_workers)
    return cost.cpu_s < (0.8 if busy > BUSY else 0.5) * cost.wall_s


def _counts(most: int) -> Iterator[int]:
    """Numbers of workers up to ``most``: at first all, later each a sixteenth more, as one more is hardly another."""
    count = 0
    while count <= most:
        yield count
        count += max(1, count // 16)


def saturated(points: Mapping[int, float]) -> bool:
    """Whether the last workers that were added gave nothing, by supply by number of workers."""
    counts = sorted(n for n, rate in points.items() if rate > 0)
    return len(counts) > 1 and points[counts[-1]] < (1 + GAIN) * max(points[n] for n in counts[:-1])
