"""Splits images into stratified parts that keep groups together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..runtime.seeding import order_rng


class Fold(NamedTuple):
    """One fold of a dataset for cross-validation."""

    fold: int
    folds: int


# a fraction (0..1) or a fold to hold out for validation; None: neither
HeldOut = float | Fold | None


def dealt(labels: np.ndarray, groups: np.ndarray, shares: np.ndarray, seed: int) -> np.ndarray:
    """Returns the part that each image belongs to, int64 ``[N]``, drawn with ``seed``.

    Each part gets about its share of every class, and at least one image if there are enough.
    Groups of several images are assigned first, from large to small, each to the part whose squared
    difference from its shares grows least. Single images then fill up each class.

    Args:
        labels: int64 ``[N]``.
        groups: int64 ``[N]``, from 0; images with the same number stay together.
        shares: float ``[parts]``, with sum 1.
        seed: breaks ties.
    """
    sizes, totals = np.bincount(groups), np.bincount(labels)
    # target and actual number of images per part and class
    wanted = np.maximum(np.outer(shares, totals), 1)
    wanted *= totals / wanted.sum(0)
    counts = np.zeros_like(wanted)
    part_of = np.zeros(len(sizes), np.int64)
    pairs, images = np.unique(groups * len(totals) + labels, return_counts=True)
    group_of, label_of = np.divmod(pairs, len(totals))
    begins = np.searchsorted(group_of, np.arange(len(sizes) + 1))
    order = order_rng(seed, 0).permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    several = np.count_nonzero(sizes > 1)
    for group in order[:several]:
        own = slice(begins[group], begins[group + 1])
        of, more = label_of[own], images[own]
        cost = ((2 * counts[:, of] + more) * more / wanted[:, of] / totals[of]).sum(1)
        # rounded, because equal costs differ in the last digits
        part_of[group] = part = np.lexsort((counts.sum(1) / shares, cost.round(9)))[0]
        counts[part, of] += more
    singles = order[several:]
    labels_of = label_of[begins[singles]]
    ends = np.bincount(labels_of, minlength=len(totals)).cumsum()
    by_label = np.split(singles[np.argsort(labels_of, kind="stable")], ends[:-1])
    for label, members in enumerate(by_label):
        filled = (counts[:, label, None] + np.arange(len(members)) + 0.5) / wanted[:, label, None]
        fuller = np.broadcast_to((counts.sum(1) / shares)[:, None], filled.shape)
        first = np.lexsort((fuller.ravel(), filled.ravel().round(9)))[: len(members)]
        part_of[members] = parts = first // max(1, len(members))
        counts[:, label] += np.bincount(parts, minlength=len(shares))
    found: np.ndarray = part_of[groups]
    return found
