"""What one worker does, be it a process, a thread or the trainer itself: fill samples, time them,
keep their errors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat

import numpy as np

from harness.feed.gauge import Gauge
from harness.feed.interface import FillableDataset, StagedDataset, stages_of
from harness.runtime.errors import BadSample
from harness.watch.stages import SAMPLE, START, StageMeter, StageTimer, Stamps

# where and why
Errors = list[tuple[str, str]]


class Filler:
    """Fills the samples of one worker: for each chunk ``begin``, ``share`` if its memory is shared,
    then ``fill``.

    Args:
        dataset: whose samples.
        slot: the worker's row of ``meter`` and ``gauge``.
        meter: is told what each chunk took, and how that divides among the stages; None: chunks are
            timed all the same.
        gauge: is told what each sample took that could be read.
    """

    def __init__(
        self, dataset: FillableDataset, slot: int, meter: StageMeter | None, gauge: Gauge | None
    ) -> None:
        self._dataset = dataset
        self._slot = slot
        self._gauge = gauge
        self._staged = dataset if isinstance(dataset, StagedDataset) else None
        self._timer = (
            StageMeter(stages_of(dataset), 0).timer(0) if meter is None else meter.timer(slot)
        )
        self._timers: Sequence[StageTimer | None] | None = None

    def begin(self, samples: int) -> None:
        """Begin a chunk of so many samples; what happens until ``fill`` is the batch's, not a
        sample's.
        """
        self._timers = self._timer.begin(samples)

    def share(self) -> None:
        """The batch gets memory that another process can map: that is handing it over."""
        self._timer.share()

    def fill(
        self,
        epoch: int,
        indices: np.ndarray,
        pixels: np.ndarray,
        labels: np.ndarray,
        batches: int = 1,
    ) -> tuple[Errors, Stamps]:
        """Write the samples ``indices`` of ``epoch``; returns what went wrong, and when the chunk
        began and was made.

        Args:
            epoch: of the samples.
            indices: their places in the data set, int64 ``[N]``.
            pixels: where they go, uint8 ``[N, 3, S, S]`` with any strides.
            labels: where their labels go, int64 ``[N]``.
            batches: how many batches the chunk completes, for the meter's count.

        Raises:
            MemoryError: which is no sample's fault.
        """
        fill = self._dataset.fill
        gauge = self._gauge
        errors = Errors()
        timers = repeat(None) if self._timers is None else self._timers
        self._timer.fill()
        # repeat() has no end
        for row, (index, laps) in enumerate(zip(indices.tolist(), timers, strict=False)):
            try:
                out = pixels[row]
                if gauge is not None:
                    wall_s = time.perf_counter()
                    cpu_s = time.thread_time()
                labels[row] = (
                    fill(epoch, index, out)
                    if laps is None
                    else self._timed(laps, epoch, index, out)
                )
                if gauge is not None:
                    gauge.add(self._slot, time.perf_counter() - wall_s, time.thread_time() - cpu_s)
            except BadSample as error:
                errors.append((error.where, error.reason))
            except MemoryError:
                raise
            except Exception as error:
                # as text: one that cannot be pickled would never arrive (pytorch #142884)
                errors.append((f"sample {index}", f"{type(error).__name__}: {error}"))
        return errors, self._timer.end(len(indices), batches)

    def _timed(self, laps: StageTimer, epoch: int, index: int, out: np.ndarray) -> int:
        """As the data set's ``fill``, timed by ``laps``."""
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
