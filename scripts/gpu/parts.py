"""Runs one part of ``gpu_check.py`` in a separate process, which reports its results.

It prints JSON lines: ``machine``, then each ``row`` and each fault as ``wrong``, then the outcome.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.clock.clock import StepClock
from harness.config import AugmentConfig, Config, ModelConfig, Precision, TrainerConfig
from harness.data import datasets
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator
from harness.runtime.distributed import World
from harness.training.state import make_state
from harness.training.step import Step
from scripts.bench.differential import Rig, compare, emulated_rig
from scripts.bench.loop import make_batches
from scripts.bench.tables import Sample, machine, plain
from scripts.gpu import feeds as gpu_feeds
from scripts.gpu import loaders as gpu_loaders
from scripts.gpu import unsettled as gpu_unsettled
from scripts.gpu.copies import Work, host_copies, overlap, plain_copies
from scripts.gpu.options import Options, Part, Row, Said, SkippedError
from scripts.gpu.overlap import Slow, step_ms, wait, wrong_values

ROOT = Path(__file__).resolve().parents[2]
# fraction of the copy that the prefetcher must hide
HIDDEN_FLOOR = 0.7
# tolerance between the clock's stall and the differential method's, as fractions of time
STALL_TOLERANCE = 0.03
# tolerance between the tuner's demand and the rate of a run without loading
DEMAND_TOLERANCE = 0.05
CUDA = "cuda_order or cuda_values"
CONFORMANCE = ("tests/runtime/test_accelerator.py", "tests/runtime/test_accelerator_memory.py")
# time limit of one run of train.py
_RUN_S = 120.0
_ON_CPU = "; no CUDA device: this shows only that the part runs"


def check_conformance(o: Options) -> Said:
    """Checks this device against the known behavior of an asynchronous one."""
    return (yield from _tested(*CONFORMANCE))


def check_pytest(o: Options) -> Said:
    """Runs the tests marked for CUDA; yields each as it ends."""
    return (yield from _tested(*cuda_tests()))


def cuda_tests() -> list[str]:
    """Returns the files with CUDA tests; others may need packages that are missing here."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.cuda_" in path.read_text()]


def _tested(*files: str) -> Said:
    command = [sys.executable, "-m", "scripts.gpu.tests", "-m", CUDA, *files]
    outcomes = Counter[str]()
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        for row in map(json.loads, child.stdout):
            outcomes[row["outcome"]] += 1
            yield row
            if row["outcome"] == "failed":
                yield {"wrong": f"{row['test']} failed"}
    if child.returncode:
        yield {"wrong": f"pytest ended with {child.returncode}"}
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())


def check_prefetcher(o: Options) -> Said:
    """Checks that the prefetcher hides the copy and yields correct values."""
    device = o.device
    # batches of ImageNet's size, and work that takes twice as long as their copy
    if o.on_gpu:
        what = "copy"
        loader = Slow(make_batches(4, 256, 224, pin=True), count=40)
        work: Callable[[], object] = Work(
            device, 2 * step_ms(DataPrefetcher(loader, device, ahead=False), lambda: None, device)
        )
    else:
        what = "loading"
        loader = Slow(make_batches(1, 1, 8, pin=False), 0.004, count=25)
        work = lambda: time.sleep(0.008)
    times: dict[str, list[float]] = {"step alone": [], "ahead=False": [], "ahead=True": []}
    for _ in range(o.turns):
        times["step alone"].append(step_ms(range(loader.count), work, device))
        for ahead in (False, True):
            times[f"ahead={ahead}"].append(
                step_ms(DataPrefetcher(loader, device, ahead=ahead), work, device)
            )
    yield from ({"loop": name, "step ms": Sample.of(values)} for name, values in times.items())
    alone, unhidden, hiding = (median(values) for values in times.values())
    hidden = (unhidden - hiding) / max(unhidden - alone, 1e-9)
    if hidden < HIDDEN_FLOOR:
        yield {"wrong": f"less than {HIDDEN_FLOOR:.0%} is hidden"}
    for slow in ("copy", "step"):
        yield from ({"wrong": text} for text in wrong_values(device, slow))
    return (
        f"{hidden:.0%} of the {what} hidden; values checked with a slow copy and with a slow step"
    )


def resnet_rig(device: torch.device, compiled: bool) -> Rig:
    """ResNet-18 in bf16 and channels_last on 128 images of 160 pixels, fed by the prefetcher."""
    trainer = TrainerConfig(precision=Precision.bf16, channels_last=True, compile=compiled)
    config = Config(model=ModelConfig(name="resnet18"), trainer=trainer)
    world = World(0, 1, 0, 1, device)
    step = Step(make_state(config, 10, world, 1000))
    ready = make_batches(4, 128, 160, pin=True)
    how: Row = {
        "mean": config.data.mean,
        "std": config.data.std,
        "dtype": torch.bfloat16,
        "channels_last": True,
    }
    return Rig(
        clock=lambda: StepClock(device),
        batches=lambda sleep_s, count, clock: iter(
            DataPrefetcher(Slow(ready, sleep_s, count), device, clock=clock, **how)
        ),
        launch=lambda batch: step(*batch),
        wait=lambda: wait(device),
    )


def check_stall(o: Options, compiled: bool = False) -> Said:
    """Compares the clock's stall with the differential method's; emulated without a GPU."""
    if compiled:
        o.need_compiler()
    steps = 10 if o.quick else 20
    rig = resnet_rig(o.device, compiled) if o.on_gpu else emulated_rig()
    return (yield from compare(rig, steps, STALL_TOLERANCE))


def check_copies(o: Options) -> Said:
    """Measures pinned and pageable copies, alone and beside unrelated work.

    Without a GPU, copies are from host to host.
    """
    n = 5 if o.quick else 20
    if not o.on_gpu:
        yield from host_copies([36], n)
        return "host memory, which bounds copies in both directions"
    # 36 MiB: 256 uint8 images of 224 pixels
    rows = plain_copies(o.device, [36], n) + overlap(o.device, 256, n)
    yield from (
        {key: row.get(key, "") for key in ("way", "done after ms", "GB/s", "hidden")}
        for row in rows
    )
    rate, hidden = ({row["way"]: row.get(key) for row in rows} for key in ("GB/s", "hidden"))
    return (
        f"pageable {rate['pageable, x.to(device)']} GB/s, pinned "
        f"{rate['pinned before, non_blocking']} GB/s; hidden behind "
        f"unrelated work: {hidden['pinned, same stream']} on one stream, "
        f"{hidden['pinned, side stream']} on a side stream"
    )


def check_demand(o: Options) -> Said:
    """Compares the tuner's demand for ResNet-50 with a run without loading.

    Also trains on JPEGs, untuned and tuned.
    """
    common, files = gpu_feeds.resnet50(o.scratch, o.images, 100 if o.on_gpu and not o.quick else 25)
    if not o.on_gpu:
        common += ["model=small", "loader.batch_size=8", "trainer.precision=fp32"]
        common += ["data.image_size=32", "tuner.budget_s=5"]
    runs = {
        "fake": ["data=fake"],
        "tuned": [*files, "loader.autotune=true", "tuner.fresh=true"],
        "untuned": files,
    }
    demand = 0.0
    rates = dict[str, list[float]]()
    for turn in range(1 if o.quick or not o.on_gpu else 2):
        for name in runs:
            # the second turn is optional and shows the spread
            if turn and o.left_s() < _RUN_S / 2:
                break
            row = train(
                [*runs[name], *common], o.scratch / f"{name}-{turn}", min(_RUN_S, o.left_s())
            )
            demand = row["demand"] or demand
            rates.setdefault(name, []).append(row["images/s"])
            yield {"run": name, **row}
    ratio = demand / median(rates["fake"])
    if o.on_gpu and abs(ratio - 1) > DEMAND_TOLERANCE:
        yield {"wrong": f"the tuner's demand is {ratio:.2f} times the rate of data=fake"}
    reached = ", ".join(f"{name} {median(found):.0f}" for name, found in rates.items())
    return f"images/s: {reached}; the tuner's demand is {demand:.0f}"


def check_launches(o: Options, compiled: bool = False) -> Said:
    """Measures step time of ResNet-50 beside 16 decoding threads, on ever fewer cores."""
    if compiled:
        o.need_compiler()
    ratios: dict[int, float] = {}
    for row in gpu_feeds.launches(o, compiled):
        ratios[row["cores"]] = row["ratio"]
        yield row
    enough = [cores for cores, ratio in ratios.items() if ratio <= gpu_feeds.BESIDE]
    return f"{gpu_feeds.least(enough)} keep the step within {gpu_feeds.BESIDE} times the step alone"


def check_feeds(o: Options, compiled: bool = False) -> Said:
    """Compares ResNet-50 fed by threads and processes with no loading, on ever fewer cores."""
    if compiled:
        o.need_compiler()
    return (yield from _fed(o, gpu_loaders.OURS, *["--compile"] * compiled))


def check_peers(o: Options) -> Said:
    """Runs the same with importable loaders of other projects."""
    names = [name for name in gpu_loaders.peers() if o.on_gpu or name != gpu_loaders.NVJPEG]
    return (yield from _fed(o, names))


def _fed(o: Options, loaders: Sequence[str], *how: str) -> Said:
    data = gpu_feeds.shapes(o.scratch, o.images)
    datasets.load(data, AugmentConfig(), 0)
    if not o.on_gpu:
        how = (*how, "--device", "cpu", "--model", "small", "--batch-size", "8", "--seconds", "1")

    def run(name: str, cores: int) -> Row:
        arguments = ["-m", gpu_loaders.__name__, name, str(data.root), str(cores), *how]
        done = _run(arguments, min(gpu_feeds.LIMIT_S, o.left_s()), cores)
        if done.returncode != 0:
            raise RuntimeError(
                f"gpu/loaders.py ended with {done.returncode}: "
                f"{(done.stdout + done.stderr)[-600:].strip()}"
            )
        found: Row = json.loads(done.stdout.splitlines()[-1])
        return found

    rows = []
    for row in gpu_feeds.cores(loaders, run, o.left_s):
        rows.append(row)
        yield row
        if row["failed"]:
            yield {"wrong": f"{row['feed']} on {row['cores']} cores: {row['failed']}"}
    if not rows:
        raise SkippedError("no time was left for a loader; name this group alone with --group")
    return gpu_feeds.fewest(rows)


def train(overrides: Sequence[str], run_folder: Path, limit_s: float) -> Row:
    """Returns the figures of a run of ``train.py``; "demand" is 0 if nothing was tuned.

    Raises:
        RuntimeError: it failed, with the end of its output, or exceeded ``limit_s``.
    """
    try:
        done = _run([str(ROOT / "train.py"), *overrides, f"hydra.run.dir={run_folder}"], limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"train.py took more than {limit_s:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(
            f"train.py ended with {done.returncode}: {(done.stdout + done.stderr)[-600:].strip()}"
        )
    report = json.loads((run_folder / "report.json").read_text(encoding="utf-8"))
    tuning = run_folder / "tuning.json"
    demand = json.loads(tuning.read_text(encoding="utf-8"))["demand"] if tuning.exists() else None
    step = report["step_ms"]
    loader = report["loader"]
    return {
        "images/s": round(report["images_per_s"]),
        "step ms": f"{step['median']:.1f} (p95 {step['p95']:.1f})",
        "stall": round(report["stall_fraction"], 3),
        "data wait": round(report["data_wait_fraction"], 3),
        "num_workers": loader["num_workers"], "pin_memory": loader["pin_memory"],
        "demand": round(demand["images_per_s"]) if demand else 0,
    }  # fmt: skip


def _run(
    arguments: Sequence[str], limit_s: float, cores: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python in the project's folder, on the first ``cores`` cores of this thread's.

    Raises:
        subprocess.TimeoutExpired: it exceeded ``limit_s``.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])
    try:
        # files, not pipes: workers that outlive a process would keep its pipes open, and this one
        # waiting
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            command = [sys.executable, *arguments]
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=limit_s,
                check=False,
            )
            said = [(file.seek(0), file.read())[1] for file in (out, err)]
            return subprocess.CompletedProcess(command, done.returncode, *said)
    finally:
        os.sched_setaffinity(0, allowed)


PARTS: dict[str, Part] = {
    "conformance": check_conformance, "events": gpu_unsettled.events,
    "demand": check_demand,
    "stall": check_stall, "prefetcher": check_prefetcher,
    "finish": gpu_unsettled.finish, "staging": gpu_unsettled.staging,
    "pinning": gpu_unsettled.pinning,
    "pytest": check_pytest, "copies": check_copies,
    "launches": check_launches,
    "stall_compiled": partial(check_stall, compiled=True),
    "launches_compiled": partial(check_launches, compiled=True),
    "feeds": check_feeds, "feeds_compiled": partial(check_feeds, compiled=True),
    "peers": check_peers,
}  # fmt: skip


def answer_for(name: str, o: Options, answer: Callable[[Row], None]) -> None:
    """Runs a part; sends its output and its outcome, whatever it raises."""
    said = PARTS[name](o)
    try:
        while True:
            row = next(said)
            answer(row if "wrong" in row else {"row": row})
    except StopIteration as end:
        answer({"ok": f"{end.value}{'' if o.on_gpu else _ON_CPU}"})
    except SkippedError as reason:
        answer({"skipped": str(reason)})
    except Exception as error:
        traceback.print_exc()
        answer({"failed": f"{type(error).__name__}: {error}"})


def _end_with(parent: int) -> None:
    """Kills this process and its children when the other end of ``parent`` closes."""
    os.read(parent, 1)
    os.killpg(0, signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run one part of gpu_check.py.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("limit_s", type=float, help="time limit, in seconds")
    parser.add_argument("scratch", type=Path, help="temporary folder")
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args(argv)
    deadline = time.monotonic() + a.limit_s
    answers = os.dup(1)
    threading.Thread(target=_end_with, args=(os.dup(0),), daemon=True).start()
    # keep library output out of the results
    os.dup2(2, 1)

    def answer(said: Any) -> None:
        os.write(answers, json.dumps(plain(said)).encode() + b"\n")

    device = accelerator.get("cuda" if accelerator.count() else "cpu").device
    answer({"machine": machine()})
    answer_for(a.part, Options(device, a.quick, a.scratch, deadline), answer)
    os.close(answers)


if __name__ == "__main__":
    main()
