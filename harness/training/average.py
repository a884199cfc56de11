"""An average of a network's weights, which is evaluated in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Average(AveragedModel):
    """torch's ``AveragedModel``, exponential and with buffers, that leaves out skipped updates.

    Bitwise torch's. Which updates were skipped is known on the device alone, and the host does not
    wait for it: all averages of a type lie in one tensor, which the device then puts back.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        device = next(network.parameters()).device
        self._average = get_ema_multi_avg_fn(decay)
        super().__init__(network, device, multi_avg_fn=self._average, use_buffers=True)
        self.requires_grad_(False)
        self._has_begun = False
        tensors = _tensors(self.module)
        # for each type: all averages, and the places of its tensors
        self._parts: list[tuple[Tensor, list[int]]] = []
        for dtype in {tensor.dtype: None for tensor in tensors}:
            places = [i for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
            sizes = [tensors[i].numel() for i in places]
            whole = torch.empty(sum(sizes), dtype=dtype, device=device)
            for i, part in zip(places, whole.split(sizes), strict=True):
                # strides as they were, but dense
                strides = torch.empty_like(tensors[i]).stride()
                tensors[i].data = part.as_strided(tensors[i].shape, strides).copy_(tensors[i])
            self._parts.append((whole, places))

    @torch.no_grad()
    def update(self, network: nn.Module, found_inf: Tensor) -> None:
        """Takes the weights of ``network`` in, unless ``found_inf`` (a scalar) is above 0."""
        if not self._has_begun:
            # here the host waits for the device, until one update has been made: that is a copy
            if not found_inf:
                self.update_parameters(network)
                self._has_begun = True
            return
        averaged = _tensors(self.module)
        current = _tensors(network)
        skipped = found_inf > 0
        for whole, places in self._parts:
            before = whole.clone()
            pairs = [averaged[i] for i in places], [current[i] for i in places]
            self._average(*pairs, self.n_averaged)
            torch.where(skipped, before, whole, out=whole)
        self.n_averaged += ~skipped

    def take_over(self, network: nn.Module, saved: dict[str, Any] | None) -> None:
        """Goes on from what ``state_dict`` gave; None: begins with the weights of ``network``."""
        if saved is None:
            self.module.load_state_dict(network.state_dict())
            self.n_averaged.zero_()
        else:
            self.load_state_dict(saved)
        self._has_begun = bool(self.n_averaged)


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
