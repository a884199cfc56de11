"""What a clock counts, in fixed memory, and the figures that come of it.

Light: the standard library alone.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import get_ident

from harness.watch.figures import Spread, Window

# steps by the host's clock: ``Window.step_ms`` where no device tells its own
HOST_STEP = "host_step_ms"

# relative error of a quantile
_ERROR = 0.01
_LOG_GROWTH = math.log((1 + _ERROR) / (1 - _ERROR))  # of the buckets' bounds


@dataclass(slots=True)
class Sketch:
    """Quantiles of any number of times in milliseconds, in fixed memory.

    A quantile is within 1 % of the value of its rank (below a microsecond: within a microsecond),
    the maximum is exact. The buckets' bounds grow by a constant factor (DDSketch; Masson, Rim and
    Lee, VLDB 2019).
    """

    _counts: Counter[int] = field(default_factory=Counter)
    _max: float = 0.0

    def add(self, value_ms: float) -> None:
        """Count one value."""
        # values outside are counted as these two: at most 1,383 buckets
        clipped = min(max(value_ms, 1e-3), 1e9)
        bucket = math.ceil(math.log(clipped) / _LOG_GROWTH)
        self._counts[bucket] += 1
        if value_ms > self._max:
            self._max = value_ms

    def merge(self, other: Sketch) -> None:
        """Count all values of ``other``."""
        self._counts.update(other._counts)
        self._max = max(self._max, other._max)

    def spread(self) -> Spread | None:
        """Returns median, 95th percentile and maximum; None before the first value."""
        if not self._counts:
            return None
        found = []
        for share in (0.5, 0.95):
            rank = share * self._counts.total()
            for bucket in sorted(self._counts):
                rank -= self._counts[bucket]
                if rank <= 0:
                    break
            # relatively as far from one bound of the bucket as from the other
            found.append(min(math.exp(bucket * _LOG_GROWTH) * (1 - _ERROR), self._max))
        median, p95 = found
        return Spread(median, p95, self._max)


# callbacks are removed by what they are, not by their figures
@dataclass(slots=True, eq=False)
class Collections:
    """Adds up the seconds of garbage collections in ``thread``; one of ``gc.callbacks``."""

    now: Callable[[], float]
    seconds: float = 0.0
    thread: int | None = None
    _began: float = 0.0

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
    # computing of steps whose kernels were launched ahead, and of as many others
    kernels_s: float = 0.0
    usual_s: float = 0.0
    prepare_s: float = 0.0  # by the host's clock
    first_steps: int = 0
    first_s: float = 0.0
    # by the same names as ``Window.shares``
    device_s: dict[str, float] = field(default_factory=dict)
    wait_parts_s: dict[str, float] = field(default_factory=dict)
    host_parts_s: dict[str, float] = field(default_factory=dict)
    pauses_s: dict[str, float] = field(default_factory=dict)
    # by field of ``Window``
    sketches: defaultdict[str, Sketch] = field(default_factory=lambda: defaultdict(Sketch))

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

    def window(self, by_host: bool = True) -> Window:
        """Returns the figures that these sums make.

        ``by_host`` says that without device times the host's waits are the device's, at most.
        """
        spreads = {name: sketch.spread() for name, sketch in self.sketches.items()}
        # a device tells of its steps late, and of some not at all
        spreads.setdefault("step_ms", spreads.pop(HOST_STEP, None))
        spent_s = dict(self.device_s)
        whole_s = sum(spent_s.values())
        on_device = whole_s > 0
        if on_device:
            if self.usual_s:
                # of computing, what the device waited for launches has a name of its own
                waited = max(0.0, 1 - self.kernels_s / self.usual_s)
                spent_s["launch"] = waited * spent_s["compute"]
                spent_s["compute"] -= spent_s["launch"]
        elif by_host:
            spreads["starved_ms"] = spreads.get("data_wait_ms")
            whole_s = self.elapsed_s
            spent_s = {"starved": self.wait_s}
            if self.compute_s:
                spent_s = {"compute": self.compute_s, **spent_s, "prepare": self.prepare_s}
                spent_s["host"] = max(0.0, whole_s - sum(spent_s.values()))
        if not spent_s.get("prepare"):
            spent_s.pop("prepare", None)
            spreads.pop("prepare_ms", None)
        shares = _shares(spent_s, whole_s)
        of_host = _shares({"wait": self.wait_s, "full": self.full_s}, self.elapsed_s)
        return Window(
            steps=self.steps,
            images=self.images,
            elapsed_s=self.elapsed_s,
            images_per_s=self.images / self.elapsed_s if of_host else None,
            data_wait_fraction=of_host.get("wait"),
            device_full_fraction=of_host.get("full") or None,
            stall_fraction=shares["starved"] + shares.get("exposed_copy", 0.0) if shares else None,
            stall_basis="device" if on_device else "host",
            shares=shares,
            wait_parts=_shares(self.wait_parts_s, sum(self.wait_parts_s.values())),
            host_parts_s={**self.host_parts_s, "gc": self.gc_s},
            first_steps=self.first_steps,
            first_step_s=self.first_s if self.first_steps else None,
            pauses_s=dict(self.pauses_s),
            **spreads,
        )


def add_all(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """Add the numbers of ``more`` to those of ``sums`` under the same keys."""
    for key, number in more.items():
        sums[key] = sums.get(key, 0.0) + number


def _shares(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Returns each part of ``whole``, at most 1; empty where that is nothing."""
    if whole <= 0:
        return {}
    return {name: min(1.0, part / whole) for name, part in parts.items()}
