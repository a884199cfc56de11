"""What ``pin_memory`` and ``non_blocking`` do to a copy from host to GPU, as three tables.

The well-known question is why a loop with pinned memory and ``non_blocking=True`` times the same as
one without, and the well-known answer that the benchmark gave it nothing to gain
(https://discuss.pytorch.org/t/should-we-set-non-blocking-to-true/38234):

a. the plain benchmark: one tensor at a time, copied alone, so that only the rate of the copy itself
    can differ;
b. the corrected one: big batches, ``DataLoader`` workers, pinned by the loader or not, and work on
    the GPU to overlap with;
c. what the answer leaves open: whether GPU work that does not need ``x`` runs beside the copy of
   ``x``. Work on one stream runs in order, whether it depends on ``x`` or not; so the copy needs a
   stream of its own, and a pinned source.

    uv run scripts/bench_pinned_copy.py
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator, limits
from harness.runtime.accelerator import Accelerator
from scripts.measured import Sample, machine, machine_line, markdown, parser, write

MIB = 2**20
# of the square matrices that stand for the work: large enough to fill a GPU
WORK_SIDE = 4096

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """One call in milliseconds.

    Until it came back to the host, until the device was done, and between events around it.
    """

    host_ms: float
    total_ms: float
    device_ms: float


def timed(own: Accelerator, call: Call) -> Timing:
    """``call`` on an idle device; what it returns lives until the device is done."""
    start = own.event(timed=True)
    end = own.event(timed=True)
    own.synchronize()
    begin = time.perf_counter()
    start.record(own.stream())
    kept = call()
    end.record(own.stream())
    returned = time.perf_counter()
    own.synchronize()
    done = time.perf_counter()
    del kept
    return Timing(1e3 * (returned - begin), 1e3 * (done - begin), start.elapsed_time(end))


def in_turns(
    calls: Mapping[str, Call], n: int, measure: Callable[[Call], Any]
) -> dict[str, list[Any]]:
    """Returns ``n`` measurements of each call, in rounds that begin with another each.

    Two rounds before them warm up.
    """
    names = list(calls)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(-2, n):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = measure(calls[name])
            if turn >= 0:
                found[name].append(value)
    return found


class Work:
    """GPU work of about ``ms`` milliseconds that needs no batch: bf16 matrix products."""

    def __init__(self, device: torch.device, ms: float) -> None:
        self._a = torch.randn(WORK_SIDE, WORK_SIDE, device=device, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._a)
        self._count = 10
        unit_ms = min(timed(accelerator.get(device), self).total_ms for _ in range(5)) / self._count
        self._count = max(1, math.ceil(ms / unit_ms))

    def __call__(self) -> None:
        """Launch it on the current stream."""
        for _ in range(self._count):
            torch.mm(self._a, self._a, out=self._out)


def plain_copies(device: torch.device, sizes_mib: Sequence[int], n: int) -> list[dict[str, Any]]:
    """Part a: one tensor, copied alone, for each size and way."""
    own = accelerator.get(device)
    rows = []
    for mib in sizes_mib:
        pageable = torch.ones(mib * MIB, dtype=torch.uint8)
        pinned = own.pin(pageable)
        ways: dict[str, Call] = {
            "pageable, x.to(device)": partial(pageable.to, device),
            "pageable, non_blocking": partial(own.copy, pageable),
            "pinned before, x.to(device)": partial(pinned.to, device),
            "pinned before, non_blocking": partial(own.copy, pinned),
            "x.pin_memory(), non_blocking": partial(_pin_and_copy, own, pageable),
        }
        for way, timings in in_turns(ways, n, partial(timed, own)).items():
            total = Sample.of([t.total_ms for t in timings])
            rows.append(
                {
                    "MiB": mib,
                    "way": way,
                    "done after ms": total,
                    "host blocked ms": Sample.of([t.host_ms for t in timings]),
                    "by events ms": Sample.of([t.device_ms for t in timings]),
                    "GB/s": f"{mib * MIB / total.median / 1e6:.1f}",
                }
            )
    return rows


def _pin_and_copy(own: Accelerator, x: Tensor) -> Tensor:
    return own.copy(own.pin(x))


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Whole uint8 batches ``[batch_size, 3, 224, 224]`` with labels, at next to no cost."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.count = count
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images = torch.full((self.batch_size, 3, 224, 224), index % 256, dtype=torch.uint8)
        return images, torch.zeros(self.batch_size, dtype=torch.int64)


def loop_copies(
    device: torch.device, batch_size: int, workers: int, work_ms: float, n: int
) -> list[dict[str, Any]]:
    """Part b: milliseconds a batch of a loop over a ``DataLoader`` with GPU work.

    Raises:
        MemoryError: the workers' batches do not fit into shared memory.
    """
    shm = limits.measure().shm_bytes
    needed = (2 * workers + 2) * batch_size * 3 * 224 * 224
    if shm is not None and needed > 0.8 * shm:
        room = f"{shm / MIB:.0f} MiB free, {needed / MIB:.0f} MiB needed"
        raise MemoryError(f"/dev/shm: {room}; lower --batch-size or --workers")
    own = accelerator.get(device)
    data = Batches(20, batch_size)
    work = Work(device, work_ms)
    made: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
    made |= {"batch_size": None, "multiprocessing_context": "forkserver"}
    loaders = {pin: DataLoader(data, pin_memory=pin, **made) for pin in (False, True)}

    def step(images: Tensor) -> Tensor:
        work()
        # something that needs the batch
        return images.sum(dtype=torch.float32)

    def moved(pin: bool, non_blocking: bool) -> Iterator[Tensor]:
        for images, labels in loaders[pin]:
            labels.to(device, non_blocking=non_blocking)
            yield images.to(device, non_blocking=non_blocking)

    def prefetched() -> Iterator[Tensor]:
        ahead = DataPrefetcher(loaders[True], device, dtype=torch.uint8)
        return (images for images, _ in ahead)

    def epoch(batches: Iterable[Tensor], consume: Callable[[Tensor], object]) -> float:
        begin = 0.0
        for i, images in enumerate(batches):
            consume(images)
            # the first batch waits for the workers
            if i == 0:
                own.synchronize()
                begin = time.perf_counter()
        own.synchronize()
        return 1e3 * (time.perf_counter() - begin) / (len(data) - 1)

    ways: dict[str, Call] = {
        "work alone": lambda: epoch([torch.zeros(1, device=device)] * len(data), step),
        "pageable loader alone": lambda: epoch((batch[0] for batch in loaders[False]), len),
        "pinned loader alone": lambda: epoch((batch[0] for batch in loaders[True]), len),
        "pageable, x.to(device)": lambda: epoch(moved(False, False), step),
        "pageable, non_blocking": lambda: epoch(moved(False, True), step),
        "pinned, x.to(device)": lambda: epoch(moved(True, False), step),
        "pinned, non_blocking": lambda: epoch(moved(True, True), step),
        "pinned, DataPrefetcher (side stream)": lambda: epoch(prefetched(), step),
    }
    found = in_turns(ways, n, lambda call: call())
    return [{"way": way, "batch ms": Sample.of(values)} for way, values in found.items()]


def overlap(device: torch.device, mib: int, n: int) -> list[dict[str, Any]]:
    """Part c: a copy and work that does not need it, on one stream and two."""
    pageable = torch.ones(mib * MIB, dtype=torch.uint8)
    own = accelerator.get(device)
    pinned = own.pin(pageable)
    side = own.side_stream()
    copy = own.copy
    # work as long as the copy, so that either can hide the other
    work = Work(device, min(timed(own, partial(copy, pinned)).total_ms for _ in range(5)))

    def one_stream(x: Tensor) -> Tensor:
        on_device = copy(x)
        work()
        return on_device

    def two_streams(x: Tensor, copy_first: bool) -> Tensor:
        if not copy_first:
            work()
        with own.on(side):
            on_device = copy(x)
        if copy_first:
            work()
        own.stream().wait_stream(side)
        return on_device

    ways: dict[str, Call] = {
        "work alone": work,
        "copy alone, pageable": partial(copy, pageable),
        "copy alone, pinned": partial(copy, pinned),
        "pageable, same stream": partial(one_stream, pageable),
        "pageable, side stream": partial(two_streams, pageable, True),
        "pageable, side stream, work launched first": partial(two_streams, pageable, False),
        "pinned, same stream": partial(one_stream, pinned),
        "pinned, side stream": partial(two_streams, pinned, True),
    }
    totals = {
        way: Sample.of([t.total_ms for t in timings])
        for way, timings in in_turns(ways, n, partial(timed, own)).items()
    }
    # what of the shorter of the two is hidden by the longer
    rows = []
    for way, total in totals.items():
        row: dict[str, Any] = {"way": way, "done after ms": total, "hidden": ""}
        if "stream" in way:
            parts = (totals["work alone"].median, totals[f"copy alone, {way.split(',')[0]}"].median)
            row["hidden"] = f"{(sum(parts) - total.median) / min(parts):.0%}"
        rows.append(row)
    return rows


def host_copies(sizes_mib: Sequence[int], n: int) -> list[dict[str, Any]]:
    """Returns what a machine without a GPU can show: copies within pageable memory."""
    rows = []
    for mib in sizes_mib:
        source = torch.ones(mib * MIB, dtype=torch.uint8)
        target = torch.zeros(mib * MIB, dtype=torch.uint8)
        taken = []
        for _ in range(n + 2):
            begin = time.perf_counter()
            target.copy_(source)
            taken.append(1e3 * (time.perf_counter() - begin))
        ms = Sample.of(taken[2:])
        rows.append(
            {"MiB": mib, "host to host ms": ms, "GB/s": f"{mib * MIB / ms.median / 1e6:.1f}"}
        )
    return rows


def parts(a: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Title and rows of every table that this machine can give."""
    if not accelerator.count():
        yield "Host memory alone", host_copies(a.sizes, a.n)
        return
    device = accelerator.get("cuda").device
    yield "a. The plain benchmark: one copy at a time", plain_copies(device, a.sizes, a.n)
    shape = (
        f"{a.batch_size} x 3 x 224 x 224 uint8, {a.workers} workers, {a.work_ms:g} ms of work "
        "a batch"
    )
    yield (
        f"b. The corrected benchmark: {shape}",
        loop_copies(device, a.batch_size, a.workers, a.work_ms, max(3, a.n // 4)),
    )
    yield (
        f"c. Work that does not need x beside the copy of x ({max(a.sizes)} MiB)",
        overlap(device, max(a.sizes), a.n),
    )


NOT_SHOWN = """No CUDA device, so this run cannot show
- a: the rate of a copy to the GPU, pageable or pinned, nor what pinning costs (torch pins only
  through CUDA);
- b: what the loader's pin_memory and non_blocking bring when there is GPU work to overlap with;
- c: whether GPU work that does not need x overlaps with the copy of x.
It shows the rate of the host's own memory, which bounds both the copy into a pinned buffer and the
driver's staging."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("Measure copies to the GPU: alone, in a loop, and beside unrelated work.")
    add = options.add_argument
    mib = [1, 4, 16, 64, 256]
    add("--sizes", type=int, nargs="+", default=mib, help="sizes of a tensor in MiB")
    add("-n", type=int, default=30, help="measurements of a row; in part b a quarter of it")
    add("--batch-size", type=int, default=256, help="images in a batch of part b")
    add("--workers", type=int, default=4, help="DataLoader workers of part b")
    add("--work-ms", type=float, default=20.0, help="milliseconds of GPU work a batch of part b")
    a = options.parse_args(argv)
    tables = {}
    found = machine()
    print(machine_line(found))
    print(f"n={a.n}, interleaved after two rounds of warm-up; median (quartiles)")
    for title, rows in parts(a):
        tables[title] = rows
        print(f"\n{title}\n\n{markdown(rows)}", flush=True)
    if not accelerator.count():
        print(f"\n{NOT_SHOWN}")
    if a.json:
        write(a.json, {"machine": found, "n": a.n, "tables": tables})
    return 0


if __name__ == "__main__":
    sys.exit(main())
