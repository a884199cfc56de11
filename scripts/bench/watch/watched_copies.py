"""Watches a CUDA step written in seven ways, whose time fractions must agree.

Forward and backward are waits on the GPU. Exits with 1 if compute, host or stall of two ways are
more than three points apart. Copies from pinned and from pageable memory must be equally fast,
as on an emulated CUDA runtime: on a real bus they differ.

    uv run python -m scripts.bench.watch.watched_copies
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WHERE = ("before", "loss", "dictionary", "collate", "images in collate", "class", "after Python")
STEPS = 40
BATCH = 64
FORWARD_S = 0.02
BACKWARD_S = 0.04
POINTS = 3.0
_MIB = 1 << 20


class Work(torch.autograd.Function):
    """Keeps the GPU busy, forward and backward."""

    @staticmethod
    def forward(context: Any, images: Tensor, weight: Tensor) -> Tensor:
        """Waits as a forward pass."""
        wait(FORWARD_S)
        return weight * 1.0

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        """Waits as a backward pass."""
        wait(BACKWARD_S)
        return None, grads[0]


class Batch:
    """A user-defined batch."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def to(self, *where: Any, **how: Any) -> Batch:
        """Returns the batch on another device."""
        return Batch(self.images.to(*where, **how), self.labels.to(*where, **how))


def wait(seconds: float) -> None:
    torch.cuda._sleep(int(seconds * 1.8e9))


def train(where: str, non_blocking: bool) -> None:
    """Trains like the watched script."""

    def made(size: int) -> Tensor:
        tensor = torch.zeros(BATCH, size // BATCH, dtype=torch.uint8)
        return tensor.pin_memory() if non_blocking else tensor

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to("cuda", non_blocking=non_blocking)

    def collate(_: Any) -> Any:
        if where == "collate":
            return moved(images), moved(labels)
        if where == "images in collate":
            return moved(images), labels
        if where == "dictionary":
            return {"images": images, "labels": labels}
        return Batch(images, labels) if where == "class" else (images, labels)

    # on a bus of 1 GB a second, 8 ms
    images = made(6 * _MIB)
    labels = made(2 * _MIB)
    weight = nn.Parameter(torch.zeros(1, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    take: dict[str, Callable[[Any], Any]] = {
        "before": lambda batch: (moved(batch[0]), moved(batch[1])),
        "dictionary": lambda batch: {name: moved(part) for name, part in batch.items()}.values(),
        "class": lambda batch: vars(batch.to("cuda", non_blocking=non_blocking)).values(),
        "loss": lambda batch: (moved(batch[0]), batch[1]),
        # a tensor that is not from the loader
        "after Python": lambda batch: (moved(batch[0][:]), batch[1]),
    }
    numbers: Any = range(BATCH * STEPS)
    for batch in torch.utils.data.DataLoader(numbers, BATCH, collate_fn=collate):
        x, y = take.get(where, lambda batch: batch)(batch)
        optimizer.zero_grad()
        out = Work.apply(x, weight)
        # no copy if already moved
        loss = (out + 0 * moved(y)[0, 0]).sum()
        loss.backward()
        optimizer.step()


def watched(where: str, how: str) -> dict[str, float]:
    """Returns the fractions that ``wellfed watch`` reports, in percent."""
    with tempfile.TemporaryDirectory() as out:
        words = ["-m", "wellfed.hooks", "--out", out, "--no-tensorboard", __file__]
        subprocess.run([sys.executable, *words, where, how], check=True, capture_output=True)
        report = json.loads((Path(out) / "report.json").read_text())
    shares = {name: 100 * share for name, share in report["shares"].items()}
    found = {name: shares.get(name, 0.0) for name in ("compute", "host")}
    return {**found, "stall": 100 * report["stall_fraction"]}


def main() -> int:
    """Prints a table; returns the exit code."""
    rows = []
    for where, how in itertools.product(WHERE, ("blocking", "non_blocking")):
        rows.append(watched(where, how))
        told = "  ".join(f"{name} {points:5.1f}" for name, points in rows[-1].items())
        print(f"{where:18} {how:13} {told}", flush=True)
    apart = {name: max(r[name] for r in rows) - min(r[name] for r in rows) for name in rows[0]}
    print("apart", "  ".join(f"{name} {points:.1f}" for name, points in apart.items()))
    return int(max(apart.values()) > POINTS)


if __name__ == "__main__":
    if sys.argv[1:]:
        train(sys.argv[1], sys.argv[2] == "non_blocking")
    else:
        sys.exit(main())
