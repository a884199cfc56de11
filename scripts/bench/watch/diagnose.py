"""Compares a diagnosis' upper bound with the speedup from cached batches.

For each workload, alternately in separate processes: ``mode=diagnose``, training on the real feed,
and the same training on real batches preloaded in memory. The upper bound should equal the gain
from cached batches.

    uv run python -m scripts.bench.watch.diagnose --rounds 5 --seconds 20 --write
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harness.config import (
    BackendName,
    CheckpointConfig,
    Config,
    DataConfig,
    LoaderConfig,
    ModelConfig,
    TrainerConfig,
)
from harness.runtime import folder, workers
from harness.runtime.launch import run_processes

PAGE = Path(__file__).parents[1] / "results" / "diagnose.md"
# tolerance between the upper bound and the measured speedup
CLAIM = 0.10
_KINDS = ("diagnose", "real", "cached")
_WIDTH = 1400
_HEIGHT = 1000
_CACHED_BATCHES = 8
# in an epoch on cached batches, to amortize the overhead per epoch
_LEAST_STEPS = 100


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement in a separate process, with its results in ``answer``."""

    kind: str
    config: Config
    seconds: float
    answer: Path


def workloads(photos: Path, threads: int | None) -> dict[str, Config]:
    """Returns each workload's settings; ``make_photos`` makes the second one's files."""
    trainer = TrainerConfig(channels_last=True, num_threads=threads)
    rest: dict[str, Any] = {"checkpoint": CheckpointConfig(enabled=False), "trainer": trainer}
    processes = LoaderConfig(backend=BackendName.processes, num_workers=1)
    loader = replace(processes, batch_size=32)
    folder_of = DataConfig(name="imagefolder", root=str(photos), split_fraction=0.1, image_size=64)
    return {
        "shapes": Config(data=DataConfig(), loader=processes, model=ModelConfig(), **rest),
        f"{_WIDTH}x{_HEIGHT} JPEGs": Config(
            data=folder_of, loader=loader, model=ModelConfig(), **rest
        ),
    }


def make_photos(root: Path, count: int) -> None:
    """Writes two classes of enlarged crops of scikit-learn's two photographs, once."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    for i in range(count):
        path = root / f"class{i % len(photos)}" / f"{i:05d}.jpg"
        width = int(rng.integers(300, 590))
        height = width * _HEIGHT // _WIDTH
        left = int(rng.integers(640 - width))
        top = int(rng.integers(427 - height))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = photos[i % len(photos)].crop((left, top, left + width, top + height))
            part.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC).save(path, quality=90)


def measure(_: int, work: Work) -> None:
    """Runs one measurement, wired as in ``train.py``."""
    workers.start_server(["harness.feed.processes", "harness.data.datasets"])
    from harness.data import datasets
    from harness.diagnose.diagnosis import diagnose
    from harness.feed.feeds import Feeds
    from harness.runtime import distributed, limits, seeding
    from harness.training.state import make_state
    from harness.training.step import Step
    from harness.tuning.training_steps import TrainingBenchmark

    config = work.config
    # wired as in train.py, without console output
    with ExitStack() as stack:
        world = stack.enter_context(distributed.joined(0, config))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(folder.logging_to(place))
        stack.enter_context(redirect_stdout(io.StringIO()))
        seeding.seed_everything(config.seed)
        splits = datasets.load(config.data, config.augment, config.seed)
        feeds = Feeds(splits, config, world)
        state = make_state(config, len(splits.classes), world, feeds.steps_per_epoch())
        step = Step(state)
        allowed = limits.measure()
        # this process's only measurement
        if work.kind == "diagnose":
            found = diagnose(feeds, TrainingBenchmark(step), allowed, (), None)
            runs = found["runs"]
            answer: dict[str, Any] = {
                "ceiling": found["ceiling"], "class": found["bottleneck"],
                "seconds": found["seconds"], "G": runs["demand"].images_per_s,
                "A": runs["delivered"].images_per_s if "delivered" in runs else None,
            }  # fmt: skip
        else:
            answer = {"images_per_s": trained(work, feeds, step, place)}
    work.answer.write_text(json.dumps(answer))


def trained(work: Work, feeds: Any, step: Any, place: Path) -> float:
    """Returns images/s of the engine's whole epochs.

    They take at least ``work.seconds``, on the feed or repeatedly on its first batches.

    Wall time is used, without the first epoch: the engine's clock excludes each epoch's first step,
    and epochs are short here, so batches made during that step would count but its time would not.
    """
    from itertools import islice

    from harness.monitor import monitor
    from harness.runtime import limits
    from harness.training.engine import Engine
    from scripts.bench.loop import CachedFeed

    feed: Any = feeds.train(feeds.settings(limits.measure()))
    if work.kind == "cached":
        batches = [
            batch._replace(
                images=batch.images.clone(),
                labels=batch.labels.clone(),
                indices=batch.indices.clone(),
            )
            for batch in islice(feed, _CACHED_BATCHES)
        ]
        feed.close()
        feed = CachedFeed(
            batches * max(1, max(_LEAST_STEPS, len(feed)) // len(batches)), feed.settings
        )
    val_feed: Any = CachedFeed([], feed.settings)
    # per epoch
    images = len(feed) * feed.settings.batch_size
    with monitor.watched(work.config, feeds.world, place, time.perf_counter()) as watch:
        engine = Engine(step, lambda size: feed, val_feed, watch, place, ())
        # not fit(), which adds evaluations: the claim is only about epochs
        engine._train_epoch(engine.state.epoch)
        began = time.perf_counter()
        epochs = 0
        while (took := time.perf_counter() - began) < work.seconds:
            engine._train_epoch(engine.state.epoch)
            epochs += 1
        engine.close()
    return float(epochs * images / took)


def compare(name: str, config: Config, rounds: int, seconds: float) -> dict[str, Any]:
    """Returns all results of one workload, measured in alternating order."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    for number in range(rounds):
        for kind in _KINDS if number % 2 == 0 else _KINDS[::-1]:
            print(f"{name}: {kind}, round {number + 1} of {rounds}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as place:
                answer = Path(place) / "answer.json"
                run_processes(measure, Work(kind, config, seconds, answer), 1)
                found[kind].append(json.loads(answer.read_text()))
    return found


def row(name: str, config: Config, found: dict[str, Any]) -> dict[str, object]:
    """Returns one workload's row of the table."""
    from scripts.bench.tables import Sample

    rates = {kind: [each["images_per_s"] for each in found[kind]] for kind in ("real", "cached")}
    gains = [cached / real for real, cached in zip(rates["real"], rates["cached"], strict=True)]
    ceilings = [each["ceiling"] for each in found["diagnose"]]
    off = statistics.median(ceilings) / statistics.median(gains) - 1
    classes = [each["class"] for each in found["diagnose"]]
    return {
        "workload": f"{name}, {config.data.image_size} px, batch {config.loader.batch_size}",
        "real images/s": Sample.of(rates["real"]),
        "A": Sample.of([each["A"] for each in found["diagnose"] if each["A"]]),
        "cached images/s": Sample.of(rates["cached"]),
        "G": Sample.of([each["G"] for each in found["diagnose"]]),
        "speed-up": Sample.of(gains),
        "ceiling": Sample.of(ceilings),
        "off": f"{off:+.1%}",
        "within 10 %": "yes" if abs(off) <= CLAIM else "NO",
        "classes": ", ".join(f"{classes.count(each)} {each}" for each in dict.fromkeys(classes)),
        "diagnosis s": Sample.of([each["seconds"] for each in found["diagnose"]]),
        "n": len(gains),
    }


def show(
    rows: Sequence[dict[str, object]], seconds: float, load: Sequence[float], threads: int | None
) -> str:
    """The page."""
    from scripts.bench.tables import machine, machine_line, markdown

    busy = f"{min(load):.1f} to {max(load):.1f}"
    count = threads or "as many"
    step = f"on {count} of torch's threads" + " as there are cores" * (threads is None)
    return f"""# Is a diagnosis right?

Made by `uv run python -m scripts.bench.watch.diagnose --write`. {machine_line(machine())}.

{markdown(rows)}

Medians (quartiles) of {rows[0]["n"]} rounds. In each, in processes of their own and in turns, there
and back: a diagnosis; whole epochs of real training for at least {seconds:g} s, by the wall, after
one that is left out; the same on {_CACHED_BATCHES} real batches that lie ready in memory. A and G:
the diagnosis' own rates of real steps and of steps on a preloaded batch. Speed-up: cached over real
images/s of one round. Off: median ceiling over median speed-up, less one; at most 10 % is claimed.
The step ran {step}. Load averages between the workloads, this benchmark's own included: {busy}.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare a diagnosis' upper bound with the speedup from cached batches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of diagnosis, real and cached training"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="least length of a training run"
    )
    parser.add_argument("--images", type=int, default=600, help="photographs in the folder")
    parser.add_argument(
        "--threads", type=int, help="torch threads, as trainer.num_threads (default: one per core)"
    )
    parser.add_argument(
        "--photos",
        type=Path,
        default=Path(tempfile.gettempdir()) / "wellfed-photos",
        help="their folder",
    )
    parser.add_argument("--only", help="one workload, by the start of its name")
    parser.add_argument(
        "--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[2])}"
    )
    a = parser.parse_args(argv)
    # workloads one after the other, the load average between them
    make_photos(a.photos, a.images)
    rows = []
    load = [os.getloadavg()[0]]
    for name, config in workloads(a.photos, a.threads).items():
        if name.startswith(a.only or ""):
            rows.append(row(name, config, compare(name, config, a.rounds, a.seconds)))
            load.append(os.getloadavg()[0])
    page = show(rows, a.seconds, load, a.threads)
    print(page)
    if a.write:
        from scripts.bench.tables import write

        write(PAGE, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
