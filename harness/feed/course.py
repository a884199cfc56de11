"""One pass over images of which some are in memory and the others are read by threads, a few batches ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from harness.feed.crew import Crew
from harness.feed.interface import FeedSettings
from harness.feed.pixels import Pixels
from harness.feed.threads import polls
from harness.runtime.errors import BadSample, LoaderError
from harness.watch.stages import StageMeter

AHEAD = 2  # batches that are looked at before they are due


class Course:
    """What is to come of one pass; what ``pixels`` lack of each batch is found out once, when it is looked at.

    Args:
        batches: the indices of each.
        pixels: hold images, and take in those that were read.
        settings: of the threads, which are there only once there is something to read.
        meter: is told what they do, by slot.
    """

    def __init__(self, batches: Iterator[np.ndarray], pixels: Pixels, settings: FeedSettings, meter: StageMeter | None) -> None:
        self._batches, self._pixels, self._settings = batches, pixels, settings
        self._due: deque[tuple[np.ndarray, int]] = deque()  # the next batches, and how many of each are read
        self._wanted: deque[np.ndarray] = deque()  # what no thread has taken on yet
        self._crew = Crew(self, pixels.stills, settings, meter)
        self.close = self._crew.close

    def look_ahead(self) -> bool:
        """Have threads read what the next batches lack; whether there is another batch."""
        while len(self._due) <= AHEAD and (indices := next(self._batches, None)) is not None:
            missing = self._pixels.missing(indices)
            self._due.append((indices, len(missing)))
            if len(missing):
                self._wanted.append(missing)
                self._crew.begin(0, _taken(self._wanted))
        return bool(self._due)

    def polled(self, poll_s: float) -> Iterator[tuple[np.ndarray, int] | None]:
        """The indices of each batch as soon as all its images are there, and how many of them were read just now.

        None for each wait of ``poll_s`` seconds that was in vain.

        Raises:
            BadSample: one cannot be read.
            LoaderError: a batch was not read within ``settings.timeout_s``, or this was closed meanwhile.
            MemoryError: there is not enough.
        """
        while self.look_ahead():
            indices, missing = self._due.popleft()
            if missing:
                yield from self._read(poll_s)
            yield indices, missing

    def _read(self, poll_s: float) -> Iterator[None]:
        """Take in the next batch that threads have read."""
        for read in polls(self._crew, self._settings, poll_s):
            if read is not None:
                if read.errors:
                    raise BadSample(*read.errors[0])
                return self._pixels.keep(read)
            yield None
        raise LoaderError("the feed was closed amid a pass; no batch may be lost")


def _taken(wanted: deque[np.ndarray]) -> Iterator[np.ndarray]:
    while wanted:
        yield wanted.popleft()
