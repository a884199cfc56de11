"""Asks NVML, the library of NVIDIA's driver, about GPUs and their use by others."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from typing import Any, NamedTuple


class Use(NamedTuple):
    """A GPU's use; an idle one comes before a busy one, of which the emptier comes first.

    Attributes:
        has_tenants: other processes compute on it.
        used_gib: whole GiB of its memory in use.
        text: as in ``30.1 of 80.0 GB``.
    """

    has_tenants: bool
    used_gib: int
    text: str

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it; a desktop takes less than 1 GiB."""
        return not self.has_tenants and not self.used_gib


def start_nvml() -> Any:
    """Returns the NVML module, ready for use; raises what it raises without a driver."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml


def handle_of(nvml: Any, uuid: str) -> tuple[Any, bool]:
    """Returns the handle of the GPU or MIG instance with torch's ``uuid``, and whether it is MIG.

    An index counts only what CUDA_VISIBLE_DEVICES shows.
    """
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), False
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"), True


def _handles(nvml: Any) -> list[Any]:
    """Returns the handles of all GPUs of this machine."""
    return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]


def are_hidden() -> bool:
    """Whether the user has hidden all GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def nvml_sees_gpu() -> tuple[str, list[str]] | None:
    """Returns the driver's version and the GPUs' names by NVML; None without a GPU.

    Does not import torch.
    """
    # no such package, no driver, or another module of its name
    with suppress(Exception):
        nvml = start_nvml()
        if names := [str(nvml.nvmlDeviceGetName(handle)) for handle in _handles(nvml)]:
            return str(nvml.nvmlSystemGetDriverVersion()), names
    return None


def use(nvml: Any, handle: Any) -> Use:
    """Returns the use of a GPU; raises what NVML raises where it does not tell."""
    # in a container it may see no processes, but still their memory
    pids = {each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    text = f"{memory.used / 1e9:.1f} of {memory.total / 1e9:.1f} GB"
    return Use(bool(pids - {os.getpid()}), memory.used >> 30, text)


def idle_names() -> list[str]:
    """Returns the names of the GPUs that nobody uses."""
    # no such package, no driver, or one that does not tell
    with suppress(Exception):
        nvml = start_nvml()
        return [
            str(nvml.nvmlDeviceGetName(handle))
            for handle in _handles(nvml)
            if use(nvml, handle).is_idle
        ]
    return []
