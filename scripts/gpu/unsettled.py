"""Measures behavior that the documentation of torch and the driver leaves open.

Parts of ``gpu_check.py``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.clock.clock import StepClock
from harness.config import AugmentConfig
from harness.data import datasets
from harness.runtime import accelerator, workers
from harness.runtime.errors import LoaderError
from scripts.bench.differential import Rig, emulated_rig
from scripts.bench.tables import Sample
from scripts.gpu.feeds import shapes
from scripts.gpu.loaders import LOADERS, Job
from scripts.gpu.options import Options, Said

BUSY_S = 0.01
_MIB = 2**20
# between two readings of the clock
_CALLS = 200
_LAUNCHES = 20_000
# limit to detect killed workers
_PASSES_S = 20.0


def events(o: Options) -> Said:
    """Measures host microseconds of event calls in the step clock and the prefetcher."""
    o.need_gpu("events are a GPU's")
    own = accelerator.get(o.device)
    start, again, end = (own.event(timed=True) for _ in range(3))
    start.record(own.stream())
    end.record(own.stream())
    calls: dict[str, Callable[[], object]] = {
        "make one and record it": lambda: own.event(timed=True).record(own.stream()),
        "record one again": lambda: again.record(own.stream()),
        "elapsed_time": lambda: start.elapsed_time(end),
    }
    summary = []
    for device in ("idle", "at work"):
        median_us = {}
        for name, call in calls.items():
            taken_us = []
            for _ in range(o.turns):
                own.synchronize()
                # an idle device answers at once, a busy one has pending events
                if device == "at work":
                    own.delay(5 * BUSY_S)
                begin = time.perf_counter()
                for _ in range(_CALLS):
                    call()
                taken_us.append(1e6 * (time.perf_counter() - begin) / _CALLS)
            found = Sample.of(taken_us)
            median_us[name] = found.median
            yield {"call": name, "device": device, "us": found}
        made, recorded, read = median_us.values()
        summary.append(f"{3 * made + 3 * recorded + 6 * read:.0f} us with the device {device}")
    return f"3 events made, 6 recorded and 6 elapsed_time in a step: {', '.join(summary)}"


def finish(o: Options) -> Said:
    """Measures the fraction of a core used to wait for the device.

    It waits like the step clock, and with a blocking event.
    """
    # on a CPU the device is emulated by threads
    rig = emulated_rig(step_s=0.05)
    if o.on_gpu:
        own = accelerator.get(o.device)
        rig = Rig(
            lambda: StepClock(o.device),
            rig.batches,
            lambda _: own.delay(5 * BUSY_S),
            own.synchronize,
        )
    clock = rig.clock()
    shares = []
    for name, settle in {"StepClock.settle": clock.settle, "a blocking event": rig.wait}.items():
        settle()
        wall_s = time.perf_counter()
        cpu_s = time.process_time()
        for _ in range(2 * o.turns):
            rig.launch(None)
            settle()
        wall_s = time.perf_counter() - wall_s
        cpu_s = time.process_time() - cpu_s
        shares.append(f"{name} {cpu_s / wall_s:.2f}")
        yield {
            "waited with": name,
            "of a core": cpu_s / wall_s,
            "ms a wait": 1e3 * wall_s / (2 * o.turns),
        }
    return f"of a core while waiting: {', '.join(shares)}"


def staging(o: Options) -> Said:
    """Measures launches while another thread copies pageable or pinned memory."""
    o.need_gpu("nothing is staged")
    pageable = torch.ones(256 * _MIB, dtype=torch.uint8)
    page_locked = accelerator.get(o.device).pin(pageable)
    sources: dict[str, Tensor | None] = {
        "nothing": None,
        "pageable": pageable,
        "page-locked": page_locked,
    }
    summary = []
    for name, source in sources.items():
        launch_us = _launches_beside(source, o)
        longest_ms = max(launch_us) / 1e3
        median_us = float(np.median(launch_us))
        p99_us = float(np.quantile(launch_us, 0.99))
        yield {
            "beside": name,
            "launch us": median_us,
            "p99 us": p99_us,
            "longest ms": longest_ms,
            "n": len(launch_us),
        }
        summary.append(f"{name} {median_us:.1f} us, at most {longest_ms:.2f} ms")
    return f"a launch beside a copy of 256 MiB: {'; '.join(summary)}"


def _launches_beside(source: Tensor | None, o: Options) -> list[float]:
    """Returns launch times in microseconds, beside eight copies of ``source`` if given."""
    done = threading.Event()
    value = torch.zeros(1, device=o.device)
    taken_us = [0.0]
    own = accelerator.get(o.device)

    def copy() -> None:
        with own.on(own.side_stream()):
            for _ in range(8 if source is not None else 0):
                own.copy(source)  # type: ignore[arg-type]
            own.synchronize()
        done.set()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    while (len(taken_us) < _LAUNCHES if source is None else not done.is_set()) and o.left_s() > 0:
        begin = time.perf_counter()
        value.add_(1)
        taken_us.append(1e6 * (time.perf_counter() - begin))
    thread.join(max(0.0, o.left_s()))
    return taken_us


def pinning(o: Options) -> Said:
    """Measures how feeds with a pinning thread end: closed, and with killed workers."""
    workers.start_server(["harness.feed.processes", "harness.data.datasets"])
    data = shapes(o.scratch, 64)
    before = set(threading.enumerate())
    slowest_s = 0.0
    datasets.load(data, AugmentConfig(), 0)
    # passes abandoned after three batches
    for end in ("closed", "workers killed"):
        for _ in range(1 if o.quick else 3):
            job = Job(Path(str(data.root)), 2, 16, o.device)
            with LOADERS["processes"](job) as feed:
                batches = iter(feed)
                pinned = [batch.images.is_pinned() for batch in islice(batches, 3)]
                begin = time.monotonic()
                said = ""
                if end != "closed":
                    said = _killed(feed.worker_pids, batches)  # type: ignore[attr-defined]
                del batches
            took_s = time.monotonic() - begin
            slowest_s = max(slowest_s, took_s)
            left = _left(before)
            yield {
                "pass": end,
                "s": round(took_s, 2),
                "page-locked": all(pinned),
                "threads left": left,
                "error": said,
            }
            if end != "closed" and not said:
                yield {"wrong": f"no LoaderError within {_PASSES_S:g} s of the workers' death"}
            if left:
                yield {"wrong": f"{end}: threads are left: {left}"}
    return f"abandoned passes end within {slowest_s:.1f} s"


def _left(before: set[threading.Thread]) -> str:
    """Returns the names of remaining threads that were not there ``before``."""
    until = time.monotonic() + 3.0
    while (left := set(threading.enumerate()) - before) and time.monotonic() < until:
        time.sleep(0.05)
    return ", ".join(sorted(thread.name for thread in left))


def _killed(pids: tuple[int, ...], batches: Iterator[object]) -> str:
    """Kills the workers; returns the feed's error, empty if none comes in time."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + _PASSES_S
    try:
        while time.monotonic() < until:
            next(batches)
    except LoaderError as error:
        return str(error)
    return ""
