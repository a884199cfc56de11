"""Measures what normalising a batch costs on a CPU, beside torch's expression.

Both ways are given the same uint8 batches, laid out as the feed lays them out. Each result is
dropped before the next one is made, as a training loop drops it. "new" is ``DataPrefetcher``'s way.
Wall time and the process's processor time are those of one batch; the ratio is of pairs of wall
times.

    uv run scripts/bench_normalise.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.feed.prefetcher import Normalise
from scripts.measured import Sample, machine, machine_line, markdown, parser, write
from scripts.paired import Estimate

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Way = Callable[[Tensor], Tensor]


def expression(dtype: torch.dtype, channels_last: bool) -> Way:
    """Torch's expression for the same values, which reads and writes whole batches."""
    mean, scale = (
        torch.tensor(values).view(1, -1, 1, 1)
        for values in ([255.0 * m for m in MEAN], [1 / (255.0 * s) for s in STD])
    )
    laid_out = torch.channels_last if channels_last else torch.contiguous_format
    return lambda images: (
        torch.sub(images.contiguous(memory_format=laid_out), mean).mul_(scale).to(dtype)
    )


def compare(
    size: int, batch_size: int, n: int, dtype: torch.dtype, channels_last: bool
) -> dict[str, Any]:
    """A row of the table: ``n`` batches of images of ``size`` pixels a side, each way."""
    device = torch.device("cpu")
    ways: dict[str, Way] = {
        "old": expression(dtype, channels_last),
        "new": Normalise(device, MEAN, STD, dtype, channels_last),
    }
    images = torch.randint(256, (batch_size, size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    # each way gives the same values, and is warm then
    expected = ways["old"](images)
    for name, way in ways.items():
        assert torch.equal(way(images), expected), f"{name} gives other values"
    wall_ms: dict[str, list[float]] = {name: [] for name in ways}
    processor_ms: dict[str, list[float]] = {name: [] for name in ways}
    # there and back, so that drift falls out
    for turn in range(n):
        for name in ways if turn % 2 == 0 else reversed(ways):
            began_s = time.perf_counter(), time.process_time()
            ways[name](images)
            wall_ms[name].append(1e3 * (time.perf_counter() - began_s[0]))
            processor_ms[name].append(1e3 * (time.process_time() - began_s[1]))
    row: dict[str, Any] = {"pixels": size, "batch": batch_size}
    row |= {f"{name}, ms": Sample.of(wall_ms[name]) for name in ways}
    row |= {f"{name}, processor ms": f"{Sample.of(processor_ms[name]).median:.3g}" for name in ways}
    row["new / old"] = f"{Estimate.ratio(wall_ms['new'], wall_ms['old']):.3f}"
    return row


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("Measure normalising on a CPU, the harness's way beside torch's expression.")
    add = options.add_argument
    sides = [32, 64, 128, 224]
    add("--sizes", type=int, nargs="+", default=sides, help="sides of an image in pixels")
    add("--batch-size", type=int, default=64, help="images in a batch")
    add("-n", type=int, default=40, help="batches of each way")
    add("--dtype", choices=DTYPES, default="float32", help="the network's type")
    add("--nchw", action="store_true", help="lay results out as NCHW, not channels last")
    add("--threads", type=int, help="torch's threads; by default as torch chooses")
    a = options.parse_args(argv)
    if a.threads:
        torch.set_num_threads(a.threads)
    found = machine()
    print(machine_line(found))
    print(
        f"{a.dtype}, {'NCHW' if a.nchw else 'channels last'}; n={a.n} in turns; median "
        "(quartiles), ratio of pairs [95 %]\n"
    )
    rows = [compare(size, a.batch_size, a.n, DTYPES[a.dtype], not a.nchw) for size in a.sizes]
    print(markdown(rows))
    if a.json:
        arguments = {**vars(a), "json": str(a.json)}
        write(a.json, {"machine": found, "n": a.n, "arguments": arguments, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
