"""The GPU's own figures, by NVML.

What a GPU, a MIG instance or a driver does not give is absent, never 0.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from harness.runtime.folder import LOGGER
from harness.watch.figures import Tag
from harness.watch.tree import Tree

Figures = Sequence[float | None]  # one for each tag, or none at all this time

_log = logging.getLogger(LOGGER)


def nvml_sees_gpu() -> tuple[str, list[str]] | None:
    """The driver's version and the names of the GPUs that NVML sees; None where it sees none.

    Does not import torch.
    """
    nvml = _started()
    if nvml is None:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        return (str(nvml.nvmlSystemGetDriverVersion()), names) if names else None
    except Exception:  # NVML's own, or whatever another module of its name comes up with
        return None
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


class Source:
    """Figures that can be read at any time; one that fails is given up for the rest of the run,
    with one line in the log.

    Attributes:
        lost: the tags of those that were given up.
    """

    _level = logging.INFO

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self._reads: dict[tuple[Tag, ...], Callable[[], Figures]] = {}

    def sample(self) -> dict[str, float]:
        """What can be had now, by tag."""
        found: dict[str, float] = {}
        reasons: dict[
            str, list[str]
        ] = {}  # with the tags: a driver that falls over takes many along
        for tags, read in list(self._reads.items()):
            try:
                figures = read()
            except (
                Exception
            ) as error:  # whatever a driver or a kernel comes up with, training goes on
                del self._reads[tags]
                reasons.setdefault(str(error) or type(error).__name__, []).extend(tags)
            else:
                found |= {
                    tag: figure
                    for tag, figure in zip(tags, figures, strict=False)
                    if figure is not None
                }
        for reason, lost in reasons.items():
            self.lost.update(lost)
            _log.log(self._level, "no %s from here on: %s", ", ".join(lost), reason)
        return found


class GpuSource(Source):
    """Utilisation, memory and power of one GPU or MIG instance.

    ``gpu/utilization`` is the share of NVML's last sample period (1/6 to 1 s) in which any kernel
    ran, whoever's, however little it filled; a MIG instance has none. ``gpu/sm_utilization`` is how
    much it filled, since the sample before: the mean share of multiprocessors at work, which Hopper
    and later count, for a MIG instance its own.
    """

    _level = logging.WARNING

    def __init__(self, uuid: str) -> None:
        """``uuid`` is torch's: an index would not do, CUDA counts only what CUDA_VISIBLE_DEVICES
        shows.
        """
        super().__init__()
        nvml = _started()
        if nvml is None:
            _log.warning(
                "no GPU figures: NVML is not there (no driver, or nvidia-ml-py is not installed)"
            )
            return
        try:
            handle, is_mig = _handle(nvml, uuid)
        except (
            Exception
        ) as error:  # NVML's own, or whatever another module of its name comes up with
            _log.warning("no GPU figures: NVML does not know GPU %s: %s", uuid, error)
            return
        self._reads = {
            (Tag.GPU_UTILIZATION,): lambda: (nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,),
            (Tag.GPU_MEMORY_USED_BYTES,): lambda: (
                float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            ),
            (Tag.GPU_POWER_W,): lambda: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000,),
            (Tag.GPU_OTHERS_UTILIZATION,): _Others(nvml, handle).read,
        }
        try:
            self._reads[(Tag.GPU_SM_UTILIZATION,)] = _SmUtilization(nvml, handle, is_mig).read
        except Exception as error:  # no loss: most GPUs and drivers have none
            _log.info("no %s: %s", Tag.GPU_SM_UTILIZATION, error)


class _SmUtilization:
    """What NVML's performance counters (GPM) say of the multiprocessors; a profiler may run beside
    them.

    Raises:
        NVMLError: this GPU or its driver has no such counters.
    """

    def __init__(self, nvml: Any, handle: Any, is_mig: bool) -> None:
        device = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_mig else handle
        if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        if is_mig:
            self._take = partial(
                nvml.nvmlGpmMigSampleGet, device, nvml.nvmlDeviceGetGpuInstanceId(handle)
            )
        else:
            self._take = partial(nvml.nvmlGpmSampleGet, device)
        self._nvml = nvml
        self._taken = False
        self._before = nvml.nvmlGpmSampleAlloc()
        self._after = nvml.nvmlGpmSampleAlloc()

    def read(self) -> Figures:
        """The mean since the read before, which NVML wants to be at least 0.1 s ago; none on the
        first.
        """
        nvml = self._nvml
        self._before, self._after = self._after, self._before
        self._take(self._after)
        if not self._taken:
            self._taken = True
            return ()
        asked = nvml.c_nvmlGpmMetricsGet_t(
            nvml.NVML_GPM_METRICS_GET_VERSION, 1, self._before, self._after
        )
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        metric = nvml.nvmlGpmMetricsGet(asked).metrics[0]
        if metric.nvmlReturn:
            raise nvml.NVMLError(metric.nvmlReturn)
        return () if math.isnan(metric.value) else (metric.value / 100,)


class _Others:
    """Other processes on a GPU, by NVML's figures of each process.

    MIG and older drivers have none.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._tree = Tree()
        self._seen_us = 0

    def read(self) -> Figures:
        """The share of the time since the read before in which they ran kernels, added up."""
        nvml = self._nvml
        try:
            running = {
                process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            }
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us)
        except Exception:  # not supported, or nothing ran
            return ()
        own = self._tree.pids()
        self._seen_us = max((sample.timeStamp for sample in samples), default=self._seen_us)
        if not own & running:  # NVML counts processes as another container does
            return ()
        return (min(1.0, sum(sample.smUtil for sample in samples if sample.pid not in own) / 100),)


def _handle(nvml: Any, uuid: str) -> tuple[Any, bool]:
    """NVML's handle, and whether it is a MIG instance's."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), False
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"), True


def _started() -> Any:
    """The NVML module, ready for use, or None."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
