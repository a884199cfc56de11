"""Declares every logged figure once: its tag, unit, sentence and chart.

A time or a share that the clock measures is a field of ``Window``, any other figure a member of
``Tag``: each with its tag, its unit, what it says, and the page's chart that draws it. Tags, the
keys of ``report.json`` and what the page shows follow. A new time of the steps is a field here and,
where it is measured, a call of ``Ledger.count``.

Light: the standard library alone.
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

_PROCESSORS = "Processors in use"
_HELD_BACK = "Held back by the system"
_READS = "Reads by this run"
_UTILIZATION = "GPU utilisation"

# steps by the host's clock: ``Window.step_ms`` where no device tells its own
HOST_STEP = "host_step_ms"
# relative error of a quantile
_ERROR = 0.01
# of the buckets' bounds
_LOG_GROWTH = math.log((1 + _ERROR) / (1 - _ERROR))

Sums = defaultdict[Any, float]


class Metric(NamedTuple):
    """How a figure is logged and shown.

    Attributes:
        tag: its name in TensorBoard and ``metrics.jsonl``; a ``Spread`` has ``<tag>/median``,
            ``/p95`` and ``/max``.
        unit: of its values; ``ms`` is a ``Spread``, ``fraction`` lies in 0..1, nothing is a plain
            number.
        text: what a window's figure says, on the page.
        chart: the title of the page's chart that draws its course; nothing: none does.
        label: its name in that chart.
    """

    tag: str
    unit: str
    text: str
    chart: str = ""
    label: str = ""


class Tag(StrEnum):
    """A figure that is no window's; what a device cannot give is left out.

    Above each is what it says; ``docs/reference/metrics.md`` has more. A unit is told where a chart
    or a bound needs it: else the name has it.
    """

    figure: Metric

    def __new__(cls, tag: str, unit: str = "", *charted: str) -> Self:
        """Makes a member; the arguments are those of ``Metric`` but for the text."""
        member = str.__new__(cls, tag)
        member._value_ = tag
        member.figure = Metric(tag, unit, "", *charted)
        return member

    # mean training loss of the window
    LOSS = "train/loss"
    # learning rate of the first parameter group
    LR = "train/lr"
    # validation images whose label is the first guess
    VAL_TOP1 = "val/top1", "fraction"
    # validation images whose label is among the first five guesses
    VAL_TOP5 = "val/top5", "fraction"
    # mean validation loss
    VAL_LOSS = "val/loss"
    # most that torch had allocated in the evaluation
    VAL_MEMORY_PEAK_BYTES = "val/memory_peak_allocated_bytes"
    # of the time some kernel ran
    GPU_UTILIZATION = "gpu/utilization", "fraction", _UTILIZATION, "some kernel ran"
    # of the multiprocessors at work
    GPU_SM_UTILIZATION = "gpu/sm_utilization", "fraction", _UTILIZATION, "its processors in use"
    # of the time kernels of other programs ran
    GPU_OTHERS_UTILIZATION = "gpu/others_utilization", "fraction"
    # memory of the whole GPU in use
    GPU_MEMORY_USED_BYTES = "gpu/memory_used_bytes"
    # most that torch had allocated in the window
    GPU_MEMORY_PEAK_ALLOCATED_BYTES = "gpu/memory_peak_allocated_bytes"
    # most that torch had taken from the driver in the window
    GPU_MEMORY_PEAK_RESERVED_BYTES = "gpu/memory_peak_reserved_bytes"
    # power that the whole GPU draws
    GPU_POWER_W = "gpu/power_w"
    # of the workers' time they made batches
    BUSY_FRACTION = (
        "stages/busy_fraction",
        "fraction",
        "Workers making batches",
        "share of their time",
    )
    # workers that load
    NUM_WORKERS = "loader/num_workers", "", "Workers", "processes or threads"
    # of the machine's processor time in use, by all programs
    CPU_FRACTION = "host/cpu_fraction", "fraction"
    # cores that all programs use
    MACHINE_CPU_CORES = "host/machine_cpu_cores", "cores", _PROCESSORS, "the whole machine"
    # cores that this run uses
    CPU_CORES = "host/own_cpu_cores", "cores", _PROCESSORS, "this run"
    # cores that others take of those this run may use
    OTHERS_CPU_CORES = "host/others_cpu_cores"
    # threads of this run that wait for a core, on average
    QUEUED_THREADS = "host/own_queued_threads"
    # memory of the machine that is neither free nor cache
    RAM_USED_BYTES = "host/ram_used_bytes"
    # of the periods a processor quota stopped this run
    THROTTLED_FRACTION = (
        "host/throttled_fraction",
        "fraction",
        _HELD_BACK,
        "throttled by a processor quota",
    )
    # of the time this run waited for memory
    MEMORY_STALL_FRACTION = (
        "host/memory_stall_fraction",
        "fraction",
        _HELD_BACK,
        "waiting for memory",
    )
    # read from local disks, by all programs
    DISK_READ_BYTES_PER_S = "host/disk_read_bytes_per_s"
    # returned to this run by read calls
    READ_BYTES_PER_S = "host/own_read_bytes_per_s", "bytes/s", _READS, "asked for"
    # fetched from storage for this run
    STORAGE_BYTES_PER_S = (
        "host/own_storage_bytes_per_s",
        "bytes/s",
        _READS,
        "came from storage (not from the page cache)",
    )
    # page faults of this run that waited for storage, per second
    MAJOR_FAULTS_PER_S = "host/major_faults_per_s"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 95th percentile and maximum of one figure, in the unit that its name carries."""

    median: float
    p95: float
    max: float


def _figure(*declared: str) -> Any:
    """Declares a field of ``Window``; the arguments are those of ``Metric``."""
    return field(default=None, metadata={"figure": Metric(*declared)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The figures of a stretch of steps: of one logged window, or of a whole run.

    The first step of every epoch is kept apart, because in it workers start, kernels are chosen and
    networks compiled. ``elapsed_s + first_step_s + sum(pauses_s.values())`` is the wall time. A
    figure that this device cannot give, or that no step has given yet, is None, and absent from a
    mapping. ``StepClock`` says what the words mean.

    Attributes:
        steps: that ended, without first ones.
        images: in these steps.
        elapsed_s: wall time of these steps, without pauses.
        shares: of the time, by part: ``compute``, ``launch`` (between kernels, where that was
            looked into), ``prepare``, ``starved``, ``exposed_copy`` and ``host``. They sum to 1.
            Where computing has no clock: ``starved`` alone.
        wait_parts: of the data wait, until its batch was made (``make``), received (``transport``),
            pinned (``pin``) and here (``move``). They sum to 1; empty where no batch told.
        host_parts_s: wall time inside the steps by the name of the work, and ``gc``.
        stall_basis: the clock of ``shares`` and what comes of them: the host's, or device events.
        first_steps: that ended.
        first_step_s: wall time of the first steps together, with what lay between two epochs.
        pauses_s: wall time by name.
    """

    steps: int
    images: int
    elapsed_s: float
    stall_fraction: float | None = _figure(
        "stall/data_fraction",
        "fraction",
        "of the time the device had nothing to run for want of data",
        "Stalled share of the time",
        "stalled",
    )
    images_per_s: float | None = _figure(
        "speed/images_per_s", "images/s", "images trained on", "Throughput", "images/s"
    )
    step_ms: Spread | None = _figure(
        "time/step_ms",
        "ms",
        "one step: end to end of computing on the device, where the host runs ahead; else host "
        "time",
    )
    data_wait_ms: Spread | None = _figure(
        "time/data_wait_ms",
        "ms",
        "host time blocked on the feed: harmless while the device has queued work",
    )
    copy_ms: Spread | None = _figure(
        "time/copy_ms", "ms", "one batch to the device, by CUDA events"
    )
    compute_ms: Spread | None = _figure(
        "time/compute_ms",
        "ms",
        "forward, backward and update: device time on CUDA, host time on a CPU",
    )
    gap_ms: Spread | None = _figure(
        "time/gap_ms", "ms", "between two blocks of computing on the device"
    )
    exposed_copy_ms: Spread | None = _figure(
        "time/exposed_copy_ms",
        "ms",
        "of the gap: a copy ran of a batch that the host had asked for",
    )
    prepare_ms: Spread | None = _figure(
        "time/prepare_ms", "ms", "batches were augmented and normalised"
    )
    starved_ms: Spread | None = _figure(
        "time/starved_ms",
        "ms",
        "of the gap: no batch was ready; without device events all of the data wait",
    )
    host_ms: Spread | None = _figure(
        "time/host_ms", "ms", "the rest: launches, logging, garbage collection"
    )
    launch_ms: Spread | None = _figure(
        "time/launch_ms",
        "ms",
        "host time within computing, where the device has a time line of its own",
    )
    data_wait_fraction: float | None = _figure(
        "stall/data_wait_fraction",
        "fraction",
        "of the time the host was blocked on the feed: an upper bound on the harm",
    )
    device_full_fraction: float | None = _figure(
        "time/device_full_fraction",
        "fraction",
        "of the time the host waited, two steps ahead of the device: no harm",
    )
    shares: Mapping[str, float]
    wait_parts: Mapping[str, float]
    host_parts_s: Mapping[str, float]
    stall_basis: Literal["host", "device"]
    first_steps: int
    first_step_s: float | None
    pauses_s: Mapping[str, float]


class Ledger:
    """The sums behind a ``Window``, in fixed memory; the clock and the device's timeline add to it.

    A quantile of a time is within 1 % of the value of its rank (below a microsecond: within a
    microsecond), the maximum is exact. The buckets' bounds grow by a constant factor (DDSketch;
    Masson, Rim and Lee, VLDB 2019).

    Attributes:
        sums: numbers by name, in groups. ``run`` has what the host's clock counts, and at first the
            arguments; ``device``, ``wait``, ``host`` and ``pause`` have seconds by part. Each time
            of a ``Window`` is a group, too: how many values each bucket has.
        longest: the largest value of each time, in milliseconds.
    """

    def __init__(self, **run: float) -> None:
        self.sums: defaultdict[str, Sums] = defaultdict(partial(defaultdict, float))
        self.sums["run"].update(run)
        self.longest: Sums = defaultdict(float)

    def count(self, name: str, seconds: float) -> None:
        """Count one value of a time."""
        ms = 1e3 * seconds
        # values outside are counted as these two: at most 1,383 buckets
        clipped = min(max(ms, 1e-3), 1e9)
        self.sums[name][math.ceil(math.log(clipped) / _LOG_GROWTH)] += 1
        if ms > self.longest[name]:
            self.longest[name] = ms

    def merge(self, other: Ledger) -> None:
        """Add all that ``other`` holds."""
        for group, sums in other.sums.items():
            add(self.sums[group], sums)
        for name, ms in other.longest.items():
            self.longest[name] = max(ms, self.longest[name])

    def quantiles(self, name: str) -> Spread | None:
        """Returns median, 95th percentile and maximum of a time; None before the first value."""
        if name not in self.longest:
            return None
        counts = sorted(self.sums[name].items())
        ranks = [*accumulate(count for _, count in counts)]
        found = [self.longest[name]]
        for share in (0.95, 0.5):
            bucket, _ = counts[bisect_left(ranks, share * ranks[-1])]
            # relatively as far from one bound of the bucket as from the other
            found.append(min(math.exp(bucket * _LOG_GROWTH) * (1 - _ERROR), found[0]))
        return Spread(*reversed(found))

    def window(self, by_host: bool = True) -> Window:
        """Returns the figures that these sums make.

        ``by_host`` says that without device times the host's waits are the device's, at most.
        """
        run = self.sums["run"]
        spreads = {name: self.quantiles(name) for name in self.longest}
        # a device tells of its steps late, and of some not at all
        spreads.setdefault("step_ms", spreads.pop(HOST_STEP, None))
        spent_s = dict(self.sums["device"])
        whole_s = sum(spent_s.values())
        on_device = whole_s > 0
        if on_device:
            if run["usual_s"]:
                # of computing, what the device waited for launches has a name of its own
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
    """Add the numbers of ``more`` to those of ``sums`` under the same keys."""
    for key, number in more.items():
        sums[key] += number


def _shares(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Returns each part of ``whole``, at most 1; empty where that is nothing."""
    if whole <= 0:
        return {}
    return {name: min(1.0, part / whole) for name, part in parts.items()}


STEP_FIGURES: Mapping[str, Metric] = {
    each.name: each.metadata["figure"] for each in fields(Window) if "figure" in each.metadata
}
"""The figures of ``Window`` by their names, which are also their keys in ``report.json``."""


FIGURES: Sequence[Metric] = (*STEP_FIGURES.values(), *(tag.figure for tag in Tag))
"""All figures, in the order in which the page draws their charts."""


def by_tag(window: Window, ranks: int = 1) -> dict[str, float | Spread | None]:
    """Returns the figures of ``window`` by tag, with the images of all ``ranks`` at its rate."""
    found = {figure.tag: getattr(window, name) for name, figure in STEP_FIGURES.items()}
    found[STEP_FIGURES["images_per_s"].tag] = window.images_per_s and ranks * window.images_per_s
    return found


def as_report(total: Window, ranks: int) -> dict[str, Any]:
    """Returns what ``report.json`` has of a whole run of so many ranks; what is empty is None."""
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
    """One rank's step in milliseconds: means, but for ``step_ms``, a median.

    ``stalled_ms`` is device time idle for want of data, not the host's wait, which is harmless
    while work is queued. None: the device cannot tell.
    """

    rank: int
    step_ms: float
    stalled_ms: float
    host_ms: float | None
    forward_ms: float | None

    @classmethod
    def of(cls, rank: int, total: Window, forward_ms: float | None) -> RankFigures:
        """Returns the figures of a rank's whole run."""
        mean_ms = 1e3 * total.elapsed_s / max(1, total.steps)
        host = total.shares.get("host")
        return cls(
            rank=rank,
            step_ms=total.step_ms.median if total.step_ms else 0.0,
            stalled_ms=(total.stall_fraction or 0.0) * mean_ms,
            host_ms=None if host is None else host * mean_ms,
            forward_ms=forward_ms,
        )
