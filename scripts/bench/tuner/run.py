"""Measures whether tuning pays off, in complete runs from command to exit.

Runs are tuned, untuned, tuned by older rules, or those of other projects.

The strategies alternate in a new random order each round. Every run is a line of the results file,
and existing lines are not measured again, so it can be interrupted at any time. Only the data is
kept between runs.

    uv run python -m scripts.bench.tuner.run --only jpeg_224 --epochs 3 --rounds 4
    uv run python -m scripts.bench.tuner.run --table
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from scripts.bench.paired import Estimate
from scripts.bench.tables import ROOT, Results, listed, machine, machine_line, markdown
from scripts.bench.tuner.slept import BEGAN, LARGE, READ, STEP

_RUN_S = 900.0
_COMMON = (
    "data=shapes",
    "data.generate.train_images=2000",
    "data.generate.val_images=100",
    "checkpoint.enabled=false",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Images, and a step that sleeps for ``step_ms``, or the network's own if empty.

    ``step_ms``, ``read_ms`` and ``large_from_s`` are as in ``slept_run.py``; one of them changes at
    ``at_s``. With ``ends_s``, a signal ends the run that long after its first window.
    """

    name: str
    about: str
    side: int
    step_ms: str = ""
    read_ms: str = ""
    overrides: tuple[str, ...] = ()
    at_s: float = 0.0
    large_from_s: str = ""
    ends_s: float = 0.0


_LARGE = ("data.generate.width=500", "data.generate.height=400")
# changes happen 13 s after the command
_Changing = partial(Workload, at_s=13, ends_s=32)
_ALL = (
    Workload("jpeg_224", "JPEG 500x400 at 224, a step of 40 ms", 224, "40", overrides=_LARGE),
    Workload("jpeg_64", "JPEG 80x80 at 64, a step of 150 ms", 64, "150"),
    Workload(
        "resnet18", "JPEG 80x80 at 64, ResNet-18 on the CPU", 64, overrides=("model=resnet18",)
    ),
    Workload("jpeg_32", "JPEG 80x80 at 32, a step of 2 ms", 32, "2"),
    Workload(
        "late_5", "JPEG 80x80 at 64, a step of 40 ms, files that come after 5 ms", 64, "40", "5"
    ),
    Workload(
        "late_20", "JPEG 80x80 at 64, a step of 40 ms, files that come after 20 ms", 64, "40", "20"
    ),
    _Changing("warms_5", "files after 5, then 0 ms, a step of 40 ms", 64, "40", "5,0@13"),
    _Changing("warms_20", "files after 20, then 0 ms, a step of 5 ms", 64, "5", "20,0@13"),
    _Changing("slows", "files after 0, then 5 ms, a step of 40 ms", 64, "40", "0,5@13"),
    _Changing("step", "files after 5 ms, a step of 160, then 40 ms", 64, "160,40@13", "5"),
    _Changing("dearer", "500x400 at 224, a step of 100, then 20 ms", 224, "100,20@13", "", _LARGE),
    _Changing("cheaper", "JPEG 80x80 at 64, a step of 40, then 150 ms", 64, "40,150@13"),
    _Changing(
        "larger", "80x80 at 224, then 500x400, a step of 40 ms", 224, "40", large_from_s="13"
    ),
    _Changing(
        "cached",
        "files after 20 ms, kept decoded, a step of 40 ms",
        64,
        "40",
        "20",
        ("data.cache=ram",),
        at_s=1,
    ),
    Workload("minute_2", "files after 2 ms, a step of 20 ms", 64, "20", "2", ends_s=62),
    Workload("minute_5", "files after 5 ms, a step of 40 ms", 64, "40", "5", ends_s=62),
    Workload("minute_10", "files after 10 ms, a step of none", 64, "0", "10", ends_s=62),
    Workload("minute_20", "files after 20 ms, a step of 160 ms", 64, "160", "20", ends_s=62),
    Workload("minute_50", "files after 50 ms, a step of 300 ms", 64, "300", "50", ends_s=62),
    Workload(
        "minute_large", "500x400 at 224 after 10 ms, 80 ms", 224, "80", "10", _LARGE, ends_s=62
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
STRATEGIES = {
    "default": (),
    "tuned": ("loader.autotune=true", "tuner.fresh=true"),
    "look": ("loader.autotune=true", "tuner.fresh=true", "tuner.live=false"),
    "2 threads": ("loader.backend=threads", "loader.num_workers=2"),
    "4 threads": ("loader.backend=threads", "loader.num_workers=4"),
    "8 threads": ("loader.backend=threads", "loader.num_workers=8"),
    "old default": ("loader.backend=processes", "loader.num_workers=1"),
    "grid": ("loader.autotune=true", "tuner=grid", "tuner.fresh=true"),
}
# of examples.py
EXAMPLES = {"examples": ("--workers", str(os.cpu_count())), "loadtune": ("--loadtune",)}


def run(workload: Workload, strategy: str, epochs: int, folder: Path) -> dict[str, Any]:
    """Returns seconds from command to exit, the seconds of tuning, and the settings."""
    place = Path(tempfile.mkdtemp(dir=folder))
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    env = os.environ | {"WELLFED_CACHE": str(folder / "cache"), "PYTHONPATH": paths}
    waits = {STEP: workload.step_ms, READ: workload.read_ms, BEGAN: str(time.time())}
    env |= {name: value for name, value in waits.items() if value}
    if workload.large_from_s:
        env[LARGE] = f"{_generated(500, folder)}@{workload.large_from_s}"
    # another project's loop, or train.py with this strategy's settings
    if strategy in EXAMPLES:
        script = "examples.py"
        width = 500 if workload.overrides == _LARGE else 80
        arguments = [str(_generated(width, folder)), f"--side={workload.side}"]
        arguments += [f"--epochs={epochs}", *EXAMPLES[strategy]]
    else:
        script = "slept_run.py"
        arguments = [*_COMMON, f"data.image_size={workload.side}", f"trainer.epochs={epochs}"]
        arguments += ["run.name=x", *workload.overrides, *STRATEGIES[strategy]]
        if workload.ends_s:
            arguments.append("trainer.epochs=1000")
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    begin = time.perf_counter()
    with (place / "out").open("w+") as out:
        with subprocess.Popen(command, cwd=place, env=env, stdout=out, stderr=out) as child:
            if workload.ends_s:
                _end_after(workload.ends_s, child, place / "outputs/x/metrics.jsonl")
            child.wait(_RUN_S)
        out.seek(0)
        text = out.read()
    seconds = time.perf_counter() - begin
    if child.returncode != 143 * bool(workload.ends_s):
        raise RuntimeError(
            f"{workload.name}, {strategy}: exit code {child.returncode}\n{text[-4000:]}"
        )
    if strategy in EXAMPLES:
        chosen = text.splitlines()[-1]
        return {"seconds": seconds, "tuning_s": 0.0, "chosen": chosen, "changes": [], "windows": []}
    # a wellfed run leaves a report
    report = json.loads((place / "outputs/x/report.json").read_text())
    tuning = report.get("tuning") or {}
    return {
        "seconds": seconds,
        "tuning_s": tuning.get("seconds", 0.0),
        "chosen": tuning.get("chosen"),
        "changes": tuning.get("changes", []),
        "windows": _windows(place / "outputs/x/metrics.jsonl", float(env[BEGAN])),
    }


def _generated(width: int, folder: Path) -> Path:
    """Returns the images of this width from an earlier run."""
    made = (folder / "cache").glob("*/shapes.json")
    return next(file.parent for file in made if json.loads(file.read_text())["width"] == width)


def _end_after(seconds: float, child: subprocess.Popen[bytes], metrics: Path) -> None:
    """Sends SIGTERM ``seconds`` after the first window of steps."""
    while child.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    time.sleep(seconds)
    child.terminate()


def _windows(metrics: Path, began_s: float) -> list[list[float]]:
    """Returns each window's end in seconds after the command, images/s and steps."""
    lines = map(json.loads, metrics.read_text().splitlines())
    windows = [line for line in lines if "speed/images_per_s" in line]
    # delay between the command and the run's clock
    late_s = metrics.stat().st_mtime - windows[-1]["time_s"] - began_s
    found = []
    before = 0
    for line in windows:
        rate = round(line["speed/images_per_s"], 1)
        found.append([round(line["time_s"] + late_s, 2), rate, line["step"] - before])
        before = line["step"]
    return found


def rate(line: dict[str, Any], from_s: float, to_s: float = math.inf) -> float:
    """Returns images/s of the windows that end in these seconds after the command, or 0.0."""
    found = [
        (images_per_s, steps)
        for end_s, images_per_s, steps in line["windows"]
        if from_s <= end_s < to_s
    ]
    if not found:
        return 0.0
    return float(statistics.harmonic_mean(*zip(*found, strict=True)))


def back_s(line: dict[str, Any], at_s: float, best: float) -> float:
    """Returns seconds from ``at_s`` until two seconds reach 0.95 of ``best`` images/s, or inf."""
    ends = (end_s for end_s, _, _ in line["windows"] if end_s >= at_s)
    return next(
        (end_s - at_s for end_s in ends if rate(line, end_s, end_s + 2) >= 0.95 * best), math.inf
    )


def changing(lines: Sequence[dict[str, Any]]) -> str:
    """Returns images/s after a change, and the time to recover.

    There is a row per changing workload and strategy.
    """
    rows = []
    for name, workload in WORKLOADS.items():
        if not workload.at_s:
            continue
        own = [line for line in lines if line["workload"] == name]
        for strategy in dict.fromkeys(line["strategy"] for line in own):
            mine = [line for line in own if line["strategy"] == strategy]
            # the best fixed number of threads, from a second later
            fixed = [
                rate(line, workload.at_s + 1)
                for line in own
                if line["strategy"].endswith("threads")
            ]
            best = max(filter(None, fixed), default=math.nan)
            after = [found for line in mine if (found := rate(line, workload.at_s))]
            back = statistics.median(back_s(line, workload.at_s, best) for line in mine)
            before = [rate(line, 9, workload.at_s) or math.nan for line in mine]
            changes = [
                ", ".join(f"{c['before']} to {c['threads']}" for c in line["changes"])
                for line in mine
            ]
            rows.append({
                "workload": name, "strategy": strategy, "n": len(mine),
                "before": f"{statistics.median(before):.0f}",
                "after": f"{statistics.median(after):.0f}",
                "of the best": f"{statistics.median(after) / best:.2f}",
                "back after": f"{back:.1f} s" if math.isfinite(back) else "never",
                "changes": "; ".join(changes),
            })  # fmt: skip
    return markdown(rows)


def trained(line: dict[str, Any], from_s: float, to_s: float, batch: int = 64) -> float:
    """Returns images/s of these seconds after the first training step, pauses included."""
    spans = [
        (end_s - steps * batch / images_per_s, end_s, steps * batch)
        for end_s, images_per_s, steps in line["windows"]
    ]
    first_s = spans[0][0]
    images = 0.0
    for begin_s, end_s, count in spans:
        inside_s = min(end_s, first_s + to_s) - max(begin_s, first_s + from_s)
        images += count * max(0.0, inside_s) / (end_s - begin_s)
    return images / (to_s - from_s)


def minutes(lines: Sequence[dict[str, Any]]) -> str:
    """Returns images/s in the first minute of training, relative to the best fixed thread count.

    There is a row per one-minute workload and strategy; the best has the highest median.
    """
    rows = []
    for name, workload in WORKLOADS.items():
        if workload.at_s or not workload.ends_s:
            continue
        own = [line for line in lines if line["workload"] == name]
        strategies = dict.fromkeys(line["strategy"] for line in own)
        spans = {"minute": (0, 60), "its second half": (30, 60)}
        medians = {
            strategy: {
                span: statistics.median(
                    trained(line, *spans[span]) for line in own if line["strategy"] == strategy
                )
                for span in spans
            }
            for strategy in strategies
        }
        for strategy in strategies:
            row = {"workload": name, "strategy": strategy}
            row["n"] = str(sum(line["strategy"] == strategy for line in own))
            for span in spans:
                fixed = [medians[s][span] for s in strategies if s.endswith("threads")]
                best = max(fixed, default=math.nan)
                row[span] = f"{medians[strategy][span]:.0f}"
                row[f"{span}, of the best"] = f"{medians[strategy][span] / best:.3f}"
            rows.append(row)
    return markdown(rows)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns seconds compared with the default of the same round.

    There is a row per workload, number of epochs and strategy.
    """
    rows = []
    groups = dict.fromkeys((line["workload"], line["epochs"], line["strategy"]) for line in lines)
    for name, epochs, strategy in sorted(
        groups, key=lambda group: (list(WORKLOADS).index(group[0]), *group[1:])
    ):
        if WORKLOADS[name].ends_s:
            continue
        # rounds with both this strategy and the default
        of_workload = [x for x in lines if (x["workload"], x["epochs"]) == (name, epochs)]
        own = {x["round"]: x for x in of_workload if x["strategy"] == strategy}
        base = {x["round"]: x["seconds"] for x in of_workload if x["strategy"] == "default"}
        paired = [(own[i]["seconds"], base[i]) for i in own.keys() & base.keys()]
        # stopped in its first round
        if not paired:
            continue
        later = Estimate.of([a - b for a, b in paired])
        ratio = Estimate.of([a / b for a, b in paired])
        chosen = sorted({str(line["chosen"]) for line in own.values() if line["chosen"]})
        rows.append({
            "workload": name, "epochs": epochs, "strategy": strategy, "n": len(paired),
            "seconds": f"{statistics.median(line['seconds'] for line in own.values()):.1f}",
            "later than the default": f"{later.value:+.1f} s [{later.low:+.1f}, {later.high:+.1f}]",
            "ratio": f"{ratio:.2f}",
            "tuning": f"{statistics.median(line['tuning_s'] for line in own.values()):.1f} s",
            "chosen": ", ".join(chosen),
        })  # fmt: skip
    return markdown(rows)


def main() -> None:
    """Measures what is missing, and prints the table."""
    known = (*STRATEGIES, *EXAMPLES)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"workloads: {','.join(WORKLOADS)}")
    parser.add_argument(
        "--strategies",
        default="default,tuned",
        help=f"of {','.join(known)}; whole runs are compared with the default",
    )
    parser.add_argument("--epochs", default="1,3,10")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--results", type=Path, default=ROOT / "outputs/tuner.jsonl")
    parser.add_argument(
        "--data", type=Path, default=Path(tempfile.gettempdir()) / "wellfed-elastic"
    )
    parser.add_argument("--table", action="store_true", help="only print existing results")
    chosen = parser.parse_args()
    names = listed(parser, "--only", chosen.only, tuple(WORKLOADS))
    strategies = dict.fromkeys(listed(parser, "--strategies", chosen.strategies, known))
    results = Results(chosen.results)
    if not chosen.table:
        chosen.data.mkdir(parents=True, exist_ok=True)
        epochs = map(int, chosen.epochs.split(","))
        for number, count, name in product(range(chosen.rounds), epochs, names):
            draw = random.Random(f"{number} {count} {name}")
            for strategy in draw.sample(list(strategies), len(strategies)):
                facts = {"workload": name, "epochs": count, "strategy": strategy, "round": number}
                if results.has(**facts):
                    continue
                if not results.has(workload=name):
                    # generates the images, and reads them once
                    run(replace(WORKLOADS[name], ends_s=0.0), "default", 1, chosen.data)
                results.add(**facts, **run(WORKLOADS[name], strategy, count, chosen.data))
                print(results.lines[-1], flush=True)
    print(f"{datetime.now(UTC):%Y-%m-%d}: {machine_line(machine())}")
    for told in (table, minutes, changing):
        print(f"\n{told(results.lines)}")


if __name__ == "__main__":
    main()
