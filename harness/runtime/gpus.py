"""Queries NVML, the NVIDIA driver library, for GPUs and their use by other processes."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from typing import Any, NamedTuple


class Use(NamedTuple):
    """A GPU's use; sorts idle GPUs first, then by used memory.

    Attributes:
        has_tenants: whether other processes use it.
        used_gib: whole GiB of its memory in use.
        text: used and total memory, as in ``30.1 of 80.0 GB``.
    """

    has_tenants: bool
    used_gib: int
    text: str

    @property
    def is_idle(self) -> bool:
        """Whether it is unused; a desktop uses less than 1 GiB."""
        return not self.has_tenants and not self.used_gib


def start_nvml() -> Any:
    """Returns the initialized NVML module; raises NVML's error if there is no driver."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml


def handle_of(nvml: Any, uuid: str) -> tuple[Any, bool]:
    """Returns the handle of the GPU or MIG instance with torch's ``uuid``, and whether it is MIG.

    Torch's indices count only the GPUs in CUDA_VISIBLE_DEVICES.
    """
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), False
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"), True


def _handles(nvml: Any) -> list[Any]:
    """Returns the handles of all GPUs in this machine."""
    return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]


def are_hidden() -> bool:
    """Whether the user has hidden all GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def nvml_sees_gpu() -> tuple[str, list[str]] | None:
    """Returns the driver version and the GPU names from NVML; None if there is no GPU.

    Does not import torch.
    """
    # no such package or driver, or another module of this name
    with suppress(Exception):
        nvml = start_nvml()
        if names := [str(nvml.nvmlDeviceGetName(handle)) for handle in _handles(nvml)]:
            return str(nvml.nvmlSystemGetDriverVersion()), names
    return None


def use(nvml: Any, handle: Any) -> Use:
    """Returns a GPU's use; raises NVML's error if the query is unsupported."""
    # in a container, processes may be hidden, but their memory is not
    pids = {each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    text = f"{memory.used / 1e9:.1f} of {memory.total / 1e9:.1f} GB"
    return Use(bool(pids - {os.getpid()}), memory.used >> 30, text)


def idle_names() -> list[str]:
    """Returns the names of unused GPUs."""
    # no such package or driver, or an unsupported query
    with suppress(Exception):
        nvml = start_nvml()
        return [
            str(nvml.nvmlDeviceGetName(handle))
            for handle in _handles(nvml)
            if use(nvml, handle).is_idle
        ]
    return []
