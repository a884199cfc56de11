"""Measures the effect of ``pin_memory`` and ``non_blocking`` on host-to-GPU copies.

One tensor at a time, copied alone, so that only the rate of the copy itself can differ; and work
that does not need ``x`` beside the copy of ``x``. Work on one stream runs in order, whether it
depends on ``x`` or not; so the copy needs a stream of its own, and a pinned source.

A part of ``gpu_check.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.runtime import accelerator
from harness.runtime.accelerator import Accelerator
from scripts.bench.tables import Sample

MIB = 2**20
# of the square matrices that stand for the work: large enough to fill a GPU
WORK_SIDE = 4096

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """One call in milliseconds.

    Until it came back to the host, until the device was done, and between events around it.
    """

    host_ms: float
    total_ms: float
    device_ms: float


def timed(own: Accelerator, call: Call) -> Timing:
    """Times ``call`` on an idle device; its result lives until the device is done."""
    start = own.event(timed=True)
    end = own.event(timed=True)
    own.synchronize()
    begin = time.perf_counter()
    start.record(own.stream())
    kept = call()
    end.record(own.stream())
    returned = time.perf_counter()
    own.synchronize()
    done = time.perf_counter()
    del kept
    return Timing(1e3 * (returned - begin), 1e3 * (done - begin), start.elapsed_time(end))


def in_turns(
    calls: Mapping[str, Call], n: int, measure: Callable[[Call], Any]
) -> dict[str, list[Any]]:
    """Returns ``n`` measurements of each call, in rounds that each start with a different call.

    Two warm-up rounds come first.
    """
    names = list(calls)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(-2, n):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = measure(calls[name])
            if turn >= 0:
                found[name].append(value)
    return found


class Work:
    """GPU work of about ``ms`` milliseconds, independent of any batch: bf16 matrix products."""

    def __init__(self, device: torch.device, ms: float) -> None:
        self._a = torch.randn(WORK_SIDE, WORK_SIDE, device=device, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._a)
        self._count = 10
        unit_ms = min(timed(accelerator.get(device), self).total_ms for _ in range(5)) / self._count
        self._count = max(1, math.ceil(ms / unit_ms))

    def __call__(self) -> None:
        """Launches it on the current stream."""
        for _ in range(self._count):
            torch.mm(self._a, self._a, out=self._out)


def plain_copies(device: torch.device, sizes_mib: Sequence[int], n: int) -> list[dict[str, Any]]:
    """Returns rows on copies of one tensor, for each size and way."""
    own = accelerator.get(device)
    rows = []
    for mib in sizes_mib:
        pageable = torch.ones(mib * MIB, dtype=torch.uint8)
        pinned = own.pin(pageable)
        ways: dict[str, Call] = {
            "pageable, x.to(device)": partial(pageable.to, device),
            "pageable, non_blocking": partial(own.copy, pageable),
            "pinned before, x.to(device)": partial(pinned.to, device),
            "pinned before, non_blocking": partial(own.copy, pinned),
            "x.pin_memory(), non_blocking": partial(_pin_and_copy, own, pageable),
        }
        for way, timings in in_turns(ways, n, partial(timed, own)).items():
            total = Sample.of([t.total_ms for t in timings])
            rows.append(
                {
                    "MiB": mib,
                    "way": way,
                    "done after ms": total,
                    "host blocked ms": Sample.of([t.host_ms for t in timings]),
                    "by events ms": Sample.of([t.device_ms for t in timings]),
                    "GB/s": f"{mib * MIB / total.median / 1e6:.1f}",
                }
            )
    return rows


def _pin_and_copy(own: Accelerator, x: Tensor) -> Tensor:
    return own.copy(own.pin(x))


def overlap(device: torch.device, mib: int, n: int) -> list[dict[str, Any]]:
    """Returns rows on a copy and independent work, on one stream and two."""
    pageable = torch.ones(mib * MIB, dtype=torch.uint8)
    own = accelerator.get(device)
    pinned = own.pin(pageable)
    side = own.side_stream()
    copy = own.copy
    # work as long as the copy, so that either can hide the other
    work = Work(device, min(timed(own, partial(copy, pinned)).total_ms for _ in range(5)))

    def one_stream(x: Tensor) -> Tensor:
        on_device = copy(x)
        work()
        return on_device

    def two_streams(x: Tensor, copy_first: bool) -> Tensor:
        if not copy_first:
            work()
        with own.on(side):
            on_device = copy(x)
        if copy_first:
            work()
        own.stream().wait_stream(side)
        return on_device

    ways: dict[str, Call] = {
        "work alone": work,
        "copy alone, pageable": partial(copy, pageable),
        "copy alone, pinned": partial(copy, pinned),
        "pageable, same stream": partial(one_stream, pageable),
        "pageable, side stream": partial(two_streams, pageable, True),
        "pageable, side stream, work launched first": partial(two_streams, pageable, False),
        "pinned, same stream": partial(one_stream, pinned),
        "pinned, side stream": partial(two_streams, pinned, True),
    }
    totals = {
        way: Sample.of([t.total_ms for t in timings])
        for way, timings in in_turns(ways, n, partial(timed, own)).items()
    }
    # fraction of the shorter of the two that the longer hides
    rows = []
    for way, total in totals.items():
        row: dict[str, Any] = {"way": way, "done after ms": total, "hidden": ""}
        if "stream" in way:
            parts = (totals["work alone"].median, totals[f"copy alone, {way.split(',')[0]}"].median)
            row["hidden"] = f"{(sum(parts) - total.median) / min(parts):.0%}"
        rows.append(row)
    return rows


def host_copies(sizes_mib: Sequence[int], n: int) -> list[dict[str, Any]]:
    """Returns rows for a machine without a GPU: copies within pageable memory."""
    rows = []
    for mib in sizes_mib:
        source = torch.ones(mib * MIB, dtype=torch.uint8)
        target = torch.zeros(mib * MIB, dtype=torch.uint8)
        taken = []
        for _ in range(n + 2):
            begin = time.perf_counter()
            target.copy_(source)
            taken.append(1e3 * (time.perf_counter() - begin))
        ms = Sample.of(taken[2:])
        rows.append(
            {"MiB": mib, "host to host ms": ms, "GB/s": f"{mib * MIB / ms.median / 1e6:.1f}"}
        )
    return rows
