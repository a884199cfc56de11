"""What differs among the devices that a network may run on: the one place that knows
``torch.cuda``.

On CUDA the host runs ahead: work is queued on streams, and events tell when the device has done it.
Elsewhere nothing is queued that we could time, and the methods for streams do nothing. Tests put an
emulated device in place with ``emulate``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# of a GPU's processors, within a third
_CYCLES_PER_S = 1.8e9


class Memory(NamedTuple):
    """Bytes of a device's memory: this process's by torch's allocator, and the whole device's.

    ``peak_*`` are the largest since the last ``reset_peaks``. ``reserved`` is what the allocator
    took from the driver.
    """

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    free: int
    total: int


class Accelerator:
    """A device whose work is done when the call returns, as a CPU's is.

    Attributes:
        kind: cpu, cuda or mps.
        has_streams: whether the host runs ahead, copies run beside the network, and events time
            both.
        collective: the process group's backend.
        device: what tensors are put on.
        place: the device that process groups and DDP are told of; None: the host.
    """

    kind = "cpu"
    has_streams = False
    collective = "gloo"
    place: torch.device | None = None
    # seconds, monotonic
    now: Callable[[], float] = staticmethod(time.perf_counter)
    # between a thread of ``start`` and its consumer
    queue: Callable[[], Any] = staticmethod(queue.SimpleQueue)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """The device as people know it."""
        return self.kind

    @property
    def uuid(self) -> str | None:
        """What tells the device from all others of its kind; None: it is the only one."""
        return None

    def make_current(self) -> None:
        """Make the device the calling thread's own."""

    def start(self, work: Callable[[], None], name: str) -> Any:
        """Start a thread that does ``work``; returns it, to be joined."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def synchronize(self) -> None:
        """Wait until the device has done what the current stream was given.

        The host sleeps meanwhile.
        """

    def event(self, *, timed: bool = False) -> Any:
        """Makes an event, on which the host sleeps and does not spin; ``timed`` ones can be told
        apart in milliseconds.
        """
        raise AssertionError(f"{self.kind} has no events")

    def stream(self) -> Any:
        """The stream that work of the calling thread goes to."""

    def side_stream(self) -> Any:
        """The stream for copies, one for the life of the process: memory of one stream is not used
        again on another.
        """

    def idle_stream(self) -> Any:
        """A stream that nothing runs on, so that the device passes its events at once."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A block whose work goes to ``stream``; None: the current one."""
        return contextlib.nullcontext()

    def delay(self, seconds: float) -> None:
        """Keep the device's current stream busy for about so long, and not the host."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in the device's memory."""
        return tensor.device == self.device

    def copy(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the device; from page-locked memory the host does not wait for the copy."""
        return tensor.to(self.device)

    def pin(self, tensor: Tensor) -> Tensor:
        """``tensor`` in page-locked memory, where that makes copies to the device faster; else
        itself.
        """
        return tensor

    def keep_for(self, stream: Any, tensor: Tensor) -> None:
        """Keep the memory of ``tensor`` until ``stream`` has done the work that it was given so
        far.
        """

    def memory(self) -> Memory | None:
        """The device's memory; None: it has none of its own."""
        return None

    def reset_peaks(self) -> None:
        """Begin the peaks of ``memory`` again."""

    def release(self) -> None:
        """Give back the device memory and the page-locked memory that nobody uses."""

    def random_state(self) -> Tensor | None:
        """The state of the device's own random generator; None: it has none."""
        return None

    def set_random_state(self, state: Tensor | None) -> None:
        """Take over what ``random_state`` returned."""


class Mps(Accelerator):
    """Apple's GPUs: asynchronous, with one stream."""

    kind = "mps"

    def synchronize(self) -> None:
        torch.mps.synchronize()


class Cuda(Accelerator):
    """One GPU of NVIDIA's."""

    kind = "cuda"
    has_streams = True
    collective = "nccl"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.place = device

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def uuid(self) -> str | None:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def make_current(self) -> None:
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        done = self.event()
        done.record(self.stream())
        done.synchronize()

    def event(self, *, timed: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timed, blocking=True)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def side_stream(self) -> Any:
        return self._side

    def idle_stream(self) -> Any:
        return self._idle

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def delay(self, seconds: float) -> None:
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(seconds * _CYCLES_PER_S))

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and self.device.index in (None, tensor.device.index)

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def keep_for(self, stream: Any, tensor: Tensor) -> None:
        tensor.record_stream(stream)

    def memory(self) -> Memory | None:
        stats = torch.cuda.memory_stats(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return Memory(
            allocated=stats.get("allocated_bytes.all.current", 0),
            reserved=stats.get("reserved_bytes.all.current", 0),
            peak_allocated=stats.get("allocated_bytes.all.peak", 0),
            peak_reserved=stats.get("reserved_bytes.all.peak", 0),
            free=free,
            total=total,
        )

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()

    def random_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor | None) -> None:
        if state is not None:
            torch.cuda.set_rng_state(state, self.device)

    @functools.cached_property
    def _side(self) -> Any:
        return torch.cuda.Stream(self.device)

    @functools.cached_property
    def _idle(self) -> Any:
        # or it might wait in a queue with others' work
        return torch.cuda.Stream(self.device, priority=-1)


_KINDS: dict[str, type[Accelerator]] = {"cuda": Cuda, "mps": Mps}
_emulated: list[Accelerator] = []


def of(device: torch.device | str) -> Accelerator:
    """The accelerator behind ``device``; CUDA without an index is the current one."""
    device = torch.device(device)
    if _emulated and device.type in ("cpu", "cuda"):
        return _emulated[-1]
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _made(device)


def count() -> int:
    """How many GPUs this process sees."""
    return 1 if _emulated else torch.cuda.device_count()


def gpu(index: int) -> torch.device:
    """The device of the GPU at ``index``."""
    return _emulated[-1].device if _emulated else torch.device("cuda", index)


@contextlib.contextmanager
def emulate(accelerator: Accelerator) -> Any:
    """A block in which ``accelerator`` is the only GPU; for tests."""
    _emulated.append(accelerator)
    try:
        yield accelerator
    finally:
        _emulated.remove(accelerator)


@functools.cache
def _made(device: torch.device) -> Accelerator:
    return _KINDS.get(device.type, Accelerator)(device)
