"""What a clock counts, in fixed memory, and the figures that come of it. Light: the standard library alone."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, TypeVar

Key = TypeVar("Key", bound=Hashable)
Number = TypeVar("Number", int, float)

_ERROR = 0.01  # relative error of a quantile
_LOG_GROWTH = math.log((1 + _ERROR) / (1 - _ERROR))  # of the buckets' bounds
_SMALLEST_MS, _LARGEST_MS = 1e-3, 1e9  # values outside are counted as these: at most 1,383 buckets
_GROUP_S = 0.025  # a group's only wait for the device is small beside it
_LEAST_STEPS = 3


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
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._max = 0.0

    def add(self, value_ms: float) -> None:
        """Count one value."""
        clipped = min(max(value_ms, _SMALLEST_MS), _LARGEST_MS)
        bucket = math.ceil(math.log(clipped) / _LOG_GROWTH)
        self._counts[bucket] += 1
        if value_ms > self._max:
            self._max = value_ms

    def merge(self, other: Sketch) -> None:
        """Count all values of ``other``."""
        add_all(self._counts, other._counts)
        self._max = max(self._max, other._max)

    def spread(self) -> Spread | None:
        """What the values look like; None where there are none."""
        if not self._counts:
            return None
        buckets = sorted(self._counts)
        up_to = list(accumulate(map(self._counts.__getitem__, buckets)))
        found = []
        for share in (0.5, 0.95):
            bucket = buckets[bisect_left(up_to, share * up_to[-1])]
            # relatively as far from one bound of the bucket as from the other
            found.append(min(math.exp(bucket * _LOG_GROWTH) * (1 - _ERROR), self._max))
        median, p95 = found
        return Spread(median, p95, self._max)


@dataclass(frozen=True, slots=True)
class Window:
    """The figures of a stretch of steps: of one logged window, or of a whole run.

    The first step of every epoch is kept apart, because in it workers start, kernels are chosen and networks compiled.
    ``elapsed_s + first_step_s + sum(pauses_s.values())`` is the wall time. A figure that this device cannot give, or that
    no step has given yet, is None, and absent from a mapping. ``StepClock`` says what the words mean.
    """

    steps: int  # that ended, without first ones
    images: int  # in these steps
    elapsed_s: float  # wall time of these steps, without pauses
    images_per_s: float | None
    step_ms: Spread | None  # from one end of computing to the next on the device, where the host runs ahead; else host time
    data_wait_ms: Spread | None  # host time blocked on the feed, per step: harmless while the device has queued work
    copy_ms: Spread | None  # one batch to the device (CUDA only)
    compute_ms: Spread | None  # within ``computing()``, per step: device time on CUDA, host time on CPU, None elsewhere
    gap_ms: Spread | None  # between two blocks of computing on the device, per step (CUDA only), and its parts:
    exposed_copy_ms: Spread | None  # a batch's copy ran that the host had asked for (CUDA only)
    prepare_ms: Spread | None  # batches were augmented and normalised: between two blocks on the device, on a CPU in ``next()``
    starved_ms: Spread | None  # the host was blocked on the feed; without device events all of the data wait
    host_ms: Spread | None  # the rest; on a CPU what is none of the other three
    launch_ms: Spread | None  # host time within ``computing()``, per step, where the device has a time line of its own
    # of the time by "compute", "launch" (between kernels, where that was looked into), "starved", "exposed_copy", "prepare"
    # and "host", on the clock of stall_basis: they sum to 1, but on a device whose computing has no clock it is "starved" alone
    shares: Mapping[str, float]
    wait_parts: Mapping[str, float]  # of the data wait, until its batch was made ("make"), received ("transport"), pinned
    # ("pin") and here ("move"): they sum to 1; empty where no batch told
    host_parts_s: Mapping[str, float]  # wall time inside the steps by the name of the work, and "gc"
    gc_s: float  # host time of garbage collections inside the steps
    data_wait_fraction: float | None  # of ``elapsed_s``: an upper bound on the harm
    device_full_fraction: float | None  # of ``elapsed_s``: the host waited, two steps ahead of the device; no harm
    stall_fraction: float | None  # of the time, starved and exposed copy: the device had nothing to run for want of data
    compute_fraction: float | None  # of the time, on the clock that ``stall_basis`` names
    stall_basis: Literal["host", "device"]  # whether shares, and what comes of them, are by the host's clock or device events
    first_steps: int  # that ended
    first_step_s: float | None  # wall time of the first steps together, with what lay between two epochs
    pauses_s: Mapping[str, float]  # wall time by name
    dropped: int  # ``computing()`` blocks without device figures because no slot was free


@dataclass(frozen=True, slots=True)
class StepRun:
    """Consecutive steps, or groups of them: the images of each, and its seconds from the end of the one before."""

    images: tuple[int, ...]
    seconds: tuple[float, ...]
    stall_fraction: float = 0.0  # of the time, as ``Window`` has it: on the device's clock, where that has one
    cpu_s: float = 0.0  # processor time of this process, all its threads, over the steps
    first_s: float = 0.0  # what the very first step took longer than the others: compiling, choosing kernels
    launch_s: float = 0.0  # host seconds per image in which a loop that loads in its own thread cannot load


def steps_of_group(step_s: float, limit_s: float, has_streams: bool) -> int:
    """Steps to be timed together: as many as last 25 ms, and on a device with streams at least three.

    A device that was waited for idles until the first kernel of the next group is launched. Three steps that would
    take longer than ``limit_s`` are timed one by one: beside a step that long, the idle time is small.
    """
    least = _LEAST_STEPS if has_streams and _LEAST_STEPS * step_s <= limit_s else 1
    return max(least, int(_GROUP_S / step_s))


@dataclass(slots=True)
class Ledger:
    """The sums behind a ``Window``; the clock and the device's timeline add to it."""

    steps: int = 0
    images: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0  # by the host's clock
    gc_s: float = 0.0
    full_s: float = 0.0
    blocks: int = 0  # behind ``device_s``
    kernels_s: float = 0.0  # of ``kernel_blocks``, whose kernels ran without waiting to be launched
    kernel_blocks: int = 0
    prepare_s: float = 0.0  # by the host's clock
    first_steps: int = 0
    first_s: float = 0.0
    dropped: int = 0
    device_s: dict[str, float] = field(default_factory=dict)  # by the same names as ``Window.shares``
    wait_parts_s: dict[str, float] = field(default_factory=dict)
    host_parts_s: dict[str, float] = field(default_factory=dict)
    pauses_s: dict[str, float] = field(default_factory=dict)
    host_step: Sketch = field(default_factory=Sketch)
    device_step: Sketch = field(default_factory=Sketch)
    wait: Sketch = field(default_factory=Sketch)
    copy: Sketch = field(default_factory=Sketch)
    compute: Sketch = field(default_factory=Sketch)
    gap: Sketch = field(default_factory=Sketch)
    exposed_copy: Sketch = field(default_factory=Sketch)
    prepare: Sketch = field(default_factory=Sketch)
    starved: Sketch = field(default_factory=Sketch)
    host: Sketch = field(default_factory=Sketch)
    launch: Sketch = field(default_factory=Sketch)

    def merge(self, other: Ledger) -> None:
        """Add all that ``other`` holds."""
        for name in self.__slots__:
            theirs = getattr(other, name)
            if isinstance(theirs, Sketch):
                getattr(self, name).merge(theirs)
            elif isinstance(theirs, dict):
                add_all(getattr(self, name), theirs)
            elif theirs:
                setattr(self, name, getattr(self, name) + theirs)

    def window(self) -> Window:
        """The figures that these sums make."""
        on_device = sum(self.device_s.values()) > 0
        shares = _shares(self._device_s()) if on_device else _shares(self._host_s(), self.elapsed_s)
        wait = self.wait.spread()
        return Window(
            steps=self.steps,
            images=self.images,
            elapsed_s=self.elapsed_s,
            images_per_s=self.images / self.elapsed_s if self.elapsed_s > 0 else None,
            step_ms=self.device_step.spread() or self.host_step.spread(),
            data_wait_ms=wait,
            copy_ms=self.copy.spread(),
            compute_ms=self.compute.spread(),
            gap_ms=self.gap.spread(),
            exposed_copy_ms=self.exposed_copy.spread(),
            prepare_ms=self.prepare.spread() if self.prepare_s or self.device_s.get("prepare") else None,
            starved_ms=self.starved.spread() if on_device else wait,
            host_ms=self.host.spread(),
            launch_ms=self.launch.spread(),
            shares=shares,
            wait_parts=_shares(self.wait_parts_s),
            host_parts_s={**self.host_parts_s, "gc": self.gc_s},
            gc_s=self.gc_s,
            data_wait_fraction=min(1.0, self.wait_s / self.elapsed_s) if self.elapsed_s > 0 else None,
            device_full_fraction=min(1.0, self.full_s / self.elapsed_s) if self.elapsed_s > 0 and self.full_s else None,
            stall_fraction=shares["starved"] + shares.get("exposed_copy", 0.0) if shares else None,
            compute_fraction=shares.get("compute"),
            stall_basis="device" if on_device else "host",
            first_steps=self.first_steps,
            first_step_s=self.first_s if self.first_steps else None,
            pauses_s=dict(self.pauses_s),
            dropped=self.dropped,
        )

    def _device_s(self) -> dict[str, float]:
        """Seconds of the steps by the device's clock; of computing, what it waited for launches has a name of its own."""
        found = {name: part for name, part in self.device_s.items() if part or name != "prepare"}
        if self.kernel_blocks and self.blocks:
            kernels_s = min(found["compute"], self.blocks * self.kernels_s / self.kernel_blocks)
            found |= {"compute": kernels_s, "launch": found["compute"] - kernels_s}
        return found

    def _host_s(self) -> dict[str, float]:
        """Seconds of the steps by the host's clock, under the names of ``Window.shares``."""
        if not self.compute_s:
            return {"starved": self.wait_s}
        found = {"compute": self.compute_s, "starved": self.wait_s}
        found |= {"prepare": self.prepare_s} if self.prepare_s else {}
        return {**found, "host": max(0.0, self.elapsed_s - sum(found.values()))}


def add_all(sums: dict[Key, Number], more: Mapping[Key, Number]) -> None:
    """Add the numbers of ``more`` to those of ``sums`` under the same keys."""
    for key, number in more.items():
        sums[key] = sums.get(key, 0) + number


def _shares(parts: Mapping[str, float], whole: float | None = None) -> dict[str, float]:
    """Each part of ``whole``, or of their sum, at most 1; empty where that is nothing."""
    whole = sum(parts.values()) if whole is None else whole
    return {name: min(1.0, part / whole) for name, part in parts.items()} if whole > 0 else {}
