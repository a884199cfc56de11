"""Every answer of an evaluation, of all ranks: which classes are confused, the surest mistakes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.runtime.distributed import World


@dataclass(frozen=True, slots=True)
class Answers:
    """What a network answered, one entry for each image.

    Attributes:
        indices: places in the data set.
        labels: the true classes.
        given: the classes that the network gave.
        probabilities: of these classes, 0..1.
        classes: how many there are.
    """

    indices: np.ndarray
    labels: np.ndarray
    given: np.ndarray
    probabilities: np.ndarray
    classes: int

    def confused(self) -> np.ndarray:
        """Returns the mistakes by kind, int64 ``[K, 3]``: true class, given class, images.

        The most frequent come first, of equally frequent ones the first by class.
        """
        wrong = self.labels != self.given
        kinds = self.classes * self.labels[wrong] + self.given[wrong]
        found, counts = np.unique(kinds, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return np.stack((*np.divmod(found, self.classes), counts), axis=1)[order]

    def surest(self, most: int) -> np.ndarray:
        """Returns which mistakes have the highest probabilities; of equal ones the first images."""
        wrong = np.flatnonzero(self.labels != self.given)
        order = np.lexsort((self.indices[wrong], -self.probabilities[wrong]))
        return wrong[order[:most]]


class Tally:
    """Keeps one rank's answers on the device, 12 bytes an image; nothing waits for it meanwhile."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, labels: Tensor, given: Tensor, scores: Tensor) -> None:
        """Keeps the answers to a batch.

        Args:
            labels: the true classes, int64 ``[N]``.
            given: the classes of the highest scores, int64 ``[N]``.
            scores: logits, float32 ``[N, classes]``.
        """
        cells = torch.add(given, labels, alpha=self._classes)
        self._kept.append((cells, scores.softmax(1).amax(1)))

    def answers(self, world: World, batches: Iterable[np.ndarray]) -> Answers:
        """Returns the answers of all ranks; every rank calls this.

        ``batches`` are the places in the data set of the samples that this rank has added.
        """
        own: list[np.ndarray] = []
        if self._kept:
            # the host waits for the device
            kept = (torch.cat(each).cpu().numpy() for each in zip(*self._kept, strict=True))
            own = [np.concatenate([*batches]), *kept]
        # a rank may have had no image
        ranks = filter(None, world.gathered(own))
        indices, cells, probabilities = map(np.concatenate, zip(*ranks, strict=True))
        return Answers(indices, *np.divmod(cells, self._classes), probabilities, self._classes)
