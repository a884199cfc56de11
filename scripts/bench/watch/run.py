"""Measures monitoring overhead: microseconds per step, and memory.

Each cost is measured against the same loop without it, in alternating order; as a control, that
loop also runs against itself, which shows the noise of this machine.
Work in the loop's thread counts in full, and so does the sampler's thread, although it runs
beside the loop; the workers' timers are a fraction of the workers' time. A claim holds if the
whole 95 % interval does, does not hold if none of it does, and is unresolved otherwise.

    uv run python -m scripts.bench.watch.run --write
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.clock.clock import StepClock
from harness.clock.figures import by_tag
from harness.clock.stages import StageMeter, Stamps
from harness.config import WatchConfig
from harness.monitor.host import HostSensor, Sampler
from harness.monitor.writer import RunWriter, Value
from scripts.bench.differential import Emulated
from scripts.bench.paired import Cost, Estimate, Plan, Work
from scripts.bench.tables import PAGES, machine, machine_line, markdown, parser, write
from scripts.bench.watch.worker import BATCH, STAGES, Worker, timers_cost

PAGE = PAGES / "watch.md"
# the step that costs are compared with
STEP_S = 0.020
# largest fraction of it for monitoring
CEILING = 0.01
# largest fraction of a worker's time for its timers
WORKERS_CEILING = 1e-3
# steps per run, short enough to end before another process is scheduled
_BLOCK = 50
# more than the CPU caches hold
_COLD_BYTES = 64 << 20
# a sample of microseconds, of tens of microseconds, and of almost a millisecond
_WORK = (50, 500, 15_000)
_CHILDREN = 16
_SAMPLED_TURNS = 5
# allowed growth; the smallest object that could be kept has 16
_BYTES_A_STEP = 1.0
# allowed growth of a clock's quantile buckets, over any number of steps
_BUCKETS_BYTES = 1 << 20
_SETTINGS = WatchConfig()

Row = dict[str, Any]


class HostEvent:
    """A timing event of a device that never lags the host."""

    def record(self, stream: Any = None) -> None:
        """Now."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """It has come."""
        return True

    def synchronize(self) -> None:
        """It has come."""

    def elapsed_time(self, end_event: Any) -> float:
        """Returns milliseconds to another event."""
        return 1e3 * float(end_event._at - self._at)


def stepping(clock: StepClock, copies: bool) -> Work:
    """Returns the calls of a training loop and its prefetcher, including closing windows."""
    numbers = count(1)

    def work(steps: int) -> None:
        for _ in range(steps):
            with clock.waiting():
                now_s = time.perf_counter()
                clock.arrived(Stamps(now_s, now_s, now_s))
                if copies:
                    start = HostEvent()
                    end = HostEvent()
                    start.record()
                    end.record()
                    clock.copied(start, end)
            with clock.computing():
                pass
            clock.step(128)
            if next(numbers) % _SETTINGS.window_steps == 0:
                with clock.noted("logging"):
                    clock.close_window()

    return work


def bare_steps(steps: int) -> None:
    """The same loop without a clock."""
    for _ in range(steps):
        pass


def clocks() -> dict[str, tuple[StepClock, bool]]:
    """Returns the clocks to measure, and whether copies are reported to them."""
    found = {
        "step clock, host clock": (StepClock(), False),
        "step clock, events that cost nothing": (
            StepClock(Emulated(HostEvent, lambda: None, None)),
            True,
        ),
    }
    if torch.cuda.is_available():
        found["step clock, CUDA events"] = (StepClock("cuda"), False)
    return found


def window_cost(folder: Path, runs: int) -> Cost:
    """Measures the end of a window: writing all figures to ``metrics.jsonl`` and the event file."""
    clock = StepClock(Emulated(HostEvent, lambda: None, None))
    meter = StageMeter(STAGES, 8)
    stepping(clock, copies=True)(_SETTINGS.window_steps)
    Worker(1, meter).make(1)
    window = clock.total()
    with (
        RunWriter(folder, tensorboard=True) as writer,
        Sampler([HostSensor()], _SETTINGS.sample_s) as sampler,
    ):

        def figures() -> dict[str, Value]:
            return {**by_tag(window), **meter.read().by_tag(8.0), **sampler.read()}

        return Cost.of(lambda _: writer.scalars(1, figures(), epoch=1), lambda _: None, Plan(runs))


@contextmanager
def children() -> Iterator[None]:
    """Keeps as many sleeping child processes as a large feed has workers."""
    with ExitStack() as stack:
        for _ in range(_CHILDREN):
            child = stack.enter_context(subprocess.Popen(["sleep", "600"]))
            stack.callback(child.kill)
        yield


def sampler_fraction(seconds: float) -> tuple[Estimate, float]:
    """Returns a sampler's fraction of a core, and this process's without it."""

    def spent() -> float:
        begin = time.perf_counter()
        cpu = time.process_time()
        time.sleep(seconds / _SAMPLED_TURNS)
        return (time.process_time() - cpu) / (time.perf_counter() - begin)

    with children():
        alone = float(np.median([spent() for _ in range(_SAMPLED_TURNS)]))
        with Sampler([HostSensor()], _SETTINGS.sample_s) as sampler:
            # the first one opens files
            sampler.look()
            return Estimate.of([spent() - alone for _ in range(_SAMPLED_TURNS)]), alone


def memory_growth(work: Work, steps: int) -> int:
    """Returns the bytes that Python memory grows from a tenth of ``steps`` to all."""
    tracemalloc.start()
    try:
        work(steps // 10)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        work(steps - steps // 10)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def measure(steps: int, runs: int, sampled_s: float, batches: int) -> dict[str, Any]:
    """Returns all costs and the growth of memory.

    Args:
        steps: steps to measure a clock and memory.
        runs: runs of everything else.
        sampled_s: seconds to measure the sampler.
        batches: batches per sample length, to measure the workers' timers.
    """
    cold = np.zeros(_COLD_BYTES // 8)
    costs = {}
    growth = {}
    for name, (clock, copies) in clocks().items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        work = stepping(clock, copies)
        costs[name] = Cost.of(work, bare_steps, Plan(-(-steps // _BLOCK), _BLOCK))
        costs[f"{name}, caches cold"] = Cost.of(work, bare_steps, Plan(runs, before=cold.sum))
        growth[name] = memory_growth(work, steps)
    with tempfile.TemporaryDirectory() as folder:
        window = window_cost(Path(folder), runs)
    sampler, alone = sampler_fraction(sampled_s)
    print("workers' timers ...", file=sys.stderr, flush=True)
    stages = [timers_cost(work, batches) for work in _WORK]
    return {
        "machine": machine(), "steps": steps, "window_steps": _SETTINGS.window_steps,
        "sample_s": _SETTINGS.sample_s,
        "clocks": costs, "window": window, "sampler_fraction": sampler, "alone_fraction": alone,
        "memory_growth_bytes": growth, "stages": stages,
    }  # fmt: skip


def per_step_us(found: Mapping[str, Any]) -> dict[str, Estimate]:
    """Returns microseconds per step of each clock with all other monitoring."""
    rest = found["window"].mean_us * (1 / found["window_steps"]) + found["sampler_fraction"] * (
        1e6 * STEP_S
    )
    return {name: cost.mean_us + rest for name, cost in found["clocks"].items()}


def claims(found: Mapping[str, Any]) -> list[str]:
    """Returns a line per claim: the figure, its interval, and whether it holds."""
    dearest = max(per_step_us(found).values(), key=lambda us: us.high) * (1e-6 / STEP_S)
    longest: Cost = found["stages"][-1]
    timers = longest.mean_us * (1 / longest.bare_us.median)
    sample_us = longest.bare_us.median / BATCH
    grown = max(found["memory_growth_bytes"].values())
    a_step = grown / (0.9 * found["steps"])
    most = _BYTES_A_STEP
    flat = "not resolved"
    if a_step <= most:
        flat = "holds"
    elif grown > _BUCKETS_BYTES:
        flat = "does not hold"
    return [
        (
            f"all watching takes at most {CEILING:.0%} of a step of 20 ms: {dearest:.3%}: "
            f"{dearest.judged(CEILING)}"
        ),
        f"the workers' timers take at most {WORKERS_CEILING:.1%} of their time, samples of "
        f"{sample_us:.0f} us: {timers:.3%}: {timers.judged(WORKERS_CEILING)}",
        f"memory stays as it was, to {most:g} byte a step: {a_step:.2f} bytes: {flat}",
    ]


def show(found: Mapping[str, Any]) -> str:
    """Returns the figures as text."""
    # tables: memory, total, workers
    memory = [
        {"memory of": name, "bytes more": size}
        for name, size in found["memory_growth_bytes"].items()
    ]
    sums = [
        {
            "all of it, with": name,
            "us a step": f"{us.value:.1f}",
            "of 20 ms [95 %]": f"{us * (1e-6 / STEP_S):.3%}",
        }
        for name, us in per_step_us(found).items()
    ]
    workers = [
        {
            "a sample's own us": f"{cost.bare_us.median / BATCH:.1f}",
            "us a batch": cost.us,
            "control us": cost.control_us,
            "n": cost.us.n,
            "us a sample": f"{cost.mean_us.value / BATCH:.3f}",
            "of the work [95 %]": f"{cost.mean_us * (1 / cost.bare_us.median):.3%}",
        }
        for cost in found["stages"]
    ]
    told = "\n".join(f"Claim, {claim}." for claim in claims(found))
    return f"""{machine_line(found["machine"])}
median (quartiles) of paired runs in turns; control: the loop without, against itself

In the process that trains

{markdown(_costs(found))}

{markdown(sums)}

In the workers, beside their own work: {len(STAGES)} stages, batches of {BATCH} samples

{markdown(workers)}

Memory after {found["steps"]} steps against after {found["steps"] // 10}

{markdown(memory)}

{told}"""


def _costs(found: Mapping[str, Any]) -> list[Row]:
    """Returns a row for each cost in the training process."""
    window = found["window"]
    fraction = found["sampler_fraction"]
    costs = [(name, cost, cost.us.median) for name, cost in found["clocks"].items()]
    costs.append(
        (
            f"end of a window, every {found['window_steps']} steps",
            window,
            window.us.median / found["window_steps"],
        )
    )
    rows = [
        {
            "what": name,
            "us each": cost.us,
            "control us": cost.control_us,
            "n": cost.us.n,
            "us a step": f"{us:.2f}",
            "of 20 ms": f"{us / (1e6 * STEP_S):.3%}",
        }
        for name, cost, us in costs
    ]
    sampler: Row = {
        "what": f"sampler's thread, every {found['sample_s']:g} s, {_CHILDREN} workers",
        "us each": f"{fraction.value:.3%} of a processor",
        "control us": f"{found['alone_fraction']:.3%}", "n": _SAMPLED_TURNS,
        "us a step": f"{1e6 * STEP_S * fraction.value:.2f}", "of 20 ms": f"{fraction.value:.3%}",
    }  # fmt: skip
    return [*rows, sampler]


def page(text: str) -> str:
    """Returns the page for scripts/bench/results/: the command, the date and its output."""
    day = f"{datetime.now(UTC).date():%d %B %Y}"
    return f"""# Monitoring overhead

`uv run python -m scripts.bench.watch.run` measures all that the harness does to see where time
goes. This is its whole output of {day}:

```
{text}
```

"Caches cold" is a step after {_COLD_BYTES >> 20} MiB were read: a training has better to do than to
watch itself. The events cost next to nothing here; CUDA's have a row of their own where there is a
GPU. What memory there is more are buckets of quantiles, which fill up as rarer times occur: a
figure has 1,383 at most. The samples of one batch in several are timed: the workers' share is the
mean over batches with and without, each by its median. Intervals are those of order
statistics.
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("Measure the overhead of monitoring per step, per worker and in memory.", PAGE)
    add = options.add_argument
    add("--steps", type=int, default=100_000, help="steps of each clock")
    add("--runs", type=int, default=500, help="runs of everything else, with and without it")
    add("--sampled-s", type=float, default=20.0, help="seconds to run the sampler's thread")
    add("--batches", type=int, default=2400, help="batches with and without the workers' timers")
    a = options.parse_args(argv)
    if a.steps < 10 or min(a.runs, a.batches) < 2 or a.sampled_s <= 0:
        options.error(
            "--steps: at least 10; --runs and --batches: at least 2; --sampled-s: more than 0"
        )
    found = measure(a.steps, a.runs, a.sampled_s, a.batches)
    print(show(found))
    if a.json:
        write(a.json, found)
    if a.write:
        write(PAGE, page(show(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
