"""Enough of ``torch.cuda`` on the CPU to run GPU code that cannot be run here: streams are one, and what returns is done.

It shows that the code runs and that its results are right, never that its order on a real device is.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
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
    def __init__(self, device: Any = None) -> None:
        return None

    def wait_stream(self, other: Stream) -> None:
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
