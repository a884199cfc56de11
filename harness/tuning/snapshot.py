"""Copies the state of networks and optimizers to the host, and restores it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..runtime.seeding import random_state, restore_random_state


class Snapshot:
    """The state of ``parts`` between two updates, and all random states.

    ``restore`` writes values in place, because DDP's buckets and compiled graphs reference tensors
    by address. The copy is in host memory, so a step that just fits on the device still fits.

    Args:
        parts: networks, optimizers, gradient scalers, and other objects with ``state_dict`` and
            ``load_state_dict``, such as schedules.
        device: its random state is saved in addition to the host's.

    Raises:
        TypeError: a part is not one of these.
    """

    def __init__(self, parts: Iterable[Any], device: torch.device) -> None:
        self._device = device
        self._random = random_state(device)
        # calls that restore the structure, in order: where each tensor is held, and plain values
        self._undo: list[Callable[[], object]] = []
        self._tensors: list[Tensor] = []
        for part in parts:
            if isinstance(part, nn.Module):
                for module in part.modules():
                    self._undo.append(partial(setattr, module, "training", module.training))
                    # some modules replace their buffers
                    self._keep(module._buffers)
                for parameter in part.parameters():
                    self._undo.append(partial(setattr, parameter, "grad", parameter.grad))
                    self._tensors.append(parameter)
                    if parameter.grad is not None:
                        self._tensors.append(parameter.grad)
            elif isinstance(part, Optimizer):
                for held in (part.state, *part.state.values(), *part.param_groups):
                    self._keep(held)
            elif isinstance(part, GradScaler):
                # not its state_dict: a step may have run out of memory during an update
                self._keep(vars(part))
                # a disabled scaler has none
                self._keep(getattr(part, "_per_optimizer_states", {}))
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                self._undo.append(partial(part.load_state_dict, copy.deepcopy(part.state_dict())))
            else:
                raise TypeError(
                    f"{type(part).__name__} has no state_dict or load_state_dict, so it cannot be "
                    "restored"
                )
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    def _keep(self, held: dict[Any, Any]) -> None:
        """Makes ``restore`` restore the current contents of ``held``, in place."""
        self._undo += [held.clear, partial(held.update, dict(held))]
        self._tensors += [value for value in held.values() if isinstance(value, Tensor)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores everything; may be called only once."""
        for put_back in self._undo:
            put_back()
        for tensor, copied in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copied)
        restore_random_state(self._random, self._device)
