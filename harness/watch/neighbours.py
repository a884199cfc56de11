"""Other programs on this machine, and whether they keep processors from this run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from harness.watch.figures import Tag
from harness.watch.host import HostSensor

# of what the run could have used, twice what counts as harm: the kernel's own threads work for the
# run and count as others
SPOILT = 0.2


def taken(sampled: Mapping[str, float]) -> float | None:
    """Returns the cores that others took of the run's; None: no harm, or not known.

    Harm takes both: others had the cores, and as many threads of the run waited for one. A run that
    fills its cores by itself has waiting threads and no others; one that wants no more has others
    and no waiting threads.
    """
    if not {Tag.OTHERS_CPU_CORES, Tag.QUEUED_THREADS, Tag.CPU_CORES} <= sampled.keys():
        return None
    others = sampled[Tag.OTHERS_CPU_CORES]
    kept = min(others, sampled[Tag.QUEUED_THREADS])
    # a thread that waits for a core for less than a tenth of the time has not held a step up
    if kept < max(0.1, SPOILT * (sampled[Tag.CPU_CORES] + kept)):
        return None
    return others


class Neighbours:
    """Looks at what other programs take while something is measured."""

    def __init__(self, cores: float | None, now: Callable[[], float] = time.monotonic) -> None:
        """``cores`` may be used; None, as where ranks share the machine: others are not known."""
        self._cores = cores
        self._sensor = HostSensor(now, cores=cores)
        self._now = now
        self._sensor.sample()
        self._looked_s = now()

    def look(self) -> float | None:
        """Returns the cores that others took since the last look; None where nothing is spoilt.

        A look within half a second of the last one takes no figures, and is None.
        """
        # processor time is counted in ticks of 10 ms
        if self._now() - self._looked_s < 0.5:
            return None
        self._looked_s = self._now()
        sampled = self._sensor.sample()
        others = sampled.get(Tag.OTHERS_CPU_CORES, 0.0)
        # what is measured by turns shows no threads that wait all the time: full processors are
        # enough
        is_full = sampled.get(Tag.CPU_FRACTION, 0.0) >= 0.85
        if self._cores and is_full and others >= SPOILT * self._cores:
            return others
        return taken(sampled)

    def told(self, others: float) -> str:
        """Returns what the user is warned of."""
        return (
            f"other programs took {others:.2g} of the {self._cores:g} cores meanwhile, so that "
            "the figures are theirs too"
        )
