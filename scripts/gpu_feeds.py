"""What the feeds are worth beside a GPU: how few cores keep ResNet-50 busy, and whether decoding threads slow its launches.

Two parts of ``gpu_check.py``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from harness.config import Backend, Config, DataConfig, GenerateConfig, LoaderConfig, ModelConfig, Precision, TrainerConfig
from harness.data import datasets
from harness.feed.forms import Feeds
from harness.runtime import limits
from harness.runtime.device import synchronize
from harness.runtime.distributed import World
from harness.training.state import make_state
from harness.training.step import Step
from scripts.bench_loop import make_batches

CORES = (1, 2, 4, 6, 8, 16)
FED = 0.99  # of the rate of a run that loads nothing
BESIDE = 1.02  # step time with decoding threads over that without, at most
THREADS = 16
_STEPS, _TURNS = 20, 6

Row = dict[str, Any]
Train = Callable[[Sequence[str], Path, float, int | None], Row]  # overrides, run folder, limit in seconds, cores


def generate(images: int) -> GenerateConfig:
    """JPEGs as large as ImageNet's."""
    return GenerateConfig(classes=100, train_images=images, val_images=256, width=500, height=375)


def cores(train: Train, common: Sequence[str], files: Sequence[str], scratch: Path, left_s: Callable[[], float]) -> list[Row]:
    """Images/s of ``train.py`` by form of the feed and by cores that the whole run may use, as far as the time goes.

    Args:
        train: runs ``train.py`` and gives its ``report.json``.
        common: overrides of all runs.
        files: those that name the images.
        scratch: a folder for the runs.
        left_s: the time that is left.
    """
    rows: list[Row] = []
    have = len(os.sched_getaffinity(0))
    ready = train(["data=fake", *common], scratch / "fake", 120, None)["images_per_s"]
    for count in (n for n in CORES[::-1] if n <= have):
        for backend in ("threads", "processes"):
            if left_s() < 90:
                return rows
            loader = [f"loader.backend={backend}", f"loader.num_workers={count}"]
            report = train([*files, *common, *loader], scratch / f"{backend}-{count}", 120, count)
            share = report["images_per_s"] / ready
            rows.append({"cores": count, "backend": backend, "images/s": round(report["images_per_s"]), "of no loading": share})
    return rows


def fewest(rows: Sequence[Row]) -> str:
    """For each form the fewest cores that keep the network fed, in words."""
    said = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        enough = [row["cores"] for row in rows if row["backend"] == backend and row["of no loading"] >= FED]
        said.append(f"{backend}: {f'{min(enough)} cores' if enough else 'none of these'} reach {FED}")
    return "; ".join(said)


def launches(device: torch.device, scratch: Path, compiled: bool) -> Row:
    """Step time of ResNet-50 on a batch at hand, alone and beside threads that decode all the while; turns alternate."""
    trainer = TrainerConfig(precision=Precision.bf16, channels_last=True, compile=compiled)
    world = World(0, 1, 0, 1, device)
    config = Config(
        data=DataConfig(root=str(scratch / "shapes"), image_size=224, generate=generate(2560)),
        loader=LoaderConfig(backend=Backend.threads, batch_size=256, num_workers=THREADS),
        model=ModelConfig(name="resnet50"),
        trainer=trainer,
    )
    step = Step(make_state(config, 10, world, 1000), config, world)
    images, labels = make_batches(1, 256, 224, pin=False)[0][:2]
    batch = images.to(device, torch.bfloat16, memory_format=torch.channels_last), labels.to(device)
    alone: list[float] = []
    beside: list[float] = []
    with _decoding(config, world) as resume:
        for turn in range(_TURNS + 1):
            for times, busy in ((alone, False), (beside, True)) if turn % 2 else ((beside, True), (alone, False)):
                resume(busy)
                took_ms = _step_ms(step, batch, device)
                if turn:  # the first compiles and chooses kernels
                    times.append(took_ms)
    return {
        "network": "compiled" if compiled else "eager", "alone ms": median(alone), "beside threads ms": median(beside),
        "ratio": median(b / a for a, b in zip(alone, beside, strict=True)),
    }  # fmt: skip


@contextmanager
def _decoding(config: Config, world: World) -> Iterator[Callable[[bool], None]]:
    """Threads that fill batches which nobody uses, while they are told to."""
    feeds = Feeds(datasets.load(config.data, config.augment, config.seed), config, world)
    feed, go, stop = feeds.train(feeds.settings(limits.measure())), threading.Event(), threading.Event()

    def drain() -> None:
        for epoch in range(10**6):
            feed.set_epoch(epoch)
            for _ in feed:
                go.wait()
                if stop.is_set():
                    return

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield lambda busy: (go.set if busy else go.clear)()
    finally:
        stop.set()
        go.set()
        thread.join(30)
        feed.close()


def _step_ms(step: Step, batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> float:
    time.sleep(0.2)  # until threads that were told to stop have filled what they may
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(_STEPS):
        step(*batch)
    step.forget()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin) / _STEPS
