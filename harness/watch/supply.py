"""What a sample costs the workers of a feed, and how many of them would meet a demand.

Pure functions.

The rates are operational ones (Denning and Buzen 1978): with w seconds of wall and c of processor
time a sample, n workers give at most n / w images/s, and C processors at most C / (c + s) where the
step takes s of them per image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from harness.watch.stages import GROUPS, StageCost, StageTotals

Kind = Literal["storage", "decode", "augment", "collate", "transport"]
DOING: Mapping[Kind, str] = MappingProxyType(
    {
        "storage": "reading",
        "decode": "decoding",
        "augment": "augmentation",
        "collate": "putting batches together",
        "transport": "getting memory that processes share",
    }
)  # in words

SPARE = 1.1  # how much more than a demand workers should give: samples are uneven
_TELLING = (
    0.1  # share of the processor time from which a stage tells how crowded the processors are
)
_WAITING = 0.5  # share of its time from which a stage is said to wait
# share of its time in which a stage that waits has a processor, at most, where processors are full
_OUTSIDE = 0.1


@dataclass(frozen=True, slots=True)
class Supply:
    """What the workers' time went for.

    Attributes:
        wall_s: seconds that a worker takes for a sample.
        cpu_s: processor seconds of these.
        wants_s: ``cpu_s`` and the seconds in which it waited for a processor.
        parts: by kind, the share of ``wall_s``; they sum to 1.
        kind: the largest of them.
        kind_s: its seconds a sample.
        stage: the largest stage of that kind.
        waits: whether that kind's time is mostly waiting, and not for a processor.
    """

    wall_s: float
    cpu_s: float
    wants_s: float
    parts: Mapping[str, float]
    kind: Kind
    kind_s: float
    stage: str
    waits: bool

    def workers_for(self, images_per_s: float) -> int:
        """Workers that give so much with ``SPARE`` on top, as long as there are processors for
        them.
        """
        return max(1, math.ceil(SPARE * images_per_s * self.wall_s))

    def rate_of(self, cores: float, step_cpu_s: float) -> float:
        """Images/s that so many processors could load, where the step takes ``step_cpu_s`` of them
        per image.
        """
        return cores / max(self.wants_s + step_cpu_s, 1e-9)


def reckon(totals: StageTotals | None, lone_crowding: float | None) -> Supply | None:
    """What ``totals`` say; None where they say nothing.

    Args:
        totals: of the workers.
        lone_crowding: how many times its processor time a stage can last for want of a processor,
            at most, where no second one tells it; None: the processors were full.
    """
    wall_s = sum(cost.wall_s for cost in totals.stages.values()) if totals else 0.0
    if totals is None or totals.samples <= 0 or wall_s <= 0:
        return None
    crowding = _crowding(totals.stages, lone_crowding)
    full = lone_crowding is None
    kinds: dict[Kind, StageCost] = {}
    largest: dict[Kind, str] = {}
    for name, cost in totals.stages.items():
        kind = _kind(name, _waits(cost, crowding, full))
        if cost.wall_s >= totals.stages[largest.setdefault(kind, name)].wall_s:
            largest[kind] = name
        before = kinds.get(kind, StageCost(0.0, 0.0))
        kinds[kind] = StageCost(before.wall_s + cost.wall_s, before.cpu_s + cost.cpu_s)
    top = max(kinds, key=lambda kind: kinds[kind].wall_s)
    waits = _waits(kinds[top], crowding, full)
    cpu_s = sum(cost.cpu_s for cost in totals.stages.values())
    return Supply(
        wall_s=wall_s / totals.samples,
        cpu_s=cpu_s / totals.samples,
        wants_s=(wall_s if full and not waits else crowding * cpu_s) / totals.samples,
        parts={kind: cost.wall_s / wall_s for kind, cost in kinds.items()},
        kind=top,
        kind_s=kinds[top].wall_s / totals.samples,
        stage=largest[top],
        waits=waits,
    )


def _kind(stage: str, waits: bool) -> Kind:
    """The kind of a stage; one that a data set does not split is reading if it waits, and decoding
    if it works.
    """
    group = GROUPS.get(stage, "augment")
    if group == "storage" or (group == "sample" and waits):
        return "storage"
    if group == "decode" or group == "sample":
        return "decode"
    if group == "transport":
        return "transport"
    return "collate" if group == "collate" else "augment"


def _waits(cost: StageCost, crowding: float, full: bool) -> bool:
    """Whether it is mostly waiting, and not for a processor: where those are full, that is harder
    to tell.
    """
    outside = not full or cost.cpu_s < _OUTSIDE * cost.wall_s
    return outside and cost.wall_s - crowding * cost.cpu_s >= _WAITING * cost.wall_s


def _crowding(stages: Mapping[str, StageCost], lone_crowding: float | None) -> float:
    """How many times its processor time work lasts here: the least of the stages that have a share
    of it.

    A lone stage that lasts long by being crowded out cannot be told from one that waits.
    """
    cpu_s = sum(cost.cpu_s for cost in stages.values())
    telling = [
        cost.wall_s / cost.cpu_s
        for cost in stages.values()
        if cost.cpu_s > 0 and cost.cpu_s >= _TELLING * cpu_s
    ]
    if len(telling) == 1 and lone_crowding is not None:
        telling.append(lone_crowding)
    return max(1.0, min(telling, default=1.0))
