"""Keeps an exponential moving average of the weights, which is evaluated in their place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Average(AveragedModel):
    """An exponential ``AveragedModel`` that includes buffers and ignores skipped updates.

    The result is bitwise identical to PyTorch's. Only the device knows which updates were skipped,
    and the host does not wait for it. All averages with the same dtype share one tensor, which the
    device restores after a skipped update.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        device = next(network.parameters()).device
        self._average = get_ema_multi_avg_fn(decay)
        super().__init__(network, device, multi_avg_fn=self._average, use_buffers=True)
        self.requires_grad_(False)
        # whether at least one update is known to be included
        self.has_begun = False
        tensors = _tensors(self.module)
        # one tensor per dtype that contains all averages
        self._wholes: dict[torch.dtype, Tensor] = {}
        for dtype in {tensor.dtype for tensor in tensors}:
            own = [tensor for tensor in tensors if tensor.dtype is dtype]
            sizes = [tensor.numel() for tensor in own]
            self._wholes[dtype] = whole = own[0].new_empty(sum(sizes))
            for tensor, part in zip(own, whole.split(sizes), strict=True):
                # the same stride order, but dense
                strides = torch.empty_like(tensor).stride()
                tensor.data = part.as_strided(tensor.shape, strides).copy_(tensor)

    @torch.no_grad()
    def update(self, network: nn.Module, found_inf: Tensor) -> None:
        """Adds the weights in ``network`` unless the scalar ``found_inf`` is above 0."""
        pairs = [*zip(_tensors(self.module), _tensors(network), strict=True)]
        skipped = found_inf > 0
        for dtype, whole in self._wholes.items():
            before = whole.clone()
            averaged, current = zip(
                *(pair for pair in pairs if pair[0].dtype is dtype), strict=True
            )
            self._average(averaged, current, self.n_averaged)
            if not self.has_begun:
                # the first update copies the weights
                is_first = self.n_averaged == 0
                for own, given in zip(averaged, current, strict=True):
                    torch.where(is_first, given, own, out=own)
            torch.where(skipped, before, whole, out=whole)
        self.n_averaged += ~skipped


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
