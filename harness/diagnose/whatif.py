"""What bounds training by the runs' figures, and what changes would give: arithmetic alone.

The rates are those of the tuner's ``Model``. A change is estimated by that model with and without
it; what real steps got is scaled by the ratio, so that what the model leaves out is left
out on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.diagnose.phases import Runs
from harness.feed.interface import FeedSettings
from harness.tuning.measures import Model
from harness.watch.figures import Ledger, Tag
from harness.watch.stages import StageCost
from harness.watch.verdict import Bottleneck, Evidence, Verdict, judge, total, worker_cost

# the rates are too uneven, or other programs' too
NO_CEILING: tuple[Bottleneck, ...] = ("unknown", "neighbours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a verdict and what-ifs are made of.

    Attributes:
        runs: what was measured.
        settings: the loader's.
        model: of throughput, by the cost of a sample with the files as they are.
        device: cpu, cuda or mps.
        cores_from: where the number of cores is said.
        image_size: side of the crop in pixels.
        short_sides: of some stored images, in pixels.
        fits: why settings do not fit into this machine, or None.
        others: cores that other programs took meanwhile; None: they spoilt nothing.
    """

    runs: Runs
    settings: FeedSettings
    model: Model
    device: str
    cores_from: str
    image_size: int
    short_sides: Sequence[int]
    fits: Callable[[FeedSettings], str | None]
    others: float | None

    @property
    def estimated(self) -> float:
        """Images/s that steps get as the model says."""
        return self.model.delivered(self.settings.num_workers)

    @property
    def measured(self) -> float | None:
        """Images/s that real steps got; None: they were not measured, or not on first reads."""
        cost = self.model.cost
        delivered = self.runs.delivered
        # without workers, steps ran on samples that were read before: their waits are left out
        if delivered and (self.settings.num_workers or cost.cpu_s > 0.5 * cost.wall_s):
            return delivered.images_per_s
        return None

    @property
    def got(self) -> float:
        """Images/s that steps get: as measured, else as the model says."""
        return self.measured or self.estimated

    @property
    def ceiling(self) -> float:
        """Speed-up if loading were free."""
        return max(1.0, self.model.demand / self.got)

    @property
    def lost(self) -> float:
        """Share of the time that loading costs: steps wait, and are faster without loading."""
        lost = 1 - 1 / self.ceiling
        if self.measured and self.runs.wait_fraction is not None:
            return min(lost, self.runs.wait_fraction)
        return lost


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change, and what steps would get then, by arithmetic."""

    change: str
    images_per_s: float
    speedup: float


def most_workers(facts: Facts) -> int:
    """Returns the fewest workers that give all that can be had, of those that fit."""
    own = facts.settings
    model = facts.model
    # no more than the tuner would try
    wanted = min(model.workers_for(model.reachable), max(8, int(4 * model.cores), own.num_workers))
    while wanted > 1 and facts.fits(replace(own, num_workers=wanted)):
        wanted -= 1
    # 0 of a backend that never has workers
    return replace(own, num_workers=wanted).num_workers


def judged(facts: Facts, **network: Any) -> Verdict:
    """Returns the verdict on a run with these figures.

    Args:
        facts: the figures.
        network: ``trainer`` and ``half_precision``, as ``Evidence`` has them.
    """
    # batches that are made in time and reach the step late wait for copies, or to be handed over
    runs = facts.runs
    copies = runs.copy_per_s
    where = "make"
    if facts.got < 0.8 * facts.estimated:
        where = "transport"
        # copies alone give hardly more than the steps get: copies are what fills the time
        if copies is not None and copies < 1.25 * facts.got:
            where = "move"
    window = replace(
        Ledger().window(),
        steps=100,
        images_per_s=facts.got,
        stall_fraction=facts.lost,
        stall_basis="host" if facts.device == "cpu" else "device",
        shares={"starved": facts.lost, "compute": 1 - facts.lost},
        wait_parts={"make": 0.0, where: 1.0},
    )
    model = facts.model
    verdict = judge(
        Evidence(
            window=window,
            stages=facts.runs.stages,
            settings=facts.settings,
            cores=model.cores,
            cores_from=facts.cores_from,
            device=facts.device,
            sampled={Tag.CPU_CORES: (model.cost.cpu_s + model.step_cpu_s) * facts.got},
            autotuned=False,
            most_workers=most_workers(facts),
            others=facts.others,
            ceiling=facts.ceiling,
            **network,
        )
    )
    uneven = any(rate and rate.is_uneven for rate in (runs.demand, runs.delivered))
    if uneven and verdict.kind != "neighbours":
        return Verdict("unknown", verdict.shares, why="uneven")
    return verdict


def what_ifs(facts: Facts, bottleneck: Bottleneck) -> list[WhatIf]:
    """Returns what changes would give, the ceiling first; nothing where there is no ceiling."""
    if bottleneck in NO_CEILING:
        return []
    got = facts.got
    rates = {"loading were free (the ceiling)": max(facts.model.demand, got)}
    # changes that leave handing over alone do not help where that is the limit
    if bottleneck not in ("transport", "copy"):
        copies = facts.runs.copy_per_s or math.inf
        for change, model, workers in _changes(facts):
            given = got / facts.estimated * model.delivered(workers)
            rates[change] = max(got, min(model.demand, copies, given))
    if facts.runs.fetch:
        rates["every file came cold from storage"] = min(got, facts.runs.fetch.images_per_s)
    return [WhatIf(change, rate, rate / got) for change, rate in rates.items()]


def _changes(facts: Facts) -> Iterator[tuple[str, Model, int]]:
    """Yields each change in words, with the model and the workers under it."""
    model = facts.model
    own = facts.settings.num_workers
    if (workers := most_workers(facts)) > own:
        yield f"loader.num_workers={workers}", model, workers
    for more in (1, 2, 4):
        widened = replace(facts.settings, num_workers=own + more)
        if widened.num_workers and facts.fits(widened) is None:
            # a step on the same cores is faster in proportion, at best
            faster = 1 + more / model.cores * (facts.device == "cpu")
            wider = replace(model, cores=model.cores + more, demand=faster * model.demand)
            yield f"{more} more core{'s' * (more > 1)}, and a worker for each", wider, own + more

    # what a sample would cost less, as shares of its wall and of its processor time
    stages = facts.runs.stages.stages
    whole = total(stages.values())
    encoded = total([stages[name] for name in ("read", "decode") if name in stages])
    wall = encoded.wall_s / whole.wall_s
    cpu = encoded.cpu_s / max(whole.cpu_s, 1e-9)
    read = stages.get("read", StageCost(0.0, 0.0))
    sample = worker_cost(facts.runs.stages)
    assert sample is not None
    # what reading waits for, but for a processor
    waits = (read.wall_s - sample.contention * read.cpu_s) / whole.wall_s
    savings = {
        "a disk twice as fast": (waits / 2, 0.0),
        "decoded images at hand (no reading, no decoding)": (wall, cpu),
    }
    # as for evaluation, and with room for random crops
    sides = facts.short_sides
    for crops in (1.15, 2.0):
        short = crops * facts.image_size
        gone = sum(1 - min(1.0, short / side) ** 2 for side in sides) / max(1, len(sides))
        savings[f"files with a short side of {short:.0f} pixels"] = gone * wall, gone * cpu
    for words, (wall, cpu) in savings.items():
        if wall > 0.02:
            wall_s = max(0.001, 1 - wall) * model.cost.wall_s
            cost = replace(model.cost, wall_s=wall_s, cpu_s=(1 - cpu) * model.cost.cpu_s)
            yield words, replace(model, cost=cost), own
