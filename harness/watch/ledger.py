"""What a clock counts, in fixed memory, and the figures that come of it.

Light: the standard library alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from threading import get_ident
from typing import TypeVar

from harness.watch.figures import Spread, Window

Key = TypeVar("Key", bound=Hashable)
Number = TypeVar("Number", int, float)

HOST_STEP = (
    "host_step_ms"  # steps by the host's clock: ``Window.step_ms`` where no device tells its own
)

_ERROR = 0.01  # relative error of a quantile
_LOG_GROWTH = math.log((1 + _ERROR) / (1 - _ERROR))  # of the buckets' bounds
# values outside are counted as these: at most 1,383 buckets
_SMALLEST_MS = 1e-3
_LARGEST_MS = 1e9


class Sketch:
    """Quantiles of any number of times in milliseconds, in fixed memory.

    A quantile is within 1 % of the value of its rank (below a microsecond: within a microsecond),
    the maximum is exact. The buckets' bounds grow by a constant factor (DDSketch; Masson, Rim and
    Lee, VLDB 2019).
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


class Collections:
    """Adds up the seconds of Python's garbage collections in ``thread``, where that is not None;
    one of ``gc.callbacks``.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.thread: int | None = None
        self.now = now
        self._began = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Take the start or the stop of a collection."""
        if get_ident() == self.thread:
            if phase == "start":
                self._began = self.now()
            else:
                self.seconds += self.now() - self._began


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
    device_s: dict[str, float] = field(
        default_factory=dict
    )  # by the same names as ``Window.shares``
    wait_parts_s: dict[str, float] = field(default_factory=dict)
    host_parts_s: dict[str, float] = field(default_factory=dict)
    pauses_s: dict[str, float] = field(default_factory=dict)
    sketches: defaultdict[str, Sketch] = field(
        default_factory=lambda: defaultdict(Sketch)
    )  # by field of ``Window``

    def merge(self, other: Ledger) -> None:
        """Adds all that ``other`` holds."""
        for name in self.__slots__:
            theirs = getattr(other, name)
            if name == "sketches":
                for key, sketch in theirs.items():
                    self.sketches[key].merge(sketch)
            elif isinstance(theirs, dict):
                add_all(getattr(self, name), theirs)
            elif theirs:
                setattr(self, name, getattr(self, name) + theirs)

    def window(self) -> Window:
        """Returns the figures that these sums make."""
        on_device = sum(self.device_s.values()) > 0
        shares = _shares(self._device_s()) if on_device else _shares(self._host_s(), self.elapsed_s)
        return Window(
            steps=self.steps,
            images=self.images,
            elapsed_s=self.elapsed_s,
            images_per_s=self._per_second(self.images),
            data_wait_fraction=self._fraction(self.wait_s),
            device_full_fraction=self._fraction(self.full_s) if self.full_s else None,
            stall_fraction=shares["starved"] + shares.get("exposed_copy", 0.0) if shares else None,
            compute_fraction=shares.get("compute"),
            stall_basis="device" if on_device else "host",
            shares=shares,
            wait_parts=_shares(self.wait_parts_s),
            host_parts_s={**self.host_parts_s, "gc": self.gc_s},
            gc_s=self.gc_s,
            first_steps=self.first_steps,
            first_step_s=self.first_s if self.first_steps else None,
            pauses_s=dict(self.pauses_s),
            dropped=self.dropped,
            **self._spreads(on_device),
        )

    def _spreads(self, on_device: bool) -> dict[str, Spread | None]:
        """The times of a step by field of ``Window``."""
        found = {name: sketch.spread() for name, sketch in self.sketches.items()}
        # a device tells of its steps late, and of some not at all
        by_host = found.pop(HOST_STEP, None)
        found.setdefault("step_ms", by_host)
        if not on_device:
            found["starved_ms"] = found.get("data_wait_ms")
        if not (self.prepare_s or self.device_s.get("prepare")):
            found.pop("prepare_ms", None)
        return found

    def _per_second(self, count: float) -> float | None:
        return count / self.elapsed_s if self.elapsed_s > 0 else None

    def _fraction(self, seconds: float) -> float | None:
        share = self._per_second(seconds)
        return None if share is None else min(1.0, share)

    def _device_s(self) -> dict[str, float]:
        """Seconds of the steps by the device's clock; of computing, what it waited for launches has
        a name of its own.
        """
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
