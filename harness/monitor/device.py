"""Reads GPU metrics through NVML, and peak memory.

Metrics that a GPU, a MIG instance or a driver does not support are omitted, not reported as 0.
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

# one value per tag, or no values this time
Figures = Sequence[float | None]


class Sensor:
    """Metrics that can be read at any time.

    A metric that fails is disabled for the rest of the run, with a line in the log.
    """

    _level = logging.INFO

    def __init__(self) -> None:
        self._reads: dict[tuple[Tag, ...], Callable[[], Figures]] = {}

    def sample(self) -> dict[str, float]:
        """Returns the available metrics by tag."""
        found: dict[str, float] = {}
        for tags, read in list(self._reads.items()):
            try:
                figures = read()
            except Exception as error:
                # drivers and kernels may raise anything
                del self._reads[tags]
                log.log(self._level, "%s disabled: %r", ", ".join(tags), error)
                continue
            for tag, figure in zip(tags, figures, strict=False):
                # NVML counters return NaN if they could not be read
                if figure is not None and not isnan(figure):
                    # two counters are not read at exactly the same time
                    found[tag] = min(1.0, figure) if tag.figure.unit == "fraction" else figure
        return found


class GpuSensor(Sensor):
    """Utilization, memory and power of one GPU or MIG instance.

    ``gpu/utilization`` is the fraction of NVML's last sample period (1/6 to 1 s) in which any
    kernel of any program ran, however small; it is not available for a MIG instance.
    ``gpu/sm_utilization`` is the mean fraction of active multiprocessors since the previous sample,
    available on Hopper and later, including per MIG instance.
    """

    _level = logging.WARNING

    def __init__(self, uuid: str) -> None:
        """``uuid`` is the UUID from torch."""
        super().__init__()
        try:
            nvml = gpus.start_nvml()
            handle, is_mig = gpus.handle_of(nvml, uuid)
        except Exception as error:
            # no such package or driver, or the driver does not know the GPU
            log.warning("no GPU metrics: NVML cannot find GPU %s: %r", uuid, error)
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
            # not worth a warning; most GPUs and drivers have none
            log.info("no %s: %s", Tag.GPU_SM_UTILIZATION, error)


@dataclass(slots=True)
class MemoryPeaks:
    """Peak memory of a run, in bytes.

    Attributes:
        total_bytes: total device memory.
        reserved_bytes: memory reserved by torch, allocated or cached.
        training_bytes: memory allocated in training steps.
        evaluation_bytes: memory allocated in evaluations.
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
    """Reads peak device memory, which takes the host up to a millisecond.

    Attributes:
        peaks: the run's peaks so far; None if the device has no memory of its own, or before the
            first read.
    """

    def __init__(self, own: Accelerator) -> None:
        self._own = own
        self.peaks: MemoryPeaks | None = None
        own.reset_peaks()

    def read(self, *, evaluating: bool = False) -> dict[str, float]:
        """Returns the peaks since the last call by tag, for a window or an evaluation."""
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
    """Returns a reader of the mean fraction of active multiprocessors (NVML's GPM counters).

    Each read covers the time since the previous one; NVML requires at least 0.1 s. A profiler may
    run at the same time.

    Raises:
        NVMLError: this GPU or its driver has no such counters.
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
    """Returns a reader of the summed fractions of time in which other processes ran kernels.

    MIG and older drivers do not report processes.
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
            # NVML uses the host's process IDs
            return ()
        return (sum(sample.smUtil for sample in samples if sample.pid not in own) / 100,)

    return read
