"""Other programs on this machine, and whether they keep processors from this run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from harness.watch.figures import Tag
from harness.watch.host import HostSource

# of what the run could have used, twice what counts as harm: the kernel's own threads work for the
# run and count as others
SPOILT = 0.2
_HARM = 0.1  # of the time: a thread that waits for a core for less has not held a step up
_FULL = 0.85  # of the machine's processor time
_LEAST_S = 0.5  # processor time is counted in ticks of 10 ms


def taken(sampled: Mapping[str, float]) -> float | None:
    """Cores that others took of those that the run may use; None where that slowed nothing, or is
    not known.

    Harm takes both: others had the cores, and as many threads of the run waited for one. A run that
    fills its cores by itself has waiting threads and no others; one that wants no more has others
    and no waiting threads.
    """
    found = [sampled.get(tag) for tag in (Tag.OTHERS_CPU_CORES, Tag.QUEUED_THREADS, Tag.CPU_CORES)]
    others, queued, used = (-1.0 if figure is None else figure for figure in found)
    kept = min(others, queued)
    return others if used >= 0 and kept >= max(_HARM, SPOILT * (used + kept)) else None


class Neighbours:
    """Looks at what other programs take while something is measured."""

    def __init__(self, cores: float | None, now: Callable[[], float] = time.monotonic) -> None:
        """``cores`` may be used; None, as where ranks share the machine: nothing is known of
        others.
        """
        self._cores = cores
        self._source = HostSource(now, cores=cores)
        self._now = now
        self._source.sample()
        self._looked_s = now()

    def look(self) -> float | None:
        """Cores that others took since the last look that was long enough ago; None where that has
        spoilt nothing.
        """
        if self._now() - self._looked_s < _LEAST_S:
            return None
        self._looked_s = self._now()
        sampled = self._source.sample()
        others = sampled.get(Tag.OTHERS_CPU_CORES)
        busy = sampled.get(Tag.CPU_FRACTION)
        # what is measured by turns shows no threads that wait all the time: full processors are
        # enough
        if (
            self._cores
            and others is not None
            and busy is not None
            and busy >= _FULL
            and others >= SPOILT * self._cores
        ):
            return others
        return taken(sampled)

    def told(self, others: float) -> str:
        """What the user is warned of."""
        return (
            f"other programs took {others:.2g} of the {self._cores:g} cores meanwhile, so that "
            "the figures are theirs too"
        )
