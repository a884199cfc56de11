"""Which loader settings to try next, when to stop, and which to choose: policy without a clock or a
process in it.

A search is a generator: it yields what to measure, is sent what came of it, and returns its choice.
So the tutorial's grid and ``tuner=auto`` (in ``look.py``) run on the same measurements, and both
can be tested on made-up machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.feed.arrays import ARRAYS, in_form
from harness.feed.interface import PROCESSES, THREADS, FeedSettings
from harness.tuning.figures import Rate, Trial


@dataclass(frozen=True, slots=True)
class Problem:
    """What is known before the search.

    Attributes:
        own: the user's own settings.
        calibration: the probes so far: of ``own``, or of one worker where it has none or failed;
            the last succeeded.
        forms: the names of the feed's forms, ``own``'s among them.
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
    forms: tuple[str, ...]
    demand: Rate
    step_cpu_s: float
    cores: float
    most: int
    pin_memory: bool
    fits: Callable[[FeedSettings], str | None]
    budget_s: float
    alone_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One measurement that a search asks for.

    Attributes:
        kind: "supply", "steps" (see ``Trial``) or "passes": as the tutorial times its loader,
            start-up included.
        target: a supply probe may stop when its interval lies wholly on one side of this many
            images/s.
        limit_s: how long to measure.
    """

    settings: FeedSettings
    kind: Literal["supply", "steps", "passes"]
    target: float | None = None
    limit_s: float = 1.5


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search found.

    Attributes:
        settings: the choice.
        before: what the user's own setting delivers, measured or predicted; None where neither
            could be had.
        after: what the choice delivers.
        demand: images/s that the step takes, as far as the search has learned; None where it did
            not look.
        waits: the share of the time that steps wait for data, before and after.
        reason: why this choice, in sentences without the last period.
        complete: False where the budget ended the search.
    """

    settings: FeedSettings
    before: Rate | None
    after: Rate | None
    demand: float | None = None
    waits: tuple[float | None, float | None] = (None, None)
    reason: str = ""
    complete: bool = True


Search = Generator[Ask, Trial, Choice]
# batches ahead where samples are uneven: of all threads together, of each process
DEEP = {THREADS: 16, PROCESSES: 4}
_CHEAPEST = (
    ARRAYS,
    THREADS,
    PROCESSES,
)  # forms by what they take beside their workers: processes share no memory


def with_workers(
    settings: FeedSettings, num_workers: int, prefetch_factor: int | None = None
) -> FeedSettings:
    """``settings`` with another number of workers, kept alive between epochs, and what goes with
    it; arrays never have any.
    """
    if settings.backend == ARRAYS:
        return in_form(settings, ARRAYS)
    return dataclasses.replace(
        settings,
        num_workers=num_workers,
        prefetch_factor=(prefetch_factor or settings.prefetch_factor or 2) if num_workers else None,
        persistent_workers=num_workers > 0
        and (settings.persistent_workers or not settings.num_workers),
    )


def in_flight(settings: FeedSettings) -> int:
    """Batches that are made, or in the making, before one is taken: processes make their own,
    threads one together.
    """
    each = settings.prefetch_factor or 0
    if settings.backend == THREADS:
        return each + 1 if settings.num_workers else 0
    return settings.num_workers * each


def cost_of(settings: FeedSettings) -> tuple[int, int, int, bool]:
    """What a setting costs the machine, for choosing the cheaper of two: workers, form, batches in
    flight, pinned memory.
    """
    form = _CHEAPEST.index(settings.backend) if settings.backend in _CHEAPEST else len(_CHEAPEST)
    return settings.num_workers, form, in_flight(settings), settings.pin_memory


def grid(own: FeedSettings, cores: int, pin_choices: Sequence[bool], budget_s: float) -> Search:
    """The well-known tutorial's search over num_workers x pin_memory, after the user's own setting.

    For each pin_memory, num_workers goes 0, 4, 8, ... up to twice the cores until one is no faster
    than the best before it; then the three values on each side of that best are tried, and the
    fastest of all is taken. Its faults stay in: it times the workers' start and their primed queue
    with the loading, the page cache favours what runs later, it does not know how fast the model
    is, and it has no statistics. It is the baseline for better searches. (As printed, the tutorial
    gives ``num_workers`` to the loader on CUDA machines alone, and elsewhere compares one setting
    with itself.)
    """
    trials: list[Trial] = []

    def enough() -> bool:
        return sum(trial.seconds for trial in trials) > budget_s

    def attempt(settings: FeedSettings) -> Generator[Ask, Trial, float]:
        known = [trial for trial in trials if trial.settings == settings]
        if not known:
            known = [(yield Ask(settings, "passes"))]
            trials.extend(known)
        return known[0].rate.images_per_s if known[0].rate else 0.0

    yield from attempt(own)
    for pin in pin_choices:
        base = dataclasses.replace(own, pin_memory=pin)
        best = 0
        best_rate = 0.0
        for workers in range(0, 2 * cores + 1, 4):
            if enough():
                break
            rate = yield from attempt(with_workers(base, workers))
            if rate > best_rate:
                best = workers
                best_rate = rate
                continue
            for near in range(max(0, best - 3), best + 4):
                if near != best and not enough():
                    yield from attempt(with_workers(base, near))
            break
    usable = [trial for trial in trials if trial.rate] or trials[:1]
    chosen = min(
        usable, key=lambda t: (-t.rate.images_per_s if t.rate else 0.0, cost_of(t.settings))
    )
    reason = (
        "It is the fastest of those tried, start-up included. How fast the model is was not "
        "measured"
    )
    return Choice(
        chosen.settings, trials[0].rate, chosen.rate, reason=reason, complete=not enough()
    )
