"""Measures the cost of loader threads for the step: time holding and waiting for the GIL.

1. ``held``: how often a sample releases the GIL, and how long it holds it. A small preloaded C
   library wraps Python's functions for this (needs ``cc`` and a Python with a shared library).
2. ``beside``: a step of 500 launches of a few microseconds each, like a network's GPU step, while
   threads or processes load.
3. ``many``: the same with 16 threads that sleep instead of decoding. They hold the GIL as often
   and as long, but need few cores. An M/G/1 queue model predicts their delay from part 1.

    uv run python -m scripts.bench.launches
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from harness.config import DataConfig
from harness.data import libraries, transforms
from harness.data.datasets import ImageDataset
from harness.data.shapes import draw
from harness.data.storage import FolderSource
from harness.data.transforms import CropTransform
from harness.data.whole import Whole
from harness.feed.base import PROCESSES, THREADS, Backend, FeedSettings
from harness.feed.order import Cursor, Order, ProbeOrder
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed
from scripts.bench.paired import Estimate
from scripts.bench.tables import Sample, machine, machine_line, markdown, parser, write

# width, height and quality
FILES = {"640x427": (640, 427, 87), "500x375": (500, 375, 90), "96x96": (96, 96, 90)}
LAUNCHES = 500
_LOADERS = ((THREADS, 1), (THREADS, 2), (THREADS, 4), (PROCESSES, 1), (PROCESSES, 2))
BATCH = 64
MANY = 16
RATES = (500, 1000, 1500, 2000, 3000)
# polling time for a batch; without a limit torch's loader waits forever
_POLL_S = 1e-4
# device time of a step, without launches
PAUSE_S = 0.01
# the resize as called by torch.ops and by torch's own functions
KERNELS = {
    "torch.ops": torch.ops.aten._upsample_bilinear2d_aa.out,
    "torch._C._nn": torch._C._nn._upsample_bilinear2d_aa,
}
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#define MOST (1 << 20)
static double held[MOST];
static long count;
static __thread int on;
static __thread double began;
static void *(*save)(void);
static void (*restore)(void *), (*acquire)(void *);
double gil_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e6 * t.tv_sec + 1e-3 * t.tv_nsec;
}
__attribute__((constructor)) static void find(void) {
  save = dlsym(RTLD_NEXT, "PyEval_SaveThread");
  restore = dlsym(RTLD_NEXT, "PyEval_RestoreThread");
  acquire = dlsym(RTLD_NEXT, "PyEval_AcquireThread");
}
static void taken(void) { if (on) began = gil_now(); }
void *PyEval_SaveThread(void) {
  if (on && count < MOST) held[count++] = gil_now() - began;
  return save();
}
void PyEval_RestoreThread(void *state) { restore(state); taken(); }
void PyEval_AcquireThread(void *state) { acquire(state); taken(); }
void gil_start(void) { on = 1; count = 0; taken(); }
long gil_count(void) { return count; }
double *gil_held(void) { return held; }
"""


def images(folder: Path, name: str) -> str:
    """Writes 64 noisy drawings as JPEGs of ``FILES``; returns their root."""
    root = folder / name / "a"
    root.mkdir(parents=True)
    width, height, quality = FILES[name]
    for i in range(64):
        rng = np.random.default_rng(i)
        noisy = draw(i % 10, 10, width, height, rng) + rng.normal(0, 6, (height, width, 3))
        picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        picture.save(root / f"{i:03}.jpg", quality=quality)
    return str(root.parent)


def dataset(root: str, side: int = 224) -> ImageDataset:
    """Returns the images with decoded random crops, as in the second epoch."""
    options = DataConfig(image_size=side)
    return ImageDataset(
        FolderSource(root), CropTransform(side), options, side, 0, whole=Whole(None)
    )


# 1. GIL hold times


def held(root: str, library: Path) -> dict[str, dict[str, float]]:
    """Measures a sample's GIL acquisitions and hold times with each of ``KERNELS``.

    Runs in a separate process.
    """
    told = [sys.executable, "-m", "scripts.bench.launches", "--held", root, str(library)]
    env = {**os.environ, "LD_PRELOAD": str(library)}
    answer: dict[str, Any] = json.loads(subprocess.check_output(told, env=env).splitlines()[-1])
    return answer


def _held(root: str, library: str) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    counter = ctypes.PyDLL(library)
    counter.gil_now.restype = ctypes.c_double
    counter.gil_count.restype = ctypes.c_long
    counter.gil_held.restype = ctypes.POINTER(ctypes.c_double)
    samples = dataset(root)
    out = np.empty((224, 224, 3), np.uint8).transpose(2, 0, 1)
    # each segment includes one clock reading
    took_us = []
    for call in (counter.gil_count, counter.gil_now) * 200:
        begin = counter.gil_now()
        for _ in range(20):
            call()
        took_us.append((counter.gil_now() - begin) / 20)
    clock_us = median(took_us[1::2]) - median(took_us[::2])
    found: dict[str, list[tuple[float, ...]]] = {kernel: [] for kernel in KERNELS}
    for epoch, kernel in itertools.product(range(10), KERNELS):
        transforms._KERNELS["bilinear"] = KERNELS[kernel]
        for i in range(len(samples)):
            cpu_s = time.thread_time()
            counter.gil_start()
            samples.fill(epoch, i, out)
            us = np.ctypeslib.as_array(counter.gil_held(), (counter.gil_count(),)) - clock_us
            cpu_us = 1e6 * (time.thread_time() - cpu_s)
            found[kernel].append((len(us), us.sum(), np.square(us).sum(), us.max(), cpu_us))
    names = "crossings", "held_us", "square_us2", "longest_us", "cpu_us"
    return {
        kernel: dict(zip(names, np.median(each[len(samples) :], axis=0).tolist(), strict=True))
        for kernel, each in found.items()
    }


def waited_us(rate: float, found: Mapping[str, float], wake_us: float) -> float:
    """Returns the mean wait of a launch for the GIL, at ``rate`` images/s of all threads.

    By the Pollaczek-Khinchine formula. A thread that takes the lock over holds it while it wakes,
    so a segment lasts ``wake_us`` longer. A launch that finds the lock taken must wake, too.
    """
    each = rate / 1e6 * found["crossings"]
    mean_us = found["held_us"] / found["crossings"]
    square_us2 = found["square_us2"] / found["crossings"] + 2 * mean_us * wake_us + wake_us**2
    busy = each * (mean_us + wake_us)
    return each * square_us2 / 2 / (1 - busy) + busy * wake_us if busy < 1 else math.inf


def wake_us() -> float:
    """Returns the time for one thread to wake another, including the lock handover."""
    turns = 2000
    mine, yours = threading.Lock(), threading.Lock()
    mine.acquire()
    yours.acquire()

    def answer() -> None:
        for _ in range(turns):
            yours.acquire()
            mine.release()

    thread = threading.Thread(target=answer)
    thread.start()
    begin = time.perf_counter()
    for _ in range(turns):
        yours.release()
        mine.acquire()
    thread.join()
    return 1e6 * (time.perf_counter() - begin) / turns / 2


# 2. and 3. Launches beside loading


class Window(NamedTuple):
    """Microseconds per launch, images/s, and cores used by this process."""

    us: float
    rate: float
    cores: float


class Launcher:
    """A step that launches kernels while feeds load."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.values = torch.zeros(20_000)
        self.pause_s = pause_s

    def window(
        self, feed: Backend | None, batches: Any, seconds: float, launches: int = LAUNCHES
    ) -> Window:
        """Returns a launch's time in the median step, and the feed's rate meanwhile."""
        add = self.values.add_
        steps: list[float] = []
        begin = time.perf_counter()
        until = begin + seconds
        samples = 0
        cpu_s = 0.0
        # an idle feed's queue is full at first
        warm = begin + 0.25 * seconds
        while (now := time.perf_counter()) < until:
            for _ in range(launches):
                add(1.0)
            done = time.perf_counter()
            if begin < warm <= now:
                begin, warm, steps = now, begin, []
                samples, cpu_s = _samples(feed), time.process_time()
            steps.append(done - now)
            if self.pause_s:
                time.sleep(self.pause_s)
            if feed is not None:
                next(batches)
        samples = _samples(feed) - samples
        wall_s = time.perf_counter() - begin
        us = 1e6 * median(steps) / LAUNCHES
        return Window(us, samples / wall_s, (time.process_time() - cpu_s) / wall_s)


def _samples(feed: Backend | None) -> int:
    return feed.meter.read().samples if feed is not None and feed.meter is not None else 0


def feed_of(samples: ImageDataset, backend: str, workers: int) -> Backend:
    """Returns an endless feed."""
    settings = FeedSettings(BATCH, workers, False, None, None, 0.0, "forkserver", backend)
    order = ProbeOrder(Order(len(samples), BATCH), Cursor())
    return (ThreadFeed if backend == THREADS else ProcessFeed)(samples, order, settings)


def in_turns(sides: Mapping[str, Callable[[], Window]], turns: int) -> dict[str, list[Window]]:
    """Returns the windows of each side, in alternating order."""
    found: dict[str, list[Window]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in sides if turn % 2 == 0 else [*sides][::-1]:
            found[name].append(sides[name]())
        print(f"turn {turn + 1} of {turns}", file=sys.stderr)
    return found


def beside(root: str, turns: int, seconds: float, pause_s: float) -> list[dict[str, object]]:
    """Returns rows on launches beside threads and processes that decode."""
    launcher = Launcher(pause_s)
    samples = dataset(root)
    with ExitStack() as stack:
        sides: dict[str, Any] = {}
        for name in ("nothing", "nothing again"):
            sides[name] = partial(launcher.window, None, None, seconds)
        for backend, workers in _LOADERS:
            feed = stack.enter_context(closing(feed_of(samples, backend, workers)))
            batches = stack.enter_context(closing(feed.polled(_POLL_S)))
            sides[f"{workers} {backend}"] = partial(launcher.window, feed, batches, seconds)
            # it starts
            for batch in batches:
                if batch is not None:
                    break
        return _rows(in_turns(sides, turns))


def many(root: str, turns: int, seconds: float, pause_s: float) -> dict[str, list[Window]]:
    """Returns windows of launches beside ``MANY`` threads that sleep instead of decoding."""
    turbo = libraries._turbojpeg()
    assert turbo is not None, "the package turbojpeg is needed"
    sleep = ctypes.CDLL(None).usleep
    asked_us = [0]
    decode = turbo.Decompress8
    turbo.Decompress8 = lambda *_: sleep(asked_us[0])
    launcher = Launcher(pause_s)
    try:
        with (
            closing(feed_of(dataset(root, 32), THREADS, MANY)) as feed,
            closing(feed.polled(_POLL_S)) as batches,
        ):

            def at(rate: int, launches: int = LAUNCHES, interval_s: float = 0.005) -> Window:
                asked_us[0] = int(1e6 * MANY / rate)
                sys.setswitchinterval(interval_s)
                return launcher.window(feed, batches, seconds, launches)

            sides: dict[str, Any] = {}
            for name in ("nothing", "nothing again"):
                sides[name] = partial(launcher.window, None, None, seconds)
            sides |= {str(rate): partial(at, rate) for rate in RATES}
            sides["1000, switch interval 0.5 ms"] = lambda: at(1000, interval_s=0.0005)
            sides[f"{RATES[-1]}, no launches"] = lambda: at(RATES[-1], 0)
            return in_turns(sides, turns)
    finally:
        sys.setswitchinterval(0.005)
        turbo.Decompress8 = decode


# 4. Fewer GIL releases


def fewer(root: str, turns: int, seconds: float) -> list[dict[str, object]]:
    """Returns rows on two threads loading with each of ``KERNELS``, and with the first again."""
    with closing(feed_of(dataset(root), THREADS, 2)) as feed:
        batches = iter(feed)

        def loaded(kernel: str) -> Window:
            transforms._KERNELS["bilinear"] = KERNELS[kernel]
            for _ in range(4):
                next(batches)
            cpu_s, begin, samples = time.process_time(), time.perf_counter(), _samples(feed)
            while time.perf_counter() < begin + seconds:
                next(batches)
            samples = _samples(feed) - samples
            wall_s = time.perf_counter() - begin
            cpu_s = time.process_time() - cpu_s
            return Window(1e6 * cpu_s / samples, samples / wall_s, cpu_s / wall_s)

        first = next(iter(KERNELS))
        sides = {name: partial(loaded, name) for name in KERNELS}
        sides[f"{first} again"] = partial(loaded, first)
        found = in_turns(sides, turns)
    us = {name: [window.us for window in windows] for name, windows in found.items()}
    rate = {name: [window.rate for window in windows] for name, windows in found.items()}
    return [
        {
            "resize by": name,
            "images/s": Sample.of(rate[name]),
            "ratio": f"{Estimate.ratio(rate[name], rate[first]):.3f}",
            "CPU us an image": Sample.of(us[name]),
            "ratio of CPU": f"{Estimate.ratio(us[name], us[first]):.3f}",
            "n": len(us[name]),
        }
        for name in found
    ]


def _rows(
    found: Mapping[str, Sequence[Window]],
    predicted: Callable[[float], float] | None = None,
) -> list[dict[str, object]]:
    alone = [window.us for window in found["nothing"]]
    rows = []
    for name, windows in found.items():
        us = [window.us for window in windows]
        rate = median(window.rate for window in windows)
        row: dict[str, object] = {
            "beside": name,
            "images/s": f"{rate:.0f}",
            "cores": f"{median(window.cores for window in windows):.2f}",
            "us a launch": Sample.of(us),
            "ratio to nothing": f"{Estimate.ratio(us, alone):.3f}",
            "delay us": f"{Estimate.of(np.subtract(us, alone).tolist()):.2f}",
        }
        if predicted is not None:
            row["model us"] = f"{predicted(rate):.2f}"
        rows.append({**row, "n": len(us)})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("Measure the GIL's effect on a step that launches kernels.")
    add = options.add_argument
    add("--turns", type=int, default=20, help="windows per side")
    add("--seconds", type=float, default=0.5, help="length of a window")
    add("--pause", type=float, default=PAUSE_S, help="seconds without launches after each step")
    add("--held", nargs=2, help="internal, used by the measurement: ROOT LIBRARY")
    a = options.parse_args(argv)
    if a.held:
        print(json.dumps(_held(*a.held)))
        return 0
    torch.set_num_threads(1)
    print(machine_line(machine()), f"switch interval {1e3 * sys.getswitchinterval():g} ms")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        library = folder / "gil.so"
        (folder / "gil.c").write_text(_SOURCE)
        build = ["cc", "-O2", "-shared", "-fPIC", f"{folder}/gil.c", "-o", str(library), "-ldl"]
        subprocess.check_call(build)
        roots = {name: images(folder, name) for name in FILES}
        rows = []
        costs = {}
        for name, root in roots.items():
            for kernel, cost in held(root, library).items():
                rows.append({"file": name, "resize by": kernel})
                rows[-1] |= {key: f"{value:.1f}" for key, value in cost.items()}
                costs[name] = cost
        print(markdown(rows), flush=True)
        woken_us = wake_us()
        print(f"a wake-up: {woken_us:.1f} us", flush=True)
        for name in ("640x427", "96x96"):
            print(f"\nloading {name} alone\n")
            print(markdown(fewer(roots[name], a.turns, 2 * a.seconds)), flush=True)
        for pause_s in (0.0, a.pause):
            print(f"\npause of {1e3 * pause_s:g} ms after {LAUNCHES} launches\n")
            print(markdown(beside(roots["640x427"], a.turns, a.seconds, pause_s)), flush=True)
            found = many(roots["500x375"], a.turns, a.seconds, pause_s)
            cost = costs["500x375"]
            predicted = partial(waited_us, found=cost, wake_us=woken_us)
            print("\n" + markdown(_rows(found, predicted)), flush=True)
    if a.json:
        write(a.json, {"costs": costs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
