"""Compares TraceML and wellfed: diagnoses of planted bottlenecks, and overhead.

TraceML (``traceml-ai`` on PyPI) is not a dependency; uv adds it to the environment for this
command:

    uv run --with traceml-ai python -m scripts.bench.watch.beside_traceml --write

Diagnoses: for each plant a hand-written loop runs under ``traceml run``, instrumented as
    documented, and ``train.py`` runs with the same data, network, batch size and workers. Both are
    quoted verbatim.

Overhead: the hand-written loop with almost no work runs bare, bare again (the control), under
    TraceML, and under all monitoring of a wellfed run. All four exist at once and take turns of a
    few hundred steps in random order; the others are stopped (SIGSTOP) with all their processes, so
    threads and helpers cost only their own turns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

import numpy as np
import psutil

from scripts.bench.paired import Estimate
from scripts.bench.tables import (
    PAGES,
    ROOT,
    Sample,
    machine,
    machine_line,
    markdown,
    parser,
    write,
)
from scripts.bench.watch.traceml_loop import BATCH, GO, PLANTS, Plant

PAGE = PAGES / "traceml.md"
LOOP = Path(__file__).with_name("traceml_loop.py")
# step times to which overhead is compared, and steps per turn
STEPS_MS = {0.25: 2000, 2.0: 400, 20.0: 40}
COSTS = {
    "control": "control: bare again",
    "traceml": "TraceML",
    "clock": "wellfed, instrumented loop: clock, sampler, TensorBoard, metrics.jsonl",
    "watch": "wellfed watch, unmodified loop",
}
# by side: wall and CPU seconds per step in each turn
Turns = Mapping[str, Sequence[tuple[float, float]]]
# timeout for a loop to start, take its turn, or end
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Said:
    """One tool's diagnosis of one run.

    Attributes:
        tool: name of the tool.
        plant: the planted bottleneck.
        words: the verdict, verbatim.
        figures: its fractions or times.
        loop_s: seconds of the training loop.
        command_s: seconds of the whole command.
    """

    tool: str
    plant: str
    words: str
    figures: str
    loop_s: float
    command_s: float


def command(side: str, plant: str, folder: Path, *more: str) -> list[str]:
    """Returns the command line of one run; TraceML's is as documented."""
    own = ["--side", side, "--plant", plant, "--folder", str(folder), *more]
    if side == "watch":
        watch = ("-m", "wellfed", "watch", "--out", str(folder / "watched"))
        return [sys.executable, *watch, str(LOOP), *own]
    if not side.startswith("traceml"):
        return [sys.executable, str(LOOP), *own]
    traceml = shutil.which("traceml", path=str(Path(sys.executable).parent)) or "traceml"
    logs = ("--logs-dir", str(folder / "logs"), "--run-name", "run")
    return [traceml, "run", str(LOOP), *logs, "--args", *own]


def environment() -> dict[str, str]:
    """Returns the processes' environment: one thread each, and this project importable."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class RunFailed(Exception):
    """A failed run, with the end of its output."""


def heard(side: str, plant: str, steps: int, attempts: int = 3) -> Said:
    """Returns the diagnosis by ``side`` of a run of ``plant``, in up to ``attempts`` tries.

    TraceML may give up on a busy machine.

    Raises:
        RunFailed: the last attempt failed too.
    """
    try:
        return listen_to(side, plant, steps)
    except RunFailed as error:
        if attempts == 1:
            raise
        print(f"again: {error}", file=sys.stderr)
        return heard(side, plant, steps, attempts - 1)


def listen_to(side: str, plant: str, steps: int) -> Said:
    """Returns the diagnosis by ``side`` of one run of ``plant``."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        begin_s = time.perf_counter()
        done = subprocess.run(
            command(side, plant, folder, "--steps", str(steps)),
            env=environment(), capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        command_s = time.perf_counter() - begin_s
        if done.returncode != 0:
            raise RunFailed(
                f"{side}, {plant}: exit code {done.returncode}: "
                f"{(done.stderr or done.stdout)[-2000:]}"
            )
        loop_s = json.loads((folder / "loop.json").read_text())["loop_s"]
        words, figures = _ours(folder) if side == "harness" else theirs(folder)
    tool = {
        "harness": "wellfed",
        "traceml": "TraceML",
        "traceml_log_inside": "TraceML, the log line inside `trace_step`",
    }[side]
    return Said(tool, plant, words, figures, loop_s, command_s)


def _ours(folder: Path) -> tuple[str, str]:
    report = json.loads((folder / "report.json").read_text())
    shares = ", ".join(
        f"{name.replace('_', ' ')} {share:.0%}" for name, share in report["shares"].items()
    )
    return (
        f"{report['verdict']['bottleneck']}: {report['verdict']['sentence']}",
        f"{shares} of the time",
    )


def theirs(folder: Path) -> tuple[str, str]:
    """Returns TraceML's verdict, verbatim, and its numbers."""
    summary = json.loads((folder / "logs" / "run" / "final_summary.json").read_text())
    text = summary["text"]
    words = [
        found[1].strip()
        for name in ("Verdict", "Why", "Next")
        if (found := re.search(rf"{name}: (.*?)\s*\|?$", text, re.M))
    ]
    evidence = summary["primary_diagnosis"]["evidence"]
    wanted = ("step_time_ms", "input_wait_ms", "compute_ms", "residual_ms")
    figures = [
        f"{key.removesuffix('_ms').replace('_', ' ')} {evidence[key]:.1f}"
        for key in wanted
        if evidence.get(key) is not None
    ]
    return " ".join(re.sub(r"\s+", " ", word) for word in words), f"{', '.join(figures)} ms a step"


class Side:
    """One loop that waits for its turns, with all its processes.

    Args:
        name: the monitoring tool.
        folder: for its files.
        block: steps per turn.
        spin_s: work per step.
    """

    def __init__(self, name: str, folder: Path, block: int, spin_s: float) -> None:
        self._name = name
        self._block = block
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / f"{name}.socket"))
        self._server.listen()
        self._server.settimeout(_PATIENCE_S)
        turns = ("--turns", str(folder / f"{name}.socket"), "--block", str(block))
        more = (*turns, "--steps", str(10**9 // BATCH), "--spin-s", str(spin_s))
        with (folder / f"{name}.txt").open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command("bare" if name == "control" else name, "nothing", folder / name, *more),
                env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._line: IO[str] | None = None

    def begin(self) -> None:
        """Waits until the loop is ready for its first turn, and stops it."""
        # its file keeps it open
        with self._server.accept()[0] as line:
            line.settimeout(_PATIENCE_S)
            self._line = line.makefile("rw", encoding="ascii")
        self._line.readline()
        self._stop(True)

    def turn(self) -> tuple[float, float]:
        """Returns wall and CPU seconds per step in a turn, of all its processes."""
        self._stop(False)
        cpu_s = self._cpu_s()
        assert self._line is not None
        self._line.write(GO)
        self._line.flush()
        took_s = float(self._line.readline())
        spent_s = self._cpu_s() - cpu_s
        self._stop(True)
        return took_s / self._block, spent_s / self._block

    def end(self) -> None:
        """Ends the loop and waits for its processes; kills those that remain."""
        processes = self._processes()
        self._stop(False)
        try:
            if self._line is not None:
                self._line.write("end\n")
                self._line.close()
                self.process.wait(_PATIENCE_S)
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
            self._server.close()

    def _stop(self, stopped: bool) -> None:
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.suspend() if stopped else process.resume()

    def _cpu_s(self) -> float:
        return sum(
            times.user + times.system
            for times in (process.cpu_times() for process in self._processes())
        )

    def _processes(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextmanager
def sides(folder: Path, block: int, spin_s: float) -> Iterator[dict[str, Side]]:
    """Yields all loops, started one after the other, and ends them afterwards."""
    with ExitStack() as stack:
        found = {}
        for name in ("bare", *COSTS):
            print(f"starting {name}", file=sys.stderr)
            found[name] = Side(name, folder, block, spin_s)
            stack.callback(found[name].end)
            found[name].begin()
        yield found


def take_turns(rounds: int, block: int, step_ms: float) -> dict[str, list[tuple[float, float]]]:
    """Returns wall and CPU seconds per step of every turn, by side, without the first round."""
    draw = random.Random(0)
    spin_s = step_ms / 1e3 if step_ms > 1 else 0.0
    with tempfile.TemporaryDirectory() as folder, sides(Path(folder), block, spin_s) as loops:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
        for number in range(-1, rounds):
            for name in draw.sample([*loops], len(loops)):
                took = loops[name].turn()
                if number >= 0:
                    found[name].append(took)
            if number > 0 and number % 20 == 0:
                print(f"round {number} of {rounds}", file=sys.stderr)
    return found


def cost_rows(costs: Mapping[float, Turns]) -> list[dict[str, object]]:
    """Returns rows on the extra time per step of each side, for each step length."""
    found: list[dict[str, object]] = []
    for turns in costs.values():
        bare_us = Sample.of([1e6 * wall_s for wall_s, _ in turns["bare"]])
        for name, about in COSTS.items():
            longer_us = 1e6 * (np.asarray(turns[name]) - np.asarray(turns["bare"]))
            wall, cpu = map(Estimate.of, longer_us.T)
            found.append({
                "bare step, us": str(bare_us), "watched by": about,
                "us a step longer": f"{wall:+.0f}", "us of a processor more": f"{cpu:+.0f}",
                "of the step": f"{wall.value / bare_us.median:.2%}", "n": len(longer_us),
            })  # fmt: skip
    return found


def said_rows(said: Sequence[Said]) -> list[dict[str, object]]:
    """Returns the diagnoses, one row per run."""
    return [
        {
            "planted": one.plant.replace("_", " "),
            "tool": one.tool,
            "says": one.words,
            "figures": one.figures,
            "loop s": f"{one.loop_s:.0f}",
            "command s": f"{one.command_s:.0f}",
        }
        for one in said
    ]


def show(said: Sequence[Said], costs: Mapping[float, Turns], steps: int) -> str:
    """The page."""
    # the loops', not this process's
    found = machine() | {"torch_threads": 1}
    return f"""# TraceML and wellfed

{machine_line(found)}; traceml-ai {metadata.version("traceml-ai")}; load average
{os.getloadavg()[0]:.1f} at the end

## Diagnoses

{markdown(said_rows(said))}

One run each of {steps} steps, batch {BATCH}, one worker, on the CPU, so that both have host clocks
only. What is slow sleeps: {_plants()}. TraceML watches a loop written by hand as its documentation
has it, `traceml run` with `trace_step` around `zero_grad` to `optimizer.step`; wellfed runs
`train.py` with the same data, network and settings, and a board that writes the slow line. Quotes
are word for
word: Verdict, Why and Next of TraceML's summary, `verdict` of wellfed's `report.json`. Loop:
    seconds of the training loop, for wellfed with start-up and evaluation; command: all, start to
    exit.

TraceML's step is the wait for input and the traced block: what comes behind the block is in none of
its figures. Its averages hold the first batch, for which the worker has to start; wellfed counts an
epoch's first step separately.

## Monitoring overhead

{markdown(cost_rows(costs))}

Medians of differences to the bare loop, whose step has its median (quartiles). Pairs are turns of
{", ".join(map(str, STEPS_MS.values()))} steps of the same round, in random order; [95 % interval,
of order statistics]. Batches are preloaded, and longer steps work longer. A side without a turn is
stopped. Processor time is that of all processes of a side, TraceML's
aggregator among them. The control says what cannot be told apart.

To repeat: `uv run --with traceml-ai python -m scripts.bench.watch.beside_traceml --write`.
"""


def _plants() -> str:
    parts = {
        "read_s": "a sample's read",
        "forward_s": "the forward pass",
        "log_s": "a log line after each step",
    }
    told = []
    for name, plant in PLANTS.items():
        sleeps = [
            f"{1e3 * getattr(plant, key):g} ms in {part}"
            for key, part in parts.items()
            if getattr(plant, key)
        ]
        if plant != Plant():
            told.append(f"{name.replace('_', ' ')}: {' and '.join(sleeps)}")
    return "; ".join(told)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(
        "Compare diagnoses of planted bottlenecks by TraceML and wellfed.", PAGE, json=False
    )
    made.add_argument("--steps", type=int, default=300, help="steps of each diagnosed run")
    made.add_argument("--rounds", type=int, default=60, help="turns of each measured loop")
    options = made.parse_args(argv)
    if importlib.util.find_spec("traceml_ai") is None:
        print(
            "error: TraceML is not installed; run uv run --with traceml-ai "
            "python -m scripts.bench.watch.beside_traceml",
            file=sys.stderr,
        )
        return 2
    said = []
    for plant in ("slow_read", "slow_step", "slow_logging"):
        own_way = ["traceml_log_inside"] if plant == "slow_logging" else []
        for side in ("traceml", *own_way, "harness"):
            print(f"{plant}, {side}", file=sys.stderr)
            said.append(heard(side, plant, options.steps))
    costs = {ms: take_turns(options.rounds, block, ms) for ms, block in STEPS_MS.items()}
    page = show(said, costs, options.steps)
    print(page)
    if options.write:
        write(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
