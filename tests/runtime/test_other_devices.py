"""Devices that are neither a CPU nor CUDA: what is asked of them, and what is believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.feed.prefetcher import HostLeadLimiter
from harness.runtime import accelerator
from harness.runtime.accelerator import Generic


class OneWay(torch.Event):
    """An event that tells no time to an earlier one, as on Apple's GPUs."""

    def elapsed_time(self, other: Any) -> float:
        found = super().elapsed_time(other)
        if found < 0:
            raise RuntimeError("the end was not recorded after the start")
        return found


class Slow(torch.Event):
    """An event in another unit."""

    def elapsed_time(self, other: Any) -> float:
        return 1e6 * super().elapsed_time(other)


@pytest.mark.cuda_order
@pytest.mark.parametrize(
    ("event", "tells"),
    [(torch.Event, True), (OneWay, False), (Slow, False)],
    ids=["sane", "one way", "slow"],
)
def test_a_device_is_tried_before_its_events_are_believed(
    event: Any, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch goes through it, between two events that time it."""
    monkeypatch.setattr(
        Generic, "event", lambda own, *, timed=False: event(own.device, enable_timing=timed)
    )
    own = accelerator.tried.__wrapped__(torch.device("cuda", 0))
    assert (own.tells, own.has_streams, own.has_events) == (tells, tells, tells)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of ``torch.Event``, of a Mac whose GPU is behind."""
    said: list[str] = []

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            # reading a time waits for all work
            assert (str(device), enable_timing) == ("mps:0", False)

        def record(self, stream: None) -> None:
            said.append("record")

        def query(self) -> bool:
            said.append("query")
            return False

        def synchronize(self) -> None:
            said.append("synchronize")

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return said


def test_the_host_is_two_steps_ahead_of_an_apple_gpu(calls: list[str]) -> None:
    """It sleeps until the step before the last one is done, by events of the default stream."""
    lead = HostLeadLimiter(accelerator.get("mps"), None)
    lead.hold()
    lead.hold()
    assert calls == ["record", "record", "query", "synchronize"]


def test_a_tensor_on_an_apple_gpu_is_there(calls: list[str]) -> None:
    """Its device has an index, and the setting has none."""
    there: Any = SimpleNamespace(device=torch.device("mps", 0))
    assert accelerator.get("mps").holds(there)
