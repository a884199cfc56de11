"""Answers of the tuner as a search might give them."""

from __future__ import annotations

import math
from typing import Any, Literal

import samples

from harness.feed.base import FeedSettings
from harness.runtime.limits import Limits
from harness.tuning.measures import Rate, SampleCost, Trial, TuningReport

# of a single block
OPEN = Rate(55.0, 0.0, math.inf)


def rate(images_per_s: float) -> Rate:
    """A rate that is known to 5 %."""
    return Rate(images_per_s, 0.95 * images_per_s, 1.05 * images_per_s)


def workers(num_workers: int) -> FeedSettings:
    """Settings with persistent workers."""
    return samples.settings(num_workers, batch_size=64, persistent_workers=True)


def trial(
    num_workers: int,
    measured: Rate | None,
    kind: Literal["supply", "steps"] = "supply",
    refused: str | None = None,
) -> Trial:
    """A trial of ``workers(num_workers)``."""
    cost = SampleCost(0.004, 0.003, 0.5) if measured else None
    return Trial(
        workers(num_workers),
        kind,
        measured,
        1.5,
        0.1 if kind == "steps" else None,
        cost,
        refused,
    )


def side(
    settings: FeedSettings,
    measured: Rate | None = None,
    waits: float | None = None,
    memory_bytes: int | None = None,
) -> Trial:
    """What a setting gave to real steps."""
    return Trial(settings, "steps", measured, wait_fraction=waits, memory_bytes=memory_bytes)


def report(num_workers: int = 3, **changes: Any) -> TuningReport:
    """A report that chose ``workers(num_workers)`` over one worker, with ``changes``."""
    settings = changes.pop("settings", workers(num_workers))
    fields: dict[str, Any] = {
        "search": "auto",
        "val": samples.settings(num_workers, batch_size=64),
        "before": side(workers(1), rate(240.0), 0.62, 210 * 10**6),
        "after": side(settings, rate(620.0), 0.012, 1_640 * 10**6),
        "demand": rate(640.0),
        "reason": "The choice is the cheapest setting that keeps the model busy",
        "trials": (
            trial(1, OPEN),
            trial(num_workers, rate(700.0)),
            trial(num_workers, rate(620.0), "steps"),
            trial(8, None, refused="worker 7 exited: /dev/shm is full"),
        ),
        "limits": Limits(2.0, 8 * 10**9, None, 1024, 30, by_quota=True),
        "notes": ("pin_memory has no use without an accelerator",),
        "seconds": 9.23,
    }
    return TuningReport(**(fields | changes))
