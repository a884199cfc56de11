"""Wraps the devices that a network can run on; no other file uses ``torch.cuda``.

On CUDA, the host runs ahead: work is queued on streams, and events record its completion. Other
``torch.accelerator`` types are treated the same if a trial succeeds. On all other devices, the
stream methods do nothing, because no queued work can be timed. Tests replace ``get`` with an
emulated device.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import gpus


class MemoryUse(NamedTuple):
    """Memory in bytes, for this process (in torch's allocator) and for the whole device.

    ``peak_*`` are maxima since the last ``reset_peaks``. ``reserved`` is memory that the allocator
    obtained from the driver.
    """

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    free: int
    total: int


class Accelerator:
    """A device without streams, such as a CPU; its work is finished when a call returns.

    Attributes:
        kind: cpu, cuda, mps, or another torch device type.
        tells: whether the device's busy time is measurable.
        has_events: whether the host runs ahead, and events record the end of work.
        has_streams: whether copies from pinned memory overlap with the network, and events can
            time both.
        has_float64: whether it supports float64.
        skips_updates: whether torch's fused optimizers support ``found_inf`` on it.
        collective: the process group's backend.
        device: the torch device.
        place: the device for process groups; None for the host.
    """

    tells = True
    has_events = False
    has_streams = False
    has_float64 = True
    skips_updates = True
    collective = "gloo"
    # seconds, monotonic
    now: Callable[[], float] = staticmethod(time.perf_counter)
    # between a thread started by ``start`` and its consumer
    queue: Callable[[], Any] = staticmethod(queue.SimpleQueue)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type
        self.place = device if device.type == "cuda" else None

    @property
    def name(self) -> str:
        """The device's product name."""
        return self.kind

    @property
    def is_host(self) -> bool:
        """Whether the host's CPU does the work."""
        return self.kind == "cpu"

    @property
    def half_precision(self) -> str | None:
        """The fast setting of ``trainer.precision``; None if unknown."""
        # private torch functions for CPU features
        flags = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
        fast = self.is_host and any(getattr(torch.cpu, flag, bool)() for flag in flags)
        return "bf16" if fast else None

    @property
    def uuid(self) -> str | None:
        """Identifies the device within its kind; None if it is the only one."""
        return None

    @property
    def pci(self) -> str:
        """The PCI bus address in Linux notation, 0000:17:00.0; empty if there is none."""
        return ""

    @property
    def lacks_kernels(self) -> bool:
        """Whether this torch was built without code for the device."""
        return False

    def make_current(self) -> None:
        """Makes the device current in the calling thread."""

    def start(self, work: Callable[[], None], name: str) -> Any:
        """Starts a thread that runs ``work``; returns the thread."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def synchronize(self) -> None:
        """Sleeps until the device has finished the current stream's work."""
        if self.has_events:
            done = self.event()
            done.record(self.stream())
            done.synchronize()

    def event(self, *, timed: bool = False) -> Any:
        """Returns an event that lets the host sleep while it waits; ``timed`` events measure ms."""
        return torch.Event(self.device, enable_timing=timed)

    def stream(self) -> Any:
        """Returns the calling thread's current stream."""

    def side_stream(self) -> Any:
        """Returns the stream for copies.

        There is one per process, because one stream's memory is not reused on another.
        """

    def idle_stream(self) -> Any:
        """Returns an idle stream, whose events complete immediately."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A block that uses ``stream``; None means the current stream."""
        return nullcontext()

    def delay(self, seconds: float) -> None:
        """Keeps the current stream busy for about ``seconds`` without blocking the host."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in device memory."""
        return tensor.device == self.device

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` on the device, asynchronously if its memory is pinned."""
        return tensor.to(self.device)

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` in pinned memory, if that makes copies to the device faster."""
        return tensor

    def keep_for(self, stream: Any, tensor: Tensor) -> None:
        """Keeps the memory of ``tensor`` until ``stream`` has finished the work queued so far."""

    def memory(self) -> MemoryUse | None:
        """Returns the device's memory statistics; None if it has no memory of its own."""
        return None

    def reset_peaks(self) -> None:
        """Resets the peaks in ``memory``."""

    def release(self) -> None:
        """Releases unused device memory and pinned memory."""

    def random_state(self) -> Tensor | None:
        """Returns the state of the device's RNG; None if it has none."""
        return None

    def set_random_state(self, state: Tensor | None) -> None:
        """Restores a state from ``random_state``."""


class Mps(Accelerator):
    """An Apple GPU. Untested.

    Its events record completion but not time, because torch would wait for all queued work to
    measure it.
    """

    has_events = True
    has_float64 = False
    # not supported in torch 2.13 and older
    skips_updates = False


class Generic(Accelerator):
    """Any ``torch.accelerator`` device. Untested except on CUDA.

    Launch overhead is unknown, because there is no ``delay``.
    """

    has_events = True
    has_streams = True
    has_float64 = False
    new_stream: Any = torch.Stream

    def make_current(self) -> None:
        torch.accelerator.set_device_index(self.device)

    def stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def side_stream(self) -> Any:
        return _stream(self.new_stream, self.device, 0)

    def idle_stream(self) -> Any:
        # needs a priority; otherwise, the stream might share a queue with other work
        return _stream(self.new_stream, self.device, -1)

    @contextmanager
    def on(self, stream: Any) -> Any:
        # as a context manager, a stream stores the previous one in itself, and threads share it
        before = self.stream()
        torch.accelerator.set_stream(stream or before)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def copy(self, tensor: Tensor) -> Tensor:
        # unpinned memory may be read after the call
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def keep_for(self, stream: Any, tensor: Tensor) -> None:
        tensor.record_stream(stream)


class Cuda(Generic):
    """An NVIDIA GPU."""

    has_float64 = True
    collective = "nccl"
    new_stream = torch.cuda.Stream

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def uuid(self) -> str | None:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    @property
    def pci(self) -> str:
        found: Any = torch.cuda.get_device_properties(self.device)
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    @property
    def lacks_kernels(self) -> bool:
        own = torch.cuda.get_device_capability(self.device)
        for arch in torch.cuda.get_arch_list():
            code, number = arch.rstrip("af").split("_")
            version = divmod(int(number), 10)
            # compute_90 compiles for any later GPU; sm_80 runs on 8.0 to 8.9
            if version <= own and (code == "compute" or version[0] == own[0]):
                return False
        return True

    @property
    def half_precision(self) -> str:
        # earlier GPUs emulate bf16
        return "fp16" if torch.cuda.get_device_capability(self.device)[0] < 8 else "bf16"

    def event(self, *, timed: bool = False) -> Any:
        # torch.Event would make the host spin
        return torch.cuda.Event(enable_timing=timed, blocking=True)

    def make_current(self) -> None:
        torch.cuda.set_device(self.device)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def delay(self, seconds: float) -> None:
        with torch.cuda.device(self.device):
            # in GPU clock cycles, accurate to within a third
            torch.cuda._sleep(int(seconds * 1.8e9))

    def copy(self, tensor: Tensor) -> Tensor:
        # the driver stages unpinned memory
        return tensor.to(self.device, non_blocking=True)

    def memory(self) -> MemoryUse | None:
        stats = torch.cuda.memory_stats(self.device)
        own = (
            stats.get(f"{kind}_bytes.all.{when}", 0)
            for when in ("current", "peak")
            for kind in ("allocated", "reserved")
        )
        return MemoryUse._make((*own, *torch.cuda.mem_get_info(self.device)))

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def random_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor | None) -> None:
        if state is not None:
            torch.cuda.set_rng_state(state, self.device)


@cache
def _stream(new: Callable[..., Any], device: torch.device, priority: int) -> Any:
    # created on first use, because it initializes CUDA
    return new(device, priority=priority)


def get(device: torch.device | str | Accelerator) -> Accelerator:
    """Returns the accelerator for ``device``; without an index, the current one of its type."""
    if isinstance(device, Accelerator):
        return device
    device = torch.device(device)
    if device.type == "cuda":
        if device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        return Cuda(device)
    # missing in torch 2.5
    own = getattr(torch, "accelerator", None)
    # the available one, if any
    if device.type != "cpu" and own and device == own.current_accelerator(True):
        device = torch.device(device.type, own.current_device_index())
    return {"cpu": Accelerator, "mps": Mps}.get(device.type, tried)(device)


@cache
def tried(device: torch.device) -> Accelerator:
    """Returns a ``Generic`` if a trial batch shows that its events measure time."""
    own = Generic(device)
    # this torch has no such device, or lacks a feature
    with suppress(Exception):
        side = own.side_stream()
        start = own.event(timed=True)
        end = own.event(timed=True)
        began_s = own.now()
        with own.on(side):
            start.record(side)
            own.keep_for(side, own.copy(own.pin(torch.zeros(1 << 18))))
            end.record(side)
        end.synchronize()
        most_ms = 1e3 * (own.now() - began_s)
        # the clock must also measure backward
        if end.query() and end.elapsed_time(start) < 0 < start.elapsed_time(end) <= most_ms:
            return own
    unknown = Accelerator(device)
    unknown.tells = False
    return unknown


@cache
def use() -> list[gpus.Use | None]:
    """Returns other processes' use of each visible GPU, measured before this process uses any."""
    found: list[gpus.Use | None] = [None] * count()
    # no such package or driver, or an unsupported query
    with suppress(Exception):
        nvml = gpus.start_nvml()
        for i in range(count()):
            handle, _ = gpus.handle_of(nvml, str(get(torch.device("cuda", i)).uuid))
            found[i] = gpus.use(nvml, handle)
    return found


def taking_over() -> Callable[[], None]:
    """Returns a function that makes this thread's GPU current in the calling thread."""
    if torch.cuda.is_available():
        return partial(torch.cuda.set_device, torch.cuda.current_device())
    return lambda: None


def count() -> int:
    """Returns the number of visible GPUs."""
    return torch.cuda.device_count()
