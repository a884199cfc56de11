"""Trains at several image sizes with a step that outruns the loader at the smallest one.

    uv run python -m scripts.bench.sizes --runs 5

The step sleeps in proportion to the pixels, in place of a GPU. The table has rows for each kind
of run, from ``report.json``; one more run is stopped within the second size and resumed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.support.run_state import digest

from .tables import ROOT, Sample

SIZES = (128, 160, 192)
KINDS: Mapping[str, tuple[str, ...]] = {
    "one process": ("loader.backend=processes", "loader.num_workers=1"),
    "defaults": (),
    "tuned": ("loader.autotune=true", "tuner.fresh=true"),
}


class Slept(nn.Module):
    """A linear layer on the mean color; its forward pass sleeps for each pixel."""

    def __init__(self, classes: int, image_s: float) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)
        self._pixel_s = image_s / SIZES[-1] ** 2

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``[B, classes]`` of ``images``, float ``[B, 3, H, W]``."""
        if self.training:
            time.sleep(self._pixel_s * images.numel() / 3)
        logits: Tensor = self.head(images.mean((2, 3)))
        return logits


def build(num_classes: int, image_s: float) -> nn.Module:
    """Returns a network whose step takes ``image_s`` seconds per image of the largest size."""
    return Slept(num_classes, image_s)


def run(place: Path, root: Path, *settings: str) -> dict[str, Any]:
    """Trains in ``place`` on the files below ``root``; returns the report."""
    command = [
        *(sys.executable, "train.py", "data=shapes", f"data.root={root}", "augment=imagenet"),
        *("data.generate.width=500", "data.generate.height=375", "data.generate.val_images=64"),
        *("data.generate.train_images=2000", "model.name=scripts.bench.sizes:build"),
        *("data.image_size=192", f"data.train_size={[*SIZES]}", "data.train_size_epochs=[0,2,4]"),
        *("trainer.epochs=6", "trainer.num_threads=1", "trainer.eval_every_epochs=6"),
        *(f"hydra.run.dir={place}", *settings),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    found: dict[str, Any] = json.loads((place / "report.json").read_text())
    return found


def main() -> None:
    """Prints a row per kind of run and size, and whether a resumed run has equal weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--image-s", type=float, default=1.25e-3)
    asked = parser.parse_args()
    network = f"model.args={{image_s:{asked.image_s}}}"
    rates: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    loaders: dict[tuple[str, int], set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as scratch:
        base, root = Path(scratch), Path(scratch, "data")
        run(base / "first", root, network, "trainer.max_steps=1")
        for number in range(asked.runs):
            for kind in random.Random(number).sample([*KINDS], len(KINDS)):
                report = run(base / f"{kind} {number}", root, network, *KINDS[kind])
                for found in report["sizes"]:
                    for name in ("images_per_s", "stall_fraction"):
                        rates[kind, found["size"], name].append(found[name])
                    loaders[kind, found["size"]].add(str(found["loader"]))
        print("| size | step allows, images/s | loader | images/s | waiting for data, % | n |")
        print("|---|---|---|---|---|---|")
        for size in SIZES:
            allowed = (SIZES[-1] / size) ** 2 / asked.image_s
            for kind in KINDS:
                speed = Sample.of(rates[kind, size, "images_per_s"])
                stall = Sample.of([100 * share for share in rates[kind, size, "stall_fraction"]])
                print(
                    f"| {size} | {allowed:.0f} | {kind}: {'; '.join(sorted(loaders[kind, size]))} "
                    f"| {speed.median:.0f} ({speed.low:.0f} to {speed.high:.0f}) "
                    f"| {stall.median:.1f} ({stall.low:.1f} to {stall.high:.1f}) | {speed.n} |"
                )
        stopped = base / "stopped"
        run(stopped, root, network, "trainer.max_steps=75")
        run(stopped, root, network, "resume=auto", "trainer.max_steps=null")
        found = [digest(place) for place in (stopped, base / "defaults 0")]
        print("resumed in the second size, bitwise identical:", found[0] == found[1])


if __name__ == "__main__":
    main()
