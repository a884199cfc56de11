"""An emulated GPU behind ``harness.runtime.accelerator``: real values, made-up time.

Its tensors lie on the CPU.

Work goes to streams, in order, each piece with a duration; how long launching it takes the host,
too. When everything ends is known as it is launched, so that no thread plays the device. On a
``VirtualClock`` time moves only where a thread would sleep; on a ``WallClock`` it is the real one,
for whole runs with worker processes. What it shows is arithmetic, and of no real GPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from harness.runtime import accelerator

# bytes: torch's device allocator gives multiples of that
_ROUND = 512
GB = 10**9
# of a stream that others are compared with: long beside what a host does in between
BUSY_S = 0.3
MIB = 2**20
# the least that torch's allocator takes from the driver for one tensor alone
SIZE = 10 * MIB


class WallClock:
    """The real time."""

    now = staticmethod(time.perf_counter)
    queue = staticmethod(queue.SimpleQueue)

    def sleep(self, seconds: float) -> None:
        # the moment may have passed since its distance was reckoned
        time.sleep(max(0.0, seconds))

    def start(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


@dataclass(eq=False)
class _Blocked:
    """A thread that waits until a time, or until something is so."""

    until_s: float
    due: Callable[[], bool]
    wake: threading.Event = field(default_factory=threading.Event)


class VirtualClock:
    """A time that stands still while a thread runs, and moves when all are blocked.

    One of its threads runs at a time.

    The thread that makes it is the first; others come by ``start``. They may block in ``sleep``, a
    queue's ``get`` and a thread's ``join`` alone. Each blocked ``get`` takes ``wake_s`` more, as a
    thread that has to be woken does.
    """

    def __init__(self, wake_s: float = 0.0) -> None:
        self._time_s = 1.0
        self._wake_s = wake_s
        self._blocked: list[_Blocked] = []

    def now(self) -> float:
        return self._time_s

    def sleep(self, seconds: float) -> None:
        until_s = self._time_s + max(0.0, seconds)
        if any(other.until_s <= until_s or other.due() for other in self._blocked):
            self.block(until_s, lambda: False)
        else:
            self._time_s = until_s

    def queue(self) -> _Queue:
        return _Queue(self)

    def start(self, work: Callable[[], None], name: str) -> _Thread:
        return _Thread(self, work, name)

    def block(self, until_s: float, due: Callable[[], bool]) -> None:
        """Let the other threads run until it is ``until_s``, or ``due``."""
        own = _Blocked(until_s, due)
        self._blocked.append(own)
        self.pass_on()
        assert own.wake.wait(30), "the virtual clock's threads wait for each other"

    def woken(self) -> None:
        """What a thread that was blocked loses before it goes on."""
        if self._wake_s:
            self.sleep(self._wake_s)

    def pass_on(self) -> None:
        """Wake the thread whose turn it is; the caller stops."""
        ready = next(
            (other for other in self._blocked if other.due() or other.until_s <= self._time_s), None
        )
        if ready is None:
            ready = min(self._blocked, key=lambda other: other.until_s)
            assert ready.until_s < math.inf, "every thread of the virtual clock waits for another"
            self._time_s = ready.until_s
        self._blocked.remove(ready)
        ready.wake.set()


class _Queue:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items = deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        if not self._items:
            self._clock.block(math.inf, lambda: bool(self._items))
            self._clock.woken()
        return self._items.popleft()


class _Thread:
    def __init__(self, clock: VirtualClock, work: Callable[[], None], name: str) -> None:
        self._clock = clock
        self._done = False
        self._begin = _Blocked(clock.now(), lambda: True)
        clock._blocked.append(self._begin)
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _run(self, work: Callable[[], None]) -> None:
        self._begin.wake.wait(30)
        try:
            work()
        finally:
            self._done = True
            self._clock.pass_on()

    def join(self) -> None:
        if not self._done:
            self._clock.block(math.inf, lambda: self._done)


@dataclass(eq=False)
class Stream:
    """Work in order; at most ``depth`` pieces are queued."""

    device: EmulatedDevice
    until_s: float = 0.0
    # when its last event is passed
    marked_s: float = 0.0
    ends_s: deque[float] = field(default_factory=deque)

    def wait_event(self, event: Event) -> None:
        self.until_s = max(self.until_s, event.at_s if event.at_s < math.inf else 0.0)

    def wait_stream(self, other: Stream) -> None:
        self.until_s = max(self.until_s, other.until_s)

    def synchronize(self) -> None:
        self.device.wait_until(max(self.until_s, self.marked_s))

    def add(self, duration_s: float) -> tuple[float, float]:
        """Queue a piece of work; when it begins and ends."""
        own = self.device
        while self.ends_s and self.ends_s[0] <= own.now():
            self.ends_s.popleft()
        # the driver spins here
        if len(self.ends_s) >= own.depth:
            own.spun_s += self.ends_s[0] - own.now()
            own.clock.sleep(self.ends_s[0] - own.now())
        began_s = max(self.until_s, own.now())
        self.until_s = began_s + duration_s
        self.ends_s.append(self.until_s)
        return began_s, self.until_s


class Event:
    """A point of a stream."""

    def __init__(self, device: EmulatedDevice, timed: bool) -> None:
        self.device = device
        self.timed = timed
        self.at_s = math.inf

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.stream()
        self.device.host(self.device.record_s)
        self.at_s = stream.marked_s = max(stream.until_s, self.device.now() + self.device.mark_s)

    def query(self) -> bool:
        passed = self.at_s == math.inf or self.at_s <= self.device.now()
        self.device.settle()
        return passed

    def synchronize(self) -> None:
        if self.at_s < math.inf:
            self.device.wait_until(self.at_s)

    def elapsed_time(self, end: Event) -> float:
        if not (self.timed and end.timed):
            raise ValueError("both events need enable_timing=True")
        if math.inf in (self.at_s, end.at_s):
            raise ValueError("both events must be recorded before their time can be told")
        if not (self.query() and end.query()):
            raise RuntimeError("both events must be passed before their time can be told")
        return 1e3 * (end.at_s - self.at_s)


@dataclass(eq=False)
class _Copy:
    """A copy from page-locked memory: its end, its source's first values, source and target."""

    until_s: float
    first: int
    source: Callable[[], Tensor | None]
    target: Callable[[], Tensor | None]

    def end(self) -> None:
        """Ends the copy with what the host has written to the source meanwhile.

        Nothing arrives where either was freed.
        """
        source = self.source()
        target = self.target()
        if source is not None and target is not None and _digest(source) != self.first:
            target.copy_(source)


def _tensor(memory: np.ndarray, place: tuple[torch.dtype, int, Any, Any]) -> Tensor:
    """A tensor of a type, an offset, a shape and strides in ``memory``."""
    return torch.empty(0, dtype=place[0]).set_(
        torch.from_numpy(memory).untyped_storage(), *place[1:]
    )


def _digest(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.contiguous().flatten().view(torch.uint8).numpy())


class Pool:
    """What a caching allocator holds: freed blocks are used again on the same stream.

    ``release`` alone gives blocks back.
    """

    def __init__(self, device: EmulatedDevice, rounded: Callable[[int], int]) -> None:
        self._device = device
        self._rounded = rounded
        # tensors end in any thread, in the middle of anything
        self._lock = threading.RLock()
        # size, owner and when streams have done with it
        self._free: list[tuple[int, Any, dict[Stream, float]]] = []
        # by address
        self._used: dict[int, tuple[int, Any, dict[Stream, float]]] = {}
        # by address
        self._memory: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def take(self, like: Tensor, owner: Any) -> Tensor:
        """Memory for a tensor like ``like`` in size and layout, of ``owner``."""
        self._device.settle()
        size = self._rounded(max(1, like.nbytes))
        with self._lock:
            found = next(
                (
                    block
                    for block in self._free
                    if block[:2] == (size, owner) and self._is_idle(block)
                ),
                None,
            )
            if found:
                self._free.remove(found)
            else:
                self.reserved += size
            self.allocated += size
            self.peak_allocated = max(self.peak_allocated, self.allocated)
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        memory = np.empty(max(1, like.untyped_storage().nbytes()), np.uint8)
        self._used[memory.ctypes.data] = (size, owner, {})
        self._memory[memory.ctypes.data] = memory
        weakref.finalize(memory, self._end, memory.ctypes.data).atexit = False
        return _tensor(memory, (like.dtype, 0, like.shape, like.stride()))

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._used

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        _, owner, uses = self._used.get(tensor.untyped_storage().data_ptr(), (0, stream, {}))
        # on its own stream the order of the work is enough
        if owner is not stream:
            uses[stream] = stream.until_s

    def again(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        """Gives ``tensor`` again, None once it was freed; does not keep its memory."""
        memory = weakref.ref(self._memory[tensor.untyped_storage().data_ptr()])
        place = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        return lambda: None if (left := memory()) is None else _tensor(left, place)

    def release(self, wait: bool = False) -> None:
        if wait:
            self._device.wait_until(
                max((at_s for block in self._free for at_s in block[2].values()), default=0.0)
            )
        with self._lock:
            idle = [block for block in self._free if self._is_idle(block)]
            self._free = [block for block in self._free if block not in idle]
            self.reserved -= sum(block[0] for block in idle)

    def _end(self, address: int) -> None:
        with self._lock:
            block = self._used.pop(address)
            self.allocated -= block[0]
            # work that was queued between record_stream and the end of the tensor counts too
            self._free.append((*block[:2], {stream: stream.until_s for stream in block[2]}))

    def _is_idle(self, block: tuple[int, Any, dict[Stream, float]]) -> bool:
        return all(until_s <= self._device.now() for until_s in block[2].values())


class EmulatedDevice(accelerator.Accelerator):
    """A GPU.

    Args:
        clock: its time; None: the real one.
        depth: launches that the queue of a stream holds.
        pinned_per_s: bytes a second of copies from page-locked memory.
        pageable_per_s: the same from pageable memory, for which the host waits.
        launch_s: what launching one piece of work takes the host, where nothing else is said.
        record_s: what recording an event takes the host.
        mark_s: an idle stream's time until it passes an event.
        wake_s: a blocking wait comes back so much later.
    """

    has_events = True
    has_streams = True
    name = "emulated"

    def __init__(
        self,
        clock: Any = None,
        *,
        depth: int = 1000,
        pinned_per_s: float = 25e9,
        pageable_per_s: float = 6e9,
        launch_s: float = 0.0,
        record_s: float = 0.0,
        mark_s: float = 5e-6,
        wake_s: float = 0.0,
        total: int = 80 * 2**30,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.kind = "cuda"
        self.clock = clock or WallClock()
        self.now = self.clock.now
        self.queue = self.clock.queue
        self.start = self.clock.start
        self.depth = depth
        self.pinned_per_s = pinned_per_s
        self.pageable_per_s = pageable_per_s
        self.launch_s = launch_s
        self.record_s = record_s
        self.mark_s = mark_s
        self.wake_s = wake_s
        self.total = total
        self.spun_s = self.slept_s = 0.0
        # of kernels
        self.busy_s: list[tuple[float, float]] = []
        # from page-locked memory, under way
        self._copies: list[_Copy] = []
        self._settling = threading.RLock()
        self._main, self._side, self._idle = (Stream(self) for _ in range(3))
        self._current = threading.local()
        self.memory_pool = Pool(self, lambda size: -(-size // _ROUND) * _ROUND)
        self.pinned_pool = Pool(self, lambda size: 1 << (size - 1).bit_length())

    def host(self, seconds: float) -> None:
        """Let the host work so long."""
        if seconds > 0:
            self.clock.sleep(seconds)

    def wait_until(self, at_s: float) -> None:
        left_s = at_s - self.now()
        if left_s > 0:
            self.slept_s += left_s + self.wake_s
            self.clock.sleep(left_s + self.wake_s)
        self.settle()

    def settle(self) -> None:
        """Gives copies that are through what their source held until then.

        The host may have changed the source too early.
        """
        # or who learns that a copy is through could let its source go while it is read here
        with self._settling:
            for copy in [copy for copy in self._copies if copy.until_s <= self.now()]:
                self._copies.remove(copy)
                copy.end()

    def launch(self, device_s: float, launch_s: float | None = None, kernels: int = 1) -> None:
        """Launch so many kernels, which take the device and the host so long together."""
        stream = self.stream()
        each_s = (kernels * self.launch_s if launch_s is None else launch_s) / kernels
        for _ in range(kernels):
            self.host(each_s)
            self.busy_s.append(stream.add(device_s / kernels))

    def busy_between(self, began_s: float, ended_s: float) -> float:
        """Seconds in which at least one kernel ran."""
        total_s = 0.0
        until_s = began_s
        for start_s, end_s in sorted(self.busy_s):
            total_s += max(0.0, min(end_s, ended_s) - max(start_s, until_s))
            until_s = max(until_s, end_s)
        return total_s

    def synchronize(self) -> None:
        self.stream().synchronize()

    def event(self, *, timed: bool = False) -> Event:
        return Event(self, timed)

    def stream(self) -> Stream:
        return getattr(self._current, "stream", self._main)

    def side_stream(self) -> Stream:
        return self._side

    def idle_stream(self) -> Stream:
        return self._idle

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.stream()
        self._current.stream = stream or before
        try:
            yield
        finally:
            self._current.stream = before

    def delay(self, seconds: float) -> None:
        self.stream().add(seconds)

    def holds(self, tensor: Tensor) -> bool:
        return self.memory_pool.has(tensor)

    def copy(self, tensor: Tensor) -> Tensor:
        is_pinned = self.pinned_pool.has(tensor)
        stream = self.stream()
        copied = self.memory_pool.take(tensor, stream).copy_(tensor)
        self.host(self.launch_s)
        _, until_s = stream.add(
            tensor.nbytes / (self.pinned_per_s if is_pinned else self.pageable_per_s)
        )
        if is_pinned:
            self.pinned_pool.keep(tensor, stream)
            again = self.pinned_pool.again(tensor), self.memory_pool.again(copied)
            self._copies.append(_Copy(until_s, _digest(tensor), *again))
        else:
            self.clock.sleep(until_s - self.now())
        return copied

    def pin(self, tensor: Tensor) -> Tensor:
        return (
            tensor
            if self.pinned_pool.has(tensor)
            else self.pinned_pool.take(tensor, None).copy_(tensor)
        )

    def keep_for(self, stream: Stream, tensor: Tensor) -> None:
        self.memory_pool.keep(tensor, stream)

    def memory(self) -> accelerator.MemoryUse:
        pool = self.memory_pool
        peaks = pool.peak_allocated, pool.peak_reserved
        return accelerator.MemoryUse(
            pool.allocated, pool.reserved, *peaks, self.total - pool.reserved, self.total
        )

    def reset_peaks(self) -> None:
        pool = self.memory_pool
        pool.peak_allocated = pool.allocated
        pool.peak_reserved = pool.reserved

    def release(self) -> None:
        self.memory_pool.release(wait=True)
        self.pinned_pool.release()


class Gpu(EmulatedDevice):
    """A GPU on the wall clock whose figures of memory are made up.

    Attributes:
        peaks: what of its memory is allocated at most, in turn for each reading; the last one
            stays.
        free: bytes of it that nobody has.
        pinned: how many tensors were page-locked.
        resets: how often the peaks were begun again.
    """

    def __init__(self, *peaks: int, free: int = 50 * GB) -> None:
        super().__init__()
        self.peaks = list(peaks or (0,))
        self.free = free
        self.pinned = self.resets = 0

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned += 1
        return super().pin(tensor)

    def memory(self) -> accelerator.MemoryUse:
        peak = self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0]
        return accelerator.MemoryUse(peak, 30 * GB, peak, 30 * GB, self.free, 80 * GB)

    def reset_peaks(self) -> None:
        self.resets += 1


def marked(own: accelerator.Accelerator, stream: Any = None, *, timed: bool = True) -> Any:
    """An event at this point of ``stream``; None: of the current one."""
    event = own.event(timed=timed)
    event.record(stream or own.stream())
    return event


def took_s(own: accelerator.Accelerator, call: Callable[[], object]) -> float:
    began_s = own.now()
    call()
    return own.now() - began_s


def source(own: accelerator.Accelerator, size: int = SIZE, value: int = 1) -> Tensor:
    """Page-locked bytes."""
    return own.pin(torch.full((size,), value, dtype=torch.uint8))


@contextlib.contextmanager
def emulated(device: Any, monkeypatch: pytest.MonkeyPatch | None = None) -> Iterator[Any]:
    """Makes ``device`` the only GPU in a block.

    With ``monkeypatch`` torch's own pinning goes to the device too.
    """
    known = accelerator.get

    def get(asked: torch.device | str) -> accelerator.Accelerator:
        return device if torch.device(asked).type in ("cpu", "cuda") else known(asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "get", get)
        patch.setattr(accelerator, "count", lambda: 1)
        if monkeypatch is not None:
            monkeypatch.setattr(
                torch.Tensor, "pin_memory", lambda tensor, device_=None: device.pin(tensor)
            )
            for name in ("empty", "zeros"):
                monkeypatch.setattr(
                    torch, name, functools.partial(_made, device, getattr(torch, name))
                )
            for name, fake in (("is_available", lambda: True), ("current_device_index", lambda: 0)):
                monkeypatch.setattr(torch.accelerator, name, fake)
            monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        yield device


def _made(
    own: EmulatedDevice,
    make: Callable[..., Tensor],
    /,
    *args: Any,
    pin_memory: bool = False,
    **how: Any,
) -> Tensor:
    return own.pin(make(*args, **how)) if pin_memory else make(*args, **how)
