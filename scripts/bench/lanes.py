"""Simulates the number of block reads from shards in an epoch, by the order of its images.

    uv run python -m scripts.bench.lanes

Nothing is read; orders are made as in training. As threads do, each rank keeps the blocks that its
batches touched last: an eighth more than its share of the windows of all lanes, and what is
announced ahead.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.data.ahead import BLOCK_BYTES
from harness.feed.feeds import block_room
from harness.feed.order import Lanes, Order
from scripts.bench.tables import markdown, parser


def blocks_of(count: int, image_bytes: int, *, packed: bool) -> np.ndarray:
    """Returns the blocks of images numbered by class, packed in that order or permuted."""
    place = np.arange(count)
    if packed:
        place = np.random.default_rng(0).permutation(count)
    return (place * image_bytes // BLOCK_BYTES).astype(np.int32)


def epoch_reads(order: Order, blocks: np.ndarray, room: int) -> int:
    """Returns the number of block reads in an epoch by all ranks of ``order``."""
    found = 0
    for rank in range(order.world_size):
        held: dict[int, None] = {}
        for batch in replace(order, rank=rank).batches(0):
            for block in np.unique(blocks[batch]).tolist():
                found += block not in held
                held.pop(block, None)
                held[block] = None
            while len(held) > room:
                del held[next(iter(held))]
    return found


def volumes(given: argparse.Namespace) -> list[dict[str, object]]:
    """Returns a row per order and number of ranks: bytes and requests of an epoch."""
    blocks = blocks_of(given.images, given.image_bytes, packed=True)
    rows: list[dict[str, object]] = []
    for window_mb in given.window_mb:
        window = max(1, (window_mb << 20) // (given.lanes * BLOCK_BYTES))
        ours = Lanes(blocks, given.lanes, window)
        for name, lanes in (("uniform", None), ("lanes", ours)):
            for ranks in given.ranks:
                order = Order(
                    given.images, given.batch, drop_last=True, world_size=ranks, lanes=lanes
                )
                room = block_room(ours, ranks)
                count = epoch_reads(order, blocks, room)
                images = order.taken(0)
                share = count * BLOCK_BYTES / (images * given.image_bytes)
                rows.append(
                    {
                        "order": name,
                        "window": f"{window_mb} MiB, {window} blocks",
                        "ranks": ranks,
                        "room of a rank": f"{room} blocks",
                        "bytes read / used": f"{share:.3f}",
                        "requests a sample": f"{count / images:.4f}",
                    }
                )
    return rows


def batches(given: argparse.Namespace) -> list[dict[str, object]]:
    """Returns a row per order and packing: the classes in an epoch's batches."""
    labels = np.arange(given.images) * given.classes // given.images
    rows: list[dict[str, object]] = []
    for packed in (False, True):
        blocks = blocks_of(given.images, given.image_bytes, packed=packed)
        for window_mb in (None, *given.window_mb):
            lanes = None
            if window_mb is not None:
                window = max(1, (window_mb << 20) // (given.lanes * BLOCK_BYTES))
                lanes = Lanes(blocks, given.lanes, window)
            elif packed:
                # same as for the other packing: it ignores the blocks
                continue
            order = Order(given.images, given.narrow, drop_last=True, lanes=lanes)
            began_s = time.process_time()
            order.indices(0)
            made_s = time.process_time() - began_s
            each = [len(np.unique(labels[batch])) for batch in order.batches(0)]
            rows.append(
                {
                    "shards": "any" if lanes is None else "permuted" if packed else "by class",
                    "order": "uniform" if lanes is None else f"lanes, {window_mb} MiB",
                    "mean": f"{np.mean(each):.1f}",
                    "fewest": min(each),
                    "most": max(each),
                    "n, batches": len(each),
                    "order made in, s": f"{made_s:.2f}",
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    wanted = parser(__doc__ or "", json=False)
    for name, default, text in (
        ("images", 1_280_000, "images in the dataset"),
        ("classes", 1000, "classes, of equal size"),
        ("image-bytes", 110_000, "bytes per image"),
        ("lanes", 64, "lanes"),
        ("batch", 256, "batch size of a rank"),
        ("narrow", 1024, "size of the batches whose classes are counted"),
    ):
        wanted.add_argument(f"--{name}", type=int, default=default, help=text)
    for name, several, text in (
        ("ranks", [1, 8, 64], "numbers of ranks"),
        ("window-mb", [1024, 8192], "shuffle windows of all lanes together, MiB"),
    ):
        wanted.add_argument(f"--{name}", type=int, nargs="+", default=several, help=text)
    given = wanted.parse_args(arguments)
    print(
        f"{given.images} images of {given.image_bytes} bytes in {given.classes} classes, "
        f"blocks of {BLOCK_BYTES >> 20} MiB, {given.lanes} lanes; Python "
        f"{sys.version.split()[0]}, numpy {np.__version__}\n\n"
        f"An epoch read by blocks, batches of {given.batch} images on each rank:\n\n"
        f"{markdown(volumes(given))}\n\n"
        f"Classes in a batch of {given.narrow}:\n\n{markdown(batches(given))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
