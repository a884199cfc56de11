"""Reads the GPU's figures by NVML, and the peaks of its memory.

What a GPU, a MIG instance or a driver does not give is absent, never 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any

from ..clock.figures import Tag
from ..runtime import gpus
from ..runtime.folder import log
from .tree import Tree

if TYPE_CHECKING:
    from ..runtime.accelerator import Accelerator

# one for each tag, or none at all this time
Figures = Sequence[float | None]


class Sensor:
    """Figures that can be read at any time.

    A figure that fails is given up for the rest of the run, with a line in the log.
    """

    _level = logging.INFO

    def __init__(self) -> None:
        self._reads: dict[tuple[Tag, ...], Callable[[], Figures]] = {}

    def sample(self) -> dict[str, float]:
        """Returns what can be had now, by tag."""
        found: dict[str, float] = {}
        for tags, read in list(self._reads.items()):
            try:
                figures = read()
            except Exception as error:
                # whatever a driver or a kernel comes up with
                del self._reads[tags]
                log.log(self._level, "no %s from here on: %r", ", ".join(tags), error)
                continue
            for tag, figure in zip(tags, figures, strict=False):
                # NVML's counters say so of what they could not measure
                if figure is not None and not isnan(figure):
                    # two counters are not read at the very same moment
                    found[tag] = min(1.0, figure) if tag.figure.unit == "fraction" else figure
        return found


class GpuSensor(Sensor):
    """Utilisation, memory and power of one GPU or MIG instance.

    ``gpu/utilization`` is the share of NVML's last sample period (1/6 to 1 s) in which any
    kernel ran, of any program, however little it filled; a MIG instance has none.
    ``gpu/sm_utilization`` is how much it filled, since the sample before: the mean share of
    multiprocessors at work, which Hopper and later count, for a MIG instance its own.
    """

    _level = logging.WARNING

    def __init__(self, uuid: str) -> None:
        """``uuid`` is torch's."""
        super().__init__()
        try:
            nvml = gpus.start_nvml()
            handle, is_mig = gpus.handle_of(nvml, uuid)
        except Exception as error:
            # no such package, no driver, or one that does not know the GPU
            log.warning("no GPU figures: NVML has no GPU %s: %r", uuid, error)
            return
        self._reads = {
            (Tag.GPU_UTILIZATION,): lambda: (nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,),
            (Tag.GPU_MEMORY_USED_BYTES,): lambda: (
                float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            ),
            (Tag.GPU_POWER_W,): lambda: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000,),
            (Tag.GPU_OTHERS_UTILIZATION,): _others(nvml, handle),
        }
        try:
            self._reads[(Tag.GPU_SM_UTILIZATION,)] = _sm_utilization(nvml, handle, is_mig)
        except Exception as error:
            # no loss: most GPUs and drivers have none
            log.info("no %s: %s", Tag.GPU_SM_UTILIZATION, error)


@dataclass(slots=True)
class MemoryPeaks:
    """The largest figures of a run, in bytes.

    Attributes:
        total_bytes: what the device has.
        reserved_bytes: what torch took from the driver, allocated or kept for later.
        training_bytes: what was allocated in training steps.
        evaluation_bytes: what was allocated in evaluations.
    """

    total_bytes: int
    reserved_bytes: int = 0
    training_bytes: int = 0
    evaluation_bytes: int = 0

    def __str__(self) -> str:
        """As in ``peak 21.3 GB allocated (9.8 GB in evaluation), 24.0 GB reserved, of 80.0 GB``."""
        most = max(self.training_bytes, self.evaluation_bytes)
        return (
            f"peak {most / 1e9:.1f} GB allocated ({self.evaluation_bytes / 1e9:.1f} GB in "
            f"evaluation), {self.reserved_bytes / 1e9:.1f} GB reserved, of "
            f"{self.total_bytes / 1e9:.1f} GB"
        )


class MemoryWatch:
    """Reads the peaks of a device's memory, which takes up to a millisecond of the host's.

    Attributes:
        peaks: of the run so far; None where the device has no memory of its own, or nothing was
            read yet.
    """

    def __init__(self, own: Accelerator) -> None:
        self._own = own
        self.peaks: MemoryPeaks | None = None
        own.reset_peaks()

    def read(self, *, evaluating: bool = False) -> dict[str, float]:
        """Returns the peaks since the last call, by tag: of a window, or of an evaluation."""
        memory = self._own.memory()
        if memory is None:
            return {}
        self._own.reset_peaks()
        peak = memory.peak_allocated
        peaks = self.peaks = self.peaks or MemoryPeaks(memory.total)
        peaks.reserved_bytes = max(peaks.reserved_bytes, memory.peak_reserved)
        if evaluating:
            peaks.evaluation_bytes = max(peaks.evaluation_bytes, peak)
            return {Tag.VAL_MEMORY_PEAK_BYTES: peak}
        peaks.training_bytes = max(peaks.training_bytes, peak)
        return {
            Tag.GPU_MEMORY_PEAK_ALLOCATED_BYTES: peak,
            Tag.GPU_MEMORY_PEAK_RESERVED_BYTES: memory.peak_reserved,
        }


def _sm_utilization(nvml: Any, handle: Any, is_mig: bool) -> Callable[[], Figures]:
    """Returns what reads the multiprocessors' mean share at work, by NVML's counters (GPM).

    Each read tells of the time since the one before, which NVML wants to be 0.1 s at least. A
    profiler may run beside the counters.

    Raises:
        NVMLError: this GPU or its driver has no counters.
    """
    device = handle
    take = partial(nvml.nvmlGpmSampleGet, handle)
    if is_mig:
        device = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
        take = partial(nvml.nvmlGpmMigSampleGet, device, instance)
    if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    before = nvml.nvmlGpmSampleAlloc()
    after = nvml.nvmlGpmSampleAlloc()
    taken = False

    def read() -> Figures:
        nonlocal before, after, taken
        before, after = after, before
        take(after)
        if not taken:
            taken = True
            return ()
        asked = nvml.c_nvmlGpmMetricsGet_t(nvml.NVML_GPM_METRICS_GET_VERSION, 1, before, after)
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        metric = nvml.nvmlGpmMetricsGet(asked).metrics[0]
        if metric.nvmlReturn:
            raise nvml.NVMLError(metric.nvmlReturn)
        return (metric.value / 100,)

    return read


def _others(nvml: Any, handle: Any) -> Callable[[], Figures]:
    """Returns what reads the share of the time in which other processes ran kernels, added up.

    MIG and older drivers know no processes.
    """
    tree = Tree()
    seen_us = 0

    def read() -> Figures:
        nonlocal seen_us
        try:
            running = {each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, seen_us)
        except Exception:
            # not supported, or nothing ran
            return ()
        own = tree.pids()
        seen_us = max((sample.timeStamp for sample in samples), default=seen_us)
        if not own & running:
            # NVML counts processes as another container does
            return ()
        return (sum(sample.smUtil for sample in samples if sample.pid not in own) / 100,)

    return read
