"""Computes a network's accuracy on the batches from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..runtime import accelerator, signals
from ..runtime.distributed import World
from ..runtime.errors import Interrupted


class Evaluation(NamedTuple):
    """Results for ``images`` images: accuracies, 0..1, and the mean cross-entropy."""

    images: int
    top1: float
    top5: float
    loss: float


@torch.no_grad()
def evaluate(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    world: World,
    autocast: Callable[[], AbstractContextManager[Any]],
    kept: list[tuple[Tensor, ...]] | None = None,
) -> Evaluation:
    """Returns the network's accuracy on the ``batches`` from all ranks.

    The ranks' samples are disjoint and only sums are exchanged, so nothing is padded or counted
    twice. The sums stay on the device until the end, as do the values ``kept`` from each batch:
    labels and predictions, int64 ``[N]``, and the predictions' probabilities, float32 ``[N]``.

    Raises:
        Interrupted: a rank received a signal; raised on every rank once all have stopped.
    """
    network.eval()
    # counts are exact up to 2**53 in float64
    dtype = torch.float64 if accelerator.get(world.device).has_float64 else torch.float32
    images_seen = 0
    # images, top-1, top-5, loss
    sums = torch.zeros(4, device=world.device, dtype=dtype)
    for images, labels in batches:
        with autocast():
            logits = network(images)
        scores = logits.float()
        # the sum does not depend on the batch size
        loss = F.cross_entropy(scores, labels, reduction="none").sum(dtype=dtype)
        # top-1 and top-5 in one call
        answers = logits.topk(min(5, logits.shape[1]), dim=1).indices
        best = answers == labels.unsqueeze(1)
        images_seen += len(labels)
        sums[1:] += torch.stack((best[:, 0].sum(), best.sum(), loss))
        if kept is not None:
            kept.append((labels.clone(), answers[:, 0], scores.softmax(1).amax(1)))
        if signals.received():
            break
    if signum := int(world.largest(signals.received())[0]):
        raise Interrupted(signum)
    sums[0] = images_seen
    # the host waits for the device
    seen, *totals = world.total(sums).tolist()
    return Evaluation(int(seen), *(total / seen for total in totals))
