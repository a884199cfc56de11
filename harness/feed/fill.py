"""What one worker does, a process, a thread or the trainer itself: it fills samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

import numpy as np

from harness.feed.interface import Failure, FillableDataset, stages_of
from harness.runtime.errors import BadSample, is_out_of_memory
from harness.runtime.seeding import instead_of
from harness.watch.stages import SAMPLE, START, StageMeter, StageTimer, Stamps


class Filler:
    """Fills the samples of one worker, times them and keeps their failures.

    For each chunk call ``timer.begin``, ``timer.share`` if the memory is shared, then ``fill``. The
    time until ``fill`` is the batch's, not a sample's.

    Args:
        dataset: gives the samples.
        slot: the worker's row of ``meter``.
        meter: counts what each chunk took, by stage; None: chunks are timed all the same.
        times_samples: whether it also counts what each readable sample took.

    Attributes:
        timer: times the chunk.
    """

    def __init__(
        self, dataset: FillableDataset, slot: int, meter: StageMeter | None, times_samples: bool
    ) -> None:
        self._dataset: Any = dataset
        self._stages = stages_of(dataset)
        meter = meter or StageMeter(self._stages, slot + 1, shared=False)
        self._fill: Any = meter.timed(slot, dataset.fill) if times_samples else dataset.fill
        self.timer = StageTimer(meter, slot)

    def fill(
        self,
        timers: Sequence[StageTimer | None] | None,
        epoch: int,
        indices: np.ndarray,
        pixels: np.ndarray,
        labels: np.ndarray,
        batches: int = 1,
    ) -> tuple[list[Failure], Stamps]:
        """Writes samples into a batch; returns their failures, and when the chunk was made.

        Args:
            timers: what ``timer.begin`` returned for the chunk.
            epoch: of the samples.
            indices: their places in the data set, int64 ``[N]``, as an order gives them.
            pixels: where they go, uint8 ``[N, 3, S, S]`` with any strides.
            labels: where their labels go, int64 ``[N]``.
            batches: how many batches the chunk completes, for the meter's count.

        Raises:
            MemoryError: no sample's fault, whichever allocator refused.
        """
        fill = self._fill
        failures: list[Failure] = []
        self.timer.fill()
        # repeat() has no end
        timed = zip(indices.tolist(), timers or repeat(None), strict=False)
        for row, (index, laps) in enumerate(timed):
            try:
                if laps is None:
                    labels[row] = fill(epoch, index, pixels[row])
                else:
                    laps.lap(START)
                    if self._stages != (SAMPLE,):
                        labels[row] = fill(epoch, index, pixels[row], laps.lap)
                    else:
                        labels[row] = fill(epoch, index, pixels[row])
                        laps.lap(SAMPLE)
            except Exception as error:
                if laps is not None:
                    # time without a lap counts for the first stage, most often reading
                    laps.lap(self._stages[0])
                if is_out_of_memory(error):
                    raise MemoryError(str(error)) from error
                place = index % len(self._dataset)
                # as text: an error that cannot be pickled would never arrive (pytorch #142884)
                where, reason = f"sample {index}", f"{type(error).__name__}: {error}"
                if isinstance(error, BadSample):
                    where, reason = error.where, error.reason
                new = self._fill_instead(epoch, index, pixels[row])
                if new is not None:
                    labels[row] = new
                failures.append(Failure(place, where, reason, new is not None))
        return failures, self.timer.end(len(indices), batches)

    def _fill_instead(self, epoch: int, index: int, out: np.ndarray) -> int | None:
        """Writes another sample in the place of ``index``; returns its label; None: not wanted."""
        dataset = self._dataset
        if dataset.skips:
            for other in instead_of(index % len(dataset), len(dataset)):
                with suppress(BadSample):
                    return int(dataset.fill(epoch, index, out, instead=other))
        return None
