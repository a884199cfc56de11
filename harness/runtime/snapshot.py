"""The state of networks and optimizers, copied to the host and written back where it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.runtime.seeding import random_state, restore_random_state


class Snapshot:
    """The state of ``parts`` between two updates, and all random states.

    ``restore`` writes values into the tensors that held them: DDP's buckets and compiled graphs
    know tensors by their address. The copy lies on the host: a step that just fits on the device
    still fits.

    Args:
        parts: networks, optimizers, and other objects with ``state_dict`` and ``load_state_dict``,
            such as gradient scalers.
        device: whose random state is kept beside the host's.

    Raises:
        TypeError: a part is none of these.
    """

    def __init__(self, parts: Iterable[Any], device: torch.device) -> None:
        self._device = device
        self._random = random_state(device)
        # puts back the structure, in order: which tensors are held where, and plain values
        self._undo: list[Callable[[], object]] = []
        tensors: list[Tensor] = []
        for part in parts:
            if isinstance(part, nn.Module):
                for module in part.modules():
                    self._undo.append(partial(setattr, module, "training", module.training))
                    # some modules put new buffers in their place
                    self._keep(module._buffers, dict(module._buffers))
                for parameter in part.parameters():
                    self._undo.append(partial(setattr, parameter, "grad", parameter.grad))
                    if parameter.grad is not None:
                        tensors.append(parameter.grad)
                tensors += [*part.parameters(), *part.buffers()]
            elif isinstance(part, Optimizer):
                self._keep(part.state, {key: dict(values) for key, values in part.state.items()})
                for group in part.param_groups:
                    self._undo.append(partial(group.update, dict(group)))
                for held in (*part.state.values(), *part.param_groups):
                    tensors += [value for value in held.values() if isinstance(value, Tensor)]
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                self._undo.append(partial(part.load_state_dict, copy.deepcopy(part.state_dict())))
            else:
                raise TypeError(
                    f"{type(part).__name__} has no state_dict and load_state_dict; it cannot be "
                    "put back"
                )
        self._copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    def _keep(self, held: dict[Any, Any], values: dict[Any, Any]) -> None:
        """Has ``restore`` put ``values`` back into ``held``, in place."""
        self._undo += [held.clear, partial(held.update, values)]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back; may be called once."""
        for put_back in self._undo:
            put_back()
        for tensor, copied in self._copies:
            tensor.copy_(copied)
        restore_random_state(self._random, self._device)
