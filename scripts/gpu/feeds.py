"""Measures how few cores keep a GPU busy with ResNet-50, for each feed.

Also measures whether decoding threads slow its launches.

Parts of ``gpu_check.py``.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Self

import torch

from harness.config import (
    AugmentConfig,
    BackendName,
    Config,
    DataConfig,
    GenerateConfig,
    LoaderConfig,
    ModelConfig,
    Precision,
    TrainerConfig,
)
from harness.data import datasets
from harness.feed.base import Backend
from harness.feed.feeds import Feeds
from harness.runtime import accelerator, limits
from harness.runtime.distributed import World
from harness.training.state import make_state
from harness.training.step import Step
from scripts.bench.loop import make_batches
from scripts.gpu.loaders import NONE
from scripts.gpu.options import Options, Row

CORES = (1, 2, 4, 6, 8, 16)
# fraction of the rate of a run without loading
FED = 0.99
# largest ratio of step time with decoding threads to that without
BESIDE = 1.02
THREADS = 16
# time limit of one run, which must be left to start one
LIMIT_S = 120
LEAST_S = 90
# until idle threads have filled their queue, and others have consumed prefetched batches
_SETTLE_S = 0.2

# a loader, cores
Run = Callable[[str, int], Row]


def shapes(scratch: Path, images: int) -> DataConfig:
    """Returns the data settings for ``images`` JPEGs of ImageNet's size, in their own folder."""
    classes = min(100, images // 8)
    val_images = min(256, images // 4)
    numbers = GenerateConfig(
        classes=classes, train_images=images, val_images=val_images, width=500, height=375
    )
    return DataConfig(root=str(scratch / f"shapes-{images}"), image_size=224, generate=numbers)


def resnet50(scratch: Path, images: int, steps: int) -> tuple[list[str], list[str]]:
    """Returns overrides for ResNet-50 (bf16, channels_last, batch 256) and for its JPEGs."""
    data = shapes(scratch, images)
    datasets.load(data, AugmentConfig(), 0)
    numbers = [f"data.generate.{name}={value}" for name, value in asdict(data.generate).items()]
    common = [
        "model=resnet50", "trainer.precision=bf16", "trainer.channels_last=true",
        "loader.batch_size=256",
        f"data.image_size={data.image_size}", *numbers, "trainer.epochs=1000",
        "trainer.eval_every_epochs=1000", f"trainer.max_steps={steps}", "checkpoint.enabled=false",
    ]  # fmt: skip
    return common, ["data=shapes", f"data.root={data.root}"]


def cores(feeds: Sequence[str], run: Run, left_s: Callable[[], float]) -> Iterator[Row]:
    """Yields images/s with each of ``feeds`` on ever fewer cores, while there is time.

    A failed run is a row with the reason.

    Args:
        feeds: loaders of ``loaders.py``.
        run: returns the output of ``loaders.py`` for one of them on a number of cores.
        left_s: returns the time left.
    """
    have = len(os.sched_getaffinity(0))
    # the network's rate without loading
    ready = run(NONE, have)["images_per_s"]
    for count in (n for n in CORES[::-1] if n <= have):
        for feed in feeds:
            if left_s() < LEAST_S:
                return
            row: Row = {
                "cores": count,
                "feed": feed,
                "images/s": 0,
                "of no loading": 0.0,
                "by": "",
                "failed": "",
            }
            # a failed run is a row with the reason
            try:
                found = run(feed, count)
                rate = found["images_per_s"]
                row |= {
                    "images/s": round(rate),
                    "of no loading": rate / ready,
                    "by": found["decoder"],
                }
            except subprocess.TimeoutExpired:
                row["failed"] = f"took more than {LIMIT_S} s"
            except RuntimeError as error:
                row["failed"] = " ".join(str(error).split())
            yield row


def fewest(rows: Sequence[Row]) -> str:
    """Returns, as text, the fewest cores that keep the network busy, for each feed."""
    said = []
    for feed in dict.fromkeys(row["feed"] for row in rows):
        enough = [
            row["cores"] for row in rows if row["feed"] == feed and row["of no loading"] >= FED
        ]
        said.append(f"{feed}: {least(enough)} reach {FED}")
    return "; ".join(said)


def least(cores: Sequence[int]) -> str:
    """Returns the lowest of the numbers of cores, in words."""
    return f"{min(cores)} cores" if cores else "none of these"


def launches(o: Options, compiled: bool) -> Iterator[Row]:
    """Yields step time alone and beside decoding threads, on ever fewer cores."""
    trainer = TrainerConfig(precision=Precision.bf16, channels_last=True, compile=compiled)
    world, (size, side, steps) = World(0, 1, 0, 1, o.device), o.scaled((256, 224, 20), (8, 64, 2))
    config = Config(
        data=shapes(o.scratch, o.images),
        loader=LoaderConfig(backend=BackendName.threads, batch_size=size, num_workers=THREADS),
        model=ModelConfig(name=o.scaled("resnet50", "small")),
        trainer=trainer,
    )
    step = Step(make_state(config, 10, world, 1000))
    images, labels = make_batches(1, size, side, pin=False)[0][:2]
    batch = (
        images.to(o.device, torch.bfloat16, memory_format=torch.channels_last),
        labels.to(o.device),
    )
    feeds = Feeds(datasets.load(config.data, config.augment, config.seed), config, world)
    # compiles and selects kernels
    _step_ms(step, batch, o.device, 1)
    with Decoding(feeds.train(feeds.settings(limits.measure()))) as decoding:
        allowed = os.sched_getaffinity(0)
        for count in (n for n in CORES[::-1] if n <= len(allowed)):
            _confine(sorted(allowed)[:count])
            # beside decoding: ms of a step, images/s
            turns: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for turn in range(o.turns + 1):
                for busy in (False, True) if turn % 2 else (True, False):
                    found = decoding.beside(lambda: _step_ms(step, batch, o.device, steps), busy)
                    # the first moves threads to their cores
                    if turn:
                        turns[busy].append(found)
            (alone, _), (beside, rates) = (zip(*turns[busy], strict=True) for busy in (False, True))
            yield {
                "cores": count, "alone ms": median(alone), "beside threads ms": median(beside),
                "images/s beside": round(median(rates)),
                "ratio": median(b / a for a, b in zip(alone, beside, strict=True)),
            }  # fmt: skip
        _confine(allowed)


def _confine(cores: Iterable[int]) -> None:
    """Restricts all present and future threads of this process to these cores."""
    for thread in os.listdir("/proc/self/task"):
        # the thread has ended
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


class Decoding:
    """Drains a feed while something else is measured."""

    def __init__(self, feed: Backend) -> None:
        self._feed = feed
        self._images = 0
        self._error = ""
        self._go = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._go.set()
        self._thread.join(30)
        self._feed.close()

    def beside(self, measured: Callable[[], float], busy: bool) -> tuple[float, float]:
        """Returns the result of ``measured``, and the images/s drained meanwhile.

        None are drained if not ``busy``.

        Raises:
            RuntimeError: no images arrived although ``busy``; with the feed's error, if any.
        """
        (self._go.set if busy else self._go.clear)()
        time.sleep(_SETTLE_S)
        before = self._images
        begin = time.perf_counter()
        found = measured()
        images = self._images - before
        seconds = time.perf_counter() - begin
        if self._error or (busy and not images):
            raise RuntimeError(
                f"the feed beside the network gave {images} images: "
                f"{self._error or 'it is too slow'}"
            )
        return found, images / seconds

    def _drain(self) -> None:
        try:
            for epoch in itertools.count():
                self._feed.set_epoch(epoch)
                for batch in self._feed:
                    self._go.wait()
                    if self._stop.is_set():
                        return
                    self._images += len(batch.labels)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"


def _step_ms(
    step: Step, batch: tuple[torch.Tensor, torch.Tensor], device: torch.device, steps: int
) -> float:
    accelerator.get(device).synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step(*batch)
    step.forget()
    accelerator.get(device).synchronize()
    return 1e3 * (time.perf_counter() - begin) / steps
