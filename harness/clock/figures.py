"""Declares every logged metric once: its tag, unit, description and chart.

Times and fractions measured by the clock are fields of ``Window``; other metrics are members of
``Tag``. Each has its tag, unit, description and chart in the report. Tags, the keys in
``report.json`` and the report follow from these. To add a step time, add a field here and a call to
``Ledger.count`` where it is measured.

This file imports only the standard library.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self

_PROCESSORS = "CPU cores in use"
_HELD_BACK = "Waiting for the system"
_READS = "Reads by this run"
_UTILIZATION = "GPU utilization"

# step times by the host's clock: ``Window.step_ms`` if there are no device times
HOST_STEP = "host_step_ms"
# relative error in a quantile
_ERROR = 0.01
# logarithm of the growth factor between bucket bounds
_LOG_GROWTH = math.log((1 + _ERROR) / (1 - _ERROR))

Sums = defaultdict[Any, float]


class Metric(NamedTuple):
    """How a metric is logged and shown.

    Attributes:
        tag: name in TensorBoard and ``metrics.jsonl``; a ``Spread`` has ``<tag>/median``, ``/p95``
            and ``/max``.
        unit: ``ms`` for a ``Spread``, ``fraction`` for a value in 0..1, empty for a plain number.
        text: description of a window's value in the report.
        chart: title of its chart in the report; empty if it has no chart.
        label: name in that chart.
    """

    tag: str
    unit: str
    text: str
    chart: str = ""
    label: str = ""


class Tag(StrEnum):
    """A metric outside of windows; metrics not supported by a device are omitted.

    The comment above each metric describes it; ``docs/reference/metrics.md`` has more details. A
    unit is given if a chart or a bound needs it; otherwise, it is part of the name.
    """

    figure: Metric

    def __new__(cls, tag: str, unit: str = "", *charted: str) -> Self:
        """Creates a member from the arguments of ``Metric`` except the text."""
        member = str.__new__(cls, tag)
        member._value_ = tag
        member.figure = Metric(tag, unit, "", *charted)
        return member

    # mean training loss in the window
    LOSS = "train/loss"
    # learning rate of the first parameter group
    LR = "train/lr"
    # fraction of validation images whose label is the top prediction
    VAL_TOP1 = "val/top1", "fraction"
    # fraction of validation images whose label is among the top five predictions
    VAL_TOP5 = "val/top5", "fraction"
    # mean validation loss
    VAL_LOSS = "val/loss"
    # peak memory allocated by torch during the evaluation
    VAL_MEMORY_PEAK_BYTES = "val/memory_peak_allocated_bytes"
    # fraction of time during which some kernel ran
    GPU_UTILIZATION = "gpu/utilization", "fraction", _UTILIZATION, "some kernel ran"
    # fraction of active multiprocessors
    GPU_SM_UTILIZATION = "gpu/sm_utilization", "fraction", _UTILIZATION, "multiprocessors in use"
    # fraction of time during which kernels from other programs ran
    GPU_OTHERS_UTILIZATION = "gpu/others_utilization", "fraction"
    # memory in use on the whole GPU
    GPU_MEMORY_USED_BYTES = "gpu/memory_used_bytes"
    # peak memory allocated by torch during the window
    GPU_MEMORY_PEAK_ALLOCATED_BYTES = "gpu/memory_peak_allocated_bytes"
    # peak memory reserved by torch during the window
    GPU_MEMORY_PEAK_RESERVED_BYTES = "gpu/memory_peak_reserved_bytes"
    # power draw of the whole GPU
    GPU_POWER_W = "gpu/power_w"
    # fraction of the workers' time spent making batches
    BUSY_FRACTION = (
        "stages/busy_fraction",
        "fraction",
        "Workers making batches",
        "share of their time",
    )
    # number of loader workers
    NUM_WORKERS = "loader/num_workers", "", "Workers", "processes or threads"
    # fraction of the machine's CPU time used by all programs
    CPU_FRACTION = "host/cpu_fraction", "fraction"
    # cores in use by all programs
    MACHINE_CPU_CORES = "host/machine_cpu_cores", "cores", _PROCESSORS, "the whole machine"
    # cores in use by this run
    CPU_CORES = "host/own_cpu_cores", "cores", _PROCESSORS, "this run"
    # cores available to this run that others use
    OTHERS_CPU_CORES = "host/others_cpu_cores"
    # mean number of this run's threads waiting for a core
    QUEUED_THREADS = "host/own_queued_threads"
    # the machine's memory that is neither free nor cache
    RAM_USED_BYTES = "host/ram_used_bytes"
    # fraction of periods in which a CPU quota throttled this run
    THROTTLED_FRACTION = (
        "host/throttled_fraction",
        "fraction",
        _HELD_BACK,
        "throttled by a CPU quota",
    )
    # fraction of time that this run waited for memory
    MEMORY_STALL_FRACTION = (
        "host/memory_stall_fraction",
        "fraction",
        _HELD_BACK,
        "waiting for memory",
    )
    # bytes read from local disks by all programs
    DISK_READ_BYTES_PER_S = "host/disk_read_bytes_per_s"
    # bytes returned by this run's read calls
    READ_BYTES_PER_S = "host/own_read_bytes_per_s", "bytes/s", _READS, "asked for"
    # bytes fetched from storage for this run
    STORAGE_BYTES_PER_S = (
        "host/own_storage_bytes_per_s",
        "bytes/s",
        _READS,
        "came from storage (not from the page cache)",
    )
    # this run's page faults that waited for storage, per second
    MAJOR_FAULTS_PER_S = "host/major_faults_per_s"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 95th percentile and maximum of a metric, in the unit in its name."""

    median: float
    p95: float
    max: float


def _figure(*declared: str) -> Any:
    """Declares a field of ``Window`` from the arguments of ``Metric``."""
    return field(default=None, metadata={"figure": Metric(*declared)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The metrics for consecutive steps, in one logged window or in a whole run.

    The first step in every epoch is counted separately, because it includes starting workers,
    choosing kernels and compiling networks. ``elapsed_s + first_step_s + sum(pauses_s.values())``
    is the wall time. Metrics that the device does not support or that are not measured yet are
    None, or absent from a mapping. ``StepClock`` defines the terms.

    Attributes:
        steps: finished steps, excluding first steps.
        images: number of images in these steps.
        elapsed_s: wall time for these steps, excluding pauses.
        shares: fractions of time: ``compute``, ``launch`` (between kernels, if measured),
            ``prepare``, ``starved``, ``exposed_copy`` and ``host``. They sum to 1. There is only
            ``starved`` if computing cannot be timed.
        wait_parts: fractions of the data wait, until the batch was made (``make``), received
            (``transport``), pinned (``pin``) and delivered (``move``). They sum to 1; empty if
            unknown.
        host_parts_s: wall time inside the steps by named work, and ``gc``.
        stall_basis: the clock for ``shares`` and derived values: the host's, or device events.
        first_steps: finished first steps.
        first_step_s: total wall time for first steps, including the time between epochs.
        pauses_s: wall time of pauses by name.
    """

    steps: int
    images: int
    elapsed_s: float
    stall_fraction: float | None = _figure(
        "stall/data_fraction",
        "fraction",
        "of the time, the device was idle due to missing data",
        "Stalled share of the time",
        "stalled",
    )
    images_per_s: float | None = _figure(
        "speed/images_per_s", "images/s", "images trained on", "Throughput", "images/s"
    )
    step_ms: Spread | None = _figure(
        "time/step_ms",
        "ms",
        "one step: between compute ends on the device if the host runs ahead; otherwise, host time",
    )
    data_wait_ms: Spread | None = _figure(
        "time/data_wait_ms",
        "ms",
        "host time blocked on the feed: harmless while the device has queued work",
    )
    copy_ms: Spread | None = _figure(
        "time/copy_ms", "ms", "copying one batch to the device, by CUDA events"
    )
    compute_ms: Spread | None = _figure(
        "time/compute_ms",
        "ms",
        "forward, backward and optimizer step: device time on CUDA, host time on a CPU",
    )
    gap_ms: Spread | None = _figure(
        "time/gap_ms", "ms", "time between two computing blocks on the device"
    )
    exposed_copy_ms: Spread | None = _figure(
        "time/exposed_copy_ms",
        "ms",
        "part of the gap: a requested batch was being copied",
    )
    prepare_ms: Spread | None = _figure(
        "time/prepare_ms", "ms", "batches were augmented and normalized"
    )
    starved_ms: Spread | None = _figure(
        "time/starved_ms",
        "ms",
        "part of the gap: no batch was ready; without device events, all of the data wait",
    )
    host_ms: Spread | None = _figure(
        "time/host_ms", "ms", "the rest: launches, logging, garbage collection"
    )
    launch_ms: Spread | None = _figure(
        "time/launch_ms",
        "ms",
        "host time within computing, if the device has its own timeline",
    )
    data_wait_fraction: float | None = _figure(
        "stall/data_wait_fraction",
        "fraction",
        "of the time, the host was blocked on the feed: an upper bound on the stall",
    )
    device_full_fraction: float | None = _figure(
        "time/device_full_fraction",
        "fraction",
        "of the time, the host waited, two steps ahead of the device: harmless",
    )
    shares: Mapping[str, float]
    wait_parts: Mapping[str, float]
    host_parts_s: Mapping[str, float]
    stall_basis: Literal["host", "device"]
    first_steps: int
    first_step_s: float | None
    pauses_s: Mapping[str, float]


class Ledger:
    """Running sums for a ``Window``, of fixed size; the clock and the timeline add to them.

    The quantiles of a time are within 1% (or within a microsecond, if below one); the maximum is
    exact. Bucket bounds grow by a constant factor (DDSketch; Masson, Rim and Lee, VLDB 2019).

    Attributes:
        sums: numbers by name, in groups. ``run`` contains sums from the host's clock; ``device``,
            ``wait``, ``host`` and ``pause`` contain seconds by part. Each time in a ``Window`` is
            also a group, with the number of values per bucket.
        longest: the largest value of each time, in milliseconds.
    """

    def __init__(self) -> None:
        self.sums: defaultdict[str, Sums] = defaultdict(partial(defaultdict, float))
        self.longest: Sums = defaultdict(float)

    def count(self, name: str, seconds: float) -> None:
        """Counts one value of a time."""
        ms = 1e3 * seconds
        # values outside this range are clamped to it, so there are at most 1,383 buckets
        clipped = min(max(ms, 1e-3), 1e9)
        self.sums[name][math.ceil(math.log(clipped) / _LOG_GROWTH)] += 1
        if ms > self.longest[name]:
            self.longest[name] = ms

    def merge(self, other: Ledger) -> None:
        """Adds the sums from ``other``."""
        for group, sums in other.sums.items():
            add(self.sums[group], sums)
        for name, ms in other.longest.items():
            self.longest[name] = max(ms, self.longest[name])

    def quantiles(self, name: str) -> Spread | None:
        """Returns a time's median, 95th percentile and maximum, or None before the first value."""
        if name not in self.longest:
            return None
        counts = sorted(self.sums[name].items())
        ranks = [*accumulate(count for _, count in counts)]
        found = [self.longest[name]]
        for share in (0.95, 0.5):
            bucket, _ = counts[bisect_left(ranks, share * ranks[-1])]
            # the geometric middle of the bucket
            found.append(min(math.exp(bucket * _LOG_GROWTH) * (1 - _ERROR), found[0]))
        return Spread(*reversed(found))

    def window(self, by_host: bool = True) -> Window:
        """Returns the window for these sums.

        ``by_host``: without device times, use the host's waits, an upper bound on the device's.
        """
        run = self.sums["run"]
        spreads = {name: self.quantiles(name) for name in self.longest}
        # a device reports its steps late, and some steps not at all
        spreads.setdefault("step_ms", spreads.pop(HOST_STEP, None))
        spent_s = dict(self.sums["device"])
        whole_s = sum(spent_s.values())
        on_device = whole_s > 0
        if on_device:
            if run["usual_s"]:
                # launch waits within computing are listed under their own name
                waited = max(0.0, 1 - run["kernels_s"] / run["usual_s"])
                spent_s["launch"] = waited * spent_s["compute"]
                spent_s["compute"] -= spent_s["launch"]
        elif by_host:
            spreads["starved_ms"] = spreads.get("data_wait_ms")
            whole_s = run["elapsed_s"]
            spent_s = {"starved": run["wait_s"]}
            if run["compute_s"]:
                spent_s = {"compute": run["compute_s"], **spent_s, "prepare": run["prepare_s"]}
                spent_s["host"] = max(0.0, whole_s - sum(spent_s.values()))
        if not spent_s.get("prepare"):
            spent_s.pop("prepare", None)
            spreads.pop("prepare_ms", None)
        shares = _shares(spent_s, whole_s)
        of_host = _shares({"wait": run["wait_s"], "full": run["full_s"]}, run["elapsed_s"])
        return Window(
            steps=int(run["steps"]),
            images=int(run["images"]),
            elapsed_s=run["elapsed_s"],
            images_per_s=run["images"] / run["elapsed_s"] if of_host else None,
            data_wait_fraction=of_host.get("wait"),
            device_full_fraction=of_host.get("full") or None,
            stall_fraction=shares["starved"] + shares.get("exposed_copy", 0.0) if shares else None,
            stall_basis="device" if on_device else "host",
            shares=shares,
            wait_parts=_shares(self.sums["wait"], sum(self.sums["wait"].values())),
            host_parts_s={**self.sums["host"], "gc": run["gc_s"]},
            first_steps=int(run["first_steps"]),
            first_step_s=run["first_s"] if run["first_steps"] else None,
            pauses_s=dict(self.sums["pause"]),
            **spreads,
        )


def add(sums: Sums, more: Mapping[Any, float]) -> None:
    """Adds the numbers in ``more`` to those in ``sums`` under the same keys."""
    for key, number in more.items():
        sums[key] += number


def _shares(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Returns each part as a fraction of ``whole``, at most 1; empty if ``whole`` is 0."""
    if whole <= 0:
        return {}
    return {name: min(1.0, part / whole) for name, part in parts.items()}


STEP_FIGURES: Mapping[str, Metric] = {
    each.name: each.metadata["figure"] for each in fields(Window) if "figure" in each.metadata
}
"""The metrics in ``Window``, keyed by the names also used in ``report.json``."""


FIGURES: Sequence[Metric] = (*STEP_FIGURES.values(), *(tag.figure for tag in Tag))
"""All metrics, in the order of the report's charts."""


def by_tag(window: Window, ranks: int = 1) -> dict[str, float | Spread | None]:
    """Returns the metrics in ``window`` by tag, with the throughput of all ``ranks`` together."""
    found = {figure.tag: getattr(window, name) for name, figure in STEP_FIGURES.items()}
    found[STEP_FIGURES["images_per_s"].tag] = window.images_per_s and ranks * window.images_per_s
    return found


def as_report(total: Window, ranks: int) -> dict[str, Any]:
    """Returns the entry for a whole run in ``report.json``; empty values are None."""
    logged = by_tag(total, ranks)
    mappings = ("shares", "wait_parts", "host_parts_s")
    return {
        **{name: logged[figure.tag] for name, figure in STEP_FIGURES.items()},
        **{name: getattr(total, name) or None for name in mappings},
        "stall_basis": total.stall_basis,
        "pauses_s": total.pauses_s,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank's step in milliseconds: means, except for ``step_ms``, which is a median.

    ``stalled_ms`` is the time that the device is idle due to missing data, not the host's wait,
    which is harmless while work is queued. Values unknown for the device are None.
    """

    rank: int
    step_ms: float
    stalled_ms: float
    host_ms: float | None
    forward_ms: float | None

    @classmethod
    def of(cls, rank: int, total: Window, forward_ms: float | None) -> RankFigures:
        """Returns the means over a rank's whole run."""
        mean_ms = 1e3 * total.elapsed_s / max(1, total.steps)
        host = total.shares.get("host")
        return cls(
            rank=rank,
            step_ms=total.step_ms.median if total.step_ms else 0.0,
            stalled_ms=(total.stall_fraction or 0.0) * mean_ms,
            host_ms=None if host is None else host * mean_ms,
            forward_ms=forward_ms,
        )
