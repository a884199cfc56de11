"""What a clock counts, in fixed memory, and the figures that come of it. Light: the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_ERROR = 0.01  # relative error of a quantile
_LOG_GROWTH = math.log((1 + _ERROR) / (1 - _ERROR))  # of the buckets' bounds
_SMALLEST_MS, _LARGEST_MS = 1e-3, 1e9  # values outside are counted as these: at most 1,383 buckets


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 95th percentile and maximum of one figure, in the unit that its name carries."""

    median: float
    p95: float
    max: float


class Sketch:
    """Quantiles of any number of times in milliseconds, in fixed memory.

    A quantile is within 1 % of the value of its rank (below a microsecond: within a microsecond), the maximum is exact.
    The buckets' bounds grow by a constant factor (DDSketch; Masson, Rim and Lee, VLDB 2019).
    """

    __slots__ = ("_counts", "_max")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._max = 0.0

    def add(self, value_ms: float) -> None:
        """Count one value."""
        clipped = min(max(value_ms, _SMALLEST_MS), _LARGEST_MS)
        bucket = math.ceil(math.log(clipped) / _LOG_GROWTH)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._max = max(self._max, value_ms)

    def merge(self, other: Sketch) -> None:
        """Count all values of ``other``."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self._max = max(self._max, other._max)

    def spread(self) -> Spread | None:
        """What the values look like; None where there are none."""
        return Spread(self._quantile(0.5), self._quantile(0.95), self._max) if self._counts else None

    def _quantile(self, share: float) -> float:
        left = math.ceil(share * sum(self._counts.values()))
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                break
        middle = math.exp(bucket * _LOG_GROWTH) * (1 - _ERROR)  # relatively as far from one bound as from the other
        return min(middle, self._max)


@dataclass(frozen=True, slots=True)
class Window:
    """The figures of a stretch of steps: of one logged window, or of a whole run.

    The first step of every epoch is kept apart, because in it workers start, kernels are chosen and networks compiled.
    ``elapsed_s + first_step_s + sum(pauses_s.values())`` is the wall time. A figure that this device cannot give, or that
    no step has given yet, is None.

    Attributes:
        steps: steps that ended, without first ones.
        images: images in these steps.
        elapsed_s: wall time of these steps, without pauses.
        images_per_s: ``images / elapsed_s``.
        step_ms: one step. With device events from the end of one step's computing to that of the next, since the host
            runs ahead of a GPU and its own clock then shows launches; else from the host's clock.
        data_wait_ms: host time blocked on the feed, per step. Harmless while the device still has queued work.
        copy_ms: copy of one batch to the device (CUDA only).
        compute_ms: time within ``computing()``, per step: device time on CUDA, host time on CPU, None elsewhere.
        data_wait_fraction: sum of data waits / ``elapsed_s``: an upper bound on the harm.
        stall_fraction: share of the time in which the device had nothing to run for want of data; see ``StepClock``.
        compute_fraction: time within ``computing()`` / all time, both on the clock that ``stall_basis`` names.
        stall_basis: ``device`` where the last two come from device events, ``host`` where from the host's clock.
        first_steps: first steps that ended.
        first_step_s: wall time of the first steps together, with what lay between two epochs; None where there are none.
        pauses_s: wall time of the pauses by name.
        dropped: ``computing()`` blocks without device figures because no slot was free.
    """

    steps: int
    images: int
    elapsed_s: float
    images_per_s: float | None
    step_ms: Spread | None
    data_wait_ms: Spread | None
    copy_ms: Spread | None
    compute_ms: Spread | None
    data_wait_fraction: float | None
    stall_fraction: float | None
    compute_fraction: float | None
    stall_basis: Literal["host", "device"]
    first_steps: int
    first_step_s: float | None
    pauses_s: Mapping[str, float]
    dropped: int


@dataclass(slots=True)
class Ledger:
    """The sums behind a ``Window``; the clock and the device's timeline add to it."""

    steps: int = 0
    images: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    host_compute_s: float = 0.0
    first_steps: int = 0
    first_s: float = 0.0
    device_s: float = 0.0
    device_compute_s: float = 0.0
    device_stall_s: float = 0.0
    dropped: int = 0
    pauses_s: dict[str, float] = field(default_factory=dict)
    host_step: Sketch = field(default_factory=Sketch)
    device_step: Sketch = field(default_factory=Sketch)
    wait: Sketch = field(default_factory=Sketch)
    copy: Sketch = field(default_factory=Sketch)
    compute: Sketch = field(default_factory=Sketch)

    def merge(self, other: Ledger) -> None:
        """Add all that ``other`` holds."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Sketch):
                mine.merge(theirs)
            elif isinstance(mine, dict):
                for key, seconds in theirs.items():
                    mine[key] = mine.get(key, 0.0) + seconds
            else:
                setattr(self, name, mine + theirs)

    def window(self) -> Window:
        """The figures that these sums make."""
        on_device = self.device_s > 0
        wait, compute = _share(self.wait_s, self.elapsed_s), self.compute.spread()
        if on_device:
            computed = _share(self.device_compute_s, self.device_s)
        else:
            computed = _share(self.host_compute_s, self.elapsed_s) if compute else None
        return Window(
            steps=self.steps,
            images=self.images,
            elapsed_s=self.elapsed_s,
            images_per_s=self.images / self.elapsed_s if self.elapsed_s > 0 else None,
            step_ms=self.device_step.spread() or self.host_step.spread(),
            data_wait_ms=self.wait.spread(),
            copy_ms=self.copy.spread(),
            compute_ms=compute,
            data_wait_fraction=wait,
            stall_fraction=_share(self.device_stall_s, self.device_s) if on_device else wait,
            compute_fraction=computed,
            stall_basis="device" if on_device else "host",
            first_steps=self.first_steps,
            first_step_s=self.first_s if self.first_steps else None,
            pauses_s=dict(self.pauses_s),
            dropped=self.dropped,
        )


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None
