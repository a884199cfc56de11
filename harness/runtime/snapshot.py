"""The state of networks and optimizers, copied to the host and written back where it was."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from harness.runtime.seeding import random_state, restore_random_state


class Snapshot:
    """The state of ``parts`` between two updates, and all random states.

    ``restore`` writes values into the tensors that held them: DDP's buckets and compiled graphs
    know tensors by their address. The copy lies on the host: a step that just fits on the device
    still fits.

    Args:
        parts: networks, optimizers, gradient scalers, and other objects with ``state_dict`` and
            ``load_state_dict``.
        device: whose random state is kept beside the host's.

    Raises:
        TypeError: a part is none of these.
    """

    def __init__(self, parts: Iterable[Any], device: torch.device) -> None:
        self._device = device
        self._random = random_state(device)
        self._modes: list[tuple[nn.Module, bool]] = []
        self._buffers: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._grads: list[tuple[Tensor, Tensor | None]] = []
        self._optimizers: list[
            tuple[Optimizer, dict[Any, dict[Any, Any]], list[dict[str, Any]]]
        ] = []
        self._scalers: list[tuple[GradScaler, dict[str, Any]]] = []
        self._others: list[tuple[Any, Any]] = []
        tensors: list[Tensor] = []
        for part in parts:
            if isinstance(part, nn.Module):
                self._modes += [(module, module.training) for module in part.modules()]
                # some modules put new buffers in their place
                self._buffers += [(module, dict(module._buffers)) for module in part.modules()]
                self._grads += [(parameter, parameter.grad) for parameter in part.parameters()]
                tensors += [*part.parameters(), *part.buffers()]
                tensors += [grad for each in part.parameters() if (grad := each.grad) is not None]
            elif isinstance(part, Optimizer):
                state = {parameter: dict(values) for parameter, values in part.state.items()}
                self._optimizers.append((part, state, [dict(group) for group in part.param_groups]))
                for held in (*state.values(), *part.param_groups):
                    tensors += _tensors(held)
            elif isinstance(part, GradScaler):
                values = {
                    key: value if isinstance(value, Tensor) else copy.copy(value)
                    for key, value in vars(part).items()
                }
                # not its state_dict: two of its tensors are made when it is first used
                self._scalers.append((part, values))
                tensors += _tensors(values)
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                self._others.append((part, copy.deepcopy(part.state_dict())))
            else:
                raise TypeError(
                    f"{type(part).__name__} has no state_dict and load_state_dict; it cannot be "
                    "put back"
                )
        self._copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back; may be called once."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        for owner, buffers in self._buffers:
            owner._buffers.clear()
            owner._buffers.update(buffers)
        for optimizer, state, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
        for part, state in self._others:
            part.load_state_dict(state)
        for scaler, values in self._scalers:
            vars(scaler).clear()
            vars(scaler).update(values)
        for tensor, copied in self._copies:
            tensor.copy_(copied)
        for module, training in self._modes:
            module.training = training
        restore_random_state(self._random, self._device)


def _tensors(values: Mapping[Any, Any]) -> Iterator[Tensor]:
    return (value for value in values.values() if isinstance(value, Tensor))
