"""What bounds training by the figures of the runs, and what changes would give: arithmetic, no
clock and no process.

The rates are those of ``harness.tuning.model``. A change is reckoned by that model with and without
it; what real steps got is scaled by the ratio, so that what the model leaves out is left out on
both sides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.feed.interface import FeedSettings
from harness.tuning.figures import Rate, SampleCost
from harness.tuning.model import Model
from harness.tuning.search import with_workers
from harness.watch.bottleneck import FED, HARM, Bottleneck, lacks_cores
from harness.watch.stages import StageCost, StageTotals
from harness.watch.supply import DOING, Supply, reckon
from harness.watch.verdict import MOST, MOST_PER_CORE

# real steps get less than so much of what the model says: handing over is in the way
_MODELLED = 0.85
_CROWDED = 0.7
_COPYING = (
    1.25  # copies alone give less than so many times what steps get: they are what fills the time
)
_MORE = 0.9  # workers give less than so much of what could be had: they are too few
_SHORT_SIDES = (
    1.15,
    2.0,
)  # of stored images, in sides of the crop: as for evaluation, and with room for random crops
_SMALLER = 0.9  # of the pixels: otherwise the files are small already
_TELLING = 0.02  # of a sample's time: less is not worth a row
_LEAST = 0.001  # of a sample's time is left whatever is taken away
NO_CEILING: tuple[Bottleneck, ...] = (
    "unknown",
    "neighbours",
)  # as the rates are too uneven, or other programs' too


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the runs found.

    Attributes:
        settings: the loader's.
        cores: processors that one rank may use, and where that is said.
        on_cpu: whether the step runs on the same processors.
        overlaps: whether the device works on the step while this process loads without workers.
        launch_s: seconds per image in which this process launches the step.
        demand: G, images/s of the step on batches at hand.
        step_cpu_s: processor seconds of the step per image.
        cost: of one sample in a worker that has a processor to itself, with the files as they are.
        stages: what the workers spent that on.
        delivered: A, images/s of real steps, without workers on samples that were read before; None
            where not measured.
        wait_fraction: share of their time in which they waited for data; None likewise.
        fetch_per_s: F, files/s from storage; None where that was not measured.
        copy_per_s: images/s that copies to the device give; None where there are none to make.
        image_size: side of the crop in pixels.
        sizes: width and height in pixels of some stored images.
        fits: why settings do not fit into this machine, or None.
        others: cores that other programs took meanwhile; None where that has spoilt nothing.
    """

    settings: FeedSettings
    cores: float
    cores_from: str
    on_cpu: bool
    overlaps: bool
    demand: Rate
    step_cpu_s: float
    cost: SampleCost
    stages: StageTotals
    delivered: Rate | None = None
    wait_fraction: float | None = None
    fetch_per_s: float | None = None
    copy_per_s: float | None = None
    launch_s: float = 0.0
    image_size: int = 0
    sizes: tuple[tuple[int, int], ...] = ()
    fits: Callable[[FeedSettings], str | None] = lambda _: None
    others: float | None = None

    @property
    def got(self) -> float:
        """Images/s that steps get: as measured, else as the model says, and no more than a first
        reading allows.
        """
        if self.delivered is None:
            return self.reckoned
        got = self.delivered.images_per_s
        if self.settings.num_workers or self.cost.cpu_s > 0.5 * self.cost.wall_s:
            return got
        # samples that wait were read before these steps
        return min(got, 1 / (model_of(self, self.cost).alone_s + self.cost.wall_s))

    @property
    def is_uneven(self) -> bool:
        """Whether the steps' rates are known too badly to tell a bottleneck from them."""
        return self.demand.is_uneven or (self.delivered is not None and self.delivered.is_uneven)

    @property
    def is_measured(self) -> bool:
        """Whether ``got`` is what real steps got."""
        return self.delivered is not None and math.isclose(self.got, self.delivered.images_per_s)

    @property
    def reckoned(self) -> float:
        """Images/s that steps get as the model says."""
        return model_of(self, self.cost).delivered(self.settings.num_workers)

    @property
    def lost(self) -> float:
        """The share of the time that loading costs: steps wait for data, and are faster without
        loading.
        """
        lost = 1 - 1 / self.ceiling
        return (
            min(lost, self.wait_fraction)
            if self.is_measured and self.wait_fraction is not None
            else lost
        )

    @property
    def ceiling(self) -> float:
        """Speed-up if loading were free."""
        return max(1.0, self.demand.images_per_s / self.got)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change, and what steps would get then, by arithmetic."""

    change: str
    images_per_s: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Bound:
    """What keeps steps from more images: the class, and why in sentences, without the last period."""

    bottleneck: Bottleneck
    words: str


def model_of(facts: Facts, cost: SampleCost) -> Model:
    """The model of throughput with samples of ``cost``."""
    demand = facts.demand.images_per_s
    return Model(
        demand=demand,
        cost=cost,
        cores=facts.cores,
        step_cpu_s=facts.step_cpu_s,
        alone_s=facts.launch_s if facts.overlaps else 1 / demand,
    )


def reachable(facts: Facts) -> tuple[float, int]:
    """The most images/s that workers can give to the steps, and how many do: no more than fit, and
    than are worth a try.
    """
    own = facts.settings
    model = model_of(facts, facts.cost)
    if not with_workers(own, 1).num_workers:
        return facts.reckoned, 0  # a form that never has workers
    top = max(MOST, int(MOST_PER_CORE * facts.cores), own.num_workers)
    most = next((n for n in range(top, 1, -1) if facts.fits(with_workers(own, n)) is None), 1)
    workers = min(most, model.workers_for(model.reachable))
    return model.delivered(workers), workers


def bound(facts: Facts) -> Bound:
    """What bounds the steps; other programs where they took processors that the steps lack."""
    # processors that others fill keep a worker waiting in every stage
    supply = reckon(
        facts.stages, None if facts.others else max(1.0, facts.settings.num_workers / facts.cores)
    )
    assert supply is not None, "at least one sample was made"
    found = _own_bound(facts, supply)
    if facts.others and (
        facts.is_uneven or lacks_cores(found.bottleneck, supply, facts.on_cpu, facts.lost)
    ):
        return Bound(
            "neighbours", f"Other programs took {facts.others:.2g} of the {facts.cores:g} cores"
        )
    return found


def _own_bound(facts: Facts, supply: Supply) -> Bound:
    """What bounds the steps in this run itself."""
    if facts.is_uneven:
        return Bound("unknown", "The measurement is too uneven to tell what bounds training")
    taken = (
        ". Loading costs it processors rather than waits"
        if facts.on_cpu and facts.ceiling > 1 + HARM
        else ""
    )
    if facts.lost < FED:
        return Bound("compute", f"The network takes nearly all of the time{taken}")
    if facts.lost < HARM:
        return Bound("balanced", f"The step waits for data {facts.lost:.0%} of the time{taken}")
    most, workers = reachable(facts)
    crowded = model_of(facts, facts.cost).reachable < facts.demand.images_per_s
    if facts.got < (_CROWDED if crowded else _MODELLED) * facts.reckoned:
        if facts.copy_per_s is not None and facts.copy_per_s < _COPYING * facts.got:
            memory = "page-locked" if facts.settings.pin_memory else "pageable"
            return Bound(
                "copy",
                f"Copies from {memory} memory give {rate_in_words(facts.copy_per_s)} images/s at "
                "most",
            )
        return Bound("transport", "Batches are made in time, but reach the step late")
    share = (
        f"{DOING[supply.kind].capitalize()} takes {supply.kind_s * 1e3:.3g} of the "
        f"{supply.wall_s * 1e3:.3g} ms of a sample"
    )
    if supply.kind == "storage" and supply.waits:
        return Bound("storage", f"{share}, mostly waiting")
    if facts.reckoned < _MORE * most and workers > facts.settings.num_workers:
        have = (
            f"num_workers={facts.settings.num_workers} can give "
            f"{rate_in_words(facts.reckoned)} images/s"
        )
        return Bound("workers", f"{have}, num_workers={workers} {rate_in_words(most)}. {share}")
    return _processors(facts, supply, share, crowded)


def _processors(facts: Facts, supply: Supply, share: str, crowded: bool) -> Bound:
    """The bound where loading has all the processors that it can have."""
    together = f". The step shares the {facts.cores:g} cores" if crowded and facts.on_cpu else ""
    if crowded and facts.cores_from.startswith("quota"):
        return Bound(
            "quota",
            f"The {facts.cores:g} cores of the {facts.cores_from} are full. {share}{together}",
        )
    more = facts.fits(with_workers(facts.settings, facts.settings.num_workers + 1))
    full = f". No more workers fit: {more}" if more and not crowded else ""
    return Bound(supply.kind, f"{share}{together}{full}")


def what_ifs(facts: Facts) -> list[WhatIf]:
    """What changes would give, the ceiling first; none where there is no ceiling.

    Where handing batches over is the limit, no change that leaves it alone.
    """
    bottleneck = bound(facts).bottleneck
    if bottleneck in NO_CEILING:
        return []
    scale = facts.got / facts.reckoned
    demand = facts.demand.images_per_s
    rows = [WhatIf("loading were free (the ceiling)", max(demand, facts.got), facts.ceiling)]
    copies = math.inf if facts.copy_per_s is None else facts.copy_per_s
    for change, changed, settings, cost in (
        _changes(facts) if bottleneck not in ("transport", "copy") else ()
    ):
        given = scale * model_of(changed, cost).delivered(settings.num_workers)
        rate = max(facts.got, min(changed.demand.images_per_s, copies, given))
        rows.append(WhatIf(change, rate, rate / facts.got))
    if facts.fetch_per_s is not None:
        rate = min(facts.got, facts.fetch_per_s)
        rows.append(WhatIf("every file came cold from storage", rate, rate / facts.got))
    return rows


def _changes(facts: Facts) -> Iterator[tuple[str, Facts, FeedSettings, SampleCost]]:
    """Each change in words, with the facts, the settings and the cost of a sample under it."""
    own = facts.settings
    cost = facts.cost
    _, workers = reachable(facts)
    if workers > own.num_workers:
        yield f"loader.num_workers={workers}", facts, with_workers(own, workers), cost
    for more in (1, 2, 4):
        widened = with_workers(own, own.num_workers + more)
        if widened.num_workers and facts.fits(widened) is None:
            yield _cores_in_words(more), _with_cores(facts, more), widened, cost
    waiting = _waiting(facts)
    encoded = _share(facts.stages, ("read", "decode"))
    if waiting > _TELLING:
        yield "a disk twice as fast", facts, own, _cheaper(cost, StageCost(waiting / 2, 0.0))
    if encoded.wall_s > _TELLING:
        yield (
            "decoded images at hand (no reading, no decoding)",
            facts,
            own,
            _cheaper(cost, encoded),
        )
    for sides in _SHORT_SIDES:
        kept = kept_pixels(facts.sizes, sides * facts.image_size)
        if kept < _SMALLER:
            gone = StageCost((1 - kept) * encoded.wall_s, (1 - kept) * encoded.cpu_s)
            yield (
                f"files with a short side of {sides * facts.image_size:.0f} pixels",
                facts,
                own,
                _cheaper(cost, gone),
            )


def kept_pixels(sizes: Sequence[tuple[int, int]], short: float) -> float:
    """The share of their pixels that images of ``sizes`` keep when short sides over ``short``
    pixels become that; 1 of none.
    """
    pixels = sum(width * height for width, height in sizes)
    kept = sum(
        width * height * min(1.0, short / min(width, height)) ** 2 for width, height in sizes
    )
    return kept / pixels if pixels else 1.0


def _share(totals: StageTotals, stages: Sequence[str]) -> StageCost:
    """The shares of a sample's wall and of its processor time that ``stages`` take together, as far
    as there are such.
    """
    parts = [totals.stages[stage] for stage in stages if stage in totals.stages]
    whole = totals.stages.values()
    wall_s = sum(cost.wall_s for cost in whole)
    cpu_s = sum(cost.cpu_s for cost in whole)
    return StageCost(
        sum(part.wall_s for part in parts) / wall_s if wall_s else 0.0,
        sum(part.cpu_s for part in parts) / cpu_s if cpu_s else 0.0,
    )


def _waiting(facts: Facts) -> float:
    """The share of a sample's wall time in which reading waits, and not for a processor, as the
    other stages do.
    """
    stages = facts.stages.stages
    read = stages.get("read", StageCost(0.0, 0.0))
    others = [cost for name, cost in stages.items() if name != "read"]
    wall_s = sum(cost.wall_s for cost in others)
    cpu_s = sum(cost.cpu_s for cost in others)
    crowding = max(1.0, wall_s / cpu_s) if cpu_s else 1.0
    return max(0.0, read.wall_s - crowding * read.cpu_s) / (read.wall_s + wall_s)


def _cheaper(cost: SampleCost, gone: StageCost) -> SampleCost:
    """``cost`` without the shares of its wall and its processor time that are ``gone``."""
    left = max(_LEAST, 1 - gone.wall_s)
    return dataclasses.replace(
        cost, wall_s=left * cost.wall_s, cpu_s=max(0.0, 1 - gone.cpu_s) * cost.cpu_s
    )


def _with_cores(facts: Facts, more: int) -> Facts:
    """The facts with so many more cores; a step that runs on them too is faster in proportion, at
    best.
    """
    cores = facts.cores + more
    if not facts.on_cpu:
        return dataclasses.replace(facts, cores=cores)
    faster = cores / facts.cores
    demand = Rate(
        *(
            rate * faster
            for rate in (facts.demand.images_per_s, facts.demand.low, facts.demand.high)
        )
    )
    return dataclasses.replace(facts, cores=cores, demand=demand)


def rate_in_words(images_per_s: float) -> str:
    """A rate with three digits or more."""
    return f"{images_per_s:.3g}" if images_per_s < 100 else f"{images_per_s:.0f}"


def _cores_in_words(more: int) -> str:
    return f"{more} more core{'s' * (more > 1)}, and a worker for each"
