"""Which loader settings to try next, when to stop, and which to choose: policy without a clock.

A search is a generator: it yields what to measure, is sent what came of it, and returns its choice.
So the tutorial's grid and ``tuner=auto`` (in ``look.py``) run on the same measurements, and both
can be tested on made-up machines.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.feed.interface import ARRAYS, PROCESSES, THREADS, FeedSettings, with_workers
from harness.tuning.measures import Rate, Trial


@dataclass(frozen=True, slots=True)
class Ask:
    """One measurement that a search asks for.

    The last two are the lab's to fill in, for probes of supply.

    Attributes:
        kind: "supply", "steps" (see ``Trial``) or "passes": as the tutorial times its loader,
            start-up included.
        limit_s: how long to measure.
        needs_batch: go on until a whole batch has come.
        skip: batches that are left out, besides those that fill the queue.
    """

    settings: FeedSettings
    kind: Literal["supply", "steps", "passes"]
    limit_s: float = 1.5
    needs_batch: bool = False
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search found.

    Attributes:
        settings: the choice.
        before: what the user's setting delivers, measured or predicted; None where neither could
            be had.
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
    demand: Rate | None = None
    waits: tuple[float | None, float | None] = (None, None)
    reason: str = ""
    complete: bool = True

    @property
    def ceiling(self) -> float | None:
        """The speed-up over ``before`` if loading were free; None where that is not known."""
        if self.demand is None or self.before is None:
            return None
        return max(1.0, self.demand.images_per_s / self.before.images_per_s)


Search = Generator[Ask, Trial, Choice]
# batches ahead where samples are uneven: of all threads together, of each process
DEEP = {THREADS: 16, PROCESSES: 4}
# by what they take beside their workers: processes share no memory
_CHEAPEST = (ARRAYS, THREADS, PROCESSES)


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
            trials[settings] = yield Ask(settings, "passes")
        return trials[settings].images_per_s

    yield from attempt(own)
    for pin in pin_choices:
        base = replace(own, pin_memory=pin)
        best = 0
        best_rate = 0.0
        for workers in range(0, 2 * cores + 1, 4):
            if is_over():
                break
            rate = yield from attempt(with_workers(base, workers))
            if rate > best_rate:
                best = workers
                best_rate = rate
                continue
            # one that is no faster: look around the best
            for near in range(max(0, best - 3), best + 4):
                if near != best and not is_over():
                    yield from attempt(with_workers(base, near))
            break
    usable = [trial for trial in trials.values() if trial.rate] or [trials[own]]
    chosen = min(usable, key=lambda trial: (-trial.images_per_s, cost_of(trial.settings)))
    return Choice(
        chosen.settings,
        before=trials[own].rate,
        after=chosen.rate,
        reason="It is the fastest of those tried, start-up included. How fast the model is was not "
        "measured",
        complete=not is_over(),
    )
