"""The GPU's own figures, by NVML. What a GPU, a MIG slice or a driver does not give is absent, never 0."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from harness.runtime.folder import LOGGER
from harness.watch.tags import Tag

_log = logging.getLogger(LOGGER)


def nvml_sees_gpu() -> tuple[str, list[str]] | None:
    """The driver's version and the names of the GPUs that NVML sees; None where it sees none. Does not import torch."""
    nvml = _started()
    if nvml is None:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        return (str(nvml.nvmlSystemGetDriverVersion()), names) if names else None
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


class Source:
    """Figures that can be read at any time; one that fails is given up for the rest of the run, with one line in the log."""

    _level = logging.INFO
    _reads: dict[Tag, Callable[[], float | None]]

    def sample(self) -> dict[str, float]:
        """What can be had now, by tag."""
        found: dict[str, float] = {}
        for tag, read in list(self._reads.items()):
            try:
                value = read()
            except Exception as error:  # whatever a driver or a kernel comes up with, training goes on
                del self._reads[tag]
                _log.log(self._level, "no %s from here on: %s", tag, error)
            else:
                found |= {} if value is None else {tag: value}
        return found


class GpuSource(Source):
    """Utilisation, memory and power of one GPU.

    ``gpu/utilization`` is the share of NVML's last sample period (1/6 to 1 s) in which any kernel ran, whoever's, however
    little it filled. ``uuid`` is torch's: an index would not do, CUDA counts only what CUDA_VISIBLE_DEVICES shows.
    """

    _level = logging.WARNING

    def __init__(self, uuid: str) -> None:
        self._reads = {}
        nvml = _started()
        if nvml is None:
            _log.warning("no GPU figures: NVML is not there (no driver, or nvidia-ml-py is not installed)")
            return
        try:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except nvml.NVMLError:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        except nvml.NVMLError as error:
            _log.warning("no GPU figures: NVML does not know GPU %s: %s", uuid, error)
            return
        self._reads = {
            Tag.GPU_UTILIZATION: lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            Tag.GPU_MEMORY_USED_BYTES: lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            Tag.GPU_POWER_W: lambda: float(nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        }


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
