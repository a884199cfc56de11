"""What is the same for every device that a network may run on."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what its current stream was given; on a CPU, steps are through when they return.

    On CUDA the host sleeps meanwhile and does not spin, so that its processor time is that of its own work.
    """
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(device))
        done.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()
