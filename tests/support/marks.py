"""Points of streams, times of calls and sources of copies, for tests of an asynchronous device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.runtime.accelerator import Accelerator

# of a stream that others are compared with: long beside what a host does in between
BUSY_S = 0.1
MIB = 2**20
# the least that torch's allocator takes from the driver for one tensor alone
SIZE = 10 * MIB


def marked(own: Accelerator, stream: Any = None, *, timed: bool = True) -> Any:
    """An event at this point of ``stream``; None: of the current one."""
    event = own.event(timed=timed)
    event.record(stream or own.stream())
    return event


def took_s(own: Accelerator, call: Callable[[], object]) -> float:
    began_s = own.now()
    call()
    return own.now() - began_s


def source(own: Accelerator, size: int = SIZE, value: int = 1) -> torch.Tensor:
    """Page-locked bytes."""
    return own.pin(torch.full((size,), value, dtype=torch.uint8))
