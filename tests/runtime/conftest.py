"""The asynchronous devices that the seam's tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulator import EmulatedDevice, VirtualClock, WallClock, emulated

from harness.runtime import accelerator
from harness.runtime.accelerator import Accelerator


@pytest.fixture(
    params=[
        "virtual",
        "wall",
        pytest.param("cuda", marks=pytest.mark.cuda_order),
    ]
)
def own(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """The device: emulated in virtual time and on the wall clock, and CUDA."""
    if request.param == "cuda":
        device = accelerator.get("cuda")
        finish(device)
        device.release()
        yield device
        finish(device)
    else:
        with emulated(
            EmulatedDevice(VirtualClock() if request.param == "virtual" else WallClock())
        ) as device:
            yield device


def finish(own: Accelerator) -> None:
    for stream in (own.stream(), own.side_stream(), own.idle_stream()):
        stream.synchronize()
