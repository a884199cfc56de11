"""The asynchronous devices that the seam's tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulator import EmulatedDevice, VirtualClock, WallClock, emulated
from generic import GenericCuda

from harness.runtime import accelerator
from harness.runtime.accelerator import Accelerator


@pytest.fixture(
    params=[
        "virtual",
        "wall",
        pytest.param("cuda", marks=pytest.mark.cuda_order),
        pytest.param("generic", marks=[pytest.mark.cuda_order, pytest.mark.slow]),
    ]
)
def own(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """The device: emulated in virtual time and on the wall clock, CUDA, and it by the class for
    other types.
    """
    if request.param in ("cuda", "generic"):
        device = accelerator.get("cuda")
        if request.param == "generic":
            device = GenericCuda(device.device)
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
