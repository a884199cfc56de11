"""Compares the same images in a folder, in tar shards and in an object store.

    uv run --extra cloud python -m scripts.bench.stores --write

Batches are read as training reads them, by each rank in turn, and hashed. Then ``train.py`` trains
an epoch from each place; the weights, optimizer and random states of the last checkpoints are
hashed. Last, windows of reading alternate between the folder and the shards, both in the page cache
and with 5 ms added to each opening of a file. The exit code is 1 if hashes differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from harness.data import datasets
from harness.feed.feeds import Feeds
from harness.runtime import limits
from harness.runtime.distributed import World
from scripts.bench.loader.measures import composed, feeds, window
from scripts.bench.paired import Estimate
from scripts.bench.tables import (
    PAGES,
    ROOT,
    Sample,
    machine,
    machine_line,
    markdown,
    parser,
    tell,
    write,
)
from tests.support.buckets import Bucket, serving
from tests.support.run_state import digest

PAGE = PAGES / "stores.md"
BATCH, SIDE, CLASSES, COMMENT = 64, 64, 10, 60_000
LANES = ("loader.order=lanes", "loader.lanes=16", "loader.window_mb=256")
OPEN_S = 0.005

Rows = list[dict[str, object]]


def drawn(root: Path, place: tuple[str, int]) -> None:
    """Writes a small noisy image with a comment that makes it as large as a photograph's file."""
    part, i = place
    small = np.random.default_rng([part == "val", i]).integers(0, 256, (12, 12, 3), np.uint8)
    path = root / part / f"c{i % CLASSES}" / f"{i:05}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(small).resize((SIDE, SIDE)).save(path, quality=92, comment=bytes(COMMENT))


def hashed(ranks: int, *settings: str) -> str:
    """Returns a hash of the batches of an epoch of all ``ranks``; within a batch, of any order."""
    config = composed(*settings, f"loader.batch_size={BATCH // ranks}")
    splits = datasets.load(config.data, config.augment, config.seed)
    parts = []
    for rank in range(ranks):
        world = World(rank, ranks, rank, ranks, torch.device("cpu"))
        made = Feeds(splits, config, world)
        feed = made.train(made.settings(limits.measure()))
        parts.append(
            [
                [
                    sha256(image.numpy().tobytes() + bytes([label])).digest()
                    for image, label in zip(batch.images, batch.labels.tolist(), strict=True)
                ]
                for batch in feed
            ]
        )
        feed.close()
    found = sha256()
    for batches in zip(*parts, strict=True):
        found.update(b"".join(sorted(chain(*batches))))
    return found.hexdigest()[:12]


def trained(out: Path, ranks: int, *settings: str) -> str:
    """Returns a hash of the last checkpoint of a run of ``train.py``."""
    spawned = ("dist=spawn", f"dist.nprocs={ranks}") if ranks > 1 else ()
    done = subprocess.run(
        [
            sys.executable, "train.py", *settings, *spawned, f"loader.batch_size={BATCH // ranks}",
            "trainer.epochs=1", "trainer.num_threads=1", "device=cpu", "watch.tensorboard=false",
            "resume=auto", f"hydra.run.dir={out}",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return digest(out)[:12]


def same(
    places: Mapping[str, tuple[str, ...]], base: Path, images: int, bucket: Bucket
) -> Iterator[Rows]:
    """Yields the rows of the batches' table, then those of the weights' table."""
    rows: Rows = []
    for order, way, ranks in (("uniform", (), (1, 2)), ("lanes", LANES, (1, 2, 4))):
        for place, settings in places.items():
            if order == "lanes" and place == "folder":
                continue
            for backend in ("threads", "processes"):
                for count in ranks:
                    how = ("loader.num_workers=2", f"loader.backend={backend}")
                    found = hashed(count, *settings, *way, *how)
                    row = {"order": order, "place": place, "backend": backend, "ranks": count}
                    rows.append({**row, "batches": found})
                    tell(str(rows[-1]))
    yield rows
    rows = []
    half = images // BATCH // 2
    for order, way, ranks in (("uniform", (), (1, 2)), ("lanes", LANES, (1, 2, 4))):
        for count in ranks:
            named = [name for name in places if order == "uniform" or name != "folder"]
            for first, second in [*((name, name) for name in named), (named[0], named[-1])]:
                out = base / f"{order}-{first}-{second}-{count}"
                settings = (*places[second], *way)
                place = first
                if first != second:
                    trained(out, count, *places[first], *way, f"trainer.max_steps={half}")
                    place = f"{first} to step {half}, then {second}"
                before = len(bucket.asked)
                found = trained(out, count, *settings)
                row = {"order": order, "place": place, "ranks": count}
                asked = len(bucket.asked) - before
                rows.append({**row, "requests": asked or "", "weights": found})
                tell(str(rows[-1]))
    yield rows


@contextmanager
def slow_opening(root: str, delay_s: float) -> Iterator[None]:
    """Delays the opening of each file below ``root``."""
    opened = os.open

    def open_late(path: str | bytes | os.PathLike[str], *args: int, **named: int) -> int:
        if delay_s and os.fspath(path).startswith(root):  # type: ignore[arg-type]
            time.sleep(delay_s)
        return opened(path, *args, **named)

    with patch("os.open", open_late):
        yield


def speeds(places: Mapping[str, tuple[str, ...]], n: int, root: str) -> Iterator[dict[str, object]]:
    """Yields rows of windows that alternate between the places and a control."""
    names = ("folder", "folder again", "shards")
    for delay_s in (0.0, OPEN_S):
        rates: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(-1, n):
            for name in names if turn % 2 else names[::-1]:
                how = ("loader.backend=threads", "loader.num_workers=2", "data.cache=none")
                with (
                    slow_opening(root, delay_s),
                    feeds(*places[name.split()[0]], *how) as (made, settings),
                ):
                    feed = made.probe(settings)
                    found = window((len(batch.labels) for batch in feed), 1.5, 2)
                    feed.close()
                if turn >= 0:
                    used = found["wall_s"] if delay_s else found["cpu_s"]
                    rates[name].append(found["images"] / used)
            tell(f"turn {turn + 1} of {n}")
        for name, each in rates.items():
            yield {
                "opening takes": f"{1e3 * delay_s:g} ms more" if delay_s else "no longer",
                "place": name,
                "images/s": Sample.of(each),
                "/ folder": f"{Estimate.ratio(each, rates['folder']):.3f}",
                "n": len(each),
            }


def differing(rows: Rows, *by: str) -> list[str]:
    """Returns the groups with the same values of ``by`` that have several hashes."""
    found: dict[str, set[object]] = {}
    for row in rows:
        *_, value = row.values()
        found.setdefault(" ".join(str(row[name]) for name in by), set()).add(value)
    return [group for group, values in found.items() if len(values) > 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    options = parser(str(__doc__).splitlines()[0], PAGE, json=False)
    options.add_argument("--images", type=int, default=20_000, help="training images")
    options.add_argument("--n", type=int, default=20, help="windows of each place")
    a = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        os.environ["WELLFED_CACHE"] = f"{folder}/cache"
        images, shards = base / "images", base / "shards"
        made = [("train", i) for i in range(a.images)] + [("val", i) for i in range(400)]
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(drawn, images), made, chunksize=200))
        packing = ["-m", "wellfed", "pack", str(images), str(shards), "--shard-mb", "128"]
        subprocess.run([sys.executable, *packing], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        files = [path for path in shards.rglob("*") if path.is_file()]
        objects = {f"d/{path.relative_to(shards)}": path.read_bytes() for path in files}
        common = ("data.image_size=32", "model=small")
        places = {
            "folder": ("data=imagefolder", f"data.root={images}", *common),
            "shards": ("data=shards", f"data.root={shards}", *common),
            "S3": ("data=shards", "data.root=s3://b/d", *common),
        }
        with serving(Bucket(objects)) as bucket:
            os.environ.update(bucket.env)
            batches, weights = same(places, base, a.images, bucket)
        fast = [*speeds(places, a.n, str(images))]
    wrong = differing(batches, "order") + differing(weights, "order", "ranks")
    text = f"""# The same images in a folder, in shards and in an object store

`uv run --extra cloud python -m scripts.bench.stores`, {machine_line(machine())}.
{a.images:,} JPEGs of {SIDE}x{SIDE} in {len([name for name in objects if name.endswith(".tar")])}
shards; the object store is a server on loopback. Different hashes where one is required:
{", ".join(wrong) or "none"}.

## Batches

One epoch at 32 pixels, global batch {BATCH}. A hash includes the pixels and labels of each batch,
in any order within the batch. Each order must have one hash.

{markdown(batches)}

## Weights

One epoch of the small network. Each order and number of ranks must have one hash. The requests
include those of the 400 validation images, one each, and the list of objects.

{markdown(weights)}

## Speed

Threads, two workers, everything in the page cache, windows of 1.5 s in turn. The first three rows
are images per second of processor time, the others per second of wall time.

{markdown(fast)}
"""
    print(text)
    if a.write:
        write(PAGE, text)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
