"""One model of throughput for the tuner and the diagnosis, by what a sample and a step cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.tuning.measures import SampleCost
from harness.watch.throughput import roofline, workers_for

# share of the processors above which workers and step are in each other's way
BUSY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What one backend can give to the steps.

    Attributes:
        demand: images/s that the step takes with a batch at hand.
        cost: of one sample in a worker that has a processor to itself.
        cores: processors that one rank may use.
        step_cpu_s: processor seconds of the step per image.
        alone_s: seconds per image that a process without workers spends on the step, and cannot
            load in.
    """

    demand: float
    cost: SampleCost
    cores: float
    step_cpu_s: float
    alone_s: float

    @property
    def roofline(self) -> float:
        """Images/s at which loading, receiving and step together fill all processors."""
        return roofline(self.cores, self.cost.cpu_s, self.cost.receive_s, self.step_cpu_s)

    @property
    def reachable(self) -> float:
        """The most images/s that any number of workers can give to the steps."""
        return min(self.demand, self.roofline)

    @property
    def is_crowded(self) -> bool:
        """Whether loading beside the step needs nearly all processors."""
        return self.reachable > BUSY * self.roofline

    def delivered(self, workers: int) -> float:
        """Returns the images/s that steps get from that many workers."""
        if workers == 0:
            return min(self.reachable, 1 / (self.alone_s + self.cost.wall_s))
        return min(self.reachable, workers / self.cost.wall_s)

    def workers_for(self, images_per_s: float) -> int:
        """Returns the fewest workers for a rate, at least 1."""
        return workers_for(images_per_s, self.cost.wall_s)


def undisturbed(cost: SampleCost, workers: int, cores: float) -> SampleCost:
    """Returns ``cost`` without what busy workers took from each other.

    They do that where there are more of them than processors.
    """
    if workers <= cores or workers * cost.cpu_s / cost.wall_s <= BUSY * cores:
        return cost
    return replace(cost, wall_s=max(cost.cpu_s, cost.wall_s * cores / workers))
