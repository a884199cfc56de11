"""Which loader settings to try next, and which to choose: policy without a clock or a process in it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A loader setting that a search may try."""

    num_workers: int
    pin_memory: bool

    def __str__(self) -> str:
        return f"num_workers={self.num_workers} pin_memory={str(self.pin_memory).lower()}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one candidate.

    Attributes:
        images_per_s: what the loader delivered with nothing consuming; 0 where it was refused.
        images: how many images that figure rests on.
        seconds: what the trial cost, the workers' start and end included.
        refused: why the candidate cannot be used, or None.
    """

    candidate: Candidate
    images_per_s: float
    images: int
    seconds: float
    refused: str | None = None


Search = Generator[Candidate, Trial, None]
"""Yields what to try, is sent what became of it, and ends when it has seen enough."""


def grid(cores: int, pin_choices: Sequence[bool]) -> Search:
    """The well-known tutorial's search over num_workers x pin_memory.

    For each pin_memory, num_workers goes 0, 4, 8, ... up to twice the cores until one is no faster than the best before it;
    then the three values on each side of that best are tried. Its faults are known (it ignores how fast the model is, and
    has no statistics): it is the baseline for better searches.
    """
    for pin in pin_choices:
        best, rate = 0, 0.0
        for workers in range(0, 2 * cores + 1, 4):
            trial = yield Candidate(workers, pin)
            if trial.images_per_s > rate:
                best, rate = workers, trial.images_per_s
                continue
            for near in range(max(0, best - 3), best + 4):
                if near != best:
                    yield Candidate(near, pin)
            break


def grid_size(cores: int, pin_choices: Sequence[bool]) -> int:
    """The most candidates that ``grid`` can yield."""
    return len(pin_choices) * (len(range(0, 2 * cores + 1, 4)) + 6)


def choose(trials: Sequence[Trial]) -> Trial:
    """The fastest trial; of equals the one with fewer workers, then the unpinned one; the first where all were refused."""
    usable = [trial for trial in trials if trial.refused is None]
    return min(usable or trials[:1], key=lambda t: (-t.images_per_s, t.candidate.num_workers, t.candidate.pin_memory))
