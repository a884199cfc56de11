"""Feeds ResNet-50 with one loader: a run of ``gpu_check.py`` in a separate process.

    uv run python -m scripts.gpu.loaders threads FOLDER 8 --seconds 6

prints its images/s as JSON. The loop is the same for all: the network is warm, the loader starts
empty, its batches go to the device through wellfed's prefetcher, and uint8 ones are normalized
there. The other projects' loaders are described in ``bench/loader/peers.py``; only nvJPEG is
defined here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from harness.config import (
    AugmentConfig,
    BackendName,
    Config,
    DataConfig,
    LoaderConfig,
    ModelConfig,
    Precision,
    TrainerConfig,
)
from harness.data import datasets
from harness.feed.feeds import Feeds
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator, limits, seeding, workers
from harness.runtime.distributed import World
from harness.training.state import make_state
from harness.training.step import DTYPES, Step
from scripts.bench.loader.peers import EXAMPLES, PEERS, dali, endless, examples, spdl

NONE = "no loading"
NVJPEG = "nvJPEG"
OURS = ("threads", "processes")
_SIDE = 224
_CLASSES = 100
# steps before the loader is made: cuDNN benchmarks kernels, the network is compiled
_WARM = 10
# between two readings of the loss, as in training
_READ_STEPS = 10

# images [N, 3, 224, 224], uint8 or normalized, and labels
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """A loader's task: batches of JPEGs, made by a number of threads or processes."""

    root: Path
    num_workers: int
    batch_size: int
    device: torch.device

    @property
    def pinned(self) -> bool:
        """Whether batches should be in pinned memory."""
        return accelerator.get(self.device).has_streams


Make = Callable[[Job], AbstractContextManager[Iterable[Any]]]


@contextmanager
def _none(job: Job) -> Iterator[Iterable[Batch]]:
    images = torch.randint(
        256, (job.batch_size, 3, _SIDE, _SIDE), dtype=torch.uint8, device=job.device
    )
    yield itertools.repeat((images, torch.randint(_CLASSES, (job.batch_size,), device=job.device)))


@contextmanager
def _ours(backend: str, job: Job) -> Iterator[Iterable[Any]]:
    config = Config(
        data=DataConfig(name="imagefolder", root=str(job.root), image_size=_SIDE),
        loader=LoaderConfig(
            backend=BackendName[backend], batch_size=job.batch_size, num_workers=job.num_workers
        ),
        model=ModelConfig(),
    )
    splits = datasets.load(config.data, AugmentConfig(), config.seed)
    feeds = Feeds(splits, config, World(0, 1, 0, 1, job.device))
    with closing(feeds.probe(feeds.settings(limits.measure()))) as feed:
        yield feed


def _examples(job: Job) -> AbstractContextManager[Iterable[Batch]]:
    how: dict[str, Any] = {"size": job.batch_size, "pin_memory": job.pinned}
    return nullcontext(examples(job.root, job.num_workers, **how))


def _dali(job: Job) -> AbstractContextManager[Iterable[Batch]]:
    # copies, because DALI reuses its tensors' memory
    made = map(np.array, dali(job.root, job.num_workers, job.batch_size))
    return closing(_labeled(made, job.pinned))


@contextmanager
def _spdl(job: Job) -> Iterator[Iterable[Batch]]:
    with (
        closing(spdl(job.root, job.num_workers, job.batch_size)) as made,
        closing(_labeled(made, job.pinned)) as batches,
    ):
        yield batches


def _labeled(made: Iterable[Any], pinned: bool) -> Generator[Batch]:
    """Yields batches ``[N, H, W, C]`` with the channels first, and zeros for labels."""
    for batch in made:
        images = torch.as_tensor(batch)
        yield (
            (images.pin_memory() if pinned else images).permute(0, 3, 1, 2),
            torch.zeros(len(images), dtype=torch.int64),
        )


def _decoded_on_device(job: Job) -> Generator[Batch]:
    """Yields batches that the device decodes, crops, resizes and flips.

    This runs on the side stream and is waited for, because decoders write to memory freed on the
    current stream without synchronizing with it.
    """
    decode = decoder()[1]
    crop = v2.RandomResizedCrop(_SIDE, antialias=True)
    # arrays, because workers hand over each tensor in a separate file
    files = ImageFolder(str(job.root / "train"), loader=_read)
    own = accelerator.get(job.device)
    for samples in endless(files, job.num_workers, list, job.batch_size):
        with own.on(own.side_stream()):
            decoded = decode([torch.from_numpy(data) for data, _ in samples], job.device)
            images = torch.stack([crop(image) for image in decoded])
            flipped = torch.rand(len(images), 1, 1, 1, device=job.device) < 0.5
            images = torch.where(flipped, functional.horizontal_flip(images), images)
            own.synchronize()
        yield images, torch.tensor([label for _, label in samples])


def _read(path: str) -> Any:
    return np.fromfile(path, np.uint8)


def decoder() -> tuple[str, Callable[[list[Tensor], torch.device], list[Tensor]]]:
    """Returns the name and the function of a JPEG decoder for a device.

    It is TorchCodec's, or torchvision's if TorchCodec fails.
    """
    try:
        torchcodec: Any = import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError):
        # missing, or built for another torch
        torchcodec = None
    if hasattr(torchcodec, "decode_jpeg"):
        return "TorchCodec", lambda files, device: torchcodec.decode_jpeg(
            files, mode="RGB", device=device
        )
    from torchvision.io import ImageReadMode, decode_jpeg

    return "torchvision", lambda files, device: decode_jpeg(files, ImageReadMode.RGB, device=device)


LOADERS: dict[str, Make] = {
    NONE: _none, **{name: partial(_ours, name) for name in OURS},
    EXAMPLES: _examples, NVJPEG: lambda job: closing(_decoded_on_device(job)),
    "DALI": _dali, "SPDL": _spdl,
}  # fmt: skip


def peers() -> list[str]:
    """Returns the importable loaders of other projects."""
    return [
        name
        for name in LOADERS
        if name not in (NONE, *OURS) and (name not in PEERS or PEERS[name].missing() is None)
    ]


class Training:
    """Trains the warm network of ``config`` on ``device``."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        world = World(0, 1, 0, 1, device)
        self._step = Step(make_state(config, _CLASSES, world, 1000))
        self._step.model.train()

    def images_per_s(
        self, name: str, job: Job, seconds: float, now: Callable[[], float] = time.perf_counter
    ) -> float:
        """Returns images/s of steps on batches of the loader ``name``, for at least ``seconds``.

        The first batches do not count, and steps are whole rounds of workers, whose batches
        arrive in bursts.
        """
        with LOADERS[NONE](job) as batches, closing(self._on_device(NONE, batches)) as warm:
            for _ in range(_WARM):
                self._step(*next(warm))
        accelerator.get(self._device).synchronize()
        skip = job.num_workers + 2
        cycle = max(1, job.num_workers)
        counted = 0
        began = 0.0
        with LOADERS[name](job) as batches, closing(self._on_device(name, batches)) as ready:
            for done, (images, labels) in enumerate(ready, 1):
                self._step(images, labels)
                if done % _READ_STEPS == 0:
                    self._step.read()
                if done == skip:
                    accelerator.get(self._device).synchronize()
                    began = now()
                elif done > skip:
                    counted += len(labels)
                    if (done - skip) % cycle == 0 and now() - began >= seconds:
                        break
            accelerator.get(self._device).synchronize()
            return counted / (now() - began)

    def _on_device(self, name: str, batches: Iterable[Any]) -> DataPrefetcher:
        data = self._config.data
        how: dict[str, Any] = {}
        # these are already normalized
        if name != EXAMPLES:
            how = {"mean": data.mean, "std": data.std}
        return DataPrefetcher(
            batches,
            self._device,
            **how,
            dtype=DTYPES[self._config.trainer.precision],
            channels_last=self._config.trainer.channels_last,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train a network (default: ResNet-50) on batches of one loader."
    )
    parser.add_argument("loader", choices=LOADERS)
    parser.add_argument("root", type=Path, help="folder whose train/CLASS/*.jpg are the images")
    parser.add_argument("num_workers", type=int, help="worker processes or threads of the loader")
    parser.add_argument("--seconds", type=float, default=6.0, help="least measurement length")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--device", default="cuda:0")
    a = parser.parse_args(argv)
    # as train.py does
    workers.start_server(["harness.feed.processes", "harness.data.datasets"])
    trainer = TrainerConfig(precision=Precision.bf16, channels_last=True, compile=a.compile)
    config = Config(model=ModelConfig(name=a.model), trainer=trainer)
    device = accelerator.get(a.device).device
    # cuDNN benchmarks kernels, as in train.py
    seeding.seed_everything(config.seed)
    job = Job(a.root, a.num_workers, a.batch_size, device)
    rate = Training(config, device).images_per_s(a.loader, job, a.seconds)
    print(json.dumps({"images_per_s": rate, "decoder": decoder()[0] if a.loader == NVJPEG else ""}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
