"""Says which samples a run was trained on, and whether they are those of its epochs."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import chain
from pathlib import Path

from harness.feed.order import Order

# by step: the epoch, and by rank the samples
Updates = dict[int, tuple[int, dict[int, list[int]]]]


def updates(notes: Path) -> Updates:
    """What ``tests/hostile/chaos/noted.py`` noted.

    Raises:
        ValueError: an update was made again, with other samples.
    """
    found: Updates = {}
    for line in map(json.loads, notes.read_text().splitlines()):
        epoch, ranks = found.setdefault(line["step"], (line["epoch"], {}))
        if (
            epoch != line["epoch"]
            or ranks.setdefault(line["rank"], line["indices"]) != line["indices"]
        ):
            raise ValueError(f"step {line['step']} was made again with other samples")
    return found


def batches(found: Updates) -> dict[int, tuple[int, list[int]]]:
    """By step the epoch and the samples of all ranks, in ascending order."""
    return {
        step: (epoch, sorted(chain(*ranks.values())))
        for step, (epoch, ranks) in sorted(found.items())
    }


def wrong_samples(found: Updates, length: int, batch: int) -> list[str]:
    """Returns what is wrong with the epochs' samples.

    Each epoch has the first samples of its order once, all but less than a global ``batch``.
    """
    wrong = []
    if sorted(found) != list(range(1, len(found) + 1)):
        wrong.append("a step is missing")
    epochs = defaultdict[int, list[int]](list)
    for epoch, indices in batches(found).values():
        epochs[epoch] += indices
    for epoch, indices in epochs.items():
        expected = Order(length, 1).indices(epoch)[: len(indices)].tolist()
        if sorted(indices) != sorted(expected) or len(indices) <= length - batch:
            wrong.append(
                f"epoch {epoch + 1}: {len(indices)} samples, {len(set(indices))} different, of "
                f"{length}"
            )
    return wrong
