"""Compares wellfed's time from command to exit with a plain training script's.

    uv run python -m scripts.bench.exits --pairs 10 --model small

Both train the same network on 1,500 generated JPEGs of 480 x 360 pixels (quality 90) at 96 pixels,
with two workers or threads, for three epochs, each of which ends with an evaluation and a
checkpoint. Runs alternate. The plain script and the untuned run have a second row as a control.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from harness.data.shapes import draw

from .paired import Estimate
from .tables import ROOT, Sample, machine, machine_line, markdown, parser

SIDE, BATCH, EPOCHS, CLASSES = 96, 64, 3, 8
PLAIN, UNTUNED, TUNED = "plain script", "untuned", "tuned"
SIDES = (PLAIN, f"{PLAIN} again", UNTUNED, f"{UNTUNED} again", TUNED)


def drawn(root: Path, place: tuple[str, int]) -> None:
    """Writes one noisy image."""
    part, i = place
    rng = np.random.default_rng([part == "val", i])
    path = root / part / f"c{i % CLASSES}" / f"{i:04}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = draw(i % CLASSES, CLASSES, 480, 360, rng) + rng.normal(0, 6, (360, 480, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def run(side: str, model: str, root: Path, place: Path) -> tuple[float, float]:
    """Returns the seconds from command to exit, and those of tuning; caches are cold."""
    if side.startswith(PLAIN):
        place.mkdir(parents=True)
        sizes = map(str, (SIDE, BATCH, EPOCHS))
        command = ["-m", "scripts.bench.plain", str(root), str(place), *sizes, model]
    else:
        command = [
            *("train.py", "data=imagefolder", f"data.root={root}", f"data.image_size={SIDE}"),
            *(f"loader.batch_size={BATCH}", f"trainer.epochs={EPOCHS}", f"model={model}"),
            *(f"loader.autotune={str(side == TUNED).lower()}", f"hydra.run.dir={place}"),
        ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["XDG_CACHE_HOME"] = f"{place}-cache"
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, env=env, check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    took_s = time.perf_counter() - began
    if side != TUNED:
        return took_s, 0.0
    report = json.loads((place / "report.json").read_text())
    return took_s, float(report["tuning"]["seconds"])


def main() -> None:
    options = parser("Compare the time from command to exit with a plain script's.")
    options.add_argument("--pairs", type=int, default=10, help="runs of each side")
    options.add_argument("--model", default="small", help="small, or a torchvision network")
    options.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE")
    a = options.parse_args()
    took: dict[str, list[float]] = defaultdict(list)
    tuning = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        places = [("train", i) for i in range(1500)] + [("val", i) for i in range(160)]
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(drawn, base / "images"), places, chunksize=20))
        for turn in range(-1, a.pairs):
            for side in a.sides if turn % 2 else a.sides[::-1]:
                name = f"{side.replace(' ', '-')}{turn}"
                s, tuned_s = run(side, a.model, base / "images", base / name)
                # the first turn fills the caches of the system
                if turn >= 0:
                    took[side].append(s)
                    tuning += [tuned_s] * (side == TUNED)
            print(f"turn {turn + 1} of {a.pairs}", file=sys.stderr, flush=True)
    print(machine_line(machine()))
    beside = {name: PLAIN if name.startswith(PLAIN) else UNTUNED for name in SIDES}
    rows = [
        {
            a.model: name,
            "s": Sample.of(took[name]),
            "/ plain script": f"{Estimate.ratio(took[name], took[PLAIN]):.3f}",
            f"s more than {PLAIN} or {UNTUNED}": f"{difference:+.2f}",
            "n": len(took[name]),
        }
        for name in a.sides
        for difference in [Estimate.of(np.subtract(took[name], took[beside[name]]).tolist())]
    ]
    print(markdown(rows))
    if tuning:
        print("seconds of tuning:", ", ".join(f"{s:.2f}" for s in tuning))


if __name__ == "__main__":
    main()
