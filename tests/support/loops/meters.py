"""What the scripts beside this file print: means, and which weights they ended with."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


class Mean:
    """The mean of what it was given."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, value: float, count: int = 1) -> None:
        self.total += value * count
        self.count += count

    def __str__(self) -> str:
        return repr(self.total / max(1, self.count))


def digest(model: nn.Module) -> str:
    """A name for all weights and buffers of ``model``, and for torch's random state."""
    found = hashlib.sha256(bytes(torch.get_rng_state().tolist()))
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
