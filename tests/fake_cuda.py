"""Enough of ``torch.cuda`` on the CPU to run GPU code that cannot be run here: streams are one, and what returns is done.

It shows that the code runs and that its results are right, never that its order on a real device is.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        return None

    def wait_stream(self, other: Stream) -> None:
        return None

    def wait_event(self, event: Event) -> None:
        return None

    def synchronize(self) -> None:
        return None


def install(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Put the fake in place; the device that stands for the GPU."""
    stream = Stream()
    for name, fake in {
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: time.sleep(cycles / 1e9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    return torch.device("cpu")


def install_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Put the fake in place, and a device of type ``cuda`` whose tensors lie on the CPU."""
    install(monkeypatch)
    for name in ("empty", "empty_like", "ones", "randn", "tensor", "zeros"):
        monkeypatch.setattr(torch, name, partial(_on_cpu, getattr(torch, name)))
    to, full = torch.Tensor.to, 256 * 2**20
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **how: _on_cpu(to, *args, **how))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    for name, fake in {
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "memory_reserved": lambda device=None: full,
        "memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (full, full),
        "set_sync_debug_mode": lambda mode: warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return torch.device("cuda", 0)


def _on_cpu(function: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """What ``function`` gives where the CPU stands in for every CUDA device that is named."""

    def cpu(value: Any) -> Any:
        named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return torch.device("cpu") if named else value

    return function(*map(cpu, args), **{name: cpu(value) for name, value in how.items()})
