"""Compares training on a folder of JPEG files with training on copies made by ``wellfed shrink``.

    uv run python -m scripts.bench.shrunk --windows 20 --seeds 5

The files are generated, 500 x 375 pixels, quality 90. Loading of 224-pixel crops by two threads is
timed in alternating windows, after a first epoch; the top-1 is that of a small network.
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
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from .loader import measures
from .tables import ROOT, Sample

SIDES = (400, 320, 256)


def folders(base: Path, images: int) -> dict[str, Path]:
    """Generates ``images`` training files below ``base`` and shrinks them; returns the folders."""
    made = base / "500"
    generated = [
        *(f"data.root={made}", "data.generate.width=500", "data.generate.height=375"),
        *(f"data.generate.train_images={images}", "data.generate.val_images=1000"),
    ]
    train(base / "run", "data=shapes", *generated, "trainer.max_steps=1")
    found = {"500": made, "500 again": made}
    for side in SIDES:
        found[f"{side}"] = base / f"{side}"
        command = ["-m", "wellfed", "shrink", f"{made}", f"{base / str(side)}"]
        subprocess.run(
            [sys.executable, *command, f"--max-side={side}"],
            cwd=ROOT, check=True, capture_output=True, timeout=600,
        )  # fmt: skip
    return found


def train(place: Path, *settings: str) -> float:
    """Trains a small network at 64 pixels in ``place``; returns its top-1."""
    command = [
        *(sys.executable, "train.py", *settings, "model=small", "data.image_size=64"),
        *("trainer.num_threads=1", f"hydra.run.dir={place}"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    found: float = json.loads((place / "report.json").read_text())["top1"]
    return found


def loaded(places: dict[str, Path], images: int, windows: int, seconds: float) -> None:
    """Prints CPU time per image, and images/s, of alternating windows."""
    times, rates = defaultdict(list), defaultdict(list)
    with ExitStack() as stack:
        feeds = {}
        for name, place in places.items():
            settings = [*measures.of_files(f"{place}"), *measures.of_form("threads", 2)]
            _, feed = stack.enter_context(measures.probed(measures.feeds(*settings)))
            feeds[name] = measures.counts(feed)
            count = 0
            while count < 2 * images:
                count += next(feeds[name])
        for number in range(windows):
            for name in random.Random(number).sample([*feeds], len(feeds)):
                began, used, count = time.perf_counter(), time.process_time(), 0
                while time.perf_counter() - began < seconds:
                    count += next(feeds[name])
                rates[name].append(count / (time.perf_counter() - began))
                idle_s = 1.0
                while idle_s > 0.01:
                    # until the threads have filled their queue
                    before = time.process_time()
                    time.sleep(0.1)
                    idle_s = time.process_time() - before
                times[name].append(1000 * (time.process_time() - used) / count)
    print("| longer side | kB a file | ms an image | of 500 | cores for 3,000/s | images/s | n |")
    print("|---|---|---|---|---|---|---|")
    for name, place in places.items():
        files = [file.stat().st_size for file in place.rglob("*.jpg")]
        each, rate = Sample.of(times[name]), Sample.of(rates[name])
        ratio = Sample.of([a / b for a, b in zip(times[name], times["500"], strict=True)])
        print(
            f"| {name} | {np.mean(files) / 1000:.1f} | {each.median:.3f} ({each.low:.3f} to "
            f"{each.high:.3f}) | {ratio.median:.3f} | {3 * each.median:.2f} | {rate.median:.0f} "
            f"({rate.low:.0f} to {rate.high:.0f}) | {each.n} |"
        )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=3000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        places = folders(base, asked.images)
        loaded(places, asked.images, asked.windows, asked.seconds)
        print("\n| longer side | top-1 of each seed | mean |\n|---|---|---|")
        top1 = defaultdict(list)
        for seed in range(asked.seeds):
            for name in ("500", *map(str, SIDES)):
                settings = ["data=imagefolder", f"data.root={places[name]}", f"seed={seed}"]
                settings.append("trainer.epochs=3")
                top1[name].append(train(base / f"{name} {seed}", *settings))
        for name, values in top1.items():
            print(f"| {name} | {', '.join(f'{v:.3f}' for v in values)} | {np.mean(values):.3f} |")


if __name__ == "__main__":
    main()
