"""What a clock counts, in fixed memory, and the figures that come of it. Light: the standard library alone."""

from __future__ import annotations

import math
from collections import Counter
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
        self._counts: Counter[int] = Counter()
        self._max = 0.0

    def add(self, value_ms: float) -> None:
        """Count one value."""
        clipped = min(max(value_ms, _SMALLEST_MS), _LARGEST_MS)
        self._counts[math.ceil(math.log(clipped) / _LOG_GROWTH)] += 1
        self._max = max(self._max, value_ms)

    def merge(self, other: Sketch) -> None:
        """Count all values of ``other``."""
        self._counts.update(other._counts)
        self._max = max(self._max, other._max)

    def spread(self) -> Spread | None:
        """What the values look like; None where there are none."""
        return Spread(self._quantile(0.5), self._quantile(0.95), self._max) if self._counts else None

    def _quantile(self, share: float) -> float:
        left = math.ceil(share * self._counts.total())
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
    """

    steps: int  # that ended, without first ones
    images: int  # in these steps
    elapsed_s: float  # wall time of these steps, without pauses
    images_per_s: float | None
    step_ms: Spread | None  # from one end of computing to the next on the device, where the host runs ahead; else host time
    data_wait_ms: Spread | None  # host time blocked on the feed, per step: harmless while the device has queued work
    copy_ms: Spread | None  # one batch to the device (CUDA only)
    compute_ms: Spread | None  # within ``computing()``, per step: device time on CUDA, host time on CPU, None elsewhere
    data_wait_fraction: float | None  # of ``elapsed_s``: an upper bound on the harm
    stall_fraction: float | None  # of the time, the device having nothing to run for want of data; see ``StepClock``
    compute_fraction: float | None  # of the time, on the clock that ``stall_basis`` names
    stall_basis: Literal["host", "device"]  # whether the last two come from the host's clock or from device events
    first_steps: int  # that ended
    first_step_s: float | None  # wall time of the first steps together, with what lay between two epochs
    pauses_s: Mapping[str, float]  # wall time by name
    dropped: int  # ``computing()`` blocks without device figures because no slot was free


@dataclass(frozen=True, slots=True)
class StepRun:
    """Consecutive steps, or groups of them: the images of each, its seconds from the end of the one before, and its wait."""

    images: tuple[int, ...]
    seconds: tuple[float, ...]
    waits_s: tuple[float, ...]  # host time blocked on the feed
    cpu_s: float = 0.0  # processor time of this process, all its threads, over the steps


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
                mine |= {key: mine.get(key, 0.0) + seconds for key, seconds in theirs.items()}
            else:
                setattr(self, name, mine + theirs)

    def window(self) -> Window:
        """The figures that these sums make."""
        wait, stall = _share(self.wait_s, self.elapsed_s), _share(self.device_stall_s, self.device_s)
        on_device, on_host = _share(self.device_compute_s, self.device_s), _share(self.host_compute_s, self.elapsed_s)
        return Window(
            steps=self.steps,
            images=self.images,
            elapsed_s=self.elapsed_s,
            images_per_s=self.images / self.elapsed_s if self.elapsed_s > 0 else None,
            step_ms=self.device_step.spread() or self.host_step.spread(),
            data_wait_ms=self.wait.spread(),
            copy_ms=self.copy.spread(),
            compute_ms=self.compute.spread(),
            data_wait_fraction=wait,
            stall_fraction=wait if stall is None else stall,
            compute_fraction=on_host or None if on_device is None else on_device,
            stall_basis="host" if stall is None else "device",
            first_steps=self.first_steps,
            first_step_s=self.first_s if self.first_steps else None,
            pauses_s=dict(self.pauses_s),
            dropped=self.dropped,
        )


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None
