"""What one worker does, be it a process, a thread or the trainer itself: fill samples, time them, keep their errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from harness.feed.gauge import Gauge, Gauged
from harness.feed.interface import FillableDataset, StagedDataset, stages_of
from harness.runtime.errors import BadSample
from harness.watch.stages import SAMPLE, START, Laps, StageMeter, Stamps

Errors = list[tuple[str, str]]  # where and why


class Filler:
    """Fills the samples of one worker: for each run of samples ``begin``, ``share`` if it is shared, then ``fill``.

    Args:
        dataset: whose samples.
        slot: the worker's row of ``meter`` and ``gauge``.
        meter: is told what each run took, and how that divides among the stages; None: a run is timed all the same.
        gauge: is told what each sample took.
    """

    def __init__(self, dataset: FillableDataset, slot: int, meter: StageMeter | None, gauge: Gauge | None) -> None:
        self._dataset = dataset if gauge is None else Gauged(dataset, gauge, slot)
        self._staged = self._dataset if isinstance(self._dataset, StagedDataset) else None
        self._timer = StageMeter(stages_of(dataset), 0).timer(0) if meter is None else meter.timer(slot)
        self._timers: Sequence[Laps | None] | None = None

    def begin(self, samples: int) -> None:
        """A run of so many samples begins; what happens until ``fill`` is the batch's, not a sample's."""
        self._timers = self._timer.begin(samples)

    def share(self) -> None:
        """The batch gets memory that another process can map: that is handing it over."""
        self._timer.share()

    def fill(
        self, epoch: int, indices: np.ndarray, pixels: np.ndarray, labels: np.ndarray, batches: int = 1
    ) -> tuple[Errors, Stamps]:
        """Write the samples ``indices`` of ``epoch``; what went wrong, as text, and when the run began and was made.

        Args:
            epoch: of the samples.
            indices: their places in the data set, int64 ``[N]``.
            pixels: where they go, uint8 ``[N, 3, S, S]`` with any strides.
            labels: where their labels go, int64 ``[N]``.
            batches: how many batches the run completes, for the meter's count.

        Raises:
            MemoryError: which is no sample's fault.
        """
        fill, errors = self._dataset.fill, Errors()
        timers = repeat(None) if self._timers is None else self._timers
        self._timer.fill()
        for row, (index, laps) in enumerate(zip(indices.tolist(), timers, strict=False)):  # repeat() has no end
            try:
                out = pixels[row]
                labels[row] = fill(epoch, index, out) if laps is None else self._timed(laps, epoch, index, out)
            except BadSample as error:
                errors.append((error.where, error.reason))
            except MemoryError:
                raise
            except Exception as error:  # as text: one that cannot be pickled would never arrive (pytorch #142884)
                errors.append((f"sample {index}", f"{type(error).__name__}: {error}"))
        return errors, self._timer.end(len(indices), batches)

    def _timed(self, laps: Laps, epoch: int, index: int, out: np.ndarray) -> int:
        """As the data set's ``fill``, told to ``laps``."""
        laps.lap(START)
        try:
            if self._staged is not None:
                return self._staged.fill(epoch, index, out, laps.lap)
            label = self._dataset.fill(epoch, index, out)
            laps.lap(SAMPLE)
            return label
        except Exception:
            laps.fail()
            raise
