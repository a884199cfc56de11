"""One command that checks on a GPU what cannot be checked without one, part by part, in under eight minutes.

    uv run scripts/gpu_check.py --out FOLDER

writes ``gpu_check.json`` and ``gpu_check.md`` there. A part that fails is recorded with its error and the others go on; the
exit code is then 1. Without a CUDA device, parts that have a form for the CPU run in it, the others say why they are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.config import AugmentConfig, Config, ModelConfig, Precision, TrainerConfig
from harness.data import datasets
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime.distributed import World
from harness.training.state import make_state
from harness.training.step import Step
from harness.watch.clock import StepClock
from scripts import gpu_feeds, gpu_loaders
from scripts.bench_loop import make_batches
from scripts.bench_pinned_copy import Work, overlap, plain_copies
from scripts.differential import Rig, compare, emulated_rig
from scripts.gpu_overlap import Slow, step_ms, wait, wrong_values
from scripts.measured import Sample, machine, machine_line, markdown, write

ROOT = Path(__file__).resolve().parent.parent
HIDDEN_FLOOR = 0.7  # share of the copy that the prefetcher must hide
STALL_TOLERANCE = 0.01  # how far the clock's stall may be from the differential method's, as shares of the time
EMULATED_TOLERANCE = 0.03  # the same where the device is made of threads, which a busy machine wakes late

Row = dict[str, Any]


class SkippedError(Exception):
    """A part that this machine cannot run; the text says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a part may use: a CUDA device or None, a folder that is thrown away, and how long."""

    device: torch.device | None
    quick: bool
    scratch: Path
    deadline: float

    def cuda(self, why: str) -> torch.device:
        """The CUDA device, or a ``SkippedError`` that says ``why`` the part needs one."""
        if self.device is None:
            raise SkippedError(f"no CUDA device: {why}")
        return self.device


@dataclass(slots=True)
class Finding:
    """What a part found: one line, a table, and what is wrong."""

    summary: str
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def check_pytest(o: Options) -> Finding:
    """The tests that are marked ``gpu``."""
    o.cuda("the tests marked gpu need one")
    done = _run(["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"], 150)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no output"]
    return Finding(lines[-1], problems=[f"exit code {done.returncode}: {' / '.join(lines[-15:])}"] if done.returncode else [])


def check_prefetcher(o: Options) -> Finding:
    """Whether the prefetcher hides the copy behind the step, and gives the right values when either of them is slow."""
    device = o.device or torch.device("cpu")
    if o.device:  # batches of ImageNet's size, and work that takes twice as long as their copy
        what, loader = "copy", Slow(make_batches(4, 256, 224, pin=True), count=40)
        work: Callable[[], object] = Work(
            device, 2 * step_ms(DataPrefetcher(loader, device, ahead=False), lambda: None, device)
        )
    else:
        what, loader = "loading (CPU)", Slow(make_batches(1, 1, 8, pin=False), 0.004, count=25)
        work = lambda: time.sleep(0.008)
    times: dict[str, list[float]] = {"step alone": [], "ahead=False": [], "ahead=True": []}
    for _ in range(3 if o.quick else 9):
        times["step alone"].append(step_ms(range(loader.count), work, device))
        for ahead in (False, True):
            times[f"ahead={ahead}"].append(step_ms(DataPrefetcher(loader, device, ahead=ahead), work, device))
    alone, plain, hiding = (median(values) for values in times.values())
    hidden = (plain - hiding) / (plain - alone)
    problems = [] if hidden >= HIDDEN_FLOOR else [f"less than {HIDDEN_FLOOR:.0%} is hidden"]
    problems += wrong_values(device, slow="copy") + wrong_values(device, slow="step")
    rows = [{"loop": name, "step ms": Sample.of(values)} for name, values in times.items()]
    return Finding(f"{hidden:.0%} of the {what} hidden; values checked with a slow copy and with a slow step", rows, problems)


def resnet_rig(device: torch.device, compiled: bool) -> Rig:
    """ResNet-18 in bf16 and channels_last on 128 images of 160 pixels, fed by the prefetcher."""
    trainer = TrainerConfig(precision=Precision.bf16, channels_last=True, compile=compiled)
    config, world = Config(model=ModelConfig(name="resnet18"), trainer=trainer), World(0, 1, 0, 1, device)
    step, ready = Step(make_state(config, 10, world, 1000), config, world), make_batches(4, 128, 160, pin=True)
    how: Row = {"mean": config.data.mean, "std": config.data.std, "dtype": torch.bfloat16, "channels_last": True}
    return Rig(
        clock=lambda: StepClock(device),
        batches=lambda sleep_s, count, clock: iter(DataPrefetcher(Slow(ready, sleep_s, count), device, clock=clock, **how)),
        launch=lambda batch: step(*batch),
        wait=lambda: wait(device),
    )


def check_stall(o: Options) -> Finding:
    """The step clock's stall against the differential method; without a GPU on an emulated device."""
    steps = 10 if o.quick else 20
    if o.device is None:
        return Finding(*compare(emulated_rig(), steps, EMULATED_TOLERANCE))
    return Finding(*compare(resnet_rig(o.device, compiled=False), steps, STALL_TOLERANCE))


def check_stall_compiled(o: Options) -> Finding:
    """The same with ``torch.compile``."""
    device = o.cuda("the emulated device has no network to compile")
    return Finding(*compare(resnet_rig(device, compiled=True), 10 if o.quick else 20, STALL_TOLERANCE))


def check_copies(o: Options) -> Finding:
    """Pinned against pageable copies, alone and beside work that does not need them."""
    device, n = o.cuda("scripts/bench_pinned_copy.py says what can be measured without one"), 5 if o.quick else 20
    rows = plain_copies(device, [36], n) + overlap(device, 256, n)  # 36 MiB: 256 uint8 images of 224 pixels
    rate, hidden = ({row["way"]: row.get(key) for row in rows} for key in ("GB/s", "hidden"))
    summary = (
        f"pageable {rate['pageable, x.to(device)']} GB/s, pinned {rate['pinned before, non_blocking']} GB/s; hidden behind "
        f"unrelated work: {hidden['pinned, same stream']} on one stream, {hidden['pinned, side stream']} on a side stream"
    )
    return Finding(summary, [{key: row.get(key, "") for key in ("way", "done after ms", "GB/s", "hidden")} for row in rows])


def check_resnet50(o: Options) -> Finding:
    """``train.py`` with ResNet-50 (bf16, channels_last, batch 256) on generated JPEGs, untuned and tuned, and on no data."""
    o.cuda("a CPU takes minutes for a step of ResNet-50")
    common, files = gpu_feeds.resnet50(o.scratch, *((1280, 25) if o.quick else (2560, 100)))
    runs = {"fake": ["data=fake"], "untuned": files, "tuned": [*files, "loader.autotune=true", "tuner.fresh=true"]}
    rows = []
    for turn in range(1 if o.quick else 2):
        for name in runs:
            if turn == 0 or time.monotonic() < o.deadline - 60:  # the second turn is for the spread; the first one is owed
                rows.append({"run": name, **_figures(train([*runs[name], *common], o.scratch / f"{name}-{turn}", 120))})
    rate = {name: median(row["images/s"] for row in rows if row["run"] == name) for name in runs}
    return Finding("images/s: " + ", ".join(f"{name} {value:.0f}" for name, value in rate.items()), rows)


def check_feeds(o: Options) -> Finding:
    """ResNet-50 fed by threads and by processes, on ever fewer cores, against a run that loads nothing."""
    return _fed(o, gpu_loaders.OURS)


def check_feeds_compiled(o: Options) -> Finding:
    """The same with ``torch.compile``."""
    return _fed(o, gpu_loaders.OURS, "--compile")


def check_peers(o: Options) -> Finding:
    """The same fed by the loaders of other projects that can be imported: pytorch/examples, nvJPEG, DALI and SPDL."""
    return _fed(o, gpu_loaders.peers())


def _fed(o: Options, loaders: Sequence[str], *how: str) -> Finding:
    o.cuda("a CPU takes minutes for a step of ResNet-50")

    def left_s() -> float:
        return o.deadline - time.monotonic()

    if left_s() < 2 * gpu_feeds.LEAST_S:
        raise SkippedError("too little time is left; name this part alone with --parts")
    data = gpu_feeds.shapes(o.scratch, 1280 if o.quick else 2560)
    datasets.load(data, AugmentConfig(), 0)

    def run(name: str, cores: int) -> Row:
        arguments = [str(ROOT / "scripts" / "gpu_loaders.py"), name, str(data.root), str(cores), *how]
        done = _run(arguments, gpu_feeds.LIMIT_S, cores)
        if done.returncode != 0:
            raise RuntimeError(f"gpu_loaders.py ended with {done.returncode}: {(done.stdout + done.stderr)[-600:].strip()}")
        found: Row = json.loads(done.stdout.splitlines()[-1])
        return found

    rows = gpu_feeds.cores(loaders, run, left_s)
    failed = [f"{row['feed']} on {row['cores']} cores: {row['failed']}" for row in rows if row["failed"]]
    return Finding(gpu_feeds.fewest(rows), rows, failed)


def check_launches(o: Options) -> Finding:
    """Step time of ResNet-50 with 16 decoding threads beside it, eager and compiled."""
    device = o.cuda("launches are a GPU's")
    rows = [gpu_feeds.launches(device, o.scratch, compiled) for compiled in (False, True)]
    over = [row for row in rows if row["ratio"] > gpu_feeds.BESIDE]
    slow = [f"{row['network']}: {row['ratio']:.3f} is over {gpu_feeds.BESIDE}" for row in over]
    return Finding(", ".join(f"{row['network']} {row['ratio']:.3f}" for row in rows) + " times the step alone", rows, slow)


def train(overrides: Sequence[str], run_folder: Path, limit_s: float) -> Row:
    """``report.json`` of a run of ``train.py``.

    Raises:
        RuntimeError: it failed; with its last words.
        subprocess.TimeoutExpired: it took longer than ``limit_s``.
    """
    done = _run([str(ROOT / "train.py"), *overrides, f"hydra.run.dir={run_folder}"], limit_s)
    if done.returncode != 0:
        raise RuntimeError(f"train.py ended with {done.returncode}: {(done.stdout + done.stderr)[-600:].strip()}")
    report: Row = json.loads((run_folder / "report.json").read_text(encoding="utf-8"))
    return report


def _figures(report: Row) -> Row:
    step, loader = report["step_ms"], report["loader"]
    return {
        "images/s": round(report["images_per_s"]), "step ms": f"{step['median']:.1f} (p95 {step['p95']:.1f})",
        "stall": round(report["stall_fraction"], 3), "data wait": round(report["data_wait_fraction"], 3),
        "num_workers": loader["num_workers"], "pin_memory": loader["pin_memory"],
    }  # fmt: skip


def _run(arguments: Sequence[str], limit_s: float, cores: int | None = None) -> subprocess.CompletedProcess[str]:
    """Python with ``arguments`` in the project's folder, where it finds the project without its being installed."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    return subprocess.run(
        ["taskset", "-c", allowed, sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths},
        timeout=limit_s, capture_output=True, text=True, check=False,
    )  # fmt: skip


PARTS: dict[str, Callable[[Options], Finding]] = {
    "pytest": check_pytest,
    "prefetcher": check_prefetcher,
    "stall": check_stall,
    "stall_compiled": check_stall_compiled,
    "copies": check_copies,
    "resnet50": check_resnet50,
    "launches": check_launches,
    "feeds": check_feeds,
    "feeds_compiled": check_feeds_compiled,
    "peers": check_peers,
}


def run_part(name: str, o: Options) -> Row:
    """What became of one part, whatever it raised."""
    begin, rows = time.monotonic(), []
    try:
        found = PARTS[name](o)
        status, text, rows = "failed" if found.problems else "ok", "; ".join((found.summary, *found.problems)), found.rows
    except SkippedError as reason:
        status, text = "skipped", str(reason)
    except Exception as error:  # one part's end is not the others'
        traceback.print_exc()
        status, text = "failed", f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - begin, 1)
    return {"part": name, "status": status, "seconds": seconds, "found": " ".join(text.split()), "rows": rows}


def show(found: Row) -> str:
    """The whole check as Markdown."""
    lines = [f"# GPU check\n\n{found['date']}: {machine_line(found['machine'])}"]
    lines.append(markdown([{key: part[key] for key in ("part", "status", "seconds", "found")} for part in found["parts"]]))
    lines += [f"## {part['part']}\n\n{markdown(part['rows'])}" for part in found["parts"] if part["rows"]]
    return "\n\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Check on a GPU what cannot be checked without one; on a CPU, the parts that can run there.",
        epilog="\n".join(f"{name:15} {check.__doc__}" for name, check in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="which of the parts below, with commas between; all if not given"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and images")
    parser.add_argument("--out", type=Path, help="write gpu_check.json and gpu_check.md into this folder")
    a = parser.parse_args(argv)
    names = a.parts.split(",")
    if unknown := set(names) - PARTS.keys():
        parser.error(f"--parts: unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    found: Row = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "quick": a.quick, "parts": []}
    with tempfile.TemporaryDirectory() as scratch:
        options = Options(device, a.quick, Path(scratch), time.monotonic() + 420)
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            found["parts"].append(run_part(name, options))
    print(show(found))
    if a.out:
        write(a.out / "gpu_check.json", found)
        write(a.out / "gpu_check.md", show(found))
    return 1 if any(part["status"] == "failed" for part in found["parts"]) else 0


if __name__ == "__main__":
    sys.exit(main())
