"""Every figure that a run logs, declared once.

A figure of the steps is a field of ``Window``, any other a member of ``Tag``: each with its tag,
its unit, what it says, and the page's chart that draws it. Tags, the keys of ``report.json`` and
what the page shows follow. A new time of the steps is a field here and, where it is measured, the
line that adds it to ``Ledger.sketches``.

Light: the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self

_PROCESSORS = "Processors in use"
_HELD_BACK = "Held back by the system"
_READS = "Reads by this run"
_UTILIZATION = "GPU utilisation"


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

    Above each is what it says; ``docs/tensorboard.md`` has more. A unit is told where a chart or a
    bound needs it: else the name has it.
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

    def of_ranks(self, ranks: int) -> Window:
        """Returns the same with the images of all ``ranks`` at this rank's rate."""
        return replace(self, images_per_s=self.images_per_s and ranks * self.images_per_s)


STEP_FIGURES: Mapping[str, Metric] = {
    each.name: each.metadata["figure"] for each in fields(Window) if "figure" in each.metadata
}
"""The figures of ``Window`` by their names, which are also their keys in ``report.json``."""


FIGURES: Sequence[Metric] = (*STEP_FIGURES.values(), *(tag.figure for tag in Tag))
"""All figures, in the order in which the page draws their charts."""


def by_tag(window: Window) -> dict[str, float | Spread | None]:
    """Returns the figures of ``window`` by tag."""
    return {figure.tag: getattr(window, name) for name, figure in STEP_FIGURES.items()}


def told(total: Window, ranks: int) -> dict[str, Any]:
    """Returns what ``report.json`` has of a whole run of so many ranks; what is empty is None."""
    mappings = ("shares", "wait_parts", "host_parts_s")
    return {
        **{name: getattr(total.of_ranks(ranks), name) for name in STEP_FIGURES},
        **{name: getattr(total, name) or None for name in mappings},
        "stall_basis": total.stall_basis,
        "pauses_s": total.pauses_s,
    }


@dataclass(frozen=True, slots=True)
class StepRun:
    """Consecutive steps, or groups of them.

    Attributes:
        images: of each.
        seconds: of each, from the end of the one before.
        stall_fraction: of the time, as ``Window`` has it: by the device's clock, where there is
            one.
        cpu_s: processor time of this process, all its threads, over the steps.
        first_s: what the very first step took longer than the others: compiling, choosing kernels.
        launch_s: host seconds per image in which a loop that loads in its own thread cannot load.
    """

    images: tuple[int, ...]
    seconds: tuple[float, ...]
    stall_fraction: float = 0.0
    cpu_s: float = 0.0
    first_s: float = 0.0
    launch_s: float = 0.0
