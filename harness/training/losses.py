"""Builds the training loss specified by ``optim.loss``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ..config import ConfigError, OptimConfig
from ..runtime import user_code

Loss = Callable[[Tensor, Tensor], Tensor]


def make_loss(config: OptimConfig, weights: Tensor | None) -> Loss:
    """Returns a function that maps logits ``[N, classes]`` and labels to the loss, float ``[]``.

    Labels are int64 ``[N]``, or float ``[N, classes]`` if they were mixed.

    Args:
        config: the settings.
        weights: class weights, float ``[classes]``; None means 1 for all.

    Raises:
        ConfigError: the function does not exist, or a later call to it fails.
    """
    smoothing = config.label_smoothing
    threshold = config.bce_threshold

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        if weights is not None and labels.ndim == 1:
            # given weights and integer labels, torch divides the sum by the batch's weights, so an
            # image would count differently on other ranks; given class probabilities, it averages
            # over images
            labels = F.one_hot(labels, len(weights)).float()
        return F.cross_entropy(logits, labels, weights, label_smoothing=smoothing)

    def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the binary cross-entropy, averaged over images and classes as in timm."""
        classes = logits.shape[1]
        shares = F.one_hot(labels, classes).float() if labels.ndim == 1 else labels
        shares = shares * (1 - smoothing) + smoothing / classes
        if threshold is not None:
            shares = (shares > threshold).float()
        return F.binary_cross_entropy_with_logits(logits.float(), shares, weights)

    if user_code.is_own(config.loss):
        function = user_code.found("optim.loss", config.loss)
        # such as an nn.Module
        if isinstance(function, type):
            function = user_code.call("optim.loss", config.loss)
        return partial(_own, function, config.loss)
    return binary_cross_entropy if config.loss == "bce" else cross_entropy


def _own(function: Loss, name: str, logits: Tensor, labels: Tensor) -> Tensor:
    with user_code.explained(f"optim.loss={name}: failed with", called=function):
        loss = function(logits, labels)
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        kind = type(loss).__name__
        if isinstance(loss, Tensor):
            kind = f"{loss.dtype} {list(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ConfigError(
            f"optim.loss={name}: returned {kind}; it must return one number with a gradient (a "
            "tensor []), such as torch.nn.functional.cross_entropy(logits, labels)"
        )
    return loss
