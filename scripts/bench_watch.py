"""What all the watching costs: microseconds per step, its share of a step of 20 ms, and whether memory stays as it was.

Each cost is measured against the same loop without it, in turns, with which goes first in turns as well; beside it the loop
without runs against itself, which shows what this machine cannot resolve. What runs in the loop's thread counts in full, and
so does the sampler's thread, although it runs beside the loop; the workers' timers are a share of the workers' own time.

    uv run scripts/bench_watch.py --write
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.config import WatchConfig
from harness.feed.processes import _Batches
from harness.watch.board import Board, Figure, stages, timings
from harness.watch.clock import StepClock
from harness.watch.host import HostSource, Sampler
from harness.watch.stages import Lap, StageMeter, StageTimer, Stamps
from harness.watch.timeline import Events
from scripts.measured import machine, machine_line, markdown, write
from scripts.paired import Cost, Plan, Work

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "bench_watch.md"
STEP_S = 0.020  # the step that costs are held against
CEILING = 0.01  # the most that watching may take of it
STAGES = ("read", "decode", "crop", "write")
_BLOCK = 50  # steps in a run: it is over before another process is given the processor
_BATCH = 32  # samples
_COLD_BYTES = 64 << 20  # more than a processor's caches hold
_WORK = (50, 500, 15_000)  # a sample of microseconds, one of tens of them, one near a millisecond
_SETTINGS = WatchConfig()

Row = dict[str, Any]


class HostEvent:
    """A timing event of a device that is never behind the host."""

    def record(self, stream: Any = None) -> None:
        """Now."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """It has come."""
        return True

    def synchronize(self) -> None:
        """It has come."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to another event."""
        return 1e3 * float(end_event._at - self._at)


def stepping(clock: StepClock, copies: bool) -> Work:
    """The calls of a training loop and its prefetcher, a window's closing among them."""
    numbers = count(1)

    def work(steps: int) -> None:
        for _ in range(steps):
            with clock.waiting():
                now_s = time.perf_counter()
                clock.arrived(Stamps(now_s, now_s, now_s, now_s))
                if copies:
                    start, end = HostEvent(), HostEvent()
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
    """Clocks to be measured, and whether they are told of copies: by the host, on events that are free, on CUDA's if there."""
    found = {
        "step clock, host clock": (StepClock(), False),
        "step clock, events that cost nothing": (StepClock(events=Events(HostEvent, lambda: None, None)), True),
    }
    if torch.cuda.is_available():
        found["step clock, CUDA events"] = (StepClock("cuda"), False)
    return found


def window_cost(folder: Path, runs: int) -> Cost:
    """Of the end of a window: its figures, the workers' and the sampler's, into ``metrics.jsonl`` and the event file."""
    clock, meter = StepClock(events=Events(HostEvent, lambda: None, None)), StageMeter(STAGES, 8)
    stepping(clock, copies=True)(_SETTINGS.window_steps)
    making(1, meter.timer(0))(1)
    window = clock.total()
    with Board(folder, tensorboard=True) as board, Sampler([HostSource()], _SETTINGS.sample_s) as sampler:

        def figures() -> dict[str, Figure]:
            return {**timings(window), **stages(meter.read(), 8, 1.0), **sampler.read()}

        return Cost.of(lambda _: board.scalars(1, figures(), epoch=1), lambda _: None, Plan(runs))


class Making:
    """A data set whose samples are so much work in each of the stages."""

    stages = STAGES
    image_size = 8

    def __init__(self, work: int) -> None:
        self.work = work

    def __len__(self) -> int:
        return _BATCH

    def fill(self, epoch: int, index: int, out: np.ndarray, lap: Lap | None = None) -> int:
        """Do the work, and tell ``lap`` of each stage."""
        for stage in STAGES:
            sum(range(self.work))
            if lap is not None:
                lap(stage)
        return 0


class Untimed(StageTimer):
    """A timer that looks at no clock."""

    def __init__(self) -> None:
        self._stamps = Stamps(0.0, 0.0, 0.0, 0.0)

    def begin(self, samples: int) -> None:
        """Nothing is to be timed."""

    def fill(self) -> None:
        """Nothing."""

    def end(self, samples: int) -> Stamps:
        """No time at all."""
        return self._stamps


def making(work: int, timer: StageTimer) -> Work:
    """What a worker does for a batch whose samples are so much ``work``."""
    batches, key = _Batches(Making(work), None), (0, np.arange(_BATCH))
    batches._timer = timer
    return lambda _: batches.__getitems__(key)


def stage_cost(work: int, runs: int) -> Cost:
    """Of the stages' timers, a batch of samples of so much ``work``."""
    timer = StageMeter(STAGES, 0).timer(0)
    return Cost.of(making(work, timer), making(work, Untimed()), Plan(runs, now=time.thread_time))


def sampler_fraction(seconds: float) -> tuple[float, float]:
    """The share of one processor that this process takes with a sampler's thread, and without, while it does nothing else."""

    def spent() -> float:
        begin, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - cpu) / (time.perf_counter() - begin)

    alone = spent()
    with Sampler([HostSource()], _SETTINGS.sample_s) as sampler:
        sampler.look()  # the first one opens files
        return spent() - alone, alone


def memory_growth(work: Work, steps: int) -> int:
    """Bytes that Python holds more after ``steps`` steps than after a tenth of them."""
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


def measure(steps: int, runs: int, sampled_s: float) -> dict[str, Any]:
    """All costs and the growth of memory.

    Args:
        steps: over how many steps a clock is measured, and memory.
        runs: of everything else.
        sampled_s: seconds over which the sampler is.
    """
    cold = np.zeros(_COLD_BYTES // 8)
    costs, growth = {}, {}
    for name, (clock, copies) in clocks().items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        work = stepping(clock, copies)
        costs[name] = Cost.of(work, bare_steps, Plan(-(-steps // _BLOCK), _BLOCK))
        costs[f"{name}, caches cold"] = Cost.of(work, bare_steps, Plan(runs, before=cold.sum))
        growth[name] = memory_growth(work, steps)
    with tempfile.TemporaryDirectory() as folder:
        window = window_cost(Path(folder), runs)
    sampler, alone = sampler_fraction(sampled_s)
    return {
        "machine": machine(), "steps": steps, "window_steps": _SETTINGS.window_steps, "sample_s": _SETTINGS.sample_s,
        "clocks": costs, "window": window, "sampler_fraction": sampler, "alone_fraction": alone, "memory_growth_bytes": growth,
        "stages": [stage_cost(work, runs) for work in _WORK],
    }  # fmt: skip


def per_step_us(found: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds a step of each clock with all else that watching does beside a step of 20 ms."""
    rest = found["window"].us.median / found["window_steps"] + 1e6 * STEP_S * found["sampler_fraction"]
    return {name: cost.us.median + rest for name, cost in found["clocks"].items()}


def show(found: Mapping[str, Any]) -> str:
    """The figures as text: what each thing costs, what all of them do to a step, the workers' timers, and memory."""
    total = per_step_us(found)
    workers = [
        {"a sample's own us": f"{cost.bare_us.median / _BATCH:.1f}", "us a batch": cost.us, "control us": cost.control_us,
         "us a sample": f"{cost.us.median / _BATCH:.3f}", "of the work": f"{cost.us.median / cost.bare_us.median:.3%}"}
        for cost in found["stages"]
    ]  # fmt: skip
    sums = [{"all of it, with": name, "us a step": f"{us:.1f}", "of 20 ms": _of_step(us)} for name, us in total.items()]
    memory = [{"memory of": name, "bytes more": size} for name, size in found["memory_growth_bytes"].items()]
    held = max(total.values()) <= 1e6 * STEP_S * CEILING
    return f"""{machine_line(found["machine"])}
median (quartiles) of paired runs in turns; control: the loop without, against itself

In the process that trains

{markdown(_costs(found))}

{markdown(sums)}

In the workers, beside their own work: {len(STAGES)} stages, batches of {_BATCH} samples

{markdown(workers)}

Memory after {found["steps"]} steps against after {found["steps"] // 10}

{markdown(memory)}

Claim, all watching takes at most {CEILING:.0%} of a step of 20 ms: {"holds" if held else "FAILS"}."""


def _costs(found: Mapping[str, Any]) -> list[Row]:
    """A row for everything that is done in the process that trains."""
    window, fraction = found["window"], found["sampler_fraction"]
    costs = [(name, cost, cost.us.median) for name, cost in found["clocks"].items()]
    costs.append((f"end of a window, every {found['window_steps']} steps", window, window.us.median / found["window_steps"]))
    rows = [
        {"what": name, "us each": cost.us, "control us": cost.control_us, "n": cost.us.n, "us a step": f"{us:.2f}",
         "of 20 ms": _of_step(us)}
        for name, cost, us in costs
    ]  # fmt: skip
    sampler: Row = {
        "what": f"sampler's thread, every {found['sample_s']:g} s", "us each": f"{fraction:.3%} of a processor",
        "control us": f"{found['alone_fraction']:.3%}", "n": 1, "us a step": f"{1e6 * STEP_S * fraction:.2f}",
        "of 20 ms": f"{fraction:.3%}",
    }  # fmt: skip
    return [*rows, sampler]


def _of_step(us: float) -> str:
    return f"{us / (1e6 * STEP_S):.3%}"


def page(text: str) -> str:
    """The page for docs/: what was run, when, and its output."""
    day = f"{datetime.now(UTC).date():%d %B %Y}"
    return f"""# What watching costs

`uv run scripts/bench_watch.py` measures all that the harness does to see where time goes. This is its whole output of {day}:

```
{text}
```

"Caches cold" is a step after {_COLD_BYTES >> 20} MiB were read: a training has better to do than to watch itself. The events
cost next to nothing here; CUDA's have a row of their own where there is a GPU. What memory there is more are buckets of
quantiles, which fill up as rarer times occur: a figure has 1,383 at most.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Measure what all watching costs a training step, a worker and memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100_000, help="steps of each clock")
    parser.add_argument("--runs", type=int, default=500, help="of everything else, with and without it in turns")
    parser.add_argument("--sampled-s", type=float, default=20.0, help="seconds over which the sampler's thread is measured")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    a = parser.parse_args(argv)
    if a.steps < 10 or a.runs < 2 or a.sampled_s <= 0:
        parser.error("--steps: at least 10; --runs: at least 2; --sampled-s: more than 0")
    found = measure(a.steps, a.runs, a.sampled_s)
    print(show(found))
    if a.json:
        write(a.json, found)
    if a.write:
        write(PAGE, page(show(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
