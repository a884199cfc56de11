"""Adds activation checkpointing to networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..config import ConfigError


def checkpoint_blocks(network: nn.Module) -> None:
    """Makes ``network`` recompute each block's activations in the backward pass.

    A block is an item in a ``Sequential`` or ``ModuleList`` that contains modules, such as a
    residual block or an encoder layer. State keys and results are unchanged: recomputation draws
    the same random numbers and does not update running statistics.

    Raises:
        ConfigError: the network has no such blocks.
    """
    blocks = [*_blocks(network)]
    if not blocks:
        raise ConfigError(
            "trainer.checkpoint_blocks=true: the network has no block list; set it to false"
        )
    for block in blocks:
        # a copy of the network gets its own
        how = partial(lambda own: (nullcontext(), _recomputing(own)), block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=how)


def _blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost list items that contain modules and are not lists themselves."""
    lists = nn.Sequential | nn.ModuleList
    for module in network.children():
        is_item = isinstance(network, lists) and not isinstance(module, lists)
        if is_item and [*module.children()]:
            yield module
        else:
            yield from _blocks(module)


@contextmanager
def _recomputing(block: nn.Module) -> Iterator[None]:
    """Prevents batch norm layers from updating their running statistics."""
    norms = [each for each in block.modules() if isinstance(each, _BatchNorm)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = count
