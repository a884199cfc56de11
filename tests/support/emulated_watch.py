"""Runs ``wellfed watch`` with the arguments of this command, on an emulated GPU.

Batches that the script brings to "cuda" are copied there, and ``torch.cuda._sleep`` is a kernel of
as many nanoseconds.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from emulator import EmulatedDevice, emulated
from torch import Tensor, nn
from watch_alone import unseen

from harness.hooks.__main__ import main


def run() -> int:
    """Watches the script."""
    own = EmulatedDevice(launch_s=20e-6, record_s=2e-6)
    to = torch.Tensor.to

    def copied(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        return own.copy(tensor) if args == ("cuda",) else to(tensor, *args, **named)

    with pytest.MonkeyPatch.context() as patch, emulated(own, patch), unseen:
        patch.setattr(torch.Tensor, "to", copied)
        # the device's tensors are the processor's, and so are the weights
        patch.setattr(nn.Module, "to", lambda module, *_: module)
        patch.setattr(torch.cuda, "_sleep", lambda cycles: own.launch(cycles / 1e9))
        return main()


if __name__ == "__main__":
    sys.exit(run())
