"""What an asynchronous device does, on the emulated one and, where there is one, on CUDA: the
emulator is held to this.

Each test names where torch or NVIDIA says so. Files are those of torch's tree; "CUDA semantics" is
the page of torch's notes.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from emulator import BUSY_S, MIB, SIZE, marked, source, took_s
from generic import GenericCuda

from harness.runtime.accelerator import Accelerator, Cuda

FASTEST = 200e9  # bytes a second that no host stages


# The queue.


@pytest.mark.slow
def test_launching_does_not_wait_for_the_device(own: Accelerator) -> None:
    """The host comes back while the work is under
    way (CUDA semantics, "Asynchronous execution").
    """
    own.delay(BUSY_S)
    end = marked(own)
    assert not end.query()
    end.synchronize()
    assert end.query()


@pytest.mark.parametrize(("launches", "waits"), [(500, False), (2000, True)])
def test_a_full_queue_holds_launches_up(own: Accelerator, launches: int, waits: bool) -> None:
    """Some 1,000 are queued; NVIDIA names no number, users measured
    it (its forum, thread 68937).
    """
    own.delay(4 * BUSY_S)
    end = marked(own)
    for _ in range(launches):
        own.delay(1e-6)
    assert end.query() == waits


# Order.


def test_work_on_one_stream_is_done_in_order(own: Accelerator) -> None:
    """One piece begins when the one before has ended (CUDA semantics, "CUDA streams")."""
    events = [marked(own)]
    for _ in range(3):
        own.delay(BUSY_S / 4)
        events.append(marked(own))
    events[-1].synchronize()
    assert all(event.query() for event in events)
    spans = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    assert all(span >= BUSY_S / 8 for span in spans)
    assert events[0].elapsed_time(events[-1]) / 1e3 == pytest.approx(sum(spans), abs=1e-3)


@pytest.mark.parametrize("side", [False, True])
def test_an_interval_read_backwards_is_negative(own: Accelerator, side: bool) -> None:
    """Within 10 us, on one stream and between two; no document says so of an earlier event."""
    other = own.side_stream() if side else own.stream()
    early = marked(own)
    other.wait_stream(own.stream())
    late = own.event(timed=True)
    with own.on(other):
        own.delay(BUSY_S / 4)
        late.record(other)
    late.synchronize()
    assert early.elapsed_time(late) > 0
    assert late.elapsed_time(early) == pytest.approx(-early.elapsed_time(late), abs=0.01)


@pytest.mark.parametrize("which", ["side_stream", "idle_stream"])
def test_a_stream_does_not_wait_for_another(own: Accelerator, which: str) -> None:
    """An event of an idle one is passed at once (c10/cuda/CUDAStream.cpp makes them with
    cudaStreamNonBlocking).
    """
    own.delay(BUSY_S)
    end = marked(own)
    other = marked(own, getattr(own, which)())
    other.synchronize()
    assert other.query() and not end.query()


@pytest.mark.parametrize("by", ["event", "stream"])
def test_a_stream_waits_for_another_without_the_host(own: Accelerator, by: str) -> None:
    """Work behind ``wait_event`` and ``wait_stream`` begins after it (cudaStreamWaitEvent;
    torch/cuda/streams.py).
    """
    main = own.stream()
    side = own.side_stream()
    own.delay(BUSY_S)
    end = marked(own)
    side.wait_event(end) if by == "event" else side.wait_stream(main)
    behind = marked(own, side)
    assert not end.query() and not behind.query()
    behind.synchronize()
    assert end.query() and end.elapsed_time(behind) >= 0


def test_a_thread_has_a_current_stream_of_its_own(own: Accelerator) -> None:
    """A new thread begins on the default one (c10/cuda/CUDAStream.cpp, current_streams is
    thread_local).
    """
    default = own.stream()
    seen = []
    with own.on(own.side_stream()):
        own.start(lambda: seen.append(own.stream()), "other").join()
        assert own.stream() == own.side_stream()
        with own.on(None):
            assert own.stream() == own.side_stream()
    assert seen == [default] == [own.stream()]


# What events tell.


def test_asking_an_event_does_not_wait(own: Accelerator) -> None:
    """``query`` comes back at once, passed or not (cudaEventQuery)."""
    own.delay(BUSY_S)
    end = marked(own)
    assert took_s(own, end.query) < BUSY_S / 2
    assert not end.query()


def test_two_passed_events_tell_the_time_between_them(own: Accelerator) -> None:
    """In milliseconds of the device, whenever the host asks (torch/csrc/cuda/Event.cpp,
    elapsed_time).
    """
    start = marked(own)
    own.delay(BUSY_S)
    end = marked(own)
    end.synchronize()
    assert 0.5 * BUSY_S < start.elapsed_time(end) / 1e3 < 2 * BUSY_S


# Waiting.


@pytest.mark.parametrize("by", ["event", "device"])
def test_the_host_sleeps_while_it_waits(own: Accelerator, by: str) -> None:
    """It takes next to no processor time (cudaEventBlockingSync; torch/csrc/cuda/Event.cpp,
    ``blocking``).
    """
    if isinstance(own, GenericCuda):
        pytest.skip("the host spins on torch.Event")
    own.delay(2 * BUSY_S)
    end = marked(own)
    before_s = time.thread_time()
    waited_s = took_s(own, own.synchronize if by == "device" else end.synchronize)
    assert end.query() and waited_s > BUSY_S / 2
    assert time.thread_time() - before_s < 0.2 * waited_s


@pytest.mark.parametrize("by", ["stream", "device"])
def test_events_are_passed_once_their_stream_was_waited_for(own: Accelerator, by: str) -> None:
    """Those of an idle stream too (cudaStreamSynchronize; cudaEventSynchronize
    of a later event).
    """
    own.synchronize()
    events = [marked(own) for _ in range(3)]
    own.synchronize() if by == "device" else own.stream().synchronize()
    assert all(event.query() for event in events) and events[0].elapsed_time(events[-1]) >= 0


# Copies.


def test_the_host_does_not_wait_for_a_copy_from_page_locked_memory(own: Accelerator) -> None:
    """It queues behind other work, and its values are right (CUDA semantics, "Use pinned memory
    buffers").
    """
    pinned = source(own, MIB, 5)
    own.delay(BUSY_S)
    copied = own.copy(pinned)
    end = marked(own)
    assert not end.query()
    end.synchronize()
    assert own.holds(copied) and not own.holds(pinned)
    assert torch.equal(copied.cpu(), pinned)


def test_the_host_waits_until_pageable_memory_may_be_changed(own: Accelerator) -> None:
    """It is staged first, which takes as long as to read it (CUDA runtime, "API synchronization
    behavior").
    """
    pageable = torch.full((SIZE,), 5, dtype=torch.uint8)
    copies = list[torch.Tensor]()
    assert took_s(own, lambda: copies.append(own.copy(pageable))) > SIZE / FASTEST
    pageable.fill_(6)
    own.synchronize()
    assert (copies[0].cpu() == 5).all()


def test_page_locked_memory_is_read_when_the_copy_has_its_turn(own: Accelerator) -> None:
    """What the host writes there before that arrives (CUDA runtime, "API synchronization behavior":
    it may be asynchronous).
    """
    pinned = source(own, MIB, 5)
    own.delay(BUSY_S)
    copied = own.copy(pinned)
    pinned.fill_(6)
    own.synchronize()
    assert (copied.cpu() == 6).all()


def test_page_locked_memory_may_be_changed_once_its_event_is_passed(own: Accelerator) -> None:
    """The copy has what was there until then (CUDA semantics, "Use pinned memory buffers")."""
    pinned = source(own, MIB, 5)
    own.delay(BUSY_S / 4)
    copied = own.copy(pinned)
    marked(own).synchronize()
    pinned.fill_(6)
    own.delay(BUSY_S / 4)
    own.synchronize()
    assert (copied.cpu() == 5).all()


def test_page_locking_copies(own: Accelerator) -> None:
    """The source stays as it is, apart from its copy (aten/src/ATen/native/Memory.cpp,
    _pin_memory).
    """
    plain = torch.arange(12).view(3, 4)
    pinned = own.pin(plain)
    pinned.zero_()
    assert plain.sum() == 66 and not own.holds(pinned)


@pytest.mark.parametrize(
    ("capability", "kernels", "lacks"),
    [
        ((7, 0), ["sm_75", "sm_80"], True),
        ((7, 5), ["sm_75", "sm_80"], False),
        ((8, 9), ["sm_75", "sm_80"], False),
        ((9, 0), ["sm_80", "sm_86"], True),
        ((9, 0), ["sm_80", "compute_80"], False),
        ((9, 0), ["sm_90a"], False),
        ((12, 0), ["sm_100", "sm_120"], False),
    ],
)
def test_kernels_serve_a_card(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernels: list[str], lacks: bool
) -> None:
    """Binary code runs within a major version from its minor on; PTX on every later card."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    assert Cuda(torch.device("cuda", 0)).lacks_kernels is lacks
