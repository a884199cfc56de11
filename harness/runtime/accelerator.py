"""Wraps the devices that a network may run on; no other file uses ``torch.cuda``.

On CUDA the host runs ahead: work is queued on streams, and events tell when the device has done it.
So it is on any other type that ``torch.accelerator`` names, if a try shows it. Elsewhere nothing is
queued that we could time, and the methods for streams do nothing. Tests put an emulated device in
the place of ``get``.
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

from . import gpus


class MemoryUse(NamedTuple):
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
    """A device without streams, as a CPU is, whose work is done when the call returns.

    Attributes:
        kind: cpu, cuda, mps, or torch's name of another type.
        tells: whether it is known when the device is at work.
        has_events: whether the host runs ahead, and events tell when work is done.
        has_streams: whether copies from page-locked memory run beside the network too, and events
            time both.
        has_float64: whether it computes in float64.
        skips_updates: whether torch's fused optimizers heed ``found_inf`` on it.
        collective: the process group's backend.
        device: what tensors are put on.
        place: the device that process groups are told of; None: the host.
    """

    tells = True
    has_events = False
    has_streams = False
    has_float64 = True
    skips_updates = True
    collective = "gloo"
    # seconds, monotonic
    now: Callable[[], float] = staticmethod(time.perf_counter)
    # between a thread of ``start`` and its consumer
    queue: Callable[[], Any] = staticmethod(queue.SimpleQueue)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type
        self.place = device if device.type == "cuda" else None

    @property
    def name(self) -> str:
        """The device as people know it."""
        return self.kind

    @property
    def is_host(self) -> bool:
        """Whether the host's own processors do the work."""
        return self.kind == "cpu"

    @property
    def half_precision(self) -> str | None:
        """The setting ``trainer.precision`` that is fast on it; None: not known."""
        # private names of torch's, for what processors have
        flags = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
        fast = self.is_host and any(getattr(torch.cpu, flag, bool)() for flag in flags)
        return "bf16" if fast else None

    @property
    def uuid(self) -> str | None:
        """Identifies the device among its kind; None: it is the only one."""
        return None

    @property
    def pci(self) -> str:
        """The address on the bus as Linux writes it, 0000:17:00.0; empty: it has none."""
        return ""

    @property
    def lacks_kernels(self) -> bool:
        """Whether this torch was built without code for the device."""
        return False

    def make_current(self) -> None:
        """Makes the device the calling thread's own."""

    def start(self, work: Callable[[], None], name: str) -> Any:
        """Starts a thread that does ``work``; returns the thread."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def synchronize(self) -> None:
        """Sleeps until the device has done the work of the current stream."""
        if self.has_events:
            done = self.event()
            done.record(self.stream())
            done.synchronize()

    def event(self, *, timed: bool = False) -> Any:
        """Returns an event on which the host sleeps; two ``timed`` ones have a distance in ms."""
        return torch.Event(self.device, enable_timing=timed)

    def stream(self) -> Any:
        """Returns the stream that work of the calling thread goes to."""

    def side_stream(self) -> Any:
        """Returns the stream for copies.

        There is one for the life of the process: memory of one stream is not used on another.
        """

    def idle_stream(self) -> Any:
        """Returns a stream that nothing runs on, so that its events are passed at once."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Opens a block whose work goes to ``stream``; None: the current stream."""
        return contextlib.nullcontext()

    def delay(self, seconds: float) -> None:
        """Keeps the current stream busy for about ``seconds``, and not the host."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in the device's memory."""
        return tensor.device == self.device

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` on the device; the host does not wait if its memory is page-locked."""
        return tensor.to(self.device)

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` in page-locked memory, if that makes copies to the device faster."""
        return tensor

    def keep_for(self, stream: Any, tensor: Tensor) -> None:
        """Keeps the memory of ``tensor`` until ``stream`` has done its work so far."""

    def memory(self) -> MemoryUse | None:
        """Returns the bytes of the device's own memory; None without any."""
        return None

    def reset_peaks(self) -> None:
        """Begins the peaks of ``memory`` again."""

    def release(self) -> None:
        """Gives back unused device memory and page-locked memory."""

    def random_state(self) -> Tensor | None:
        """Returns the state of the device's own random generator; None without any."""
        return None

    def set_random_state(self, state: Tensor | None) -> None:
        """Sets what ``random_state`` returned."""


class Mps(Accelerator):
    """Apple's GPU, never run by us.

    Its events tell that work is done, and no time: for that torch would wait for all queued work.
    """

    has_events = True
    has_float64 = False
    # by torch 2.13 and older
    skips_updates = False


class Generic(Accelerator):
    """A device as ``torch.accelerator`` has it; of another type than CUDA, never run by us.

    Without ``delay`` it is not told what launching costs.
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
        # with a priority, or the stream might wait in a queue with others' work
        return _stream(self.new_stream, self.device, -1)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Any:
        # as a block a stream keeps what was before in itself, and two threads share it
        before = self.stream()
        torch.accelerator.set_stream(stream or before)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def copy(self, tensor: Tensor) -> Tensor:
        # other memory may be read after the call
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def keep_for(self, stream: Any, tensor: Tensor) -> None:
        tensor.record_stream(stream)


class Cuda(Generic):
    """One GPU of NVIDIA's."""

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
            # compute_90 is compiled for any later card, sm_80 runs on 8.0 to 8.9
            if version <= own and (code == "compute" or version[0] == own[0]):
                return False
        return True

    @property
    def half_precision(self) -> str:
        # before, bf16 is emulated
        return "fp16" if torch.cuda.get_device_capability(self.device)[0] < 8 else "bf16"

    def event(self, *, timed: bool = False) -> Any:
        # with torch.Event the host would spin
        return torch.cuda.Event(enable_timing=timed, blocking=True)

    def make_current(self) -> None:
        torch.cuda.set_device(self.device)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def delay(self, seconds: float) -> None:
        with torch.cuda.device(self.device):
            # cycles of a GPU's processors, within a third
            torch.cuda._sleep(int(seconds * 1.8e9))

    def copy(self, tensor: Tensor) -> Tensor:
        # the driver stages other memory than page-locked
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


@functools.cache
def _stream(new: Callable[..., Any], device: torch.device, priority: int) -> Any:
    # from its first use on: making one starts CUDA
    return new(device, priority=priority)


def get(device: torch.device | str | Accelerator) -> Accelerator:
    """Returns the accelerator behind ``device``; without an index, the current one of its type."""
    if isinstance(device, Accelerator):
        return device
    device = torch.device(device)
    if device.type == "cuda":
        if device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        return Cuda(device)
    # torch 2.5 has none
    own = getattr(torch, "accelerator", None)
    # the one that is there, if any
    if device.type != "cpu" and own and device == own.current_accelerator(True):
        device = torch.device(device.type, own.current_device_index())
    kinds = {"cpu": Accelerator, "mps": Mps}
    return kinds.get(device.type, tried)(device)


@functools.cache
def tried(device: torch.device) -> Accelerator:
    """Returns a ``Generic`` if a batch's way through it shows that its events tell the time."""
    own = Generic(device)
    # this torch has no such device, or not all that is asked of it
    with contextlib.suppress(Exception):
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
        # a clock reads distances backwards, too
        if end.query() and end.elapsed_time(start) < 0 < start.elapsed_time(end) <= most_ms:
            return own
    unknown = Accelerator(device)
    unknown.tells = False
    return unknown


@functools.cache
def use() -> list[gpus.Use | None]:
    """Returns the use by others of each GPU that this process sees, before it uses any itself."""
    found: list[gpus.Use | None] = [None] * count()
    # no such package, no driver, or one that does not tell
    with contextlib.suppress(Exception):
        nvml = gpus.start_nvml()
        for i in range(count()):
            handle, _ = gpus.handle_of(nvml, str(get(torch.device("cuda", i)).uuid))
            found[i] = gpus.use(nvml, handle)
    return found


def taking_over() -> Callable[[], None]:
    """Returns a function that makes this thread's current GPU that of the thread that calls it."""
    if torch.cuda.is_available():
        return functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    return lambda: None


def count() -> int:
    """Returns the number of GPUs that this process sees."""
    return torch.cuda.device_count()
